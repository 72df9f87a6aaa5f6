"""Closed forms, and the simulations that test them: ACPO's Proposition 1, Remark 1 and Lemma 1.
Nothing here needs a run or a model."""

import math
from itertools import groupby
from statistics import NormalDist, linear_regression

import numpy as np
import torch

from study.quantities import BANDS

NORMAL = NormalDist()
NODES, WEIGHTS = map(torch.from_numpy, np.polynomial.legendre.leggauss(400))  # from -1 to 1


def expected_gradient(s, low, high, eq=53):
    """E[rho A 1(not clipped)] sqrt(2 pi) / sigma_A for ratios of std s, by ACPO's eq. 53, or by
    eq. 56, which has Phi(-e_l / s) where eq. 53 has Phi(e_l / s)."""
    lower = NORMAL.cdf(low / s if eq == 53 else -low / s)
    densities = NORMAL.pdf(high / s) + NORMAL.pdf(low / s)
    return NORMAL.cdf(high / s) - lower - s * densities


def monte_carlo(s, low, high, n=10**6):
    """The same expectation, drawn under the proposition's assumptions: A ~ N(0, 1) and
    rho ~ N(1, s^2) are independent. -> its mean, the standard error of that"""
    g = torch.Generator().manual_seed(0)
    advantage = torch.randn(n, generator=g, dtype=torch.float64)
    rho = 1 + s * torch.randn(n, generator=g, dtype=torch.float64)
    unclipped = torch.where(advantage > 0, rho <= 1 + high, rho >= 1 - low)
    values = rho * advantage * unclipped * math.sqrt(2 * math.pi)
    return values.mean().item(), (values.std() / n**0.5).item()


def proposition_1(clip=0.2):
    """{eq: by how many standard errors of a Monte Carlo it is off at most}, over spreads of rho."""
    drawn = {s: monte_carlo(s, clip, clip) for s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)}
    return {eq: max(abs(mean - expected_gradient(s, clip, clip, eq)) / error
                    for s, (mean, error) in drawn.items()) for eq in (53, 56)}


def band_mean(kappa, band, low=0.2, high=0.2, eq=53):
    """ACPO's eq. 54 or 55 before the absolute value: the mean of E[G | pi] over pi uniform in the
    band (start, end), for sigma_A = 1 and ratios of std s = kappa (1 - pi)^2, with E[G | pi] by
    eq. 53 or with eq. 56 in it.

    -> its sign and the natural logarithm of its size, which falls to e^-100000 where s is small: no
    float64 holds that. Phi(e_h / s) - Phi(e_l / s) of eq. 53 is taken as Phi(-e_l / s) -
    Phi(-e_h / s): no digits cancel."""
    log_density = torch.distributions.Normal(0.0, 1.0).log_prob
    start, end = band
    u = (NODES + 1) / 2  # most of u^6 lies near 0: all of the integral is there for a small kappa
    rest, weight = 1 - start - (end - start) * u**6, 3 * WEIGHTS * u**5
    s = kappa * rest ** 2
    first, second = (-low / s, -high / s) if eq == 53 else (high / s, -low / s)
    logs = torch.stack([torch.special.log_ndtr(first), torch.special.log_ndtr(second),
                        s.log() + log_density(high / s), s.log() + log_density(low / s)])
    largest = logs.max()
    plus, *minus = (logs - largest).exp()
    mean = (weight * rest * (plus - sum(minus))).sum().item() / math.sqrt(2 * math.pi)
    return math.copysign(1, mean), largest.item() + math.log(abs(mean))


def low_over_high(kappa, low=0.2, high=0.2, eq=53):
    """-> log10 of |G_L| / |G_H|, ACPO's eq. 54 over eq. 55. Below 0 there is a reversal."""
    (_, of_low), (_, of_high) = (band_mean(kappa, band, low, high, eq) for band in BANDS.values())
    return (of_low - of_high) / math.log(10)


def scan(high, low=0.2):
    """Remark 1 over kappa, by eq. 53 and with eq. 56: log10 of eq. 54 over eq. 55 at some kappas
    from 0.01 to 100, and the ranges [from, to] of kappa with |G_L| < |G_H|, by 200 in a decade.
    What is narrower is not found: with e_h > e_l, G_L by eq. 53 goes through 0 at a kappa where
    |G_H| is below 1e-60."""
    grid = [10 ** (i / 200) for i in range(-400, 401)]
    log10, ranges = {}, {}
    for eq in (53, 56):
        of = {kappa: low_over_high(kappa, low, high, eq) for kappa in grid}
        parts = [list(part) for reverses, part in groupby(grid, lambda x: of[x] < 0) if reverses]
        log10[eq], ranges[eq] = [*of.values()][::50], [[part[0], part[-1]] for part in parts]
    return dict(low=low, high=high, kappas=grid[::50], log10=log10, reversed=ranges)


def tabular_model(n, vocabulary):
    """The slope of log std(rho) on log(1 - pi), which Lemma 1 has at 2, in its own tabular model.

    Each token has logits of its own: pi is uniform, and what it leaves is spread over the other
    tokens by a softmax of N(0, 1), whatever pi is. It takes one policy-gradient step on its own
    advantage (eq. 11), A ~ N(0, 1), drawn 100 times. By eq. 14 log rho is lr A times (1 - pi)^2
    plus the sum of the other pi_j^2; eq. 15, and so the lemma, has the first term alone. The slope
    is 2 also where the second is a fixed share of the first, as with a vocabulary of 2, where they
    are equal.

    A group of tokens has the same log(1 - pi) within 0.25, since in a wide one the std is that of
    the largest 1 - pi and the place the mean of all: groups of equal size, of which the last are
    wide, give slopes of 1.7 to 1.9 where narrow ones give 1.95 to 2.
    -> slope, and `left_out`: the mean over the tokens of the second term over the first"""
    g = torch.Generator().manual_seed(0)
    size = max(1, 10**6 // vocabulary)  # a hundred thousand logits a token: some tokens at a time
    parts = []
    for begin in range(0, n, size):
        left = 1 - torch.rand(min(size, n - begin), 1, generator=g)
        pi = left * torch.randn(len(left), vocabulary - 1, generator=g).softmax(-1)
        parts.append((pi.sum(-1, dtype=torch.float64), (pi ** 2).sum(-1, dtype=torch.float64)))
    rest, others = (torch.cat(column) for column in zip(*parts, strict=True))
    advantages = torch.randn(n, 100, generator=g, dtype=torch.float64)
    rho = (1e-3 * advantages * (rest ** 2 + others)[:, None]).exp()  # lr is 1e-3
    place = (rest.log() / 0.25).floor()
    groups = [(place == x) & (rest > 1e-3) for x in place.unique()]
    points = [(rest[part].log().mean().item(), rho[part].std().log().item())
              for part in groups if part.sum() >= 16]
    return dict(slope=linear_regression(*zip(*points)).slope,
                left_out=(others / rest ** 2)[rest > 1e-3].mean().item())

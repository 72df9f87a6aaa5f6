"""Closed forms, and the simulations that test them: ACPO's Proposition 1 and Lemma 1, FADE's
gradient masses.

Nothing here needs a run or a model. Every function returns plain numbers.
"""

import math

import torch

from experiment.tables import markdown_table
from losses import gradient_mass, group_advantages, row


def slope(points):
    """The slope of the least squares line through (x, y) points."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


# ---------------------------------------------------------------------------- ACPO


def normal_density(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def expected_gradient(s, low, high, eq=53):
    """E[rho A 1(not clipped)] sqrt(2 pi) / sigma_A for ratios of std s, by ACPO's eq. 53 or 56.

    Eq. 56 has Phi(-e_l / s) where eq. 53 has Phi(e_l / s)."""
    lower = normal_cdf(low / s if eq == 53 else -low / s)
    densities = normal_density(high / s) + normal_density(low / s)
    return normal_cdf(high / s) - lower - s * densities


def monte_carlo(s, low, high, n=10**6, seed=0):
    """The same expectation, drawn under the proposition's assumptions: A ~ N(0, 1) and
    rho ~ N(1, s^2) are independent.

    -> its mean, the standard error of that, and the mean of |rho A| 1(not clipped), which is what
    the paper's reading of the proposition is about."""
    g = torch.Generator().manual_seed(seed)
    advantage = torch.randn(n, generator=g, dtype=torch.float64)
    rho = 1 + s * torch.randn(n, generator=g, dtype=torch.float64)
    unclipped = torch.where(advantage > 0, rho <= 1 + high, rho >= 1 - low)
    gradient = rho * advantage * unclipped
    values = gradient * math.sqrt(2 * math.pi)
    return values.mean().item(), (values.std() / n**0.5).item(), gradient.abs().mean().item()


def proposition_1(low=0.2, high=0.2):
    """The Monte Carlo beside eq. 53 and eq. 56, for ratios that spread more and more."""
    lines = []
    for s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):
        mean, error, size = monte_carlo(s, low, high)
        lines.append(dict(s=s, monte_carlo=mean, error=error,
                          eq53=expected_gradient(s, low, high),
                          eq56=expected_gradient(s, low, high, 56), size=size))
    return lines


def proposition_1_table(lines):
    return markdown_table(("s", "Monte Carlo", "standard error", "eq. 53", "eq. 56", "mean abs"),
                          [[f"{x:.4g}" for x in line.values()] for line in lines]) + (
        "\n\ns is the standard deviation of the ratio. Monte Carlo is the simulated expectation of "
        "the gradient that\nis not clipped, with its standard error; eq. 53 and eq. 56 are what "
        "ACPO has for it; mean abs is the\nmean size of that gradient.\n"
        "Look at whether an equation stays within three standard errors of the Monte Carlo on "
        "every line.\n")


def tabular_slope(n=4000, vocabulary=50, lr=1e-3, seed=0):
    """The slope of log std(rho) on log(1 - pi), which Lemma 1 has at 2, in the tabular case.

    Each token has logits of its own and takes one policy-gradient step on its own advantage,
    A ~ N(0, 1), drawn 100 times. The change of log pi is |e - pi|^2 = (1 - pi)^2 + the sum of the
    other pi_j^2, and the lemma has the first term alone."""
    g = torch.Generator().manual_seed(seed)
    scale = 4 * torch.rand(n, 1, generator=g, dtype=torch.float64)
    logits = scale * torch.randn(n, vocabulary, generator=g, dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    token = torch.multinomial(logprobs.exp(), 1, generator=g)
    pi = logprobs.gather(-1, token).exp()[:, 0]
    # |e - pi|^2 is d log pi per unit of lr A
    derivative = (1 - pi) ** 2 + (logprobs.exp() ** 2).sum(-1) - pi ** 2
    advantages = torch.randn(n, 100, generator=g, dtype=torch.float64)
    rho = (lr * advantages * derivative[:, None]).exp()
    rest = 1 - pi
    return slope([(rest[part].mean().log().item(), rho[part].std().log().item())
                  for part in rest.argsort().chunk(20) if rest[part].mean() > 1e-4])


# ---------------------------------------------------------------------------- FADE


def balanced(mass):
    """p -> the same mass on successes and on failures, from mass(p, 1 - p)."""
    return lambda p: (mass(p, 1 - p),) * 2


# p -> m_S, m_F: the gradient masses of an infinitely large group with binary rewards and solve
# rate p. fade is taken as it begins, at a solve rate of 1/2: alpha = 3/2, delta = 1
MASSES = {
    "raw": lambda p: (p, 0.0),
    "centred": balanced(lambda p, q: p * q),
    "leave_one_out": balanced(lambda p, q: p * q),
    "zscore": balanced(lambda p, q: math.sqrt(p * q)),
    "asym": lambda p: (p * (1 - p), p * (1 - p) / 2),
    "power": balanced(lambda p, q: p * q**2),
    "fade": balanced(lambda p, q: p * q**1.5),
    "maxrl": balanced(lambda p, q: q),
    "passk": balanced(lambda p, q: p * q**2 / math.sqrt(1 - q**4)),
}


def masses(size=16):
    """{advantage: {"theory", "measured": [(solve rate, m_S, m_F)]}}, measured on groups of `size`
    completions of which 1, 2, ... succeed."""
    groups = [torch.tensor([[1.0] * k + [0.0] * (size - k)]) for k in range(1, size)]
    result = {}
    for name, formula in MASSES.items():
        method = row("dr_grpo", advantage=name)
        # fade's controllers must not move from group to group
        if "fade_ema" in method.flags:
            method = method.bind(fade_ema=0.0)
        measured = [(rewards.mean().item(),
                     *gradient_mass(group_advantages(method, rewards, dict(entropy=1.0))))
                    for rewards in groups]
        result[name] = dict(theory=[(i / 100, *formula(i / 100)) for i in range(1, 100)],
                            measured=measured)
    return result

"""ACPO's measures of an update, as the paper defines them, of the tokens of one optimizer step or
of a whole rollout: of losses.Tokens, or of their numbers in one dimension."""

import math
from statistics import linear_regression

import torch

from anatomy.rollout import HIGH, LOW, signed_gradient, walk
from losses import weight_on_logprob

BANDS = dict(low=(0.0, LOW), high=(HIGH, 1.0))


def uniform_mean(values, probs, band, parts=10):
    """The mean of values [n] over probs [n] that are uniform in the band (start, end): ACPO's
    eq. 54 and 55 before the absolute value. None without tokens.

    Tokens are not uniform: most of those above 0.8 are nearly at 1. So it is the plain mean over
    those of `parts` equal sub-bins that have a token, of the mean of the tokens in each."""
    start, end = band
    inside = (probs >= start) & (probs <= end)
    values = values[inside].double()
    part = ((probs[inside] - start) / (end - start) * parts).long().clamp(max=parts - 1)
    count = torch.bincount(part, minlength=parts)
    means = values.new_zeros(parts).index_add(0, part, values) / count.clamp(min=1)
    return means[count > 0].mean().item() if len(values) else None


def reversal(tokens, method):
    """Remark 1's two sides: the mean of G over pi <= 0.2 and over pi >= 0.8, uniform in pi; |G_L|
    and |G_H| of ACPO's eq. 54 and 55 are their sizes."""
    values, probs = signed_gradient(tokens, method)[tokens.mask], tokens.probs[tokens.mask]
    return [uniform_mean(values, probs, band) for band in BANDS.values()]


def clip_status(tokens, method, probs, entropy):
    """Of the tokens that have an advantage (no other can be clipped): is it clipped, its
    probability and its entropy, [n] each. probs and entropy [B, T] are of the policy that sampled:
    the current ones have already moved, the clipped ones most."""
    there = tokens.mask & (tokens.advantages != 0)
    clipped = weight_on_logprob(method, tokens) == 0
    return clipped[there], probs[there], entropy[there]


def clipped_tokens(clipped, probs, entropy, edges):
    """Clipped tokens against the others, by probability and entropy (ACPO, fig. 2c and app. C).

    clipped, probs, entropy [n] are clip_status's, of one step or of several joined; edges are the
    inner quantiles of the rollout's entropies. -> of the clipped and of the passed tokens: their
    number, mean probability, and the mean entropy of those with pi < 0.2; then the share clipped by
    the groups that the edges make."""
    def mean(x):
        return x.double().mean().item() if len(x) else None
    result = {name: dict(tokens=int(here.sum()), probability=mean(probs[here]),
                         entropy_if_low=mean(entropy[here & (probs < LOW)]))
              for name, here in (("clipped", clipped), ("passed", ~clipped))}
    quantile = torch.bucketize(entropy.contiguous(), edges, right=True)
    groups = [clipped[quantile == i] for i in range(len(edges) + 1)]
    return dict(result, by_entropy=[dict(tokens=len(x), clipped=mean(x)) for x in groups])


def quantiles(entropy):
    """The inner edges [4] that cut entropies [n] into five equally large groups."""
    inner = torch.arange(1, 5, device=entropy.device, dtype=torch.float64) / 5
    return torch.quantile(entropy.double(), inner).to(entropy)


def ratio_spread(tokens, bins=20):
    """[(log(1 - pi), log std(rho))] of `bins` equally large groups of tokens by pi_old. By ACPO's
    Lemma 1 they lie on a line of slope 2. Tokens with 1 - pi below 1e-4 are left out: their log
    probability is all rounding in float32."""
    rest = -tokens.old_logprobs[tokens.mask].double().expm1()
    ratio, rest = tokens.ratio[tokens.mask][rest > 1e-4].double(), rest[rest > 1e-4]
    groups = [part for part in rest.argsort().chunk(bins) if len(part) > 1]
    points = [(rest[part].mean().log().item(), ratio[part].std().log().item()) for part in groups]
    return [p for p in points if math.isfinite(p[1])]


def ratio_std(tokens):
    """The standard deviation of the ratios of low- and of high-probability tokens."""
    probs, ratio = tokens.old_logprobs.exp()[tokens.mask], tokens.ratio[tokens.mask]
    return dict(low=ratio[probs <= LOW].std().item(), high=ratio[probs > HIGH].std().item())


def own_slope(tokens):
    """Lemma 1's slope on the tokens of one optimizer step: in groups of 32 tokens or more, at most
    20 of them. None where too few tokens are left for a line."""
    points = ratio_spread(tokens, max(2, min(20, int(tokens.mask.sum()) // 32)))
    return linear_regression(*zip(*points)).slope if len(points) > 1 else None


def effective_problems(rates, alpha):
    """(sum m)^2 / sum m^2, m = p (1 - p)^alpha: the mass that power's advantage gives a problem of
    solve rate p on each side."""
    masses = [p * (1 - p) ** alpha for p in rates]
    return sum(masses) ** 2 / sum(m * m for m in masses)


def measured_steps(kept, count=None):
    """Ratios, gradients and clipping along the optimizer steps of a method of one pass.

    The whole rollout is looked at before the first step and after 1, 2, 4, 8, ... and the last: its
    reversal (Remark 1), after one step its ratio_spread (Lemma 1), and after the last its
    ratio_std. own_slope is of the first step's own tokens; met has of each step how many of its
    tokens have an advantage, and how many of these are in the lowest of ACPO's five bins, pi < 0.2;
    clipped is of all steps' tokens as these met them."""
    reversals, met, statuses, last = {}, [], [], None
    for taken, rows in walk(kept, count):
        if taken & (taken - 1) == 0 or rows is None:  # 0, 1, 2, 4, ...
            tokens = kept.tokens()
            reversals[taken] = reversal(tokens, kept.method)
            if taken == 0:
                probs, entropy = tokens.old_logprobs.exp(), tokens.entropy
            elif taken == 1:
                spread, slope_of_step = ratio_spread(tokens), own_slope(kept.tokens(last))
        if rows is not None:
            own = kept.tokens(rows)
            with_advantage = own.probs[own.mask & (own.advantages != 0)]
            met.append([len(with_advantage), int((with_advantage < LOW).sum())])
            statuses.append(clip_status(own, kept.method, probs[rows], entropy[rows]))
        last = rows
    joined = map(torch.cat, zip(*statuses, strict=True))
    clipped = clipped_tokens(*joined, quantiles(entropy[tokens.mask]))
    return dict(reversal=reversals, spread=spread, own_slope=slope_of_step,
                ratio_std=ratio_std(tokens), met=met, clipped=clipped)

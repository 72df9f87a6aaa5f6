"""ACPO's measures of an update, as the paper defines them, of the tokens of one optimizer step or
of a whole rollout, and the walk along which RESULTS.md has them.

The functions take losses.Tokens, or their numbers in one dimension, and return plain numbers or
masks.
"""

import math

import torch

from analysis.anatomy import signed_gradient, token_statistics, weight_on_logprob
from analysis.rollout import walk

LOW, HIGH = 0.2, 0.8  # ACPO's low- and high-probability tokens
BANDS = dict(low=(0.0, LOW), high=(HIGH, 1.0))


# ---------------------------------------------------------------------------- the reversal


def uniform_mean(values, probs, rows, band, parts=10):
    """The mean of values [n] over probs [n] that are uniform in the band (start, end): ACPO's
    eq. 54 and 55 before the absolute value.

    Tokens are not uniform: most of those above 0.8 are nearly at 1. So it is the plain mean over
    `parts` equal sub-bins of the mean of the tokens in each. A sub-bin without a token is left
    out, and the mean is over the others. rows [n] says which completion a token belongs to.
    -> mean (None without tokens); its standard error, as completions vary; tokens of each
    sub-bin. A sub-bin with one token adds nothing to the error, which then is too small."""
    start, end = band
    inside = (probs >= start) & (probs <= end)
    values, rows = values[inside].double(), rows[inside]
    part = ((probs[inside] - start) / (end - start) * parts).long().clamp(max=parts - 1)
    count = torch.bincount(part, minlength=parts)
    if not len(values):
        return dict(mean=None, error=None, tokens=count.tolist())
    means = values.new_zeros(parts).index_add(0, part, values) / count.clamp(min=1)
    occupied = count > 0
    # what each completion moves the mean by: a completion's tokens share their advantage
    moves = (values - means[part]) / (count[part] * occupied.sum())
    by_row = values.new_zeros(int(rows.max()) + 1).index_add(0, rows, moves)
    return dict(mean=means[occupied].mean().item(), error=by_row.norm().item(),
                tokens=count.tolist())


def reversal(tokens, method, parts=10):
    """Remark 1's two sides: `size` of low and of high is |G_L| and |G_H| of ACPO's eq. 54 and 55,
    by uniform_mean of G over pi <= 0.2 and over pi >= 0.8; low_over_high is below 1 after a
    reversal, and None where a side has no token or no gradient."""
    mask = tokens.mask
    rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)[mask]
    values, probs = signed_gradient(tokens, method)[mask], tokens.probs[mask]
    sides = {name: uniform_mean(values, probs, rows, band, parts) for name, band in BANDS.items()}
    for side in sides.values():
        side["size"] = None if side["mean"] is None else abs(side["mean"])
    low, high = sides["low"]["size"], sides["high"]["size"]
    return dict(sides, low_over_high=None if low is None or not high else low / high)


def sides(probs):
    """Which tokens are of low and which of high probability, as masks."""
    return dict(low=probs <= LOW, high=probs > HIGH)


def dominance(tokens, method):
    """The token-weighted mean of |G| of low- and high-probability tokens, and their share of the
    sum of all |G|. It is not the quantity of ACPO's Remark 1, which `reversal` has: there the mean
    is taken before the absolute value, and over pi that are uniform in the band."""
    size, probs = signed_gradient(tokens, method).abs()[tokens.mask], tokens.probs[tokens.mask]
    return {name: dict(mean=size[side].mean().item(), share=(size[side].sum() / size.sum()).item())
            for name, side in sides(probs).items()}


# ---------------------------------------------------------------------------- clipped tokens


def clip_status(tokens, method, probs, entropy):
    """Of the tokens that have an advantage (no other can be clipped): is it clipped, its
    probability and its entropy, [n] each. probs and entropy [B, T] are of the policy that sampled:
    the current ones have already moved, the clipped ones most."""
    there = tokens.mask & (tokens.advantages != 0)
    clipped = weight_on_logprob(tokens, method) == 0
    return clipped[there], probs[there], entropy[there]


def share_of(clipped, groups, count):
    """[{tokens, clipped: their share}] of each of `count` groups; None where a group is empty."""
    lines = []
    for i in range(count):
        here = clipped[groups == i]
        lines.append(dict(tokens=len(here),
                          clipped=here.double().mean().item() if len(here) else None))
    return lines


def clipped_tokens(clipped, probs, entropy, edges, bins=5):
    """Clipped tokens against the others, by probability and entropy (ACPO, fig. 2c and app. C).

    clipped, probs, entropy [n] are clip_status's, of one step or of several joined; edges are the
    inner quantiles of the rollout's entropies. -> of the clipped and of the passed tokens: their
    number, mean probability and entropy, the mean entropy of those with pi < 0.2, and low_low, the
    share with pi < 0.2 and an entropy in the lowest two of the groups that the edges make; then the
    share clipped by bin of the probability and by those groups."""
    quantile = torch.bucketize(entropy.contiguous(), edges, right=True)
    low = probs < LOW

    def mean(x):
        return x.double().mean().item() if len(x) else None
    result = {}
    for name, here in (("clipped", clipped), ("passed", ~clipped)):
        result[name] = dict(tokens=int(here.sum()), probability=mean(probs[here]),
                            entropy=mean(entropy[here]), entropy_if_low=mean(entropy[here & low]),
                            low_low=mean((low & (quantile < 2))[here]))
    bin_of = (probs * bins).long().clamp(max=bins - 1)
    return dict(result, by_probability=share_of(clipped, bin_of, bins),
                by_entropy=share_of(clipped, quantile, len(edges) + 1))


def quantiles(entropy, groups=5):
    """The inner edges [groups - 1] that cut entropies [n] into equally large groups."""
    inner = torch.arange(1, groups, device=entropy.device, dtype=torch.float64) / groups
    return torch.quantile(entropy.double(), inner).to(entropy)


# ---------------------------------------------------------------------------- the spread of ratios


def slope(points):
    """The slope of the least squares line through (x, y) points."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


def ratio_spread(tokens, bins=20):
    """[(log(1 - pi), log std(rho))] of `bins` equally large groups of tokens by pi_old. By ACPO's
    Lemma 1 they lie on a line of slope 2.

    Tokens with 1 - pi below 1e-4 are left out: their log probability is all rounding in
    float32."""
    rest = -tokens.old_logprobs[tokens.mask].double().expm1()
    ratio, rest = tokens.ratio[tokens.mask][rest > 1e-4].double(), rest[rest > 1e-4]
    groups = [part for part in rest.argsort().chunk(bins) if len(part) > 1]
    points = [(rest[part].mean().log().item(), ratio[part].std().log().item()) for part in groups]
    return [p for p in points if math.isfinite(p[1])]


def ratio_histograms(tokens):
    """{side: density, edges and std of the ratios} of low- and high-probability tokens."""
    probs, ratio = tokens.old_logprobs.exp()[tokens.mask], tokens.ratio[tokens.mask]
    edges, histograms = torch.linspace(0.5, 1.5, 51), {}
    for name, side in sides(probs).items():
        counts = torch.histc(ratio[side].clamp(0.5, 1.5).cpu(), 50, 0.5, 1.5)
        histograms[name] = dict(density=(counts / counts.sum() * 50).tolist(),
                                edges=edges.tolist(), std=ratio[side].std().item())
    return histograms


def own_slope(tokens):
    """Lemma 1's slope on the tokens of one optimizer step: in groups of 32 tokens or more, at most
    20 of them. None where too few tokens are left for a line."""
    points = ratio_spread(tokens, max(2, min(20, int(tokens.mask.sum()) // 32)))
    return slope(points) if len(points) > 1 else None


# ---------------------------------------------------------------------------- step by step


def steps(kept, count=None, lr=None, optimizer=torch.optim.AdamW, at=(1, 2, 4, 8, 16, 32, 64)):
    """Ratios, gradient sizes and clipping along the optimizer steps of a method of one pass.

    The whole rollout is looked at before the first step, after the last, and after those in `at`:
    slope and spread (Lemma 1), reversal (Remark 1), dominance; own_slope is of the tokens of the
    step just taken alone. tables and clipped["steps"] are of each step's own tokens as it met them,
    clipped["rollout"] is of these joined, clipped["after"] of the rollout after the last step."""
    result = dict(spread={}, slope={}, own_slope={}, reversal={}, dominance={}, tables=[])
    met, last = [], None
    for taken, rows in walk(kept, count, lr, optimizer):
        if taken in at or taken == 0 or rows is None:
            tokens = kept.tokens()
            result["reversal"][taken] = reversal(tokens, kept.method)
            result["dominance"][taken] = dominance(tokens, kept.method)
            if taken:
                result["spread"][taken] = ratio_spread(tokens)
                result["slope"][taken] = slope(result["spread"][taken])
                result["own_slope"][taken] = own_slope(kept.tokens(last))
            else:
                probs, entropy = tokens.old_logprobs.exp(), tokens.entropy
        if rows is not None:
            step_tokens = kept.tokens(rows)
            result["tables"].append(token_statistics(step_tokens, kept.method))
            met.append(clip_status(step_tokens, kept.method, probs[rows], entropy[rows]))
        last = rows
    edges = quantiles(entropy[tokens.mask])
    after = clip_status(tokens, kept.method, probs, entropy)
    clipped = dict(steps=[clipped_tokens(*status, edges) for status in met],
                   rollout=clipped_tokens(*map(torch.cat, zip(*met, strict=True)), edges),
                   after=clipped_tokens(*after, edges))
    return dict(result, clipped=clipped, ratios=ratio_histograms(tokens))

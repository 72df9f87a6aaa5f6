"""What ACPO measures of an update, as the paper defines it, of the tokens of one optimizer step or
of a whole rollout: G and its means by probability, clipped tokens, selections.

Every function takes losses.Tokens, or their numbers in one dimension, and returns plain numbers or
masks. analysis/anatomy.py has the walks and the gradients that they are measured along.
"""

from dataclasses import replace

import torch

from losses import objective_of

LOW, HIGH = 0.2, 0.8  # ACPO's low- and high-probability tokens
BANDS = dict(low=(0.0, LOW), high=(HIGH, 1.0))


# ---------------------------------------------------------------------------- G


def weight_on_logprob(tokens, method):
    """-d loss / d log pi of each token [B, T]: rho A where PPO's clip lets it pass, 0 where it does
    not (ACPO, eq. 2)."""
    leaf = replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_())
    gradient, = torch.autograd.grad(objective_of(method, leaf)[0].sum(), leaf.logprobs)
    return -gradient * tokens.mask


def signed_gradient(tokens, method):
    """G = (1 - pi) rho A 1[not clipped] of each token (ACPO, eq. 3 and 39), times what the method
    selects, [B, T]; pi is the current policy's."""
    weight = weight_on_logprob(tokens, method)
    return (1 - tokens.probs) * weight * method.call(method.select, tokens)


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


def slope(points):
    """The slope of the least squares line through (x, y) points."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)

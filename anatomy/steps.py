"""Ratios, clipping and gradients of a kept rollout after each optimizer step, by the token's
probability."""

from math import nan

from anatomy.rollout import logged, signed_gradient, walk
from harness.curves import draw
from harness.stats import markdown_table
from losses import weight_on_logprob


def token_statistics(tokens, method, bins=5):
    """For each sign of the advantage and bin of the probability: the number of tokens, the share
    of them that the objective clips, their mean weight on log pi over |A|, the standard deviation
    of their ratios, the mean of |G| and their share of its sum. Tokens without an advantage are in
    no bin; without a token a number is nan."""
    mask, lines = tokens.mask, []
    weight = weight_on_logprob(method, tokens).abs()[mask]
    size = signed_gradient(tokens, method).abs()[mask]
    advantage, ratio = tokens.advantages[mask], tokens.ratio[mask]
    bin_of = (tokens.probs[mask] * bins).long().clamp(max=bins - 1)
    for sign in (-1, 1):
        for i in range(bins):
            here = (bin_of == i) & (advantage.sign() == sign)
            numbers = dict(
                tokens=here.sum(), gradient=size[here].sum() / size.sum().clamp(min=1e-12),
                clipped=(weight[here] == 0).float().mean(),
                weight=(weight[here] / advantage[here].abs()).mean(),
                ratio_std=(ratio[here] - ratio[here].mean()).square().mean().sqrt(),
                size=size[here].mean())
            lines.append(dict(sign=sign, bin=i, **{key: x.item() for key, x in numbers.items()}))
    return lines


def steps(kept, steps=None, lr=None):
    """{"steps": [numbers of the whole rollout]} before the first optimizer step and after each:
    clip_frac, ess and approx_kl as train.py logs them, and token_statistics as bins."""
    lines = []
    for _ in walk(kept, steps, lr):
        tokens = kept.tokens()
        lines.append(dict(logged(tokens, kept.method, "clip_frac", "ess", "approx_kl"),
                          bins=token_statistics(tokens.masked(), kept.method)))
    return dict(steps=lines)


def steps_table(result):
    rows = [(taken, *(f"{line[key]:.3g}" for key in ("clip_frac", "ess", "approx_kl")),
             *(f"{line['bins'][i]['size']:.3g}" for i in (0, 4, 5, 9)))
            for taken, line in enumerate(result["steps"])]
    return markdown_table(("steps", "clipped", "ess", "KL", "A < 0: abs G, low", "high",
                           "A > 0: abs G, low", "high"), rows) + (
        "\n\nEach line is of the whole rollout, after that number of optimizer steps. clipped: "
        "share of the tokens that have an\nadvantage and no gradient. ess: effective sample size, "
        "1 where all ratios are 1. KL: to the policy that sampled, in\nnats. abs G: mean size of "
        "a token's gradient, G = (1 - pi) rho A, 0 where it is clipped, of the tokens of\nlow "
        "(pi < 0.2) and high (pi > 0.8) probability.\nLook at which tokens have the larger "
        "gradient, and in the figure whose ratios spread and which are clipped.\n")


def draw_steps(result, out):
    """Ratios, clipping and gradients of `steps` by sign of A, a line for each bin of pi."""
    names = dict(ratio_std="std of the ratio", clipped="share clipped", gradient="share of |G|")
    panels = {f"{text}, A {'<>'[sign > 0]} 0": {
        f"pi from {i / 5:g} to {(i + 1) / 5:g}": [
            (taken, line["bins"][i + 5 * (sign > 0)][key], nan, nan)
            for taken, line in enumerate(result["steps"])] for i in range(5)}
        for sign in (-1, 1) for key, text in names.items()}
    draw(panels, out, f"rollout {result['rollout']}, {result['method']}, learning rate "
                      f"{result['lr']:g}", "optimizer steps taken")

"""The anatomy of an update: ratios, clipping and gradients along the optimizer steps on a kept
rollout."""

from dataclasses import replace

import torch

from analysis.rollout import walk
from experiment.tables import markdown_table
from losses import measure, objective_of


def weight_on_logprob(tokens, method):
    """-d loss / d log pi of each token [B, T]: rho A where PPO's clip lets it pass, 0 where it does
    not (ACPO, eq. 2)."""
    leaf = replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_())
    gradient, = torch.autograd.grad(objective_of(method, leaf)[0].sum(), leaf.logprobs)
    return -gradient * tokens.mask


def signed_gradient(tokens, method):
    """G = (1 - pi) rho A 1[not clipped] of each token (ACPO, eq. 3 and 39), times the weight of the
    method's select, [B, T]; pi is the current policy's."""
    weight = weight_on_logprob(tokens, method)
    return (1 - tokens.probs) * weight * method.call(method.select, tokens)


def token_statistics(tokens, method, bins=5):
    """For each sign of the advantage and bin of the probability: the number of tokens, the share
    of them that the objective clips, their mean weight on log pi over |A|, the standard deviation
    of their ratios, the mean of |G| and their share of its sum. Tokens without an advantage are in
    no bin; without a token a number is nan."""
    mask, lines = tokens.mask, []
    weight = weight_on_logprob(tokens, method).abs()[mask]
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


def logged(tokens, method, *names):
    """{name: number} of the tokens as of one optimizer step, as train.py logs it."""
    measured = measure(method, tokens.without_junk())
    return {name: measured[name].item() for name in names}


def steps(kept, steps=None, lr=None):
    """{"steps": [numbers of the whole rollout]} before the first optimizer step and after each:
    clip_frac, ess and approx_kl as train.py logs them, and token_statistics as bins."""
    lines = []
    for _ in walk(kept, steps, lr):
        tokens = kept.tokens()
        lines.append(dict(logged(tokens, kept.method, "clip_frac", "ess", "approx_kl"),
                          bins=token_statistics(tokens.without_junk(), kept.method)))
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

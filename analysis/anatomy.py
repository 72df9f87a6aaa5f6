"""The anatomy of an update: what the optimizer steps on one kept rollout do to ratios, tokens,
gradients and entropy.

Each analysis takes an open rollout (analysis/rollout.py) with any Hugging Face model and returns
plain numbers; the function ..._table beside it writes them as a Markdown table.
"""

import math
import statistics

import torch

from analysis.quantities import (
    HIGH,
    LOW,
    clip_status,
    clipped_tokens,
    quantiles,
    reversal,
    slope,
    weight_on_logprob,
)
from analysis.rollout import walk
from experiment.tables import markdown_table
from losses import METHODS, every_token


def sides(probs):
    """Which tokens are of low and which of high probability, as masks."""
    return dict(low=probs <= LOW, high=probs > HIGH)


# ---------------------------------------------------------------------------- step by step


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


def logprob_gradient(tokens, method):
    """|d loss / d log pi| of each token, 0 where the objective clips, [B, T]: |A| times the weight
    of ACPO's gradient."""
    return weight_on_logprob(tokens, method).abs()


def gradient_size(tokens, method, token_filter=every_token):
    """|G| = (1 - pi) |d loss / d log pi| (ACPO, sec. 2.3), times what the method selects,
    [B, T]."""
    return ((1 - tokens.probs) * logprob_gradient(tokens, method)
            * method.call(method.select, tokens) * method.call(token_filter, tokens))


def dominance(tokens, method):
    """The token-weighted mean of |G| of low- and high-probability tokens, and their share of the
    sum of all |G|. It is not the quantity of ACPO's Remark 1, which quantities.reversal has: there
    the mean is taken before the absolute value, and over pi that are uniform in the band."""
    size, probs = gradient_size(tokens, method)[tokens.mask], tokens.probs[tokens.mask]
    return {name: dict(mean=size[side].mean().item(), share=(size[side].sum() / size.sum()).item())
            for name, side in sides(probs).items()}


def token_statistics(tokens, method, token_filter=every_token, bins=5):
    """For each sign of the advantage and bin of the probability: the number of tokens, the share
    of them that the objective clips, its mean weight on log pi over |A|, and their share of the
    sum of all |G|."""
    mask = tokens.mask
    weight = logprob_gradient(tokens, method)[mask]
    size = gradient_size(tokens, method, token_filter)[mask]
    advantage, probs = tokens.advantages[mask], tokens.probs[mask]
    bin_of, lines = (probs * bins).long().clamp(max=bins - 1), []
    for sign in (-1, 1):
        for i in range(bins):
            here = (bin_of == i) & (advantage.sign() == sign)
            n = int(here.sum())
            lines.append(dict(
                sign=sign, bin=i, tokens=n,
                gradient=(size[here].sum() / size.sum().clamp(min=1e-12)).item(),
                clipped=(weight[here] == 0).float().mean().item() if n else None,
                weight=(weight[here] / advantage[here].abs()).mean().item() if n else None))
    return lines


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


def steps(kept, count=None, lr=None, optimizer=torch.optim.AdamW, at=(1, 2, 4, 8, 16, 32, 64)):
    """Ratios, gradient sizes and clipping along the optimizer steps on one rollout.

    The whole rollout is looked at before the first step, after the last, and after those in `at`:
    slope and spread (Lemma 1), reversal (Remark 1), dominance; own_slope is of the tokens of the
    step just taken alone. tables and clipped["steps"] are of each step's own tokens as it met them,
    clipped["rollout"] is of these joined, clipped["after"] of the rollout after the last step."""
    result = dict(spread={}, slope={}, own_slope={}, reversal={}, dominance={}, tables=[])
    met, last = [], None
    for taken, rows, token_filter in walk(kept, count, lr, optimizer):
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
            result["tables"].append(token_statistics(step_tokens, kept.method, token_filter))
            met.append(clip_status(step_tokens, kept.method, probs[rows], entropy[rows]))
        last = rows
    edges = quantiles(entropy[tokens.mask])
    after = clip_status(tokens, kept.method, probs, entropy)
    clipped = dict(steps=[clipped_tokens(*status, edges) for status in met],
                   rollout=clipped_tokens(*map(torch.cat, zip(*met, strict=True)), edges),
                   after=clipped_tokens(*after, edges))
    return dict(result, clipped=clipped, ratios=ratio_histograms(tokens))


def number(x):
    return "-" if x is None else f"{x:.3g}"


def steps_table(result):
    rows = []
    for taken, sides in result["reversal"].items():
        sizes = [f"{number(sides[side]['size'])} ({number(sides[side]['error'])})"
                 for side in ("low", "high")]
        occupied = [sum(n > 0 for n in sides[side]["tokens"]) for side in ("low", "high")]
        means = [result["dominance"][taken][side]["mean"] for side in ("low", "high")]
        rows.append([str(taken), number(result["slope"].get(taken)),
                     number(result["own_slope"].get(taken)), *sizes,
                     number(sides["low_over_high"]), "{} + {}".format(*occupied),
                     *map(number, means)])
    return markdown_table(("steps taken", "slope", "own slope", "G low", "G high", "low / high",
                           "sub-bins", "mean abs G, pi <= 0.2", "mean abs G, pi > 0.8"), rows) + (
        "\n\nEach line shows the rollout after so many optimizer steps. slope is that of log "
        "std(rho) on log(1 - pi)\nover groups of tokens: it is 2 by Lemma 1 of ACPO, and 1 where "
        "the ratio rho spreads as 1 - pi does. own\nslope is the same over the tokens of the step "
        "just taken. G = (1 - pi) rho A, 0 where it is clipped, is the\ngradient of a token. G low "
        "and G high are what ACPO's Remark 1 is about (eq. 54 and 55): the absolute value\nof the "
        "mean of G over pi uniform from 0 to 0.2 and from 0.8 to 1, each the mean of 10 sub-bins, "
        "with its\nstandard error over completions. low / high is the one over the other. sub-bins "
        "is how many of the 10 of each\nhave tokens: the others are left out. mean abs G is "
        "another quantity, the mean of the absolute values, over\ntokens.\n"
        "Look at whether low / high falls below 1 as the steps go on, and whether G high is above "
        "its standard\nerror by then; and at whether a slope stays away from 0.\n") + (
        clipped_table(result["clipped"]))


def clipped_table(clipped):
    """Where the clipped tokens are: as each step met its tokens, and after the last step."""
    columns = dict(tokens="tokens", probability="probability", entropy="entropy",
                   entropy_if_low="entropy, pi < 0.2", low_low="both low")
    rows = [(f"{kind}, {name}", *(number(clipped[when][kind][key]) for key in columns))
            for when, name in (("rollout", "as met"), ("after", "after the last step"))
            for kind in ("clipped", "passed")]
    shares = [(name, *(number(line["clipped"]) for line in clipped["rollout"][key]))
              for name, key in (("by probability", "by_probability"),
                                ("by entropy", "by_entropy"))]
    return "\n" + markdown_table(("tokens with an advantage", *columns.values()), rows) + (
        "\n\nprobability and entropy are means, of the policy that sampled. both low is the share "
        "of tokens with pi < 0.2\nand an entropy in the rollout's lowest two fifths. as met: each "
        "step's own tokens just before it.\n\n") + (
        markdown_table(("share clipped", *(f"fifth {i}" for i in range(1, 6))), shares)) + (
        "\n\nThe fifths are of the probability, from [0, 0.2) to [0.8, 1], and of the rollout's "
        "tokens by entropy, from the\nlowest.\n")


# ---------------------------------------------------------------------------- replay


def replay(kept, names):
    """The gradients of the methods on the rollout, all of it as one optimizer step: loss, gradient
    norm and clip fraction of each, and the cosine between every two.

    A method has its flags at their defaults; the run's own method has the run's. At a checkpoint
    before the rollout was learnt from the ratios are 1, a later one spreads them."""
    run_name, run_method = kept.flags["loss"], kept.method
    run_coefficients, gradients, result = kept.coefficients, {}, {}
    for name in names:
        is_run = name == run_name
        try:
            kept.use(run_method if is_run else METHODS[name])
        except ValueError as e:
            print(f"{name} is left out: {e}")
            continue
        kept.coefficients = run_coefficients if is_run else {}
        kept.policy.zero_grad()
        passes = [kept.backward(token_filter=token_filter) for token_filter in kept.method.passes]
        gradients[name] = torch.cat([p.grad.flatten().cpu() for p in kept.policy.parameters()])
        result[name] = dict(loss=sum(metrics["loss"].item() for metrics in passes),
                            grad_norm=gradients[name].norm().item(),
                            **{key: statistics.fmean(metrics[key].item() for metrics in passes)
                               for key in ("clip_frac", "approx_kl", "ess")})

    def dot(a, b):  # a float32 sum over all parameters is off by 1e-4 and more
        return (gradients[a] * gradients[b]).sum(dtype=torch.float64)
    return dict(methods=result, cosine=[
        [(dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).item() for b in result] for a in result])


def replay_table(result):
    rows = [(name, *(f"{x:.4g}" for x in v.values())) for name, v in result["methods"].items()]
    return markdown_table(("method", "loss", "gradient norm", "clipped", "KL", "ess"), rows) + (
        "\n\nloss and gradient norm are those of the whole rollout as one optimizer step; clipped "
        "is the share of tokens\nwithout a gradient because of their ratio; KL, in nats, says how "
        "far the model is from the policy that\nsampled; ess is the effective sample size, 1 "
        "where all ratios are 1. At the weights that sampled, KL and\nclipped are 0; --model with "
        "a later checkpoint spreads the ratios.\nLook at the cosines in the figure: near 1, two "
        "methods make the same update, whatever their norms, because\nAdamW divides the norm "
        "out.\n")

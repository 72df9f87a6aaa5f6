"""The anatomy of an update: what the optimizer steps on one kept rollout do to ratios, tokens,
gradients and entropy.

Each analysis takes an open rollout (analysis/rollout.py) with any Hugging Face model and returns
plain numbers; the function ..._table beside it writes them as a Markdown table.
"""

import math
import statistics
from collections import namedtuple
from dataclasses import replace

import torch

import losses
from analysis.quantities import (
    HIGH,
    LOW,
    clip_status,
    clipped_tokens,
    quantiles,
    reversal,
    selected_shares,
    top_entropy_of_each,
    weight_on_logprob,
)
from analysis.rollout import open_rollout, walk
from analysis.theory import slope
from engine.loading import layers_of
from experiment.log import numbers
from experiment.tables import markdown_table
from losses import METHODS, Method, cells, every_token, gradient_mass, ppo_clip


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


# ---------------------------------------------------------------------------- size and direction

# on_policy: the gradient is taken where all ratios are 1. is_part: the three parts of this kind,
# by probability, are all of the tokens
Subset = namedtuple("Subset", "method token_filter on_policy is_part",
                    defaults=(every_token, False, False))
ONE_STEP = "on-policy, one step"


def subsets(kept):
    """{name: Subset}: what the gradient is taken of, and by which loss; all of it comes first."""
    method, entropy = kept.method, kept.tokens().entropy[kept.batch.mask]
    top_fifth = math.ceil(0.2 * len(entropy))
    high_entropy = entropy.sort(descending=True).values[top_fifth - 1].item()

    def tokens_with(test, is_part=False):
        return Subset(method, lambda tokens: test(tokens).to(tokens.entropy), is_part=is_part)

    def objective(f, **hyperparameters):
        return Subset(replace(method, objective=f).bind(**hyperparameters))
    return {
        "full": Subset(method),
        f"pi < {LOW}": tokens_with(lambda t: t.probs < LOW, is_part=True),
        f"{LOW} <= pi <= {HIGH}": tokens_with(lambda t: (t.probs >= LOW) & (t.probs <= HIGH),
                                              is_part=True),
        f"pi > {HIGH}": tokens_with(lambda t: t.probs > HIGH, is_part=True),
        "top 20% entropy": tokens_with(lambda t: t.entropy >= high_entropy),
        "top 20% entropy of each": tokens_with(top_entropy_of_each),
        "A > 0": tokens_with(lambda t: t.advantages > 0),
        "A < 0": tokens_with(lambda t: t.advantages < 0),
        "clip-higher": objective(ppo_clip, eps_low=0.2, eps_high=0.3, dual_clip=None),
        "no clip": objective(ppo_clip, eps_low=math.inf, eps_high=math.inf, dual_clip=None),
        "cispo": objective(losses.cispo, ratio_max=5.0),
        "cispo of ACPO": objective(losses.cispo, ratio_max=1.45, drop_low=0.2, drop_high=0.3),
        "on-policy": Subset(method, on_policy=True)}


def sampled_matrices(model, layers):
    """{name: parameter} of the weight matrices of at most `layers` transformer blocks, evenly over
    the depth."""
    blocks = layers_of(model)
    count = min(layers, len(blocks))
    places = [round(i * (len(blocks) - 1) / max(1, count - 1)) for i in range(count)]
    chosen = {id(p) for place in places for p in blocks[place].parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in chosen and p.dim() == 2}


def right_subspace(matrix, k):
    """The top-k right singular vectors [k, n]. None for k is 128, or an eighth of a smaller matrix
    (with all of its vectors it would be the whole space)."""
    k = k or min(128, max(1, min(matrix.shape) // 8))
    return torch.linalg.svd(matrix.double(), full_matrices=False).Vh[:k]


def angle(a, b):
    """The mean principal angle in degrees between subspaces given by orthonormal rows."""
    return torch.linalg.svdvals(a @ b.T).clamp(max=1).acos().mean().item() * 180 / math.pi


def norm(x):
    """In float64: a float32 sum over so many squares is off by 1e-4."""
    return x.norm(dtype=torch.float64)


def walk_to(kept, after, lr):
    """Takes `after` steps of the run, by default half of them. -> their number"""
    total = len(kept.method.passes) * kept.flags["steps_per_rollout"]
    after = total // 2 if after is None else after
    if not 0 <= after <= total:
        raise ValueError(f"--steps {after}: its run took {total}")
    next(taken for taken, *_ in walk(kept, lr=lr) if taken == after)
    return after


def gradient_of(kept, matrices, method=None, token_filter=every_token):
    """{name: gradient of a matrix} of the rollout as one optimizer step."""
    kept.policy.zero_grad()
    kept.backward(token_filter=token_filter, method=method)
    return {n: p.grad.detach().clone() for n, p in matrices.items()}


def gradient_of_selected(kept, matrices, method, chosen):
    """The gradient of the chosen tokens [N, T] with denominators that count these alone: by
    seq_mean the mean over a completion's chosen tokens, then the mean over the completions that
    have one.

    ACPO's released code selects by multiplying the response mask, to the same effect. It divides by
    0 for a completion without a chosen token, which its own selection always has; here such a
    completion is left out. To count it as 0 instead scales the gradient by the share of completions
    that have one. An objective that looks at the whole step, as acpo's, sees the chosen tokens
    alone. constant divides by the limit of tokens, whatever is chosen."""
    whole = kept.batch.mask
    kept.batch.mask = whole & chosen
    try:
        return gradient_of(kept, matrices, method)
    finally:
        kept.batch.mask = whole


def gradients_of(kept, matrices):
    """Yields (name, Subset, {name: gradient of a matrix}, the same by the selected tokens, what is
    selected) of each subset; the last two are None where all tokens are taken."""
    for p in kept.policy.parameters():
        p.requires_grad_(False)
    for p in matrices.values():
        p.requires_grad_(True)
    tokens, old = kept.tokens(), kept.batch.old_logprobs
    for name, subset in subsets(kept).items():
        kept.batch.old_logprobs = tokens.logprobs if subset.on_policy else old
        gradients = gradient_of(kept, matrices, subset.method, subset.token_filter)
        selected = chosen = None
        if subset.token_filter is not every_token:
            chosen = subset.token_filter(tokens).bool() & tokens.mask
            if chosen.any():
                selected = gradient_of_selected(kept, matrices, subset.method, chosen)
        yield name, subset, gradients, selected, chosen
    kept.batch.old_logprobs = old


class Reference:
    """The gradients that others are held against: {name: gradient of a matrix}."""

    def __init__(self, gradients, k):
        self.spaces = {n: right_subspace(g, k) for n, g in gradients.items()}
        self.sizes = {n: norm(g) for n, g in gradients.items()}
        self.size, self.k = math.sqrt(sum(s.item() ** 2 for s in self.sizes.values())), k

    def compare(self, gradients):
        """-> the norm over the reference's, the mean principal angle to it in degrees (eq. 7), and
        both of each matrix; an angle is nan where a matrix has no gradient."""
        each = {}
        for n, g in gradients.items():
            to_it = angle(right_subspace(g, self.k), self.spaces[n]) if g.any() else math.nan
            each[n] = dict(norm=(norm(g) / self.sizes[n]).item(), angle=to_it)
        size = math.sqrt(sum(norm(g).item() ** 2 for g in gradients.values()))
        return dict(norm=size / self.size,
                    angle=sum(v["angle"] for v in each.values()) / len(each), matrices=each)


def compare_subsets(kept, layers=8, k=None, after=None, lr=None):
    """After `after` steps of the run (default half of them): each subset's gradient norm over the
    full one's, and the mean principal angle to it, per weight matrix and overall.

    norm and angle are of a sum with the denominators of all tokens, which does not grow where few
    are selected. norm_selected and angle_selected are of gradient_of_selected; tokens and
    completions are the shares selected. "on-policy" has ratios of 1 at the weights of the full
    gradient, ONE_STEP is the whole rollout's gradient at the weights before the first step.
    sum_error is how far the three parts by probability are from adding up to the full gradient,
    relative to it: the largest over the matrices."""
    matrices, result = sampled_matrices(kept.policy.model, layers), {}
    one_step = gradient_of(kept, matrices)
    after = walk_to(kept, after, lr)
    for name, subset, gradients, selected, chosen in gradients_of(kept, matrices):
        if not result:
            full, remainder = Reference(gradients, k), dict(gradients)
        if subset.is_part:
            remainder = {n: g - gradients[n] for n, g in remainder.items()}
        result[name] = full.compare(gradients)
        if chosen is not None:
            tokens, completions = selected_shares(kept.batch.mask, chosen)
            by = full.compare(selected) if selected else dict(norm=None, angle=None)
            result[name].update(tokens=tokens, completions=completions, norm_selected=by["norm"],
                                angle_selected=by["angle"])
    result[ONE_STEP] = full.compare(one_step)
    error = max((norm(g) / full.sizes[n]).item() for n, g in remainder.items())
    return dict(after=after, subsets=result, sum_error=error)


def subsets_table(result):
    keys = ("tokens", "completions", "norm", "angle", "norm_selected", "angle_selected")
    rows = [(name, *(number(v.get(key)) for key in keys))
            for name, v in result["subsets"].items()]
    return markdown_table(("subset", "tokens", "completions", "norm, all", "angle, all",
                           "norm, selected", "angle, selected"), rows) + (
        "\n\ntokens is the share of the tokens that are selected, completions that of the "
        "completions that have one.\nnorm is the length of the gradient of some of the tokens, or "
        "by another loss, over that of the full one. all:\nthe sum is divided as the full one is, "
        "by all tokens; selected: it is averaged over the selected tokens of a\ncompletion, then "
        "over the completions that have one, as ACPO's code does.\nangle is the mean principal "
        "angle in degrees between its leading directions and the full one's: at 0\nthey are the "
        "same, at 90 they have nothing in common.\n"
        "on-policy has all ratios at 1 and the weights of the full gradient; on-policy, one step "
        "is of the weights that\nsampled. cispo of ACPO bounds the ratio at 1.45 and drops the "
        "tokens that a clip of 0.2 and 0.3 would.\n"
        "Look for what is long and far off: it turns the update most.\nThe three parts "
        f"by probability add up to the full gradient to {result['sum_error']:.1g} of its length: "
        "this is the rounding error.\n")


# ---------------------------------------------------------------------------- all of it


def anatomy_of(file, model=None):
    """What RESULTS.md has of one kept rollout of a run in 16 steps, as plain numbers.

    Each analysis opens the rollout anew: the one before has moved the policy.

    steps    the run's own steps, all of steps()
    near     the same in 2 steps
    far      in 64 steps of the run's learning rate, looked at after 32 and 64
    fast     in 64 steps of five times the learning rate
    slow     in the run's number of steps, of a quarter of the learning rate, after 1
    sgd      in the run's number of steps, plain gradient steps of learning rate 0.02, after 1
    subsets  compare_subsets
    solve_rates  the mean reward of each problem's completions
    of near to sgd: slope, own_slope, reversal, dominance, and clipped without its single steps.
    Numbers of steps are keys, which become texts in a JSON file; None stands for nan."""
    def walked(at, **settings):
        result = steps(open_rollout(file, model), at=at, **settings)
        del result["clipped"]["steps"]
        return {key: result[key]
                for key in ("slope", "own_slope", "reversal", "dominance", "clipped")}
    kept = open_rollout(file, model)
    lr = kept.flags["lr"]
    return numbers(dict(
        rollout=kept.rollout, method=kept.flags["loss"], seed=kept.flags["seed"], lr=lr,
        steps=steps(kept), near=walked((1, 2), count=2), far=walked((32, 64), count=64),
        fast=walked((32, 64), count=64, lr=5 * lr), slow=walked((1,), lr=lr / 4),
        sgd=walked((1,), lr=0.02, optimizer=torch.optim.SGD),
        subsets=compare_subsets(open_rollout(file, model)),
        solve_rates=kept.rewards.mean(1).tolist()))


# ---------------------------------------------------------------------------- entropy


def entropy_changes(kept, lr=None):
    """For every advantage: FADE's prediction of the rollout's entropy change, up to a factor,
    against what the steps do.

    predicted   (m_S - m_F) H - Cov(A, log pi) over the completion tokens (FADE)
    covariance  -Cov(A, log pi) alone (arXiv 2505.22617)
    reversed    the first term with the other sign, by which mass on successes costs entropy
    measured    nats, over the same prefixes, after the steps of `constant | ppo_clip`"""
    start, changes = [p.detach().clone() for p in kept.policy.parameters()], {}
    kept.coefficients = {}
    variants = {name: (advantage, {}) for name, advantage in cells("advantage").items()}
    variants.update({f"asym, delta {d:g}": (losses.asym, dict(delta=d)) for d in (0.25, 0.5, 4)})
    for name, (advantage, hyperparameters) in variants.items():
        method = Method(advantage, ppo_clip, losses.constant).bind(**hyperparameters)
        with torch.no_grad():
            for p, value in zip(kept.policy.parameters(), start, strict=True):
                p.copy_(value)
        try:
            kept.use(method)
        except ValueError as e:
            print(f"{name} is left out: {e}")
            continue
        changes[name] = entropy_change(kept, lr)
    kinds = ("predicted", "covariance", "reversed")
    return dict(advantages=changes, **{
        f"correlation_{kind}": correlation([(v[kind], v["measured"]) for v in changes.values()])
        for kind in kinds})


def entropy_change(kept, lr):
    """What entropy_changes gives of one advantage; takes the steps."""
    before = kept.tokens()
    a, logprobs = before.advantages[before.mask].double(), before.logprobs[before.mask].double()
    if not a.any():
        raise ValueError("its advantages are all 0")
    pos, neg = gradient_mass(a)
    entropy = before.entropy[before.mask].mean().item()
    for _ in walk(kept, lr=lr):
        pass
    covariance = ((a - a.mean()) * (logprobs - logprobs.mean())).mean().item()
    # AdamW's steps have one size whatever the scale of A: so must the prediction
    scale = a.abs().mean().item()
    return dict(mass_pos=pos, mass_neg=neg,
                predicted=((pos - neg) * entropy - covariance) / scale,
                covariance=-covariance / scale,
                reversed=(-(pos - neg) * entropy - covariance) / scale,
                measured=kept.tokens().entropy[before.mask].mean().item() - entropy)


def correlation(points):
    return torch.corrcoef(torch.tensor(points, dtype=torch.float64).T)[0, 1].item()


def entropy_table(result):
    columns = ("predicted", "covariance", "reversed", "measured")
    rows = [(name, *(f"{v[column]:.4g}" for column in columns))
            for name, v in result["advantages"].items()]
    correlations = ", ".join(f"{result[f'correlation_{kind}']:.2f}" for kind in columns[:3])
    return markdown_table(("advantage", "predicted", "-Cov", "reversed", "measured"), rows) + (
        f"\ncorrelation with what is measured: {correlations}\n\n"
        "measured is the change of the entropy, in nats per token, by the run's steps with this "
        "advantage.\npredicted is (m_S - m_F) H - Cov(A, log pi), -Cov its second term alone, and "
        "reversed has the first term\nwith the other sign: all over mean |A|, and up to a "
        "factor.\nLook at the signs and at the correlations (in the order of the columns), not at "
        "the sizes: a prediction\nthat holds has a correlation near 1.\n")


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

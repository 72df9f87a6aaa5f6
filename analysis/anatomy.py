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
from analysis.rollout import walk
from analysis.theory import slope
from engine.loading import layers_of
from engine.policy import compute_logprobs
from experiment.tables import markdown_table
from losses import METHODS, Method, cells, every_token, gradient_mass, objective_of, ppo_clip

LOW, HIGH = 0.2, 0.8  # ACPO's low- and high-probability tokens


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
    leaf = replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_())
    gradient, = torch.autograd.grad(objective_of(method, leaf)[0].sum(), leaf.logprobs)
    return gradient.abs() * tokens.mask


def gradient_size(tokens, method, token_filter=every_token):
    """|G| = (1 - pi) |d loss / d log pi| (ACPO, sec. 2.3), times what the method selects,
    [B, T]."""
    return ((1 - tokens.probs) * logprob_gradient(tokens, method)
            * method.call(method.select, tokens) * method.call(token_filter, tokens))


def dominance(tokens, method):
    """The mean |G| of low- and high-probability tokens, and their share of the sum of all |G|."""
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


def steps(kept, count=None, lr=None, optimizer=torch.optim.AdamW, at=(1, 2, 4, 8, 16, 32, 64)):
    """Ratios, gradient sizes and clipping along the optimizer steps on one rollout.

    The whole rollout is looked at before the first step, after the last, and after those in
    `at`."""
    result = dict(spread={}, slope={}, dominance={}, tables=[])
    for taken, rows, token_filter in walk(kept, count, lr, optimizer):
        if rows is not None:
            step_tokens = kept.tokens(rows)
            result["tables"].append(token_statistics(step_tokens, kept.method, token_filter))
        if taken in at or taken == 0 or rows is None:
            tokens = kept.tokens()
            result["dominance"][taken] = dominance(tokens, kept.method)
            if taken:
                result["spread"][taken] = ratio_spread(tokens)
                result["slope"][taken] = slope(result["spread"][taken])
    return dict(result, ratios=ratio_histograms(tokens))


def steps_table(result):
    rows = []
    for taken, of_sides in result["dominance"].items():
        values = [of_sides[side][key] for key in ("mean", "share") for side in ("low", "high")]
        slope_text = f"{result['slope'][taken]:.4g}" if taken in result["slope"] else "-"
        rows.append([str(taken), slope_text, *(f"{x:.4g}" for x in values)])
    return markdown_table(("steps taken", "slope", "mean abs G, pi <= 0.2", "mean abs G, pi > 0.8",
                           "share, pi <= 0.2", "share, pi > 0.8"), rows) + (
        "\n\nEach line shows the rollout after so many optimizer steps. slope is that of log "
        "std(rho) on log(1 - pi)\nover groups of tokens: it is 2 by Lemma 1 of ACPO, and 1 where "
        "the ratio rho spreads as 1 - pi does.\nabs G = (1 - pi) |d loss / d log pi| is the size "
        "of a token's gradient: its mean over the tokens of low\nand of high probability, and "
        "their share of its sum over all tokens.\n"
        "Look at whether the slope stays away from 0 (unlikely tokens move most), and at which "
        "tokens have the\nlarger mean and which the larger share as the steps go on.\n")


# ---------------------------------------------------------------------------- size and direction

# on_policy: the gradient is taken where all ratios are 1. is_part: the three parts of this kind,
# by probability, are all of the tokens
Subset = namedtuple("Subset", "method token_filter on_policy is_part",
                    defaults=(every_token, False, False))


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
        "A > 0": tokens_with(lambda t: t.advantages > 0),
        "A < 0": tokens_with(lambda t: t.advantages < 0),
        "clip-higher": objective(ppo_clip, eps_low=0.2, eps_high=0.3, dual_clip=None),
        "no clip": objective(ppo_clip, eps_low=math.inf, eps_high=math.inf, dual_clip=None),
        "cispo": objective(losses.cispo, ratio_max=5.0),
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


def gradients_of(kept, matrices):
    """Yields (name, Subset, {name: gradient of a matrix}) of each subset."""
    for p in kept.policy.parameters():
        p.requires_grad_(False)
    for p in matrices.values():
        p.requires_grad_(True)
    now, old = compute_logprobs(kept.policy, kept.batch)[0], kept.batch.old_logprobs
    for name, subset in subsets(kept).items():
        kept.policy.zero_grad()
        kept.batch.old_logprobs = now if subset.on_policy else old
        kept.backward(token_filter=subset.token_filter, method=subset.method)
        yield name, subset, {n: p.grad.detach().clone() for n, p in matrices.items()}
    kept.batch.old_logprobs = old


def compare_subsets(kept, layers=8, k=None, after=None, lr=None):
    """After `after` steps of the run (default half of them): each subset's gradient norm over the
    full one's, and the mean principal angle to it, per weight matrix and overall.

    sum_error is how far the three parts by probability are from adding up to the full gradient,
    relative to it: the largest over the matrices."""
    after, result, full = walk_to(kept, after, lr), {}, None
    matrices = sampled_matrices(kept.policy.model, layers)
    for name, subset, gradients in gradients_of(kept, matrices):
        if full is None:
            full, remainder = gradients, {n: g.clone() for n, g in gradients.items()}
            spaces = {n: right_subspace(g, k) for n, g in full.items()}
            sizes = {n: norm(g) for n, g in full.items()}
        if subset.is_part:
            remainder = {n: g - gradients[n] for n, g in remainder.items()}
        each = {}
        for n, g in gradients.items():
            to_full = angle(right_subspace(g, k), spaces[n]) if g.any() else math.nan
            each[n] = dict(norm=(norm(g) / sizes[n]).item(), angle=to_full)
        square = sum(norm(g).item() ** 2 for g in gradients.values())
        full_square = sum(size.item() ** 2 for size in sizes.values())
        result[name] = dict(norm=math.sqrt(square / full_square),
                            angle=sum(v["angle"] for v in each.values()) / len(each),
                            matrices=each)
    error = max((norm(g) / sizes[n]).item() for n, g in remainder.items())
    return dict(after=after, subsets=result, sum_error=error)


def subsets_table(result):
    rows = [(name, f"{v['norm']:.4g}", f"{v['angle']:.4g}")
            for name, v in result["subsets"].items()]
    return markdown_table(("subset", "norm", "angle"), rows) + (
        "\n\nnorm is the length of the gradient of some of the tokens, or by another loss, over "
        "that of the full one.\nangle is the mean principal angle in degrees between its leading "
        "directions and the full one's: at 0\nthey are the same, at 90 they have nothing in "
        "common.\nLook for what is long and far off: it turns the update most.\nThe three parts "
        f"by probability add up to the full gradient to {result['sum_error']:.1g} of its length: "
        "this is the rounding error.\n")


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

"""More of an update than analysis/anatomy.py has: the gradients of subsets of the tokens, FADE's
prediction of the entropy's change, and all numbers of RESULTS.md of one kept rollout.

Each analysis takes an open rollout (analysis/rollout.py) with any Hugging Face model and returns
plain numbers; the function ..._table beside it writes them as a Markdown table.
"""

import math
from collections import namedtuple
from dataclasses import replace

import torch

import losses
from analysis.rollout import open_rollout, walk
from engine.loading import layers_of
from experiment.log import numbers
from experiment.tables import markdown_table
from losses import Method, cells, gradient_mass, ppo_clip
from study.quantities import HIGH, LOW, steps


def top_entropy_of_each(tokens, share=0.2):
    """The tokens of highest entropy of each completion, a mask [B, T]: max(1, int(share T)) of its
    T tokens, which is how ACPO's released code selects them."""
    count = (tokens.mask.sum(1) * share).long().clamp(min=1)
    rank = tokens.entropy.masked_fill(~tokens.mask, -1.0).argsort(1, descending=True).argsort(1)
    return (rank < count[:, None]) & tokens.mask


def selected_shares(mask, chosen):
    """-> the share of the tokens in mask [B, T] that are chosen, and the share of the completions
    that have a chosen one."""
    chosen = chosen & mask
    return (chosen.sum() / mask.sum()).item(), (chosen.any(1).sum() / mask.any(1).sum()).item()


# on_policy: the gradient is taken where all ratios are 1. is_part: the three parts of this kind,
# by probability, are all of the tokens
Subset = namedtuple("Subset", "method choose on_policy is_part",
                    defaults=(None, False, False))


ONE_STEP = "on-policy, one step"


def subsets(kept):
    """{name: Subset}: what the gradient is taken of, and by which loss; all of it comes first."""
    method, entropy = kept.method, kept.tokens().entropy[kept.batch.mask]
    top_fifth = math.ceil(0.2 * len(entropy))
    high_entropy = entropy.sort(descending=True).values[top_fifth - 1].item()

    def tokens_with(test, is_part=False):
        return Subset(method, test, is_part=is_part)

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


def gradient_of(kept, matrices, method=None, weight=None):
    """{name: gradient of a matrix} of the rollout as one optimizer step, by another method's loss
    if one is given. weight [N, T]: of its tokens; None is 1."""
    kept.policy.zero_grad()
    own, kept.method = kept.method, method or kept.method
    kept.backward(replace(kept.batch, weight=weight))
    kept.method = own
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
        weight = subset.choose and subset.choose(tokens).to(tokens.entropy)
        gradients = gradient_of(kept, matrices, subset.method, weight)
        selected = chosen = None
        if subset.choose:
            chosen = weight.bool() & tokens.mask
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
    def number(x):
        return "-" if x is None else f"{x:.3g}"
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

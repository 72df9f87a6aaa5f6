"""The gradients of subsets of a rollout's tokens, against the gradient of all of them."""

import math
from dataclasses import replace

import torch

from anatomy.rollout import HIGH, LOW, walk
from engine.loading import layers_of
from engine.policy import backward
from harness.curves import plt, save
from harness.stats import markdown_table
from losses import ppo_clip


def top_entropy_of_each(tokens, share=0.2):
    """The tokens of highest entropy of each completion, a mask [B, T]: max(1, int(share T)) of its
    T tokens, which is how ACPO's released code selects them."""
    count = (tokens.mask.sum(1) * share).long().clamp(min=1)
    rank = tokens.entropy.masked_fill(~tokens.mask, -1.0).argsort(1, descending=True).argsort(1)
    return (rank < count[:, None]) & tokens.mask


PARTS = (f"pi < {LOW}", f"{LOW} <= pi <= {HIGH}", f"pi > {HIGH}")  # together, all tokens
ONE_STEP = "on-policy, one step"


def subsets(method):
    """{name: (the loss that the gradient is taken of, Tokens -> which of them or None for all)}"""
    def clipped_at(low, high):
        bounds = dict(eps_low=low, eps_high=high, dual_clip=None)
        return replace(method, objective=ppo_clip).bind(**bounds), None
    low, middle, high = PARTS
    return {"full": (method, None),
            low: (method, lambda t: t.probs < LOW),
            middle: (method, lambda t: (t.probs >= LOW) & (t.probs <= HIGH)),
            high: (method, lambda t: t.probs > HIGH),
            "top 20% entropy": (method, top_entropy_of_each),
            "A > 0": (method, lambda t: t.advantages > 0),
            "A < 0": (method, lambda t: t.advantages < 0),
            "clip-higher": clipped_at(0.2, 0.3), "no clip": clipped_at(math.inf, math.inf)}


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


def norm(gradients):
    """Of all of {name: gradient}, in float64: a float32 sum over so many squares is off by 1e-4."""
    return math.hypot(*(g.norm(dtype=torch.float64).item() for g in gradients.values()))


def gradient_of(kept, matrices, method=None, weight=None):
    """{name: gradient of a matrix} of the rollout as one optimizer step, by another method's loss
    if one is given. weight [N, T]: of its tokens; None is 1."""
    kept.policy.zero_grad()
    backward(kept.policy, replace(kept.batch, weight=weight), method or kept.method,
             kept.flags["max_tokens"], **kept.coefficients)
    gradients = {n: p.grad.detach().clone() for n, p in matrices.items()}
    kept.policy.zero_grad()  # a walk's next step adds to what is left
    return gradients


def gradient_of_selected(kept, matrices, method, chosen):
    """The gradient of the chosen tokens [N, T] with denominators that count these alone: by
    seq_mean the mean over a completion's chosen tokens, then over the completions that have one.

    ACPO's released code selects by multiplying the response mask, to the same effect. It divides by
    0 for a completion without a chosen token, which its own selection always has; here such a
    completion is left out. An objective that looks at the whole step, as acpo's, sees the chosen
    tokens alone. constant divides by the limit of tokens, whatever is chosen."""
    return gradient_of(replace(kept, batch=replace(kept.batch, mask=chosen)), matrices, method)


class Reference:
    """The gradients that others are held against: {name: gradient of a matrix}."""

    def __init__(self, gradients, k):
        self.spaces = {n: right_subspace(g, k) for n, g in gradients.items()}
        self.norm, self.k = norm(gradients), k

    def compare(self, gradients):
        """-> the norm over the reference's, and the mean principal angle to it in degrees (eq. 7);
        nan where a matrix has no gradient."""
        angles = [angle(right_subspace(g, self.k), self.spaces[n]) if g.any() else math.nan
                  for n, g in gradients.items()]
        return dict(norm=norm(gradients) / self.norm, angle=sum(angles) / len(angles))


def compare_subsets(kept, layers=8, k=None):
    """Half-way through the run's steps: each subset's gradient norm over the full one's, and the
    mean principal angle to it.

    norm and angle are of a sum with the denominators of all tokens, norm_selected and
    angle_selected of gradient_of_selected; tokens is the share selected. "on-policy" has ratios of
    1 at the weights of the full gradient, ONE_STEP is the whole rollout's gradient at the weights
    before the first step. sum_error: how far PARTS are from adding up to the full one, a share."""
    matrices, result = sampled_matrices(kept.policy.model, layers), {}
    one_step = gradient_of(kept, matrices)
    after = len(kept.method.passes) * kept.flags["steps_per_rollout"] // 2
    next(taken for taken, *_ in walk(kept) if taken == after)
    tokens, remainder = kept.tokens(), gradient_of(kept, matrices)
    full = Reference(remainder, k)

    def add(name, gradients, selected=None, share=1.0):
        by_all, by = full.compare(gradients), full.compare(selected or gradients)
        result[name] = dict(tokens=share, **by_all, norm_selected=by["norm"],
                            angle_selected=by["angle"])
    for name, (method, choose) in subsets(kept.method).items():
        chosen = choose(tokens) & tokens.mask if choose else tokens.mask
        gradients = gradient_of(kept, matrices, method, chosen.to(tokens.entropy))
        if name in PARTS:
            remainder = {n: g - gradients[n] for n, g in remainder.items()}
        add(name, gradients, gradient_of_selected(kept, matrices, method, chosen)
            if chosen.any() else None, (chosen.sum() / tokens.mask.sum()).item())
    kept.batch.old_logprobs = tokens.logprobs
    add("on-policy", gradient_of(kept, matrices))
    add(ONE_STEP, one_step)
    return dict(after=after, subsets=result, sum_error=norm(remainder) / full.norm)


def subsets_table(result):
    columns = ("tokens", "norm", "angle", "norm_selected", "angle_selected")
    rows = [(name, *(f"{subset[key]:.3g}" for key in columns))
            for name, subset in result["subsets"].items()]
    return markdown_table(("subset", *columns), rows) + (
        "\n\ntokens: share of the tokens that are selected. norm: length of their gradient, or by "
        "another loss, over the full\none's; it is divided as the full one is, by all tokens. "
        "norm_selected: averaged over the selected tokens of a\ncompletion, then over the "
        "completions that have one, as in ACPO's code. angle: mean principal angle in degrees\n"
        "between its leading directions and the full one's: 0 the same, 90 nothing in common. "
        "on-policy has all ratios at 1\nand the weights of the full gradient; on-policy, one step "
        "is of the weights that sampled.\nLook for what is long and far off: it turns the update "
        "most. The three parts by probability add up to\nthe full gradient to "
        f"{result['sum_error']:.1g} of its length.\n")


def draw_subsets(result, file):
    """Norms and angles of one rollout, by all tokens (bars) and by the selected (diamonds)."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    names = list(result["subsets"])[1:]  # the first is the full gradient
    for axis, key, label in zip(axes, ("norm", "angle"), (
            "norm over the full gradient's", "mean principal angle to it (degrees)"), strict=True):
        for i, name in enumerate(names):
            axis.barh(-i, result["subsets"][name][key], color="C0")
            axis.plot(result["subsets"][name][f"{key}_selected"], -i, "D", color="C1", ms=4)
        axis.set(xlabel=label)
    axes[0].set_yticks([-i for i in range(len(names))], names)
    save(figure, file, f"rollout {result['rollout']}, {result['method']}, after {result['after']} "
                       "steps; bars: divided by all tokens, diamonds: by the selected")

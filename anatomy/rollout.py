"""A rollout that train.py --save_rollouts kept, and the walk along its run's optimizer steps."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from data import sources
from engine import parallel
from engine.loading import Compute, load
from engine.policy import Batch, Policy, compute_logprobs, minibatches
from engine.trainer import Trainer, lr_factor
from harness.checkpoint import read_pickle
from harness.flags import Parser, add_method_flags
from losses import (
    AXES,
    METHODS,
    Method,
    group_advantages,
    measure,
    row,
    selected,
    weight_on_logprob,
)

COEFFICIENTS = "entropy_coef", "kl_coef", "kl_unbiased"  # of the loss, and flags
LOW, HIGH = 0.2, 0.8  # ACPO's low- and high-probability tokens


def bound(text, methods=METHODS):
    """The method of a text with its flags, as "grpo --eps_low 0.05"; other flags are those of the
    row in methods. Raises ValueError for a name that there is not, and refuses such a flag."""
    name, *flags = text.split() or [""]
    if name not in methods:
        raise ValueError(f"no such method: {name}; there are {', '.join(methods)}")
    method, parser = methods[name], Parser("anatomy")
    add_method_flags(parser, name, method)
    return method.bind(**vars(parser.parse_args(flags)))


@dataclass
class Kept:
    """A kept rollout of N completions, and the policy that its steps are taken with again."""

    batch: Batch
    rewards: torch.Tensor  # [P, G] as graded
    shaped_rewards: torch.Tensor  # [P, G] as learnt from
    state: dict            # of the advantage, from the rollouts before
    flags: dict            # of the run
    method: Method         # whose advantages the batch has
    policy: Policy
    rollout: int           # its number in the run
    coefficients: dict     # of losses.policy_loss and the entropy bonus, as the run had them

    def follow(self, text):
        """-> Kept, with a method of `bound` and its advantages, which may raise ValueError. The
        run's method has the run's flags, coefficients and teacher; another its defaults alone."""
        own = self.flags["loss"]
        method, is_own = bound(text, {**METHODS, own: self.method}), text.split()[0] == own
        teacher = self.batch.teacher_logprobs if is_own else None
        kept = replace(self, method=method, coefficients=self.coefficients if is_own else {},
                       batch=replace(self.batch, teacher_logprobs=teacher))
        kept.batch.set_advantages(group_advantages(method, self.shaped_rewards, dict(self.state)))
        return kept

    def tokens(self, rows=None):
        """The Tokens of the rollout, or of some of its rows, at the policy's present weights."""
        batch = self.batch if rows is None else self.batch.rows(rows)
        return batch.tokens(*compute_logprobs(self.policy, batch))


def open_rollout(path, model=None):
    """The rollout of a file, and a model, by default the one that its run began with. -> Kept

    Raises ValueError for another file than train.py --save_rollouts writes, a run whose steps
    cannot be taken again, a rollout without a gradient, and a model that cannot be loaded."""
    try:
        saved = read_pickle(path, map_location=parallel.device())
        batch, flags = Batch(**saved.pop("batch")), saved["flags"]
        method = row(flags["loss"], **{axis: flags[axis] for axis in AXES})
        method = method.bind(**{name: x for name, x in saved.pop("hp").items()
                                if name in method.flags})
        kept = Kept(**saved, batch=batch, method=method, policy=None,
                    coefficients={name: flags.get(name) for name in COEFFICIENTS})
    except Exception as e:  # a pickle that is none raises anything, an unknown method KeyError
        raise ValueError("it is no rollout that train.py --save_rollouts kept "
                         f"with this losses.py ({type(e).__name__}: {sources.reason(e)})") from None
    if flags["lora_rank"]:
        raise ValueError("its run trained adapters (--lora_rank), which a rollout does not keep")
    model, places = model or flags["model"], torch.arange(batch.mask.shape[1]).to(batch.mask.device)
    probe = replace(batch, mask=places < batch.completion_len[:, None])  # also of truncated rows
    try:
        kept.policy = load(
            model, None, probe.rows(torch.arange(4) % len(batch.ids)), Compute(
                budget=flags["tokens_per_micro_batch"], **{name: flags[name] for name in (
                    "temperature", "dtype", "head_dtype", "share_prompts")}))
    except (OSError, LookupError, RuntimeError, ValueError) as e:
        raise ValueError(f"the model {model} cannot be used with it: {sources.reason(e)}") from None
    kept = kept.follow(flags["loss"])
    if not (batch.mask & (kept.batch.advantages != 0)).any():
        raise ValueError("none of its completions has a gradient: in no group do rewards differ, "
                         "or its run's --mask_truncated left all of them out")
    return kept


def walk(kept, steps=None, lr=None):
    """Takes the run's optimizer steps on the rollout again, AdamW's moments from 0.

    Yields (steps taken, rows of the next step); the rows are None after the last step. Raises
    ValueError for a number of steps that does not divide the completions, or as Trainer.step."""
    flags, count = kept.flags, steps or kept.flags["steps_per_rollout"]
    together = flags["group_size"] if flags["shuffle"] == "groups" else 1
    if len(kept.batch.ids) // together % count:
        raise ValueError(f"its {len(kept.batch.ids)} completions, {together} in one piece, do not "
                         f"divide into {count} steps")
    # the learning rate goes on from where the run's was when it came to this rollout
    per_rollout = flags["steps_per_rollout"] * len(kept.method.passes)
    factor = partial(lr_factor, flags["warmup"], flags["schedule"],
                     flags["rollouts"] * per_rollout)
    before = (kept.rollout - 1) * per_rollout
    trainer = Trainer(
        kept.policy, kept.method, lr=lr or flags["lr"],
        factor=lambda taken: factor(before + taken), **kept.coefficients,
        **{name: flags[name] for name in ("max_tokens", "weight_decay", "max_grad_norm")})
    plan = list(minibatches(kept.batch, kept.method, count, flags["seed"], kept.rollout, together))
    for taken, (rows, minibatch) in enumerate(plan):
        yield taken, rows.to(parallel.device())
        trainer.step(minibatch)
    yield len(plan), None


def logged(tokens, method, *names):
    """{name: number} of the tokens as of one optimizer step, as train.py logs it."""
    measured = measure(method, tokens.masked())
    return {name: measured[name].item() for name in names}


def signed_gradient(tokens, method):
    """G = (1 - pi) rho A 1[not clipped] of each token (ACPO, eq. 3 and 39), times the weight of the
    method's select, [B, T]; pi is the current policy's."""
    weight = weight_on_logprob(method, tokens)
    return (1 - tokens.probs) * weight * selected(method, tokens)[0]

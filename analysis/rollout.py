"""A rollout that train.py --save_rollouts kept, and the walk along its run's optimizer steps."""

import pickle
from dataclasses import dataclass

import torch

from engine import parallel
from engine.loading import load, lr_factor
from engine.policy import Batch, Policy, backward, compute_logprobs, minibatches
from losses import AXES, METHODS, Method, group_advantages, row

# what torch.load and the look into what it gives raise for a file that is no rollout
NO_ROLLOUT = (OSError, EOFError, AttributeError, ImportError, LookupError, RuntimeError, TypeError,
              ValueError, pickle.UnpicklingError)


@dataclass
class Kept:
    """A kept rollout, and the policy that its steps are taken with again."""

    batch: Batch
    rewards: torch.Tensor  # [P, G]
    state: dict            # what the advantage knew of the rollouts before
    flags: dict            # of the run
    method: Method         # whose advantages the batch has
    policy: Policy
    rollout: int           # its number in the run
    coefficients: dict     # of losses.policy_loss and the entropy bonus, as the run had them

    def use(self, method):
        """Goes over to another method: the batch gets its advantages. -> the advantages [P, G]"""
        self.method = method
        advantages = group_advantages(method, self.rewards, dict(self.state))
        self.batch.advantages = advantages.view(-1, 1).expand(self.batch.mask.shape)
        return advantages

    def tokens(self, rows=None):
        """The Tokens of the rollout, or of some of its rows, at the policy as it is now."""
        batch = self.batch if rows is None else self.batch.rows(rows)
        return batch.tokens(*compute_logprobs(self.policy, batch))

    def backward(self, batch=None, method=None):
        """Adds the gradient of one optimizer step on the rollout, or on a minibatch of it, to the
        parameters' .grad, by another method's loss if one is given. -> its metrics"""
        return backward(self.policy, batch or self.batch, method or self.method,
                        self.flags["max_tokens"], **self.coefficients)


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def open_rollout(path, model=None):
    """Opens a kept rollout with a model, by default the one that its run began with.

    Raises ValueError for a file that is no rollout, for a rollout that teaches nothing, and for a
    model that cannot be loaded."""
    try:
        saved = torch.load(path, map_location=parallel.device(), weights_only=False)
        flags, batch = saved["flags"], Batch(**saved["batch"])
        rewards, state, hp, number = (saved[name] for name in ("rewards", "state", "hp", "rollout"))
    except NO_ROLLOUT as e:
        raise ValueError("it is no rollout that train.py --save_rollouts kept "
                         f"({first_line(e)})") from None
    if flags["lora_rank"]:
        raise ValueError(
            "its run trained adapters (--lora_rank), which are not kept with a rollout")
    if flags["loss"] not in METHODS:
        raise ValueError(f"its run's method {flags['loss']} is not in losses.py; there are "
                         f"{', '.join(METHODS)}")
    probe = batch.rows(torch.arange(4) % len(batch.ids))
    try:
        policy = load(model or flags["model"], None, probe, temperature=flags["temperature"],
                      budget=flags["tokens_per_micro_batch"], dtype=flags["dtype"],
                      share_prompts=flags["share_prompts"])
    except (OSError, LookupError, RuntimeError, ValueError) as e:
        raise ValueError(f"the model {model or flags['model']} cannot be used with it: "
                         f"{first_line(e)}") from None
    method = row(flags["loss"], **{axis: flags[axis] for axis in AXES})
    method = method.bind(**{name: x for name, x in hp.items() if name in method.flags})
    coefficients = {name: flags.get(name) for name in (
        "entropy_coef", "kl_coef", "correction", "correction_low", "correction_high")}
    kept = Kept(batch, rewards, state, flags, method, policy, number, coefficients)
    if not batch.mask.any():
        raise ValueError("no completion of this rollout is in the loss: all of them were cut off, "
                         "and its run had --mask_truncated")
    if not kept.use(method).any():
        raise ValueError("no completion of this rollout has an advantage: in no group do "
                         "rewards differ")
    return kept


def walk(kept, steps=None, lr=None, optimizer=torch.optim.AdamW):
    """Takes the run's optimizer steps on the rollout again, AdamW's moments from 0.

    Yields (steps taken, rows of the next step, its minibatch); both are None after the last step.
    Raises ValueError for a number of steps that does not divide the completions."""
    flags, passes = kept.flags, kept.method.passes
    count = steps or flags["steps_per_rollout"]
    together = flags["group_size"] if flags.get("shuffle") == "groups" else 1
    if (pieces := len(kept.batch.ids) // together) % count:
        what = "groups" if together > 1 else "completions"
        raise ValueError(f"its {pieces} {what} do not divide into {count} steps")
    optimizer = optimizer(kept.policy.parameters(), lr=lr or flags["lr"],
                          weight_decay=flags["weight_decay"], fused=True)
    # the learning rate goes on from where the run's was when it came to this rollout
    per_rollout = flags["steps_per_rollout"] * len(passes)
    factor = lr_factor(flags["warmup"], flags["schedule"], flags["rollouts"] * per_rollout)
    before = (kept.rollout - 1) * per_rollout
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(before + step))
    plan = list(minibatches(kept.batch, kept.method, count, flags["seed"], kept.rollout, together))
    for taken, (rows, minibatch) in enumerate(plan):
        yield taken, rows.to(parallel.device()), minibatch
        optimizer.zero_grad()
        kept.backward(minibatch)
        torch.nn.utils.clip_grad_norm_(kept.policy.parameters(), flags["max_grad_norm"])
        optimizer.step()
        schedule.step()
    yield len(plan), None, None

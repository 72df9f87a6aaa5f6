"""The weights in training and all that goes with them, from loading to a checkpoint."""

import math
from dataclasses import replace

import torch
from torch.distributed.checkpoint import state_dict as gathered

from engine import loading, parallel
from engine.policy import backward


class NotFinite(ValueError):
    """A loss or a gradient is not finite. No weight was changed. `minibatch`: the step's Batch."""


def lr_factor(warmup, schedule, steps, step):
    """The rate's factor at optimizer step `step`, from 0: linear warm-up times 1 or a cosine."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(1, step / steps))
    return min(1, (step + 1) / (warmup + 1)) * (cosine if schedule == "cosine" else 1)


class Trainer:
    """Takes optimizer steps of a Policy, on its parameters with a gradient, by a losses.Method.

    max_tokens: of a completion. factor: optimizer step -> factor of the learning rate. options:
    kl_coef, kl_unbiased, entropy_coef."""

    reference = None  # what scores for a KL penalty: a Policy, or one without its adapters
    teacher = None    # a Policy

    def __init__(self, policy, method, *, max_tokens, lr, factor=lambda step: 1.0,
                 weight_decay=0.0, betas=(0.9, 0.999), max_grad_norm=1.0, **options):
        self.policy, self.method = policy, method
        self.max_tokens, self.max_grad_norm, self.options = max_tokens, max_grad_norm, options
        self.optimizer = torch.optim.AdamW(
            [p for p in policy.parameters() if p.requires_grad],  # of LoRA the adapters alone
            betas=betas, weight_decay=weight_decay, fused=True)
        self.lr, self.factor, self.steps_taken = lr, factor, 0
        # of float16's gradients; off, it scales by 1 and steps as the optimizer does
        self.scaler = torch.amp.GradScaler(parallel.device().type,
                                           enabled=policy.dtype == "float16")

    def step(self, minibatch):
        """One optimizer step on a Batch, whose gradient is added to .grad. Returns its metrics.

        In float16 the gradient is scaled, and scaled back before it is used. Where it overflows,
        the step is not taken, and the next has a smaller scale. Raises NotFinite, with no weight
        changed, for a loss, or at a scale of 1 a gradient, that is not finite."""
        metrics = backward(self.policy, minibatch, self.method, self.max_tokens,
                           scale=self.scaler.scale, **self.options)
        self.scaler.unscale_(self.optimizer)
        norm = parallel.full(torch.nn.utils.clip_grad_norm_(
            self.policy.parameters(), self.max_grad_norm))
        metrics["grad_norm"], overflow = norm, not norm.isfinite()
        # without a scaler get_scale() is 1
        if not metrics["loss"].isfinite() or (overflow and self.scaler.get_scale() <= 1):
            error = NotFinite(f"optimizer step {self.steps_taken + 1}: loss "
                              f"{metrics['loss'].item()}, gradient norm {norm.item()}")
            error.minibatch = minibatch
            raise error
        group, = self.optimizer.param_groups
        group["lr"] = self.lr * self.factor(self.steps_taken)
        if not self.steps_taken:  # drops what get_optimizer_state_dict fills a fresh one with
            self.optimizer.state.clear()
        self.scaler.step(self.optimizer)  # not where a gradient overflowed
        self.scaler.update()
        metrics["lr"], metrics["overflow"] = group["lr"], float(overflow)
        self.steps_taken += not overflow
        self.optimizer.zero_grad()  # to None, now: the sampler needs the memory
        return metrics

    @classmethod
    def load(cls, model, eos, probe, method, compute, *, weights=None, kl_coef=0.0, teacher=None,
             **training):
        """-> the Trainer of a model's folder or id, with a reference where kl_coef is not 0.

        compute: a loading.Compute. weights: the folder of a checkpoint to continue from. Adapters
        come with its state, on top of the model's own weights. teacher: another folder or id.
        training: of Trainer. Raises ValueError as loading.load does."""
        second = bool(kl_coef and not compute.lora_rank)
        policy = loading.load(model if compute.lora_rank else weights or model, eos, probe, compute,
                              beside=second + bool(teacher))
        trainer = cls(policy, method, kl_coef=kl_coef, **training)
        alike = replace(compute, budget=policy.budget, lora_rank=0, activation_checkpointing=False)
        if second:
            trainer.reference = loading.load(model, eos, probe, alike, frozen=True)
        elif kl_coef:
            trainer.reference = loading.WithoutAdapters(policy)
        if teacher:
            trainer.teacher = loading.load(teacher, eos, probe, alike, frozen=True)
        return trainer

    def weights(self, merged=True):
        """Yields name and whole weight, adapters merged or beside; every rank must take all."""
        return parallel.weights(self.policy, merged)

    def state(self):
        """-> what a checkpoint has beside the weights: adapters, optimizer, schedule and scaler, of
        all ranks, on the CPU. Every rank must call it."""
        options = gathered.StateDictOptions(full_state_dict=True, cpu_offload=True)
        adapter = {name: parallel.full(p).cpu() for name, p in self.policy.state_dict().items()
                   if "lora_" in name}
        optimizer = gathered.get_optimizer_state_dict(self.policy, self.optimizer, options=options)
        return dict(adapter=adapter, optimizer=optimizer, optimizer_steps=self.steps_taken,
                    scaler=self.scaler.state_dict())

    def restore(self, state):
        """Takes over a `state`. The weight decay stays its own; each step sets the rate. Raises
        ValueError for adapters that it lacks, and other errors for another state."""
        options = gathered.StateDictOptions(full_state_dict=True, strict=False)
        _, unknown = gathered.set_state_dict(  # adapter: {} without LoRA, for load took the weights
            self.policy, self.optimizer, model_state_dict=state["adapter"],
            optim_state_dict=state["optimizer"], options=options)
        if unknown:  # ignored otherwise, the optimizer's moments of them, too
            raise ValueError(f"it has adapters that this model lacks, {unknown[0]} for one: the "
                             "commit that began the run is in its config.json")
        self.steps_taken, (group,) = state["optimizer_steps"], self.optimizer.param_groups
        group["weight_decay"] = self.optimizer.defaults["weight_decay"]
        if state["scaler"]:  # {} where the run was not in float16
            self.scaler.load_state_dict(state["scaler"])

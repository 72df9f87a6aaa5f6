"""How a command ends badly: refused before it begins (exit code 2), or failed on the way (1)."""

import os
import sys
import time
from contextlib import contextmanager

import torch


class RunFailed(RuntimeError):
    """The run cannot go on: one sentence for the user, exit code 1."""


class NotFinite(FloatingPointError):
    """A loss or a gradient is not finite. Nothing was changed. `minibatch` is the step's Batch."""

    def __init__(self, message, minibatch):
        super().__init__(message)
        self.minibatch = minibatch


@contextmanager
def room_for(phase, flags=None):
    """Makes CUDA's error of a full memory RunFailed: the phase, as in the log's time/<phase>, the
    bytes asked for, the flags that help, train.py's if none are given."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        asked, one = ". ".join(str(e).split(". ")[:2]), "less --gpu_memory_utilization or "
        helpful = flags or dict(
            update="--activation_checkpointing or fewer --tokens_per_micro_batch",
            logp="--lora_rank 16 or fewer --tokens_per_micro_batch",
            sample=one + "fewer --max_num_seqs", eval=one + "fewer --max_num_seqs",
        ).get(phase, one + "--lora_rank 16")
        name = dict(sample="sampling", logp="scoring", eval="evaluation").get(phase, phase)
        raise RunFailed(f"the GPU's memory is full in {name} ({asked}): {helpful} make room"
                        ) from None


def refuse(program, message):
    """Flags, data or a model cannot be used: one sentence, once on each node, and exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: {message}", file=sys.stderr)
    else:
        time.sleep(20)  # torchrun ends all ranks with the first, which must not be this silent one
    sys.exit(2)

"""How a command ends badly: refused before it begins (exit code 2), or failed on the way (1)."""

import os
import sys
import time
from contextlib import contextmanager


class RunFailed(RuntimeError):
    """The run cannot go on: one sentence for the user, exit code 1."""


@contextmanager
def room_for(phase, flags=None):
    """Makes CUDA's error of a full memory RunFailed, with the phase and flags that make room."""
    try:
        yield
    except RuntimeError as e:  # of torch, its class or "CUDA error"; of vLLM, which has no class
        if "out of memory" not in str(e):
            raise
        flags = flags or (
            "less --gpu_memory_utilization or fewer --max_num_seqs" if phase in ("sample", "eval")
            else "--lora_rank 16 or fewer --tokens_per_micro_batch")
        raise RunFailed(
            f"the GPU's memory is full in the phase {phase} ({e}): {flags} make room") from None


@contextmanager
def refusing(subject="", program="train.py"):
    """Makes a ValueError, a sentence that may go on from its subject, a refusal."""
    try:
        yield
    except (ValueError, RecursionError) as e:  # the second of JSON that is nested too deep
        refuse(f"{subject}{e}", program)


def refuse(message, program="train.py"):
    """Flags, data or a model cannot be used: one sentence, once on each node, and exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(20)  # torchrun ends all ranks with the first: this one is alone if it goes on
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(2)

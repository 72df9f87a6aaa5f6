"""How a command ends badly: refused before it begins (exit code 2), or failed on the way (1)."""

import os
import sys
import time


class RunFailed(RuntimeError):
    """The run cannot go on: one sentence for the user, exit code 1."""


class NotFinite(FloatingPointError):
    """A loss or a gradient is not finite. Nothing was changed. `minibatch` is the step's Batch."""

    def __init__(self, message, minibatch):
        super().__init__(message)
        self.minibatch = minibatch


def refuse(program, message):
    """Flags, data or a model cannot be used: one sentence, once on each node, and exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: {message}", file=sys.stderr)
    else:
        time.sleep(20)  # torchrun ends all ranks with the first, which must not be this silent one
    sys.exit(2)

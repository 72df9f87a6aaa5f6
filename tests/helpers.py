"""What several tests make or run."""

import torch

from engine import policy


def make_batch(prompts, completions, device="cpu"):
    """A Batch of N prompts with a completion each; equal prompts are one group."""
    pairs, number = zip(prompts, completions, strict=True), {}
    batch = policy.make_batch([(prompt, [c]) for prompt, c in pairs], device)
    batch.group = torch.tensor([number.setdefault(tuple(p), len(number)) for p in prompts])
    return batch.to(device)

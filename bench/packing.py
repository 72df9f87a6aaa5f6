"""Tokens per second of the update's forward and backward: like lengths together, or packed,
against naive padding.

    python bench/packing.py

512 completions of log-normal length (sigma 0.8), the same rows and the same number of tokens at
once for all. Naive padding takes the rows as they come, as many at once as the longest row allows:
"naive" pads them to the longest of all and has logits of every place, as a plain loop over one
generation's batch does; "cut" is the same through policy.Policy, padded to the longest of the
micro-batch only. Ratios are to "cut", the stronger of the two. On a CPU, packed attention goes
sequence by sequence. Turns alternate; medians over them.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import tiny
from engine import (
    parallel,
    policy,
)
from engine.sampler import Completion


def naive(batch, budget):
    """Rows in their order, as many at once as fit when all are as long as the longest."""
    rows = max(1, budget // int((batch.prompt_len + batch.completion_len).max()))
    return [list(range(i, min(i + rows, len(batch.ids)))) for i in range(0, len(batch.ids), rows)]


def padded_forward(model, batch):
    """The plain loop's: padded to the longest row of the whole batch."""
    logits = model(batch.ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument(
        "--median", type=float, default=60, help="median length of a completion, in tokens"
    )
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    g = torch.Generator().manual_seed(0)
    lengths = (
        (args.median * (args.sigma * torch.randn(args.rows, generator=g)).exp())
        .long()
        .clamp(2, args.longest)
        .tolist()
    )
    model = tiny.empty_model(tiny.RECIPE, len(tiny.tokenizer())).to(parallel.device())
    batch = policy.make_batch(
        [[5, 6, 7, 8] * 4] * args.rows,
        [Completion([9] * n, [0.0] * n, False) for n in lengths],
        parallel.device(),
    )
    tokens = int((batch.prompt_len + batch.completion_len).sum())
    ways = {
        "naive": naive(batch, args.budget),
        "cut": naive(batch, args.budget),
        "sorted": policy.micro_batches(batch, args.budget),
        "packed": policy.micro_batches(batch, args.budget, True),
    }
    chosen, seconds, gradients = policy.Policy(model), {name: [] for name in ways}, {}
    for _ in range(args.turns + 1):
        for name, parts in ways.items():
            chosen.pack(name == "packed")
            chosen.zero_grad()
            began = time.perf_counter()
            for part in parts:
                rows = batch.rows(part)
                if name == "naive":
                    place = torch.arange(rows.ids.shape[1] - 1, device=rows.ids.device)
                    counts = (place >= rows.prompt_len[:, None] - 1) & (
                        place < (rows.prompt_len + rows.completion_len)[:, None] - 1
                    )
                    (padded_forward(model, rows) * counts).sum().backward()
                else:
                    chosen(rows)[0].sum().backward()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
            gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    print(
        f"{args.rows} completions, median {args.median:g}, sigma {args.sigma}, at most "
        f"{args.longest} tokens; {tokens} tokens with prompts, {args.budget} at once"
    )
    for name, parts in ways.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["cut"][1:], seconds[name][1:]))
        off = ((gradients[name] - gradients["naive"]).norm() / gradients["naive"].norm()).item()
        print(
            f"{name:<7} {len(parts):4d} micro-batches, "
            f"{tokens / statistics.median(seconds[name][1:]):9.0f} tokens/s, "
            f"{ratio:.2f} times cut, gradient off by {off:.1e}"
        )


if __name__ == "__main__":
    main()

"""Completion tokens per second of the update's forward and backward, and the memory it takes, by
layout.

    python bench/layouts.py                                  512 completions, each of its own prompt
    python bench/layouts.py --each 16 --embedded             the embedded task's lengths and steps
    python bench/layouts.py --each 16 --prompt 1500 --median 100 --prompts 2 --wide
    python bench/layouts.py --each 16 --prompt 150 --median 1000 --prompts 2 --wide

The model has the embedded base's shape, or with --wide 4 layers of 256. Completions are of
log-normal length, the rows and the number of tokens at once the same for all layouts. "naive" takes
the rows as they come, as many at once as the longest row allows, pads them to the longest of all
and has logits of every place, as a plain loop over one generation's batch does. The others are
those of engine/forward.py, through policy.Policy. Ratios are to "padded", which puts like lengths
together. --score is the forward pass alone. Memory is what autograd keeps of the largest
micro-batch. Turns alternate; medians over them.
"""

import argparse
import statistics

import gpu  # it puts the root into sys.path
import torch

from engine import forward, loading, parallel, policy
from study import tiny


def make_model(wide):
    if wide:
        return tiny.empty_model(dict(tiny.RECIPE, hidden=256, mlp=1024, layers=4, heads=8), 1000,
                                positions=8192)
    return tiny.empty_model(tiny.RECIPE, len(tiny.tokenizer()))


def make_rows(args):
    g = torch.Generator().manual_seed(0)
    lengths = args.median * (args.sigma * torch.randn(args.prompts * args.each, generator=g)).exp()
    return gpu.make_rows(lengths.long().clamp(2, args.longest).tolist(), args.prompt, args.each,
                         vocabulary=200)


def naive(batch, budget):
    """Rows in their order, as many at once as fit when all are as long as the longest."""
    rows = max(1, budget // int((batch.prompt_len + batch.completion_len).max()))
    return [list(range(i, min(i + rows, len(batch.ids)))) for i in range(0, len(batch.ids), rows)]


def naive_forward(model, batch):
    """-> log pi of the completion tokens: padded to the longest row of the whole batch."""
    place = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
    counts = (place >= batch.prompt_len[:, None] - 1) & (
        place < (batch.prompt_len + batch.completion_len)[:, None] - 1)
    logits = model(batch.ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0] * counts


def turn(chosen, batch, name, shares, budget, score):
    """Forward and backward of the sum of all log probabilities, or forward alone."""
    for rows in map(batch.rows, shares):
        parts = (naive(rows, budget) if name == "naive"
                 else forward.micro_batches(rows, budget, name))
        for part in map(rows.rows, parts):
            with torch.set_grad_enabled(not score):
                logprobs = naive_forward(chosen.model, part) if name == "naive" else chosen(part)[0]
                if not score:
                    logprobs.sum().backward()


def kept_gigabytes(chosen, batch, name, budget):
    """What autograd keeps of the largest micro-batch of a layout."""
    chosen.use_layout(name)
    return max(loading.kept_bytes(chosen, batch.rows(part))
               for part in forward.micro_batches(batch, budget, name)) / 1e9


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--each", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--median", type=float, default=60, help="of a completion's tokens")
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps that share the rows")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--embedded", action="store_true", help="64 prompts of 9 tokens, "
                        "completions of 8 to 11, 16 steps, 4,096 tokens at once")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if args.embedded:
        args.prompts, args.prompt, args.median, args.sigma, args.longest = 64, 9, 10, 0.05, 11
        args.budget, args.steps = 4096, 16
    batch, chosen = make_rows(args), policy.Policy(make_model(args.wide).to(parallel.device()))
    shares = torch.arange(len(batch.ids), device=parallel.device()).chunk(
        1 if args.score else args.steps)
    names = ["naive", *gpu.LAYOUTS] if args.each == 1 else gpu.LAYOUTS
    seconds, gradients = {name: [] for name in names}, {}
    for _ in range(args.turns + 1):
        for name in names:
            chosen.use_layout("padded" if name == "naive" else name)
            chosen.zero_grad()
            seconds[name].append(gpu.watched(turn, chosen, batch, name, shares, args.budget,
                                             args.score)["s"])
            gradients[name] = None if args.score else torch.cat(
                [p.grad.flatten() for p in chosen.parameters()])
    tokens = int(batch.completion_len.sum())
    print(f"{args.prompts} prompts x {args.each} completions, {tokens} tokens of completions, "
          f"{args.budget} at once, {len(shares)} steps")
    for name in names:
        ratio = statistics.median(a / b for a, b in zip(
            seconds["padded"][1:], seconds[name][1:], strict=True))
        rate = tokens / statistics.median(seconds[name][1:])
        off = memory = ""
        if not args.score:
            off = (gradients[name] - gradients["padded"]).norm() / gradients["padded"].norm()
            off = f", gradient off by {off.item():.1e}"
        if name != "naive":
            memory = f", {kept_gigabytes(chosen, batch, name, args.budget):.3f} GB kept"
        print(f"{name:<7} {rate:9.0f} tokens/s, {ratio:.2f} times padded{memory}{off}")


if __name__ == "__main__":
    main()

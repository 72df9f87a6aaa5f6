"""Peak memory of the update, one process for each so that one's peak is not another's.

    python bench/memory.py                      log probabilities and entropies of 4,096 tokens,
    vocabulary of 151,936
    python bench/memory.py --update             a whole update of a model with that vocabulary, too

Chunked is kernels.HeadLogprobs; full is log_softmax of whole logits, the entropy from it and
autograd, as the plain loop has it. What is compared is the peak beyond what was there before
(model, hidden states) and beyond the head's gradient, which both need.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine import kernels, parallel, policy
from engine.sampler import Completion
from study import tiny


def full(hidden, weight, ids):
    log_pi = torch.nn.functional.linear(hidden, weight).log_softmax(-1)
    return log_pi.gather(-1, ids[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)


def head(kind, args, out):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=g).requires_grad_()
    weight = (
        torch.randn(args.vocabulary, args.hidden, generator=g) / args.hidden**0.5
    ).requires_grad_()
    ids = torch.randint(args.vocabulary, (args.tokens,), generator=g)
    weigh = torch.rand(args.tokens, generator=g)
    before = parallel.peak_memory()
    logprobs, entropy = (
        full(hidden, weight, ids)
        if kind == "full"
        else kernels.HeadLogprobs.apply(hidden, weight, None, ids, 1.0)
    )
    (logprobs * weigh + 0.1 * entropy * weigh.flip(0)).sum().backward()
    extra = parallel.peak_memory() - before - 4 * weight.numel()
    torch.save((logprobs.detach(), entropy.detach(), hidden.grad, weight.grad), out)
    return extra


def update(kind, args, out):
    recipe = dict(
        tiny.RECIPE, hidden=args.hidden, mlp=4 * args.hidden, layers=4, heads=2, tied=True
    )
    model = tiny.empty_model(recipe, args.vocabulary)
    batch = policy.make_batch(
        [[5] * 8] * (args.tokens // 128),
        [Completion([7] * 120, [0.0] * 120, False)] * (args.tokens // 128),
    )
    chosen = policy.Policy(model)
    before = parallel.peak_memory()
    if kind == "full":
        log_pi = model(batch.ids, use_cache=False).logits.log_softmax(-1)
        logprobs = log_pi[:, 7:-1].gather(-1, batch.ids[:, 8:, None])[..., 0]
    else:
        logprobs = chosen(batch)[0]
    logprobs.sum().backward()
    return parallel.peak_memory() - before - 4 * sum(p.numel() for p in model.parameters())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--kind", help="what a process of its own is started with", nargs=2)
    args = parser.parse_args()
    if args.kind:
        print((update if args.update else head)(args.kind[0], args, args.kind[1]))
        return

    def measure(kind, out, *flags):
        sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocabulary", "hidden")]
        done = subprocess.run(
            [sys.executable, __file__, *sizes, *flags, "--kind", kind, out],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout.splitlines()[-1])

    told = {}
    with tempfile.TemporaryDirectory() as folder:
        a, b = (measure(kind, f"{folder}/{kind}") for kind in ("full", "chunked"))
        one, two = (torch.load(f"{folder}/{kind}") for kind in ("full", "chunked"))
        errors = [((x - y).abs().max() / x.abs().max()).item() for x, y in zip(one, two)]
        told.update(
            head_full_gb=a / 1e9,
            head_chunked_gb=b / 1e9,
            head_ratio=b / a,
            logprobs_error=max(errors[:2]),
            gradient_error=max(errors[2:]),
        )
        if args.update:
            a, b = (measure(kind, "-", "--update") for kind in ("full", "chunked"))
            told.update(update_full_gb=a / 1e9, update_chunked_gb=b / 1e9, update_ratio=b / a)
    print(
        f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden size {args.hidden}; extra "
        f"peak memory, and largest errors relative to the largest value"
    )
    print(json.dumps({k: float(f"{v:.3g}") for k, v in told.items()}))


if __name__ == "__main__":
    main()

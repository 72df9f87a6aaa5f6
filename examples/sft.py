"""Supervised fine-tuning: a cold start for tasks that a base model never solves.

    python examples/sft.py --model models/gemma --data runs/demonstrations.jsonl --out runs/start

The rows are {prompt, completion}. The loss is the mean of -log pi over the completions' tokens and
the end-of-sequence token after each: REINFORCE on demonstrations, all of reward 1. So layouts,
micro-batches and adapters are those of train.py, which takes the folder as its --model.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from tqdm import tqdm

if __name__ == "__main__":  # imports begin at the project's folder
    sys.path[0] += "/.."

from data.prompts import encode
from engine import loading, parallel
from engine.completion import Completion
from engine.policy import backward, make_batch
from losses import METHODS


def demonstrations(rows, tokenizer, eos, template=None):
    """-> the (prompt ids, Completion) of each row, its end-of-sequence token included."""
    def completion(text):
        tokens = tokenizer(text, add_special_tokens=False).input_ids + [eos]
        return Completion(tokens, [0.0] * len(tokens), truncated=False)
    return [(encode(tokenizer, row, template), completion(row["completion"])) for row in rows]


def linear(steps, warmup=0.1):
    """-> f(step), the learning rate's factor: a linear warm-up, then linearly to 0."""
    return lambda step: min((step + 1) / (warmup * steps + 1), (steps - step) / steps)


def fit(policy, batches, steps, schedule, description="fine-tuning", **options):
    """Takes one AdamW step on each of `batches`, engine.policy.Batch -> the last step's loss.
    schedule: step -> factor of the learning rate. options: of AdamW."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), **options)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    bar = tqdm(batches, description, steps, unit="step")
    tokens = 0
    for batch in bar:
        batch = batch.to(parallel.device())
        batch.advantages = torch.ones_like(batch.sampler_logprobs)
        batch.old_logprobs = batch.entropy = batch.sampler_logprobs
        metrics = backward(policy, batch, METHODS["reinforce"], max_tokens=1)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rate.step()
        tokens += int(batch.mask.sum())
        bar.set_postfix(loss=f"{metrics['loss'].item():.3f}", refresh=False,
                        tok_per_s=f"{tokens / max(1e-9, bar.format_dict['elapsed']):.0f}")
    return metrics["loss"].item()


def load_policy(args, tokenizer, eos, row):
    """The Policy of --model, with room for the longest row."""
    probe = loading.probe_batch(encode(tokenizer, row, args.template)[:64], eos)
    return loading.load(args.model, [eos], probe, longest=args.longest, dtype=args.dtype,
                        budget=args.tokens_per_micro_batch, lora_rank=args.lora_rank)


def save(policy, tokenizer, out):
    """The folder of a model, its adapters merged."""
    policy.model.save_pretrained(out, state_dict=dict(parallel.weights(policy)))
    tokenizer.save_pretrained(out)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--model", required=True, help="Hugging Face folder or id")
    flag("--data", required=True, help="a file.jsonl of {prompt, completion} rows")
    flag("--out", required=True, type=Path, help="the new folder")
    flag("--template", help="the prompt's form, see data/README.md")
    flag("--epochs", type=int, default=1, help="passes over the rows (default %(default)s)")
    flag("--batch", type=int, default=32, help="rows of a step (default %(default)s)")
    flag("--lr", type=float, default=1e-5, help="learning rate (default %(default)s)")
    flag("--dtype", default=parallel.default_dtype(), help="of computation (%(default)s)")
    flag("--lora_rank", type=int, default=0, help="rank of adapters; 0 trains all weights")
    flag("--tokens_per_micro_batch", type=int, help="default by the free memory")
    flag("--seed", type=int, default=0, help="the seed of the rows' order")
    return parser.parse_args()


def main():
    from transformers import AutoTokenizer
    args = parse_args()
    rows = [json.loads(line) for line in open(args.data, encoding="utf-8") if line.strip()]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    eos = loading.eos_ids(args.model, tokenizer)[0]
    pairs = demonstrations(rows, tokenizer, eos, args.template)
    args.longest = max(len(prompt) + len(c.tokens) for prompt, c in pairs)
    torch.manual_seed(args.seed)
    policy, steps = load_policy(args, tokenizer, eos, rows[0]), len(rows) // args.batch

    def batches():
        for epoch in range(args.epochs):
            order = random.Random(f"{args.seed} {epoch}").sample(range(len(rows)), len(rows))
            for step in range(steps):
                yield make_batch(*zip(*(pairs[i] for i in order[step::steps][:args.batch])))
    fit(policy, batches(), args.epochs * steps, linear(args.epochs * steps), lr=args.lr,
        weight_decay=0.0)
    save(policy, tokenizer, args.out)


if __name__ == "__main__":
    main()

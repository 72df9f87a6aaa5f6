"""Supervised fine-tuning: a cold start for tasks that a base model never solves.

    python examples/sft.py --model models/gemma --data runs/demonstrations.jsonl --out models/start

The rows are {prompt, completion}. The loss is the mean of -log pi over the tokens of completions,
with the end-of-sequence token behind each: REINFORCE on completions of advantage 1. So layouts,
micro-batches, dtypes and adapters are train.py's, which takes the folder as its --model.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from tqdm import tqdm

if __name__ == "__main__":  # imports begin at the project's folder
    sys.path[0] += "/.."

from data.prompts import encode
from data.sources import DataError, json_lines
from engine import loading, parallel
from engine.policy import Completion, make_batch
from engine.trainer import NotFinite, Trainer
from losses import METHODS


def demonstrations(rows, tokenizer, eos, template=None):
    """-> the prompt's ids and the Completion, with `eos` at its end, of {prompt, completion}s."""
    pairs = []
    for row in rows:
        tokens = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, eos]
        pairs.append((encode(tokenizer, row, template),
                      Completion(tokens, [0.0] * len(tokens), truncated=False)))
    return pairs


def fit(policy, batches, steps, factor, title="fine-tuning", **options):
    """Takes an optimizer step on each of `batches`, lists of (prompt's ids, Completion); there are
    `steps`. factor: step -> factor of the learning rate. options: of Trainer. -> the last loss"""
    trainer = Trainer(policy, METHODS["reinforce"], max_tokens=1, factor=factor, betas=(0.9, 0.95),
                      **options)
    bar, tokens = tqdm(batches, title, steps, unit="step"), 0
    for pairs in bar:
        batch = make_batch([(prompt, [c]) for prompt, c in pairs], parallel.device())
        batch.advantages = torch.ones_like(batch.sampler_logprobs)
        batch.old_logprobs = batch.entropy = batch.sampler_logprobs  # no ratio is taken
        loss = trainer.step(batch)["loss"].item()
        tokens += int(batch.mask.sum())
        seconds = max(1e-9, bar.format_dict["elapsed"])
        bar.set_postfix_str(f"loss {loss:.3f}, {tokens / seconds:.0f} tokens/s", refresh=False)
    return loss


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--model", required=True, help="Hugging Face folder or id")
    flag("--data", required=True, help="a file.jsonl of {prompt, completion} rows")
    flag("--out", required=True, type=Path, help="the new folder")
    flag("--template", help="the prompt's form, see data/README.md")
    flag("--epochs", type=int, default=1, help="passes over the rows (default %(default)s)")
    flag("--batch", type=int, default=32, help="rows of a step (default %(default)s)")
    flag("--lr", type=float, default=1e-5, help="highest learning rate (default %(default)s)")
    flag("--dtype", default=parallel.default_dtype(), choices=("float32", "bfloat16"),
         help="of the computation (default here: %(default)s)")
    flag("--lora_rank", type=int, default=0, help="rank of adapters; 0 trains all weights")
    flag("--tokens_per_micro_batch", type=int, help="default by the free memory")
    flag("--seed", type=int, default=0, help="the seed of the rows' order")
    args = parser.parse_args(argv)
    try:
        if args.out.exists():
            raise DataError(f"--out {args.out} is there already; another makes a new folder")
        args.rows = []
        for place, row in json_lines(args.data):
            if not all(isinstance(row.get(name), str) for name in ("prompt", "completion")):
                raise DataError(f"{place} is no row of texts {{prompt, completion}}")
            args.rows.append(row)
        if len(args.rows) < args.batch:
            raise DataError(f"{args.data} has {len(args.rows)} rows, fewer than --batch "
                            f"{args.batch}")
    except DataError as e:
        parser.exit(2, f"sft.py: {e}\n")
    return args


def main(argv=None):
    from transformers import AutoTokenizer
    args = parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    eos = tokenizer.eos_token_id
    pairs = demonstrations(args.rows, tokenizer, eos, args.template)
    torch.manual_seed(args.seed)  # adapters are drawn
    policy = loading.load(
        args.model, [eos], loading.probe_batch(pairs[0][0][:64], eos), loading.Compute(
            longest=max(len(prompt) + len(c.tokens) for prompt, c in pairs), dtype=args.dtype,
            budget=args.tokens_per_micro_batch, lora_rank=args.lora_rank))
    each = len(pairs) // args.batch  # steps of an epoch
    steps, rng = args.epochs * each, random.Random(args.seed)
    orders = (rng.sample(pairs, len(pairs)) for _ in range(args.epochs))
    batches = (order[i::each][:args.batch] for order in orders for i in range(each))
    try:
        fit(policy, batches, steps, lr=args.lr,
            factor=lambda i: min((i + 1) / (0.1 * steps + 1), (steps - i) / steps))
    except NotFinite as e:
        sys.exit(f"sft.py: {e}: a lower --lr may help")
    part = args.out.with_name(args.out.name + ".part")  # a folder of the name is whole
    policy.model.save_pretrained(part, state_dict=dict(parallel.weights(policy)))
    tokenizer.save_pretrained(part)
    part.rename(args.out)


if __name__ == "__main__":
    main()

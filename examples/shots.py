"""A set's problems with solved ones in front of each prompt, as base models are evaluated.

    python -m examples.shots math500 --solved math > runs/shots.jsonl
    python eval.py --benchmarks runs/shots.jsonl --template none --stop Question:

The solved ones are of the split to learn from of gsm8k, math, deepscaler, or a file whose rows have
a field `solution`. They are drawn by --seed, and left out of the problems.
"""

import argparse
import json
import random

import data


def with_shots(problems, solved, n, seed):
    """-> rows of the problems, with n of the solved ones in front of each prompt."""
    solved = [p for p in solved if p.get("solution")]
    if n > len(solved):
        raise ValueError(f"--n {n}: {len(solved)} of the problems to learn from have a solution")
    chosen = random.Random(seed).sample(solved, n)
    shown = "".join(f"Question: {p['prompt']}\nAnswer: {p['solution']}\n\n" for p in chosen)
    asked = [(p, f"Question: {p['prompt']}\nAnswer:") for p in problems]
    return [dict(prompt=shown + text, answer=p["answer"], verifier=p["verifier"], id=p["id"])
            for p, text in asked if text not in shown]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m examples.shots")
    parser.add_argument("name", help="of a set, or a file.jsonl")
    for flag, default in dict(solved="gsm8k", n=4, split="test", seed=0, data_dir="").items():
        parser.add_argument(f"--{flag}", default=default, type=type(default))
    args = parser.parse_args()
    try:
        rows = with_shots(data.load(args.name, args.split, args.data_dir),
                          data.load(args.solved, "train", args.data_dir), args.n, args.seed)
    except ValueError as e:
        parser.error(str(e))
    print("\n".join(map(json.dumps, rows)))

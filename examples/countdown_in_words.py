"""Countdown in words, for a model with a cold start: demonstrations show an answer's form, and as
a solution the random expression that made the puzzle.

    mkdir -p runs
    python examples/countdown_in_words.py 2000 --solved > runs/demonstrations.jsonl
    python examples/sft.py --model models/gemma --data runs/demonstrations.jsonl --out models/start
    python examples/countdown_in_words.py 4000 > runs/learnt.jsonl
    python examples/countdown_in_words.py 256 --held_out > runs/held_out.jsonl
    python train.py --model models/start --data runs/learnt.jsonl --eval_data runs/held_out.jsonl \\
        --template none
"""

import argparse
import json
import sys

if __name__ == "__main__":  # imports begin at the project's folder
    sys.path[0] += "/.."

from data import countdown


def problem(index, seed, split):
    """Puzzle `index` of data/countdown.py's smaller form, with a solution as `completion`."""
    nums, target, solution = countdown.puzzle("countdown", seed, index, split)
    return dict(prompt=f"Use the numbers {nums[0]}, {nums[1]} and {nums[2]}, each once, to make "
                       f"{target}.",
                completion=f" <answer>{solution}</answer>",
                answer=dict(nums=nums, target=target), verifier="countdown", id=str(index))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="puzzles; held-out prompts are all different")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--solved", action="store_true", help="another draw, with solutions")
    which.add_argument("--held_out", action="store_true", help="puzzles nobody learns from")
    args = parser.parse_args()
    split = "test" if args.held_out else "train"
    problems = (problem(i, int(args.solved), split) for i in range(100 * args.count))
    if args.held_out:
        rows = countdown.distinct(problems, args.count)
    else:
        rows = [next(problems) for _ in range(args.count)]
    for row in rows:
        if not args.solved:
            del row["completion"]
        print(json.dumps(row))

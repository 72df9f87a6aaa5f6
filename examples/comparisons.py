"""Comparisons of numbers, with four solved lines in front: a task that Gemma 3 270M, a base model,
solves in a third of its completions, so that RL has something to learn from at once.

    python examples/comparisons.py 4000 > runs/learnt.jsonl
    python examples/comparisons.py 256 --held_out > runs/held_out.jsonl
    python train.py --model models/gemma --data runs/learnt.jsonl --eval_data runs/held_out.jsonl \
        --template none --stop "</answer>"
"""

import json
import random
import sys

SOLVED = """\
Which number is larger, 41 or 87? <answer>87</answer>
Which number is larger, 930 or 112? <answer>930</answer>
What is the smallest of 8, 3, 5? <answer>3</answer>
What is the smallest of 71, 64, 90? <answer>64</answer>
"""


def problem(index, held_out):
    """Problem `index`, the same in every process. A pair or a triple of numbers is learnt from or
    held out, in any order: by the remainder of its sum."""
    rng = random.Random(f"{index} {held_out}")
    while True:
        top = rng.choice((100, 1000))
        numbers = rng.sample(range(1, top), rng.choice((2, 3)))
        if (sum(numbers) % 5 == 0) == held_out:
            break
    if len(numbers) == 2:
        question = f"Which number is larger, {numbers[0]} or {numbers[1]}?"
        answer = max(numbers)
    else:
        question = f"What is the smallest of {', '.join(map(str, numbers))}?"
        answer = min(numbers)
    return dict(prompt=SOLVED + question, answer=str(answer), verifier="math", id=str(index))


if __name__ == "__main__":
    for index in range(int(sys.argv[1])):
        print(json.dumps(problem(index, "--held_out" in sys.argv)))

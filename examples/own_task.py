"""A task from two functions: one makes problem i, the other grades an answer.

    python examples/own_task.py 2000 > runs/train.jsonl
    python examples/own_task.py 256 --held_out > runs/test.jsonl
    python train.py --data runs/train.jsonl --eval_data runs/test.jsonl --max_prompt_tokens 500

train.py needs the verifier, in two lines below REWARDS in rewards.py:

    from examples.own_task import palindrome
    REWARDS["palindrome"] = palindrome
"""

import argparse
import json
import random
import re
import sys
from string import ascii_lowercase

if __name__ == "__main__":  # imports begin at the project's folder
    sys.path[0] += "/.."

from graders import Unparsed


def problem(index, held_out):
    """Problem `index`, the same in every process: the length of a palindrome and its beginning.
    Held-out ones begin with another letter, so that the two splits cannot share a problem."""
    rng = random.Random(index)
    start = rng.choice("wxyz" if held_out else ascii_lowercase[:22])
    start += "".join(rng.choices(ascii_lowercase, k=2))
    length = rng.randint(5, 9)
    prompt = (f"Write a palindrome of {length} letters that begins with {start}, within <answer> "
              "</answer> tags.")
    return dict(prompt=prompt, answer=dict(start=start, length=length), verifier="palindrome",
                id=str(index))


def palindrome(completion, answer):
    """1 for a palindrome as it was asked for, in the only <answer> of the completion, else 0."""
    found = re.findall("<answer>(.*?)</answer>", completion, re.S)
    if len(found) != 1:
        raise Unparsed("not exactly one answer")  # counted apart from wrong answers
    text = found[0].strip()
    return float(text == text[::-1] and len(text) == answer["length"]
                 and text.startswith(answer["start"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--held_out", action="store_true", help="problems to evaluate")
    args = parser.parse_args()
    for index in range(args.number):
        print(json.dumps(problem(index, args.held_out)))

"""The tasks of reasoning-gym (pip install reasoning-gym==0.1.25) as problems of your own.

    python examples/reasoning_gym.py chain_sum 2000 --out runs/train.jsonl
    python examples/reasoning_gym.py chain_sum 256 --held_out --out runs/test.jsonl
    python train.py --data runs/train.jsonl --eval_data runs/test.jsonl

train.py needs the verifier, in two lines below REWARDS in rewards.py:

    from examples.reasoning_gym import rg
    REWARDS["rg"] = Verifier(rg, seconds=20.0)

A hash of the question holds one in five out. An answer is {task, index, gold}, of which the
verifier makes the entry again: some verifiers evaluate its parts, and a file is not trusted.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import json
import re
import sys
from importlib.metadata import version

if __name__ == "__main__":  # the project in place of this folder, whose file shadows the package
    sys.path[0] += "/.."

import reasoning_gym
from reasoning_gym.factory import DATASETS

from graders import Unparsed

if version("reasoning-gym") != "0.1.25":  # Others may evaluate other answers as Python.
    raise ImportError("pip install reasoning-gym==0.1.25: its verifiers were tried, others not")
FORMAT = "\nThink first. Then give the answer, and nothing else, within <answer> </answer> tags."
UNUSABLE = {  # other problems in every process; a verifier that takes wrong answers; no defaults
    "acre", "codeio", "isomorphic_strings", "knight_swap", "list_functions", "ransom_note",
    "polynomial_multiplication", "word_ladder", "coin_flip", "game_of_life_halting", "puzzle24",
    "composite"}

# The verifiers of these tasks evaluate the model's answer as Python: graded are only answers that
# can call nothing but functions of mathematics, without sympy's Integral, which solves nothing.
LISTS = r"[\w\s\[\],'\"+-]*"
ARITHMETIC = r"(?!.*\*\*)[\d\s+*/().-]*"
ALGEBRA = (r"([\d\s+*/^()-]|(?<=\d)\.|\.(?=\d)|\b(a?sin|a?cos|a?tan|sec|csc|cot|sinh|cosh|tanh|exp|"
           r"log|sqrt|erf|pi|[A-Za-z])(?![A-Za-z_]))*")
EVALUATED = {
    "countdown": ARITHMETIC, "binary_matrix": LISTS, "n_queens": LISTS, "spiral_matrix": LISTS,
    "string_insertion": LISTS, "intermediate_integration": ALGEBRA, "simple_integration": ALGEBRA,
    "complex_arithmetic": r"[\d\s+*/().ij-]*"}  # evaluates nothing, but takes nan for right


@functools.cache
def dataset(task):
    return reasoning_gym.create_dataset(task, seed=0, size=1_000_000)


@functools.lru_cache(maxsize=256)
def entry(task, index):
    """{question, answer, metadata}: the same in every process."""
    with contextlib.redirect_stdout(io.StringIO()):  # Some tasks print while they make an entry.
        return dataset(task)[index]


def rg(completion, answer):
    """The task's own score, from 0 to 1, of the last <answer> after </think>; 1 is right."""
    text = completion.split("</think>")[-1]
    _, opening, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
    if "<think>" in text or not opening or not inside.strip():
        raise Unparsed("no answer")
    task, problem = answer["task"], entry(answer["task"], answer["index"])
    if task in UNUSABLE or problem["answer"] != answer["gold"]:
        raise ValueError(f"problem {answer['index']} of {task} is another one here")
    if not re.fullmatch(EVALUATED.get(task, ".*"), inside.strip(), re.S):
        raise Unparsed("not of the form of the task's answers")
    try:
        score = float(dataset(task).score_answer(inside.strip(), problem))
    except Exception as e:  # Some verifiers raise where an answer is no number.
        raise Unparsed(f"{type(e).__name__}: {e}") from None
    if not 0 <= score <= 1:  # nan, too; some verifiers add up to a little more than 1
        raise Unparsed(f"the task's verifier gives it {score}")
    return score


def problems(task, held_out):
    """Problems with different questions, whose gold answer, where the task gives one, scores 1."""
    asked = set()
    for index in range(20_000):
        question, gold = (entry(task, index)[name] for name in ("question", "answer"))
        answer = dict(task=task, index=index, gold=gold)
        with contextlib.suppress(Unparsed):
            if ((hashlib.sha256(question.encode()).digest()[0] % 5 == 0) == held_out
                    and question not in asked
                    and (gold is None or rg(f"<answer>{gold}</answer>", answer) == 1)):
                asked.add(question)
                yield dict(prompt=question.rstrip() + FORMAT, answer=answer, verifier="rg",
                           id=f"{task}/{index}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=sorted(DATASETS.keys() - UNUSABLE))
    parser.add_argument("number", type=int, nargs="?", default=1000)
    parser.add_argument("--held_out", action="store_true", help="of the questions held out")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    args = parser.parse_args()
    for _, problem in zip(range(args.number), problems(args.task, args.held_out)):
        print(json.dumps(problem), file=args.out)

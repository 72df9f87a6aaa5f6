"""Countdown: reach a target from given numbers, each used once (github.com/Jiayi-Pan/TinyZero).

Puzzle i is the same in every run, and nothing is stored: --seed orders the puzzles. A hash of
its numbers and its target decides the split of a puzzle: the two splits share none.
"""

import hashlib
import random
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from operator import add, mul, sub

# "countdown" is for the embedded base: three numbers of one digit, and * half as often as + or -;
# "countdown34" is the papers' form.
FORMS = {
    "countdown": dict(counts=(3,), largest=9, operators="++--*", highest=50),
    "countdown34": dict(counts=(3, 4), largest=99, operators="+-*/", highest=99),
}

OPERATIONS = {"+": add, "-": sub, "*": mul, "/": Fraction}  # all exact

SYSTEM = "You are a helpful assistant. You think about the problem first, then give the answer."
QUESTION = (
    "Using the numbers {nums}, create an equation that equals {target}. You can use basic "
    "arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in "
    "<think> </think> tags, and return the final answer in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>.")


def random_expression(rng, nums, operators):
    """-> a random expression over all of `nums`, and its exact value. Raises ZeroDivisionError."""
    terms = [(str(n), n) for n in rng.sample(nums, len(nums))]
    while len(terms) > 1:
        i = rng.randrange(len(terms) - 1)
        (left, a), (right, b) = terms[i], terms[i + 1]
        op = rng.choice(operators)
        terms[i:i + 2] = [(f"({left}{op}{right})", OPERATIONS[op](a, b))]
    text, value = terms[0]
    return text[1:-1], value  # the outermost needs no brackets


def puzzle(form, seed, index, split):
    """-> the numbers, the target and a solution of puzzle `index` of `split`.

    A solution exists by construction: the target is the value of a random expression. Expressions
    are drawn until one gives a puzzle of `split`."""
    shape = FORMS[form]
    # seeded by a text, because hash() of a tuple with texts differs between processes
    rng = random.Random(f"{form} {seed} {index} {split}")
    count = rng.choice(shape["counts"])
    while True:
        nums = [rng.randint(1, shape["largest"]) for _ in range(count)]
        with suppress(ZeroDivisionError):
            solution, value = random_expression(rng, nums, shape["operators"])
            if (1 <= value <= shape["highest"] and value.denominator == 1
                    and split_of(nums, int(value)) == split):
                return nums, int(value), solution


def split_of(nums, target):
    """The split of a puzzle, the same for its numbers in any order: one in five is held out."""
    digest = hashlib.sha256(f"{sorted(nums)} {target}".encode()).digest()
    return "test" if digest[0] % 5 == 0 else "train"


def problem(form, seed, index, split):
    """A problem of data.load: {prompt, (messages,) answer, verifier, id}."""
    nums, target, _ = puzzle(form, seed, index, split)
    fields = dict(prompt=short_prompt(nums, target), answer=dict(nums=nums, target=target),
                  verifier="countdown", id=f"{form}/{split}/{seed}/{index}")
    if form == "countdown":
        return fields
    question = QUESTION.format(nums=nums, target=target)
    begin = "Assistant: Let me solve this step by step.\n<think>"
    return dict(fields, prompt=f"{SYSTEM}\nUser: {question}\n{begin}",
                messages=[dict(role="system", content=SYSTEM), dict(role="user", content=question)])


def short_prompt(nums, target):
    """The prompt for the embedded base, such as 7,1,9=16:"""
    return f"{','.join(map(str, nums))}={target}:"


class Generated(Sequence):
    """The training problems of a form; each is computed when it is asked for."""

    def __init__(self, form):
        self.form = form

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return problem(self.form, 0, range(len(self))[index], "train")


def held_out(form, n):
    """n held-out problems with different prompts: the same for every seed of a run."""
    return distinct((problem(form, 0, index, "test") for index in range(100 * n)), n)


def distinct(problems, n):
    """The first n problems with different prompts, shuffled: puzzles that are found late have few
    solutions, and are harder. Raises ValueError where there are fewer than n."""
    found = {}
    for item in problems:
        found.setdefault(item["prompt"], item)
        if len(found) == n:
            return random.Random(0).sample(list(found.values()), n)
    raise ValueError(f"there are fewer than {n} different held-out puzzles")

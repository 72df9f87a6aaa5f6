"""Countdown: reach a target from given numbers, each used once (TinyZero, github.com/Jiayi-Pan/TinyZero).

Problem i is a function of (seed, i): nothing is stored, and a resumed run needs no replay. A puzzle
belongs to the held-out split by a hash of what it asks, so the two splits cannot share one.
"""

import hashlib
import random
from collections.abc import Sequence
from fractions import Fraction

# the first for the embedded base: three digits, and sums more often than products; the second the papers' form
FORMS = {
    "countdown": dict(counts=(3,), largest=9, operators="++--*", highest=50),
    "countdown34": dict(counts=(3, 4), largest=99, operators="+-*/", highest=99),
}

SYSTEM = "You are a helpful assistant. You think about the problem first, then give the answer."
QUESTION = ("Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic "
            "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags, "
            "and return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.")


def random_expression(rng, nums, operators):
    """A random bracketed expression over all of `nums` in random order, and its exact value (None: division by 0)."""
    terms = [(str(n), Fraction(n)) for n in rng.sample(nums, len(nums))]
    while len(terms) > 1:
        i = rng.randrange(len(terms) - 1)
        (left, a), (right, b) = terms[i], terms[i + 1]
        op = rng.choice(operators)
        if op == "/" and b == 0:
            return None, None
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[op]
        text = f"{left}{op}{right}"
        terms[i:i + 2] = [(f"({text})" if len(terms) > 2 else text, value)]  # the outermost needs no brackets
    return terms[0]


def puzzle(form, seed, index, split):
    """-> (nums, target, a solution). Solvable by construction; drawn again until it falls into `split`."""
    shape = FORMS[form]
    rng = random.Random(f"{form} {seed} {index} {split}")  # seeded by text: the same in every process
    count = rng.choice(shape["counts"])
    while True:
        nums = [rng.randint(1, shape["largest"]) for _ in range(count)]
        solution, value = random_expression(rng, nums, shape["operators"])
        if value is None or value.denominator != 1 or not 1 <= value <= shape["highest"]:
            continue
        if split_of(nums, int(value)) == split:
            return nums, int(value), solution


def split_of(nums, target):
    """Which split a puzzle belongs to, whatever the order of its numbers: one in five is held out."""
    digest = hashlib.sha256(f"{sorted(nums)} {target}".encode()).digest()
    return "test" if digest[0] % 5 == 0 else "train"


def problem(form, seed, index, split):
    """A problem as the loop takes it: {prompt, (messages,) answer, reward, id}."""
    nums, target, _ = puzzle(form, seed, index, split)
    made = dict(prompt=short_prompt(nums, target), answer=dict(nums=nums, target=target), reward="countdown",
                id=f"{form}/{split}/{seed}/{index}")
    if form == "countdown":
        return made
    question = QUESTION.format(nums=nums, target=target)
    return dict(made, prompt=f"{SYSTEM}\nUser: {question}\nAssistant: Let me solve this step by step.\n<think>",
                messages=[dict(role="system", content=SYSTEM), dict(role="user", content=question)])


def short_prompt(nums, target):
    """The embedded base's form: 7,1,9=16:"""
    return f"{','.join(map(str, nums))}={target}:"


class Generated(Sequence):
    """`size` problems of a form, each made when it is asked for."""

    def __init__(self, form, size=100_000):
        self.form, self.size = form, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return problem(self.form, 0, index, "train")


def held_out(form, n):
    """The first n held-out problems with different prompts: the same whatever the run's seed."""
    prompts, problems = set(), []
    for index in range(100 * n):
        item = problem(form, 0, index, "test")
        if item["prompt"] not in prompts:
            prompts.add(item["prompt"])
            problems.append(item)
        if len(problems) == n:
            return problems
    raise ValueError(f"{form} has not got {n} different held-out puzzles")

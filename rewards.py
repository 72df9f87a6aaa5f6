"""The verifiers, and `grade`, which runs them where they can be killed.

A verifier is a pure function (completion, answer) -> reward. To add one, write or import it
directly below the table REWARDS, and add it: REWARDS["mine"] = mine. A problem names its verifier.
A completion that cannot be read, or makes its verifier hang or crash, is counted, and gets the
least reward that the verifier gives: no policy learns to avoid being graded.
"""

import ast
import json
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import NamedTuple

from graders import Unparsed, UnparsedGold, sandbox, worker
from graders.answer import last_boxed
from graders.equal import check_read, equal, readable
from graders.sandbox import run_tests

MODULE = "rewards"  # The worker processes import this module and use its `call`.
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.UAdd: operator.pos, ast.USub: operator.neg}


# ------------------------------------------------------------------ Countdown

def the_answer(completion):
    """The text in the only <answer> and </answer> after </think>. Raises Unparsed."""
    parts = re.split("(</?answer>)", after_thinking(completion))
    if parts[1::2] != ["<answer>", "</answer>"]:
        raise Unparsed("not exactly one answer")
    return parts[2].strip()


def arithmetic(text):
    """-> (exact value, numbers used) of an expression in + - * / ( ) and whole numbers. Raises
    Unparsed. The limits bound recursion and numbers."""
    if text.count("(") > 40 or not re.fullmatch(r"[-+*/()0-9\s]{1,200}", text):
        raise Unparsed("no short expression in + - * / ( ) and whole numbers")
    plain, numbers = re.sub(r"\b0+(?=[0-9])", "", " ".join(text.split())), []

    def value(node):
        if isinstance(node, ast.Constant):
            numbers.append(node.value)
            return Fraction(node.value)
        operands = [value(x) for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)]
        return OPERATORS[type(node.op)](*operands)
    try:
        return value(ast.parse(plain, mode="eval").body), numbers
    except (SyntaxError, LookupError, AttributeError, ZeroDivisionError) as e:
        raise Unparsed(f"no expression: {e}") from None


def countdown(completion, answer):
    """1 if the only <answer> has the exact value answer["target"] and exactly the numbers
    answer["nums"], each as often as it is given; else 0."""
    value, numbers = arithmetic(the_answer(completion))
    return float(value == answer["target"] and sorted(numbers) == sorted(answer["nums"]))


def countdown_gold(gold):
    numbers = [gold["target"], *gold["nums"]]
    return {*map(type, numbers)} == {int} and min(gold["nums"], default=-1) >= 0


# ------------------------------------------------------------------ mathematics

def after_thinking(completion):
    """The text after </think>; "" if it was cut off while it was thinking."""
    text = completion.split("</think>")[-1]
    return "" if "<think>" in text else text


def final_answer(completion):
    """The last box after </think>, with those joined to it; else the last <answer>, or Unparsed."""
    text = re.sub("(?i)<(/?)answer>", r"<\1answer>", after_thinking(completion))
    text = re.sub(r"\\boxed *(-?[0-9.]*[0-9])(?![0-9A-Za-z{])", r"\\boxed{\1}", text)
    pred = last_boxed(text)
    if pred is None:
        _, begin, pred = text.rpartition("</answer>")[0].rpartition("<answer>")
        pred = pred if begin else ""
    if not pred.strip():
        raise Unparsed("no closed box and no answer")
    return pred.strip()


def math(completion, answer):
    """1 for a final answer that equals the gold answer, else 0."""
    pred = final_answer(completion)
    if equal(pred, answer):
        return 1.0
    check_read(pred, answer)  # raises UnparsedGold or Unparsed
    return 0.0


def math_gold(gold):
    """Control characters are JSON's reading of one backslash: of "\\frac" it makes a form feed."""
    return (type(gold) in (str, int, float) and readable(gold)
            and not re.search(r"[\a\b\f\r\t\v]", str(gold)))


# ------------------------------------------------------------------ tables

def cell(value):
    """A table's entry: a float, without "," "$" "%", or a lower-case text, both without LaTeX."""
    text = re.sub(r"\\(?:text|math|mbox)\w* *\{([^{}]*)\}", r"\1", str(value)).replace("{,}", ",")
    text = text.replace("\\", "").strip().strip("\"'").lower()
    text = text.removesuffix(".") or text
    text = re.sub("[\u2013\u2212]", "-", text)  # en dash, minus sign
    plain = re.sub("(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text).strip("$% ").replace("-$", "-")
    is_number = re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]{1,2})?", plain)
    return float(plain) if is_number else text


def same_cell(pred, gold):
    pred, gold = cell(pred), cell(gold)
    numbers = type(pred) is type(gold) is float
    return abs(pred - gold) <= 1e-5 * abs(gold) if numbers else pred == gold


def entries(text, count):
    """The entries of an answer: a list of JSON or Python, or split at | or commas, if that gives
    `count`. Raises Unparsed for an object without an answer."""
    value, read = [], ast.literal_eval if text.startswith("[") else json.loads
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        value = read(text)
    if isinstance(value, dict):
        value = value.get("answer")
        if value is None:
            raise Unparsed("an object without an answer")
    value = value if isinstance(value, list) else [value]
    text = re.sub(r"(?s)^\[(.*)\]$", r"\1", text)  # [1,234] may be one entry
    splits = value, [text], text.split("|"), re.split(r",\s+", text)
    return next((split for split in splits if len(split) == count), [text])


def table(completion, answer):
    """1 for a final answer with the entries of the list `answer` in the same order: numbers to 1e-5
    of their size, texts up to case (HiTab's lists, arXiv 2108.06712); else 0."""
    preds = entries(final_answer(completion), len(answer))
    return float(len(preds) == len(answer) and all(map(same_cell, preds, answer)))


def table_gold(gold):
    return bool(isinstance(gold, list) and gold and REWARDS["table"](
        f"<answer>{json.dumps(gold, allow_nan=False)}</answer>", gold))


# ------------------------------------------------------------------ programs

def code(completion, answer):
    """1 for a program, a fenced block after </think>, that passes all of answer["tests"], else 0.
    They call the function answer["fn_name"]; without it they use stdin and stdout."""
    blocks = sandbox.fenced_blocks(after_thinking(completion))
    if not blocks:
        raise Unparsed("no fenced block")
    if not answer["tests"]:
        raise UnparsedGold("no tests")
    fn_name = answer.get("fn_name")
    return float(run_tests(sandbox.final_program(blocks, fn_name), answer["tests"], fn_name))


def code_gold(gold):
    """Tests are texts, those of a function JSON lines (else ValueError): arguments, and result. No
    program prints more than sandbox.OUTPUT, or returns NaN."""
    name, tests = gold.get("fn_name"), gold["tests"]
    texts = [text for test in tests for text in (test["input"], test["output"])]
    if {*map(type, texts)} != {str} or not (name is None or type(name) is str
                                            and name.isidentifier()):
        return False
    for test in tests if name is not None else ():
        for text in filter(str.strip, test["input"].split("\n")):
            json.loads(text)
        json.dumps(json.loads(test["output"]), allow_nan=False)
    return all(len(test["output"].encode()) <= sandbox.OUTPUT for test in tests)


# ------------------------------------------------------------------ the table

class Verifier(NamedTuple):
    """A row of REWARDS; a function alone is a row with these defaults."""

    grade: Callable                        # (completion, answer) -> reward
    gold_ok: Callable = lambda gold: True  # can it grade this gold answer?
    seconds: float = 4.0                   # its limit for one completion
    least: float = 0.0                     # the least reward, also of what cannot be graded
    boxed: bool = False                    # does the template qwen_boxed ask for what it reads?
    vote: Callable | None = None           # completion -> its answer, which votes in maj@n
    programs: bool = False                 # does it run what a model writes?

    def __call__(self, completion, answer):
        """For callers without workers: the reward; `least` for an unreadable answer."""
        try:
            return self.grade(completion, answer)
        except Unparsed:
            return self.least


REWARDS = {
    "math": Verifier(math, math_gold, boxed=True, vote=final_answer),
    "countdown": Verifier(countdown, countdown_gold),
    "table": Verifier(table, table_gold, vote=final_answer),
    # each run of a program has a limit, too
    "code": Verifier(code, code_gold, seconds=600.0, programs=True)}


def verifier(name):
    row = REWARDS[name]
    return row if isinstance(row, Verifier) else Verifier(row)


def call(name, *arguments):
    """What a worker process runs: the verifier of this name, or for "gold NAME" its gold_ok."""
    row = verifier(name.removeprefix("gold "))
    return (row.gold_ok if name.startswith("gold ") else row.grade)(*arguments)


def grade(problems, completions, timeout=None, workers=worker.WORKERS):
    """-> P lists of worker.Results, (reward, fault): a verifier's exceptions are faults and not
    raised; errors and time-outs are printed, one of each kind.

    problems: P dicts with "verifier", a name in REWARDS, and "answer". completions: for each, a
    list of texts. timeout: seconds for one, instead of its verifier's."""
    jobs = [worker.Job(p["verifier"], [text, p["answer"]], timeout or row.seconds, row.least)
            for p, texts in zip(problems, completions, strict=True)
            for row in [verifier(p["verifier"])] for text in texts]
    results = worker.run_jobs(MODULE, jobs, workers)
    faults = defaultdict(list)  # of a kind: alike up to a digit or a quotation mark
    for job, (_, fault) in zip(jobs, results):
        if fault and fault.kind in ("error", "timeout"):
            faults[job.name, job.seconds, re.split("[0-9'\"]", str(fault))[0]].append(fault)
    for (name, seconds, _), found in faults.items():
        print(f"rewards: {name}, {len(found)} of {len(jobs)} completions: {found[0]}"
              + f" after {seconds:g} s" * (found[0].kind == "timeout"), file=sys.stderr)
    in_order = iter(results)
    return [[next(in_order) for _ in texts] for texts in completions]


def announce(problems, allow_unsafe):
    """sandbox.announce where a verifier of the problems runs programs."""
    if any(verifier(p["verifier"]).programs for p in problems):
        sandbox.announce(allow_unsafe)


def gradable(problems):
    """-> the worker.Result of each gold answer: reward 1 where its verifier can grade it."""
    jobs = [worker.Job(f"gold {p['verifier']}", [p["answer"]], 60.0) for p in problems]
    return worker.run_jobs(MODULE, jobs, worker.WORKERS)

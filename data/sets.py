"""The data sets: their ids on the Hub, and how a row becomes a problem.

A new set is one row of SETS and, if its fields are of another shape, one function from a row to a
problem {prompt, answer, (messages, solution)}; data/sources.py adds id and verifier, and checks it.
"""

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable
from typing import NamedTuple

from graders.answer import last_boxed

IDS = "id unique_id problem_idx idx question_id number".split()  # number: of load_set


class Set(NamedTuple):
    hub: str  # the id on the Hub
    problem: Callable  # a row -> a problem
    splits: dict = {"test": "test"}  # our split -> the Hub's; a benchmark has "test" alone
    verifier: str = "math"
    options: dict = {}  # of datasets.load_dataset, such as the columns of large files
    files: list = ()  # names of data files, where it is no table


def first(row, names):
    """The value of the first field that is there and is not empty."""
    for name in names:
        if row.get(name) not in (None, "", []):
            return row[name]
    raise KeyError(" or ".join(names))


def gold(value):
    """The text of a gold answer; 27.0 becomes 27."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def maths(row):
    """The answer is a field, or its elements, else the last box of the solution."""
    if isinstance(row.get("solution"), str):
        row = {"solution with \\boxed{}": last_boxed(row["solution"]), **row}
    answer = first(row, ("answer", "final_answer", "solution with \\boxed{}"))
    answer = ", ".join(map(gold, answer if isinstance(answer, list) else [answer]))
    return dict(prompt=first(row, ("problem", "question")), answer=answer,
                solution=row.get("solution"))


def orz(row):
    return dict(prompt=row["0"]["value"], answer=gold(row["1"]["ground_truth"]["value"]))


def gsm8k(row):
    solution, _, answer = row["answer"].rpartition("####")
    answer = gold(answer.replace(",", ""))
    return dict(prompt=row["question"], answer=answer,
                solution=f"{solution.strip()}\nThe answer is \\boxed{{{answer}}}.")


def hitab(row):
    """The prompt has the table as text, with merged cells filled in. A correction of October 2025
    replaces what it corrects. On the Hub table is table_content, and values are Python's texts."""
    if "table_content" in row:
        row = dict(row, table=ast.literal_eval(row["table_content"]),
                   answer=ast.literal_eval(row["answer"]))
    table = row["table"]
    cells = [*map(list, table["texts"])]
    for region in table["merged_regions"]:
        top, left = region["first_row"], region["first_column"]
        for line in cells[top:region["last_row"] + 1]:  # some reach beyond the table
            for j in range(left, min(region["last_column"] + 1, len(line))):
                line[j] = cells[top][left]
    lines = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)
    question = row.get("question_checked") or row["question"]
    prompt = (f"{table['title']}\n\n{lines}\n\nQuestion: {question}\nGive the answer as a "
              "JSON list within <answer> </answer> tags, for example <answer>[12.5]</answer>.")
    return dict(prompt=prompt, answer=row.get("answer_checked") or row["answer"])


CONTEST_TESTS = "public_tests private_tests generated_tests".split()
CODER = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests.")
WITH_STARTER = ("You will use the following starter code to write the solution to the problem and "
                "enclose your code within delimiters.\n```python\n{starter}\n```")
FROM_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
    "\n```python\n# YOUR CODE HERE\n```")


def programming(question, starter, tests, fn_name=None):
    """A problem in LiveCodeBench's generic format."""
    form = WITH_STARTER.format(starter=starter) if starter else FROM_STDIN
    text = (f"### Question:\n{question}\n\n### Format: {form}\n\n"
            "### Answer: (use the provided format with backticks)\n\n")
    messages = [dict(role="system", content=CODER), dict(role="user", content=text)]
    return dict(prompt=text, messages=messages, answer=dict(tests=tests, fn_name=fn_name))


class OnlyText(pickle.Unpickler):
    """Reads the private tests, which the Hub has pickled, without building or calling anything."""

    def find_class(self, module, name):
        raise ValueError(f"the tests hold {module}.{name}, where plain text belongs")


def livecodebench(row):
    private = row["private_test_cases"]
    if not private.startswith("["):
        # a gigabyte at most: some kilobytes may unpack to any number
        unpacked = zlib.decompressobj().decompress(base64.b64decode(private), 2**30)
        private = OnlyText(io.BytesIO(unpacked)).load()
    tests = json.loads(row["public_test_cases"]) + json.loads(private)
    fn_name = json.loads(row["metadata"] or "{}").get("func_name")
    return programming(row["question_content"], row["starter_code"], tests, fn_name)


def code_contests(row):
    tests = [dict(input=given, output=expected) for kind in CONTEST_TESTS
             for given, expected in zip(row[kind]["input"], row[kind]["output"])]
    return programming(row["description"], "", tests)


# of release_v6
LCB_FILES = "test.jsonl test2.jsonl test3.jsonl test4.jsonl test5.jsonl test6.jsonl".split()
ONLY_TRAIN = {"train": "train"}
BOTH = {**ONLY_TRAIN, "test": "test"}
TRAIN_AS_TEST = {"test": "train"}  # benchmarks whose one split the Hub calls train

SETS = {
    # sets to learn from; "test" where the set has a held-out part
    "orz": Set("Open-Reasoner-Zero/orz_math_57k_collection", orz, ONLY_TRAIN),
    "deepscaler": Set("agentica-org/DeepScaleR-Preview-Dataset", maths, ONLY_TRAIN),
    "math": Set("DigitalLearningGmbH/MATH-lighteval", maths, BOTH),
    "gsm8k": Set("openai/gsm8k", gsm8k, BOTH, options=dict(name="main")),
    "hitab": Set("kasnerz/hitab", hitab, BOTH, "table"),
    "code_contests": Set("deepmind/code_contests", code_contests, BOTH, "code",
                         dict(columns=["description", *CONTEST_TESTS])),
    # benchmarks
    "aime24": Set("HuggingFaceH4/aime_2024", maths, TRAIN_AS_TEST),
    "aime25": Set("math-ai/aime25", maths),
    "aime26": Set("MathArena/aime_2026", maths, TRAIN_AS_TEST),
    "amc23": Set("math-ai/amc23", maths),
    "amc": Set("AI-MO/aimo-validation-amc", maths, TRAIN_AS_TEST),
    "math500": Set("HuggingFaceH4/MATH-500", maths),
    "minerva": Set("math-ai/minervamath", maths),
    "olympiad": Set("Hothan/OlympiadBench", maths, TRAIN_AS_TEST,
                    options=dict(name="OE_TO_maths_en_COMP")),
    "livecodebench": Set("livecodebench/code_generation_lite", livecodebench, verifier="code",
                         files=LCB_FILES),
}

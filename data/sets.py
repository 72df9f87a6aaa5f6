"""The data sets: their ids on the Hub, their local file names, and how a row becomes a problem.

A new set is one row of SETS and, if its fields are of another shape, one function from a row to a
problem {prompt, answer, (messages)}; data/sources.py adds id and verifier and checks the answer.
data/README.md has their known flaws.
"""

import ast
import base64
import io
import json
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass

QUESTION = ("problem", "question", "Problem", "Question")
ANSWER = ("answer", "Answer", "final_answer")
IDS = ("id", "ID", "unique_id", "problem_idx", "idx", "question_id")


@dataclass(frozen=True)
class Set:
    """hub: the id on the Hub. local: local file names without .jsonl, in which * is any text.

    problem: the function from a row to a problem. splits: our split -> the Hub's; a benchmark has
    "test" alone. files: for sets that are not plain tables, a function from options to the names of
    data files in the Hub's repository. columns: the fields to read of large parquet files."""

    hub: str
    local: tuple
    problem: Callable
    verifier: str = "math"
    splits: dict = None
    config: str | None = None
    files: Callable | None = None
    columns: tuple | None = None


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
    """The answer is a field of ANSWER, or its one element, else the last box of the solution."""
    try:
        answer = first(row, ANSWER)
    except KeyError:
        from graders.answers import last_boxed
        answer = last_boxed(row.get("solution") or "")
        if answer is None:
            raise KeyError("answer or final_answer, or a solution with \\boxed{}") from None
    answer = answer[0] if isinstance(answer, list) else answer
    return dict(prompt=first(row, QUESTION), answer=gold(answer))


def orz(row):
    return dict(prompt=row["0"]["value"], answer=gold(row["1"]["ground_truth"]["value"]))


def gsm8k(row):
    answer = row["answer"].split("####")[-1].strip().replace(",", "")
    return dict(prompt=row["question"], answer=answer)


def hitab(row):
    """The prompt has the table as text, a line per row, with merged cells filled in.

    The corrections of October 2025 are used where the row has them. The Hub has table_content for
    table, and in every field the text that Python prints for a value."""
    if "table_content" in row:
        row = dict(row, table=ast.literal_eval(row["table_content"]),
                   answer=ast.literal_eval(row["answer"]))
    table = row["table"]
    cells = [list(line) for line in table["texts"]]
    for region in table.get("merged_regions", ()):
        top, left = region["first_row"], region["first_column"]
        for i in range(top, min(region["last_row"] + 1, len(cells))):  # some reach beyond the table
            for j in range(left, min(region["last_column"] + 1, len(cells[i]))):
                cells[i][j] = cells[top][left]
    lines = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)
    question = row.get("question_checked") or row["question"]
    prompt = (f"{table.get('title', '')}\n\n{lines}\n\nQuestion: {question}\nGive the answer as a "
              "JSON list within <answer> </answer> tags, for example <answer>[12.5]</answer>.")
    return dict(prompt=prompt, answer=row.get("answer_checked") or row["answer"])


CODER = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests.")
WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your "
    "code within delimiters.\n```python\n{starter}\n```")
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
    if not private.lstrip().startswith("["):
        private = OnlyText(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load()
    tests = json.loads(row["public_test_cases"]) + json.loads(private)
    fn_name = json.loads(row["metadata"] or "{}").get("func_name")
    return programming(row["question_content"], row["starter_code"], tests, fn_name)


def joined(lines):
    return "\n".join(lines) if isinstance(lines, list) else lines


def returned(outputs, fn_name, row):
    """The values that a function of TACO returns: some rows (Codewars) have each in a list, others
    (LeetCode) have not. [] where neither the starter code's type nor the question tells."""
    if not all(isinstance(value, list) and len(value) == 1 for value in outputs):
        return outputs
    unwrapped = [value[0] for value in outputs]
    kind = re.search(rf"def {fn_name}\(.*\) *->([^:\n]*)", row.get("starter_code") or "")
    if not kind:  # A function that returns lists of one element has such a list in its examples.
        return [] if any(str(value) in row["question"] for value in outputs) else unwrapped
    depth = max(len(re.match(r"\[*", str(value))[0]) for value in outputs)
    wrappers = depth - len(re.findall("list|tuple", kind[1].lower()))
    return {0: outputs, 1: unwrapped}.get(wrappers, [])


def taco(row):
    """TACO's shape: input_output, a JSON text of inputs, outputs and, for functions, fn_name.

    A row without tests is left out later, as one that cannot be graded."""
    sys.set_int_max_str_digits(0)  # some rows hold integers of many thousand digits
    cases = json.loads(row["input_output"])
    pairs = list(zip(cases["inputs"], cases["outputs"], strict=True))
    fn_name = cases.get("fn_name")
    if fn_name:  # TACO lists the arguments; we have JSON lines
        values = returned(cases["outputs"], fn_name, row)
        tests = [dict(input="\n".join(map(json.dumps, given)), output=json.dumps(value))
                 for (given, _), value in zip(pairs, values) if isinstance(given, list)]
    else:
        tests = [dict(input=joined(given), output=joined(expected)) for given, expected in pairs]
    return programming(row["question"], row.get("starter_code"), tests, fn_name)


def code_contests(row):
    if "input_output" in row:
        return taco(row)
    tests = [dict(input=given, output=expected)
             for kind in CONTEST[1:]
             for given, expected in zip(row[kind]["input"], row[kind]["output"], strict=False)]
    return programming(row["description"], "", tests)


def lcb_files(options):
    """release_v6 is the first six files; v6 the sixth alone."""
    release = options.get("lcb_release") or "release_v6"
    match = re.fullmatch(r"(release_)?v(\d)", release)
    if not match or not 1 <= int(match[2]) <= 6:
        raise ValueError(f"--lcb_release {release}: there are release_v1 to release_v6, "
                         "and v1 to v6 for one file alone")
    last = int(match[2])
    numbers = range(1 if match[1] else last, last + 1)
    return [f"test{n if n > 1 else ''}.jsonl" for n in numbers]


BENCHMARK = {"test": "test"}
ONLY_TRAIN = {"train": "train"}
BOTH = {"train": "train", "test": "test"}
TRAIN_AS_TEST = {"test": "train"}  # benchmarks whose one split the Hub calls train
CONTEST = ("description", "public_tests", "private_tests", "generated_tests")

SETS = {
    # sets to learn from; "test" where the set has a held-out part
    "orz": Set("Open-Reasoner-Zero/orz_math_57k_collection", ("orz*",), orz, splits=ONLY_TRAIN),
    "deepscaler": Set("agentica-org/DeepScaleR-Preview-Dataset", ("deepscaler*",), maths,
                      splits=ONLY_TRAIN),
    "math": Set("DigitalLearningGmbH/MATH-lighteval", ("math",), maths, splits=BOTH),
    "gsm8k": Set("openai/gsm8k", ("gsm8k*",), gsm8k, splits=BOTH, config="main"),
    "hitab": Set("kasnerz/hitab", ("hitab*",), hitab, "table", splits=BOTH),
    "code_contests": Set("deepmind/code_contests", ("code_contests*",), code_contests, "code",
                         splits=BOTH, columns=CONTEST),
    # benchmarks
    "aime24": Set("HuggingFaceH4/aime_2024", ("aime24", "aime_2024"), maths, splits=TRAIN_AS_TEST),
    "aime25": Set("math-ai/aime25", ("aime25", "aime_2025"), maths, splits=BENCHMARK),
    "aime26": Set("MathArena/aime_2026", ("aime26", "aime_2026"), maths, splits=TRAIN_AS_TEST),
    "amc23": Set("math-ai/amc23", ("amc23", "amc_2023"), maths, splits=BENCHMARK),
    "amc": Set("AI-MO/aimo-validation-amc", ("amc", "amc_2022_2023"), maths, splits=TRAIN_AS_TEST),
    "math500": Set("HuggingFaceH4/MATH-500", ("math500",), maths, splits=BENCHMARK),
    "minerva": Set("math-ai/minervamath", ("minerva", "minerva_math"), maths, splits=BENCHMARK),
    "olympiad": Set("Hothan/OlympiadBench", ("olympiad", "olympiadbench"), maths,
                    splits=TRAIN_AS_TEST, config="OE_TO_maths_en_COMP"),
    "livecodebench": Set("livecodebench/code_generation_lite", ("livecodebench*",), livecodebench,
                         "code", splits=BENCHMARK, files=lcb_files),
}

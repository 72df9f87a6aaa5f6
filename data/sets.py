"""The data sets: where they are on the Hub, what their files are called locally, and how a row becomes a problem.

A new set is one row of SETS and, if its fields are of another shape, one function from a row to a problem
{prompt, answer, (messages)}; the rest (id, reward, checks) follows. Licences and known flaws: data/README.md.
"""

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
IDS = ("id", "ID", "unique_id", "problem_idx", "idx", "question_id")


@dataclass(frozen=True)
class Set:
    """hub: the id on the Hub, or the data files in it. local: file names without .jsonl (* is any text)."""

    hub: str
    local: tuple
    problem: Callable
    reward: str = "math"
    splits: dict = None   # our split -> the Hub's; a benchmark has "test" alone
    config: str | None = None
    files: Callable | None = None  # options -> file names in the repository, for sets that are not plain tables


def first(row, names):
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise KeyError(" or ".join(names))


def gold(value):
    """The text of a gold answer: 27.0 is 27."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def maths(row):
    """problem or question; answer, else final_answer's one element, else the last box of the solution."""
    if (answer := next((row[k] for k in ("answer", "Answer", "final_answer") if row.get(k) not in (None, "", [])), None)) is None:
        from answers import last_boxed
        answer = last_boxed(row.get("solution") or "")
        if answer is None:
            raise KeyError("answer or final_answer, or a solution with \\boxed{}")
    return dict(prompt=first(row, QUESTION), answer=gold(answer[0] if isinstance(answer, list) else answer))


def orz(row):
    return dict(prompt=row["0"]["value"], answer=gold(row["1"]["ground_truth"]["value"]))


def gsm8k(row):
    return dict(prompt=row["question"], answer=row["answer"].split("####")[-1].strip().replace(",", ""))


def hitab(row):
    """The table as text, a line per row, merged cells filled in; the October 2025 corrections where the row has them."""
    cells = [list(line) for line in row["table"]["texts"]]
    for r in row["table"].get("merged_regions", ()):
        for i in range(r["first_row"], min(r["last_row"] + 1, len(cells))):  # some regions reach beyond the table
            for j in range(r["first_column"], min(r["last_column"] + 1, len(cells[i]))):
                cells[i][j] = cells[r["first_row"]][r["first_column"]]
    lines = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)
    question = row.get("question_checked") or row["question"]
    return dict(prompt=f"{row['table'].get('title', '')}\n\n{lines}\n\nQuestion: {question}\nGive the answer as a JSON list within <answer> "
                       "</answer> tags, for example <answer>[12.5]</answer>.", answer=row.get("answer_checked") or row["answer"])


CODER = ("You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct "
         "Python program that matches the specification and passes all tests.")


def programming(question, starter, tests, fn_name=None):
    """A problem in LiveCodeBench's generic format."""
    if starter:
        form = ("You will use the following starter code to write the solution to the problem and enclose your code within delimiters.\n"
                f"```python\n{starter}\n```")
    else:
        form = ("Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample inputs). "
                "Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the inputs, runs the "
                "algorithm and writes output to STDOUT.\n```python\n# YOUR CODE HERE\n```")
    text = f"### Question:\n{question}\n\n### Format: {form}\n\n### Answer: (use the provided format with backticks)\n\n"
    return dict(prompt=text, messages=[dict(role="system", content=CODER), dict(role="user", content=text)],
                answer=dict(tests=tests, fn_name=fn_name))


class OnlyText(pickle.Unpickler):
    """Private tests are pickled on the Hub; unpickling what was downloaded must not be able to build or call anything."""

    def find_class(self, module, name):
        raise ValueError(f"the tests hold {module}.{name}, where plain text belongs")


def livecodebench(row):
    private = row["private_test_cases"]
    if not private.lstrip().startswith("["):
        private = OnlyText(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load()
    tests = json.loads(row["public_test_cases"]) + json.loads(private)
    return programming(row["question_content"], row["starter_code"], tests, json.loads(row["metadata"] or "{}").get("func_name"))


def joined(lines):
    return "\n".join(lines) if isinstance(lines, list) else lines


def taco(row):
    """TACO's shape: input_output, a JSON text of inputs, outputs and, for functions, fn_name."""
    sys.set_int_max_str_digits(0)  # some rows hold integers of many thousand digits
    both = json.loads(row["input_output"])
    fn_name = both.get("fn_name")
    pairs = zip(both["inputs"], both["outputs"], strict=True)
    if fn_name:  # arguments as a list there, one JSON per line here; the value in a list of one
        tests = [dict(input="\n".join(map(json.dumps, i)), output=json.dumps(o[0] if isinstance(o, list) else o)) for i, o in pairs]
    else:
        tests = [dict(input=joined(i), output=joined(o)) for i, o in pairs]
    return programming(row["question"], row.get("starter_code"), tests, fn_name)


def code_contests(row):
    if "input_output" in row:
        return taco(row)
    tests = [dict(input=i, output=o) for kind in ("public_tests", "private_tests", "generated_tests")
             for i, o in zip(row[kind]["input"], row[kind]["output"])]
    return programming(row["description"], "", tests)


def eurus(row):
    """None for its rows of mathematics."""
    if row.get("ability", "code") != "code":
        return None
    return taco(dict(question=row["prompt"][-1]["content"], input_output=row["reward_model"]["ground_truth"]))


def lcb_files(options):
    """release_v6 is the first six files; v6 the sixth alone."""
    found = re.fullmatch(r"(release_)?v(\d)", options.get("lcb_release") or "release_v6")
    if not found or not 1 <= int(found[2]) <= 6:
        raise ValueError(f"--lcb_release {options['lcb_release']}: there are release_v1 to release_v6, and v1 to v6 for one file alone")
    last = int(found[2])
    return [f"test{n if n > 1 else ''}.jsonl" for n in range(1 if found[1] else last, last + 1)]


BENCHMARK = {"test": "test"}
SETS = {
    # to learn from; "test" where the set has a held-out part
    "orz": Set("Open-Reasoner-Zero/orz_math_57k_collection", ("orz*",), orz, splits={"train": "train"}),
    "deepscaler": Set("agentica-org/DeepScaleR-Preview-Dataset", ("deepscaler*",), maths, splits={"train": "train"}),
    "math": Set("DigitalLearningGmbH/MATH-lighteval", ("math", "math_train"), maths, splits={"train": "train", "test": "test"}),
    "gsm8k": Set("openai/gsm8k", ("gsm8k*",), gsm8k, splits={"train": "train", "test": "test"}, config="main"),
    "hitab": Set("kasnerz/hitab", ("hitab*",), hitab, "table", splits={"train": "train", "test": "test"}),
    "code_contests": Set("deepmind/code_contests", ("code_contests*",), code_contests, "code", splits={"train": "train", "test": "test"}),
    "taco": Set("BAAI/TACO", ("taco*",), taco, "code", splits={"train": "train", "test": "test"},
                files=lambda options: [f"ALL/{options['split']}-*.parquet"]),
    "eurus_code": Set("PRIME-RL/Eurus-2-RL-Data", ("eurus*",), eurus, "code", splits={"train": "train", "test": "validation"}),
    # benchmarks
    "aime24": Set("HuggingFaceH4/aime_2024", ("aime24", "aime_2024"), maths, splits={"test": "train"}),
    "aime25": Set("math-ai/aime25", ("aime25", "aime_2025"), maths, splits=BENCHMARK),
    "aime26": Set("MathArena/aime_2026", ("aime26", "aime_2026"), maths, splits={"test": "train"}),
    "amc23": Set("math-ai/amc23", ("amc23", "amc_2023"), maths, splits=BENCHMARK),
    "amc": Set("AI-MO/aimo-validation-amc", ("amc", "amc_2022_2023"), maths, splits={"test": "train"}),
    "math500": Set("HuggingFaceH4/MATH-500", ("math500",), maths, splits=BENCHMARK),
    "minerva": Set("math-ai/minervamath", ("minerva", "minerva_math"), maths, splits=BENCHMARK),
    "olympiad": Set("Hothan/OlympiadBench", ("olympiad", "olympiadbench"), maths, splits={"test": "train"}, config="OE_TO_maths_en_COMP"),
    "livecodebench": Set("livecodebench/code_generation_lite", ("livecodebench*",), livecodebench, "code", splits=BENCHMARK, files=lcb_files),
}

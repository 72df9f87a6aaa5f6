"""Reading problems: from the Hub, from local JSONL files with the Hub's fields, from a user's file.

Whatever is wrong with a row is a DataError that names the file and the line. Problems whose gold
answer the verifier cannot grade are left out and named.
"""

import fnmatch
import glob
import json
import sys
from datetime import date
from pathlib import Path

from data import hub
from data.sets import IDS, SETS
from rewards import REWARDS, grade


class DataError(ValueError):
    """A sentence on what is wrong with the data, where, and what would be right.

    train.py and eval.py print it and exit with 2."""


def load_set(name, split, data_dir, left_out, options):
    """The problems of a set of data/sets.py; for the arguments see data.load."""
    spec = SETS[name]
    if not data_dir and split not in spec.splits:
        raise DataError(f"--data {name} has no {split} split on the Hub, "
                        f"only {', '.join(spec.splits)}")
    rows = local_rows(spec, data_dir) if data_dir else hub_rows(spec, split, options)
    return problems_of_set(name, rows, left_out, options)


def problems_of_set(name, rows, left_out, options):
    """The problems of a set's rows, each with its place. Raises DataError."""
    spec = SETS[name]
    first_day, last_day = contest_days(options)
    problems, places, ids = [], [], set()
    for number, (place, row) in enumerate(rows):
        try:
            if "contest_date" in row:
                day = date.fromisoformat(str(row["contest_date"])[:10])
                if not first_day <= day <= last_day:
                    continue
            problem = spec.problem(row)
        except Exception as e:  # a row may hold anything, and so may the errors that it causes
            reason = f"field {e} is missing" if isinstance(e, KeyError) else str(e)
            raise DataError(f"{place} is not a row of {name}: {reason}") from None
        if problem is None:
            continue  # a row of another kind, such as mathematics in eurus_code
        row_id = next((str(row[field]) for field in IDS if row.get(field) is not None), str(number))
        unique_id = f"{row_id}/{number}" if row_id in ids else row_id  # some sets repeat their ids
        problems.append(dict(problem, reward=spec.reward, id=unique_id))
        places.append(place)
        ids.add(row_id)
    if not problems:
        window = name == "livecodebench" and (options.get("lcb_from") or options.get("lcb_to"))
        raise DataError(f"{name}: no problem is left between --lcb_from and --lcb_to" if window
                        else f"{name}: its rows hold no problem")
    return with_right_golds(name, problems, places, left_out)


def contest_days(options):
    """-> the first and the last day of LiveCodeBench's contests that are asked for."""
    try:
        return (date.fromisoformat(options.get("lcb_from") or "0001-01-01"),
                date.fromisoformat(options.get("lcb_to") or "9999-12-31"))
    except ValueError as e:
        raise DataError(f"--lcb_from and --lcb_to are days such as 2024-08-01: {e}") from None


def local_rows(spec, folder):
    """The rows of the first of a set's local file names that exists, each with its place."""
    for stem in spec.local:
        paths = sorted(glob.glob(str(Path(glob.escape(str(folder)), stem + ".jsonl"))))
        if len(paths) > 1:
            names = ", ".join(Path(path).name for path in paths)
            raise DataError(f"--data_dir {folder} has several {stem}.jsonl ({names}), and a set is "
                            "one file there: join them, or give each as a path, as in "
                            f"--data {paths[0]}")
        if paths:
            return json_lines(paths[0])
    names = " or ".join(stem + ".jsonl" for stem in spec.local)
    raise DataError(f"--data_dir {folder} has no {names}")


def json_lines(path):
    """The objects of a JSONL file, each with its place, "FILE, line N"."""
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{path}, line {number} is not JSON: {e}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is not an object")
        yield f"{path}, line {number}", row


def lines_of(path):
    """The lines of a file, as bytes. Raises DataError for a folder, or without permission."""
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None


def hub_rows(spec, split, options):
    """The rows of a set on the Hub, each with its place. An error while they are read is a
    DataError, too."""
    try:
        files = spec.files and spec.files(dict(options, split=split))
    except ValueError as e:
        raise DataError(str(e)) from None

    def rows():
        try:
            for number, row in enumerate(hub.rows(spec, split, files)):
                yield f"{spec.hub}, row {number}", row
        except Exception as e:  # the Hub's errors are of many classes
            raise DataError(f"{spec.hub} cannot be loaded from the Hub: {hub.reason(e)} "
                            "(--data_dir FOLDER takes local files)") from None
    return rows()


def load_file(path, left_out=None):
    """The problems of a file: {prompt or messages, answer, reward, (id)} in every row, or the rows
    of a set whose local name the file has."""
    try:
        there = path.is_file()
    except OSError as e:  # of a name that is too long, or without permission
        raise DataError(f"--data {path} cannot be read: {e.strerror}") from None
    if not there:
        raise DataError(f"--data {path}: there is no such file")
    if name := set_of(path):
        try:
            return problems_of_set(name, json_lines(path), left_out, {})
        except DataError as e:
            raise DataError(f"{e} (the file's name is that of the set {name}; a file of one's own "
                            "has a reward in every row)") from None
    problems, places = [], []
    for place, row in json_lines(path):
        problems.append(problem_of_row(place, row, len(problems)))
        places.append(place)
    if not problems:
        raise DataError(f"{path} is empty")
    if len({p["id"] for p in problems}) < len(problems):
        raise DataError(f"{path}: two rows have the same id")
    return with_right_golds(str(path), problems, places, left_out)


def set_of(path):
    """The set whose local name a file has; None for a file of one's own, whose first row names a
    reward whatever the file is called."""
    _, first = next(json_lines(path), (None, {"reward": None}))
    if "reward" in first:
        return None
    return next((name for name, spec in SETS.items()
                 if any(fnmatch.fnmatch(path.stem, stem) for stem in spec.local)), None)


def problem_of_row(place, row, number):
    """A row of a user's file as a problem; its id is `number` where it has none."""
    missing = {"answer", "reward"} - set(row)
    if not missing and not {"prompt", "messages"} & set(row):
        missing = {"prompt"}
    if missing:
        raise DataError(f"{place} has no field {', '.join(sorted(missing))}: "
                        f"a row is {{prompt or messages, answer, reward}}{hint(row)}")
    if str(row["reward"]) not in REWARDS:
        raise DataError(f"{place}: reward {row['reward']!r} is none of {', '.join(REWARDS)}")
    try:
        prompt = row["prompt"] if "prompt" in row else row["messages"][-1]["content"]
    except (TypeError, LookupError):
        prompt = None
    if prompt == "":
        raise DataError(f"{place}: prompt is empty")
    if not isinstance(prompt, str):
        raise DataError(f"{place}: prompt is a text, or messages a list of {{role, content}}")
    fits, shape = SHAPES.get(row["reward"], (lambda answer: True, ""))
    if not fits(row["answer"]):
        raise DataError(f"{place}: the answer of reward {row['reward']} is {shape}, "
                        f"not {json.dumps(row['answer'])[:100]}")
    return {**row, "prompt": prompt, "id": str(row.get("id", number))}


def hint(row):
    """What to add to the refusal of a row that has the fields of a set."""
    names = []
    for name, spec in SETS.items():
        try:
            spec.problem(row)
            names.append(name)
        except Exception:  # it is not a row of this set; a row may hold anything
            continue
    return (f"; this one has the fields of a set: --data NAME --data_dir FOLDER reads "
            f"FOLDER/NAME.jsonl, where NAME is {' or '.join(names)}") if names else ""


# ------------------------------------------------------------------ answers

def is_expression(answer):
    return isinstance(answer, (str, int, float)) and not isinstance(answer, bool)


def is_puzzle(answer):
    return (isinstance(answer, dict) and type(answer.get("target")) is int
            and isinstance(answer.get("nums"), list)
            and all(type(number) is int for number in answer["nums"]))


def are_tests(answer):
    return (isinstance(answer, dict) and isinstance(answer.get("fn_name"), (str, type(None)))
            and isinstance(answer.get("tests"), list)
            and all(isinstance(test, dict) and isinstance(test.get("input"), str)
                    and isinstance(test.get("output"), str) for test in answer["tests"]))


# What the answer of a reward looks like, where the reward is one of ours: a function that tells,
# and the words. data/README.md has the same in a table.
SHAPES = {
    "math": (is_expression, 'a text such as "1/2", or a number'),
    "countdown": (is_puzzle, '{"nums": [3, 5], "target": 8}, of whole numbers'),
    "table": (lambda answer: isinstance(answer, list), 'a list such as ["north", 1.5]'),
    "code": (are_tests, '{"tests": [{"input": TEXT, "output": TEXT}, ...], "fn_name": NAME or '
                        'null}'),
}
# why the verifier takes no answer at all for right, where it does not say so itself
UNGRADED = {
    "math": "the verifier cannot read it", "countdown": "it has no numbers",
    "table": "it is empty, or not equal to itself", "code": "it has no tests",
}


def with_right_golds(name, problems, places, left_out=None):
    """The problems whose gold answer the verifier grades as right. Of the others, the first five
    are named, each by its place (FILE, line N), and the rest are counted."""
    golds = [dict(p, reward="gold_" + p["reward"]) for p in problems]
    details = []
    grade(golds, [[""] for _ in problems], details=details)
    kept, lines = [], []
    for problem, place, (right, fault, _) in zip(problems, places, details, strict=True):
        if right:
            kept.append(problem)
            continue
        if left_out is not None:
            left_out.append(problem["id"])
        why = fault or UNGRADED.get(problem["reward"], "the verifier does not take it for right")
        lines.append(f"{place} (id {problem['id']}) is left out: its gold answer "
                     f"{str(problem['answer'])[:200]!r} cannot be graded, {why}")
    if len(lines) > 5:
        lines[5:] = [f"{name}: {len(lines) - 5} more are left out, for answers that cannot be "
                     "graded"]
    for line in lines:
        print(line, file=sys.stderr)
    if not kept:
        raise DataError(f"{name}: no problem is left")
    return kept

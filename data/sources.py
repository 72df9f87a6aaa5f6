"""Reading problems: from the Hub, from local JSONL files with the Hub's fields, from a user's file.

Whatever is wrong with a row is a DataError that names the file and the line. Problems whose gold
answer the verifier cannot grade are left out and named.
"""

import glob
import json
import sys
from datetime import date
from pathlib import Path

from data.sets import IDS, SETS
from rewards import REWARDS, grade


class DataError(ValueError):
    """A sentence on what is wrong with the data, where, and what would be right.

    train.py and eval.py print it and exit with 2."""


def load_set(name, split, data_dir, left_out, options):
    """The problems of a set of data/sets.py; for the arguments see data.load."""
    spec = SETS[name]
    first_day, last_day = contest_days(options)
    if not data_dir and split not in spec.splits:
        raise DataError(f"--data {name} has no {split} split on the Hub, "
                        f"only {', '.join(spec.splits)}")
    rows = local_rows(spec, data_dir) if data_dir else hub_rows(spec, split, options)
    problems, ids = [], set()
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
        ids.add(row_id)
    return with_right_golds(name, problems, left_out)


def contest_days(options):
    """-> the first and the last day of LiveCodeBench's contests that are asked for."""
    try:
        return (date.fromisoformat(options.get("lcb_from") or "0001-01-01"),
                date.fromisoformat(options.get("lcb_to") or "9999-12-31"))
    except ValueError as e:
        raise DataError(f"--lcb_from and --lcb_to are days such as 2024-08-01: {e}") from None


def local_rows(spec, folder):
    """The rows of the first of a set's local file names that exists, each with its place."""
    paths = [path for stem in spec.local
             for path in sorted(glob.glob(str(Path(folder, stem + ".jsonl"))))]
    if not paths:
        names = " or ".join(stem + ".jsonl" for stem in spec.local)
        raise DataError(f"--data_dir {folder} has no {names}")
    return json_lines(paths[0])


def json_lines(path):
    """The objects of a JSONL file, each with its place, "FILE, line N"."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise DataError(f"{path}, line {number} is not JSON: {e}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is not an object")
            yield f"{path}, line {number}", row


def hub_rows(spec, split, options):
    """The rows of a set on the Hub, each with its place.

    A set that is a script there is read file by file, because datasets runs no scripts."""
    from datasets import load_dataset
    try:
        if spec.files:
            names = spec.files(dict(options, split=split))
            kind = "parquet" if names[0].endswith(".parquet") else "json"
            urls = [f"hf://datasets/{spec.hub}/{name}" for name in names]
            rows = load_dataset(kind, data_files=urls, split="train", streaming=True)
        else:
            rows = load_dataset(spec.hub, spec.config, split=spec.splits[split])
    except Exception as e:  # the Hub's errors are of many classes; the sentence is the same
        raise DataError(f"{spec.hub} cannot be loaded from the Hub: {str(e).splitlines()[0]} "
                        "(--data_dir FOLDER takes local files)") from None
    return ((f"{spec.hub}, row {number}", row) for number, row in enumerate(rows))


def load_file(path, left_out=None):
    """The problems of a user's file: {prompt or messages, answer, reward, (id)} in every row."""
    if not path.is_file():
        raise DataError(f"--data {path}: there is no such file")
    problems = []
    for place, row in json_lines(path):
        problems.append(problem_of_row(place, row, len(problems)))
    if not problems:
        raise DataError(f"{path} is empty")
    if len({p["id"] for p in problems}) < len(problems):
        raise DataError(f"{path}: two rows have the same id")
    return with_right_golds(str(path), problems, left_out)


def problem_of_row(place, row, number):
    """A row of a user's file as a problem; its id is `number` where it has none."""
    missing = {"answer", "reward"} - set(row)
    if not missing and not {"prompt", "messages"} & set(row):
        missing = {"prompt"}
    if missing:
        raise DataError(f"{place} has no field {', '.join(sorted(missing))}: "
                        "a row is {prompt or messages, answer, reward}")
    if str(row["reward"]) not in REWARDS:
        raise DataError(f"{place}: reward {row['reward']!r} is none of {', '.join(REWARDS)}")
    try:
        prompt = row["prompt"] if "prompt" in row else row["messages"][-1]["content"]
    except (TypeError, LookupError):
        prompt = None
    if not isinstance(prompt, str):
        raise DataError(f"{place}: prompt is a text, or messages a list of {{role, content}}")
    return {**row, "prompt": prompt, "id": str(row.get("id", number))}


def with_right_golds(name, problems, left_out=None):
    """The problems whose gold answer the verifier grades as right; the others are named."""
    golds = [dict(p, reward="gold_" + p["reward"]) for p in problems]
    rewards, _ = grade(golds, [[""] for _ in problems])
    kept = []
    for problem, (right,) in zip(problems, rewards, strict=True):
        if right:
            kept.append(problem)
            continue
        if left_out is not None:
            left_out.append(problem["id"])
        print(f"{name}: left out {problem['id']}, its gold answer cannot be graded: "
              f"{str(problem['answer'])[:200]!r}", file=sys.stderr)
    if not kept:
        window = "" if problems else " between --lcb_from and --lcb_to"
        raise DataError(f"{name}: no problem is left{window}")
    return kept

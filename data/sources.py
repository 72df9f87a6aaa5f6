"""Reading problems: from the Hub, from local JSONL files with the Hub's fields, from a user's file.

A fault in a row is a DataError that names the file and the line. The Hub's cache is HF_HOME;
HF_HUB_OFFLINE=1 reads the cache alone."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from data.prompts import as_text
from data.sets import IDS, SETS, first
from rewards import REWARDS, gradable


class DataError(ValueError):
    """A sentence on a fault of the data. train.py and eval.py print it and exit with 2."""


def load_set(name, split, data_dir, options):
    """The problems of a set of data/sets.py; for the arguments see data.load."""
    spec = SETS[name]
    if data_dir:  # a file without the split in its name is both
        of_split = Path(data_dir, f"{name}_{split}.jsonl")
        rows = json_lines(of_split if of_split.exists() else Path(data_dir, f"{name}.jsonl"))
    elif split in spec.splits:
        rows = hub_rows(spec, split)
    else:
        raise DataError(f"--data {name} has no {split} split on the Hub, "
                        f"only {', '.join(spec.splits)}")
    found, ids = {}, set()
    for number, (place, row) in enumerate(rows):
        try:
            day = row.get("contest_date", "")[:10]
            if day and not (options.get("lcb_from") or "") <= day <= (options.get("lcb_to") or "9"):
                continue
            problem = spec.problem(row)
        except Exception as e:  # a row may hold anything
            fault = f"field {e} is missing" if isinstance(e, KeyError) else str(e)
            raise DataError(f"{place} is not a row of {name}: {fault}") from None
        row_id = str(first({**row, "number": number}, IDS))
        if row_id in ids:  # some sets repeat their ids
            row_id = f"{row_id}/{number}"
        ids.add(row_id)
        found[place] = dict(problem, verifier=spec.verifier, id=row_id)
    return with_right_golds(name, found)


def json_lines(path):
    """The objects of a JSONL file, each with its place, "FILE, line N"."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("it is another value")
                    yield f"{path}, line {number}", row
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}, line {number} is not a JSON object: {getattr(e, 'msg', e)}"
                        ) from None


def reach(name):
    """Raises ConnectionError if `name` is an id and the Hub silent; its clients try for minutes."""
    from huggingface_hub import constants, get_session
    try:
        if not os.path.exists(name) and not constants.is_offline_mode():
            get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as e:  # of the HTTP client, whose classes change with its versions
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({e}); HF_HUB_OFFLINE=1 reads "
                              "the cache") from None


def reason(error):
    """-> one clause of an error of the Hub's clients: its first paragraph that says something."""
    first, *rest = str(error).strip().split("\n\n")
    words = (rest[0] if rest and " Error. (" in first else first).split()  # 404 Client Error. (...)
    return " ".join(words)[:300] or type(error).__name__


def hub_rows(spec, split):
    """The rows of a set on the Hub, each with its place: of a table, or of data files."""
    try:
        reach(spec.hub)
        if spec.files:
            from huggingface_hub import hf_hub_download
            rows = (row for name in spec.files for _, row in
                    json_lines(hf_hub_download(spec.hub, name, repo_type="dataset")))
        else:
            from datasets import load_dataset
            rows = load_dataset(spec.hub, split=spec.splits[split], **spec.options)
        for number, row in enumerate(rows):
            yield f"{spec.hub}, row {number}", row
    except Exception as e:  # the Hub's errors are of many classes
        raise DataError(f"{spec.hub} cannot be loaded from the Hub: {reason(e)} "
                        "(--data_dir FOLDER takes local files)") from None


def load_file(path):
    """The problems of a file of {prompt or messages, answer, verifier, (id)}."""
    found = {place: problem_of_row(place, row, number)
             for number, (place, row) in enumerate(json_lines(path))}
    if len({problem["id"] for problem in found.values()}) < len(found):
        raise DataError(f"{path}: two rows have the same id")
    return with_right_golds(path, found)


def problem_of_row(place, row, nth):
    """A row of a user's file as a problem; its id is `nth` where it has none."""
    if missing := {"answer", "verifier"} - set(row):
        raise DataError(f"{place} has no field {', '.join(sorted(missing))}: a row is {{prompt or "
                        "messages, answer, verifier}; --data NAME --data_dir FOLDER reads a set's")
    if row["verifier"] not in list(REWARDS):
        raise DataError(f"{place}: verifier {row['verifier']!r} is none of {', '.join(REWARDS)}, "
                        "the table REWARDS of rewards.py")
    with suppress(TypeError, LookupError, UnicodeError):  # half a surrogate pair is no text
        prompt = row.get("prompt") or as_text(row["messages"])
        if prompt and str.encode(prompt):
            return row | {"prompt": prompt, "id": str(nth if row.get("id") is None else row["id"])}
    raise DataError(f"{place} has no prompt, a text, and no messages, a list of {{role, content}}")


def with_right_golds(name, found):
    """The problems whose gold answer the verifier can grade, of {place: problem}. Of the others,
    the first five are named, each by its place (FILE, line N), and the rest are counted."""
    kept, lines = [], []
    for (place, problem), result in zip(found.items(), gradable(found.values())):
        if result.reward:
            kept.append(problem)
            continue
        lines.append(f"{place} (id {problem['id']}) is left out: {problem['verifier']} cannot "
                     f"grade the gold answer {str(problem['answer'])[:200]!r}"
                     f"{f' ({result.fault})' * bool(result.fault)}; for what it takes see "
                     "data/README.md, or gold_ok in rewards.py\n")
    if lines[5:]:
        lines[5:] = [f"{name}: {len(lines) - 5} more are left out, for such answers\n"]
    sys.stderr.writelines(lines)
    if not kept:
        raise DataError(f"{name} has no problem that can be used")
    return kept

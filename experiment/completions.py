"""Files of completions: eval.py's completions.jsonl, whose folder belongs to one setting, and the
files that --completions grades."""

import json
import os
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

from experiment.eval_flags import refuse
from experiment.failures import RunFailed
from experiment.files import write

# what may differ where completions are used again: nothing here has a part in what they are
FREE = {"out", "origin", "k", "allow_unsafe_code"}


def claim_folder(out, flags):
    """Makes the folder and notes the settings; refuses one with completions of other settings.

    flags: {flag: value}"""
    settings = {flag: value for flag, value in flags.items() if flag not in FREE}
    name = f"--out {out}{' (the default folder)' if str(out) == 'eval' else ''}"
    noted = out / "settings.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if noted.exists() and (out / "completions.jsonl").exists():
            before = dict(json.loads(noted.read_text()))
            changes = [f"--{flag} was {before.get(flag)} and is now {value}"
                       for flag, value in settings.items() if value != before.get(flag)]
            if changes:
                refuse(f"{name} holds an evaluation with other settings: {'; '.join(changes)}; "
                       "--out FOLDER takes another folder")
        write(noted, json.dumps(settings, indent=1))
    except OSError as e:
        refuse(f"{name} cannot be written: {e.strerror}")
    except (ValueError, TypeError) as e:
        refuse(f"{noted} cannot be read, so nobody knows of which settings the completions beside "
               f"it are ({e}); --out FOLDER takes another folder")


@contextmanager
def writing(what):
    """Makes of an OSError within the block a RunFailed. what: the file or folder, in words."""
    try:
        yield
    except OSError as e:
        raise RunFailed(f"{what} cannot be written: {e.strerror}; the same command continues") \
            from None


def chunk_of(rows):
    """Rows as text, and the empty line that marks the end of a whole chunk."""
    return "".join(json.dumps(row) + "\n" for row in rows) + "\n"


def append_chunk(path, rows):
    """Writes rows through to the disk. Raises RunFailed."""
    with writing(path), open(path, "a") as file:
        file.write(chunk_of(rows))
        file.flush()
        os.fsync(file.fileno())


def write_whole(path, rows):
    """Writes a file of rows in one piece. Raises RunFailed."""
    with writing(path):
        write(path, chunk_of(rows))


def resume(path):
    """The rows of a completions.jsonl, which is cut back to its last whole chunk."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    chunk_ends = [i + 1 for i, line in enumerate(lines) if line == b"\n"]
    whole = lines[:max(chunk_ends, default=0)]
    os.truncate(path, sum(map(len, whole)))
    return [json.loads(line) for line in whole if line != b"\n"]


def rows_by_problem(path):
    """-> {(benchmark, id): rows} of a completions.jsonl"""
    groups = defaultdict(list)
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line != "\n":
                row = json.loads(line)
                groups[row["benchmark"], str(row["id"])].append(row)
    return groups


def read_given(path):
    """-> {(benchmark, id): rows} of a user's file.

    Refuses a file that has a row without benchmark, id or completion."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as e:
        refuse(f"--completions {path} cannot be read: {e.strerror}")
    groups = defaultdict(list)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = row["benchmark"], str(row["id"])
            if not isinstance(row["completion"], str):
                raise TypeError("completion is not a text")
        except (ValueError, KeyError, TypeError) as e:
            refuse(f"{path}, line {number}: a row is {{benchmark, id, completion}}; "
                   f"{type(e).__name__}: {e}")
        groups[key].append(row)
    return groups


def missing(path, name, problems, given):
    """The refusal of a file that lacks completions of a benchmark's problems; None where it has
    all. given: {(benchmark, id): rows} of the file."""
    there = [(name, problem["id"]) in given for problem in problems]
    if all(there):
        return None
    benchmarks = sorted({benchmark for benchmark, _ in given})
    if not any(there):
        return (f"{path} has no completion for any of {name}'s {len(problems)} problems; "
                f"it has completions for {', '.join(benchmarks) or 'nothing'}")
    first = sum(there)
    if all(there[:first]):
        return (f"{path} has completions for the first {first} of {name}'s {len(problems)} "
                f"problems alone: --limit {first} grades those")
    return (f"{path} has no completion for {len(problems) - first} of {name}'s {len(problems)} "
            f"problems (id {problems[there.index(False)]['id']})")


def given_groups(path, sets, ks):
    """-> {benchmark: for each problem its rows} of a user's file.

    Refuses a file that lacks completions of a problem, or has fewer than the k of pass@k need."""
    given, groups = read_given(path), {}
    for name, problems in sets.items():
        if sentence := missing(path, name, problems, given):
            refuse(sentence)
        groups[name] = [given[name, p["id"]] for p in problems]
        samples = len(groups[name][0])
        if any(len(rows) != samples for rows in groups[name]):
            refuse(f"{path} has different numbers of completions for the problems of {name}")
        if ks and max(ks) > samples:
            refuse(f"--k {max(ks)}: {path} has {samples} completions of each problem of {name}")
    return groups

"""Files of completions: eval.py's completions.jsonl, and the files that --completions grades."""

import json
import os
from collections import defaultdict
from pathlib import Path

from experiment.eval_flags import refuse


def append_chunk(file, rows):
    """Writes rows and an empty line, which marks the end of a whole chunk, through to the disk."""
    file.write("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    file.flush()
    os.fsync(file.fileno())


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


def given_groups(path, sets, ks):
    """-> {benchmark: for each problem its rows} of a user's file.

    Refuses a file that lacks completions of a problem, or has fewer than the k of pass@k need."""
    given, groups = read_given(path), {}
    for name, problems in sets.items():
        missing = [p["id"] for p in problems if (name, p["id"]) not in given]
        if missing:
            refuse(f"{path} has no completion for {len(missing)} of {name}'s "
                   f"{len(problems)} problems (id {missing[0]})")
        groups[name] = [given[name, p["id"]] for p in problems]
        samples = len(groups[name][0])
        if any(len(rows) != samples for rows in groups[name]):
            refuse(f"{path} has different numbers of completions for the problems of {name}")
        if ks and max(ks) > samples:
            refuse(f"--k {max(ks)}: {path} has {samples} completions of each problem of {name}")
    return groups

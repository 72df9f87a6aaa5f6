"""Files of completions: eval.py's completions.jsonl, whose folder belongs to one setting, and the
files that --completions grades."""

import json
import os
import zlib
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path

from experiment.eval_flags import refuse
from experiment.failures import RunFailed
from experiment.files import lock, write

# what may differ where completions are used again: nothing here has a part in what they are
FREE = {"out", "origin", "k", "allow_unsafe_code"}


def claim_folder(out, flags, sets):
    """Makes the folder, locks it and notes the settings; refuses one with completions of other
    settings, another model or other problems, and one that another process is at work in.

    flags: {flag: value}. sets: {benchmark: problems}"""
    settings = {flag: value for flag, value in flags.items() if flag not in FREE}
    settings["fingerprints"] = fingerprints(flags["model"], sets)
    name = f"--out {out}{' (the default folder)' if str(out) == 'eval' else ''}"
    noted, path = out / "settings.json", out / "completions.jsonl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock(out)
        if path.is_dir():
            refuse(f"{path} is a folder; it has to be a file, or nothing")
        if path.exists() and path.stat().st_size:
            if not noted.exists():
                refuse(f"{name} holds completions.jsonl without settings.json, so nobody knows of "
                       "which settings it is; --out FOLDER takes another folder")
            if changes := differences(dict(json.loads(noted.read_bytes())), settings):
                refuse(f"{name} holds an evaluation with other settings: {'; '.join(changes)}; "
                       "--out FOLDER takes another folder")
        write(noted, json.dumps(settings, indent=1))
    except BlockingIOError:
        refuse(f"{name} is another process's at this moment")
    except OSError as e:
        refuse(f"{name} cannot be written: {e.strerror}")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as e:
        refuse(f"{noted} cannot be read, so nobody knows of which settings the completions beside "
               f"it are ({e}); --out FOLDER takes another folder")


def differences(before, settings):
    """-> sentences on what changed since settings.json was written; the flags alone, where any
    did, because the problems follow from them."""
    changes = [f"--{flag} was {before.get(flag)} and is now {value}"
               for flag, value in settings.items()
               if flag != "fingerprints" and value != before.get(flag)]
    if changes or "fingerprints" not in before:  # older files have no fingerprints
        return changes
    old, new = before["fingerprints"], settings["fingerprints"]
    if old.get("model") != new["model"]:
        changes.append(f"the weights of --model {settings['model']} are not those that it had")
    changes += [f"the problems of {name} are not those that it had"
                for name, value in new["problems"].items() if value != old["problems"].get(name)]
    return changes


def fingerprints(model, sets):
    """-> {"model", "problems"}: numbers that change with the weights and with the problems.

    model: a folder, an id of the Hub or None; the last two have None here. sets: {benchmark:
    problems}"""
    problems = {}
    for name, rows in sets.items():
        problems[name] = 0
        for problem in rows:  # one by one: the tests of programs can be large
            text = json.dumps(problem, sort_keys=True, default=str)
            problems[name] = zlib.crc32(text.encode(), problems[name])
    try:
        return dict(model=weights_fingerprint(Path(model)) if model else None, problems=problems)
    except OSError as e:
        refuse(f"--model {model} cannot be read: {e.filename}: {e.strerror}")


def weights_fingerprint(folder):
    """Of a model's folder, None where there is none. Raises OSError.

    A checkpoint of a run has checksums of its files, which are written last. Of other weights, and
    of those that were put into a checkpoint later, it takes name, size and time, because reading
    them can take minutes."""
    if not folder.is_dir():
        return None
    files = sorted(path for end in ("safetensors", "bin") for path in folder.glob(f"*.{end}"))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    sums = folder / "checksums.json"
    if sums.is_file() and all(time <= sums.stat().st_mtime_ns for _, _, time in stats):
        return zlib.crc32(sums.read_bytes())
    return zlib.crc32(json.dumps(stats).encode())


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


def resume(path, sets, samples):
    """-> [(benchmark, index)] of the problems that have no rows yet, in their order. Cuts a
    completions.jsonl back to its last whole chunk.

    Refuses a file that does not hold `samples` rows of each of these problems, in their order: what
    follows would be sampled for the wrong ones. sets: {benchmark: problems}"""
    counts = Counter()
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        chunk_ends = [i + 1 for i, line in enumerate(lines) if line == b"\n"]
        whole = lines[:max(chunk_ends, default=0)]
        for number, line in enumerate(whole, 1):
            if line != b"\n":
                counts[benchmark_of_row(f"{path}, line {number}", line, counts, sets, samples)] += 1
        for name, count in counts.items():
            if count % samples:
                problem = sets[name][count // samples]
                refuse(f"{path} has {count % samples} completions of {name}'s problem "
                       f"{problem['id']}, and --samples is {samples}: it was changed or damaged; "
                       "--out FOLDER takes another folder")
        if lines:
            os.truncate(path, sum(map(len, whole)))
    except OSError as e:
        refuse(f"{path} cannot be used: {e.strerror}")
    return [(name, i) for name, problems in sets.items()
            for i in range(counts[name] // samples, len(problems))]


def benchmark_of_row(place, line, counts, sets, samples):
    """-> the benchmark of the next row of a completions.jsonl; refuses one that is no such row, or
    not of the problem whose turn it is. counts: {benchmark: how many of its rows came before}"""
    types = dict(benchmark=str, id=str, completion=str, score=(int, float), tokens=int,
                 truncated=bool)
    try:
        row = json.loads(line)
        for field, kind in types.items():
            if not isinstance(row[field], kind):
                raise TypeError(f"{field} is {row[field]!r:.50}")
        problems, done = sets.get(row["benchmark"], ()), counts[row["benchmark"]] // samples
        due = problems[done]["id"] if done < len(problems) else "none"
        if row["id"] != due:
            raise ValueError(f"it is of {row['benchmark']}'s problem {row['id']}, where {due} is "
                             "due")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        refuse(f"{place} is not what was written there ({type(e).__name__}: {e}): the file was "
               "changed or damaged; --out FOLDER takes another folder")
    return row["benchmark"]


def rows_by_problem(path, sets, samples):
    """-> {benchmark: for each problem its rows} of a completions.jsonl. Raises RunFailed where a
    problem has not `samples` of them; None takes what there is."""
    found = defaultdict(list)
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line != "\n":
                    row = json.loads(line)
                    found[row["benchmark"], str(row["id"])].append(row)
    except (OSError, ValueError) as e:
        raise RunFailed(f"{path} cannot be read again: {e}") from None
    groups = {name: [found[name, problem["id"]] for problem in problems]
              for name, problems in sets.items()}
    for name, problems in sets.items():
        for problem, rows in zip(problems, groups[name], strict=True):
            if len(rows) != (samples or len(groups[name][0])):
                raise RunFailed(f"{path} has {len(rows)} completions of {name}'s problem "
                                f"{problem['id']}, not {samples}: something else wrote to it")
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
            check_given(row)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            refuse(f"{path}, line {number}: a row is {{benchmark, id, completion}}; "
                   f"{type(e).__name__}: {e}")
        groups[key].append(row)
    return groups


def check_given(row):
    """Raises TypeError for a row of a user's file whose fields are of other types."""
    for field in ("benchmark", "completion"):
        if not isinstance(row[field], str):
            raise TypeError(f"{field} is not a text")
    tokens = row.get("tokens")
    if tokens is not None and not (type(tokens) is int and 0 <= tokens < 2**31):
        raise TypeError("tokens is not a whole number of 0 or more, below 2**31")
    if row.get("truncated") not in (None, True, False):
        raise TypeError("truncated is not true or false")


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

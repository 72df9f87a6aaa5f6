"""The files of a run or an evaluation: how they are written, and what their numbers depend on:
completions, graded again; checksums of problems and weights; code, by name."""

import ast
import fcntl
import inspect
import json
import os
import symtable
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

import losses
import rewards
from data import sources
from harness.failures import refusing
from losses import require

# as this process imported them; a run's folder keeps copies
CODE = {f"{module.__name__}.py": inspect.getsource(module) for module in (losses, rewards)}
LOCKED = set()  # folders that this process has locked, as (device, inode): names may change


def lock(out):
    """Makes a folder, this process's alone while it lives. Raises BlockingIOError for another's."""
    out.mkdir(parents=True, exist_ok=True)
    place = out.stat().st_dev, out.stat().st_ino
    if place not in LOCKED:
        fcntl.flock(os.open(out, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        LOCKED.add(place)


@contextmanager
def writing(path, aside=None):
    """Yields a path to write a file or a folder to, by default a hidden one beside `path`, and
    renames it to `path` at the end. Makes the errors of a full disk, torch's and safetensors' too,
    one OSError that names the path: their own need not."""
    aside = aside or path.with_name(f".{path.name}")
    try:
        yield aside
        aside.replace(path)
    except (OSError, RuntimeError, SafetensorError) as e:
        raise OSError(f"{path} cannot be written: {(str(e) or repr(e)).splitlines()[0]}") from None


def write(path, text):
    """Replaces a file by a text, atomically. Raises OSError."""
    with writing(path) as aside:
        aside.unlink(missing_ok=True)
        with open(aside, "x", encoding="utf-8") as file:  # a new one, and not a link's
            file.write(text)


def numbers(x):
    """x with None for nan and infinity, which JSON lacks."""
    return json.loads(json.dumps(x), parse_constant=lambda _: None)


def append(path, rows):
    """Adds rows to a file of JSON lines. Raises OSError."""
    with writing(path, aside=path), open(path, "a") as file:
        file.writelines(json.dumps(numbers(row)) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def checkpoint_folders(out):
    """The checkpoints of a run, in their order."""
    return sorted((out / "checkpoints").glob("rollout_" + 6 * "[0-9]"))


def global_names(scope):
    """The names in a symtable's scope that are not local to it, or to one within."""
    found = {x.get_name() for x in scope.get_symbols() if x.is_global()}
    return found.union(*map(global_names, scope.get_children()))


def reached(tree, roots):
    """-> {name: its text, without comments and layout} of what these names, as METHODS['fade'],
    reach by name in a module's tree: functions, classes and rows of tables."""
    nodes, found, waiting = {}, {}, [*roots]
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                nodes[node.name] = node
            case ast.Assign([ast.Name(table)], ast.Dict(keys, rows)):
                nodes |= {f"{table}[{ast.unparse(k)}]": x for k, x in zip(keys, rows) if k}
            case ast.Assign([ast.Name()], ast.Tuple([ast.Name(), *_]) | ast.Set([ast.Name(), *_])):
                pass  # a list of functions: a new one changes no run
            case ast.Assign([ast.Name() | ast.Subscript() as target], value):
                nodes[ast.unparse(target)] = value  # or a row, below its table
    while waiting:
        name = waiting.pop()
        if node := nodes.pop(name, None):
            found[name] = ast.unparse(node)
            waiting += global_names(symtable.symtable(found[name], name, "exec"))
    return found


def folder_fault(model):
    """A sentence on a path that is no model's folder; None for one that is, or an id of the Hub."""
    folder = Path(model)
    if not folder.exists() and (model.count("/") > 1 or model[0] in "./~"):  # no id has that
        return f"--model {model}: there is no such folder"
    if (folder / "metrics.jsonl").exists():
        checkpoints = ", ".join(map(str, checkpoint_folders(folder))) or "none yet"
        return f"--model {model} is a run's folder, not a model's; its checkpoints: {checkpoints}"
    if folder.exists() and not (folder / "config.json").is_file():  # a pipe would never end
        return f"--model {model} is not a Hugging Face folder: it has no config.json"


def read_rows(path):
    """-> {(benchmark, id): rows} of a completions.jsonl, not graded. Raises ValueError for a line
    that is no row, but for the last one, which a killed process was writing."""
    found = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                x = json.loads(line)
                row = dict(benchmark=x["benchmark"], id=str(x["id"]),
                           completion="" + x["completion"], reward=None,
                           tokens=x.get("tokens") and int(float(x["tokens"])),  # None: not counted
                           truncated=x.get("truncated") and x["truncated"] is True)
                found.setdefault((row["benchmark"], row["id"]), []).append(row)
            except Exception as e:  # such a line may raise anything
                require(not line.endswith(b"\n"),
                        f"{path}, line {number} is no row {{benchmark, id, completion}}: {e!r}")
    return found


@refusing(program="eval.py")
def read_groups(path, problems, n=None, flag=None, size=1):
    """-> for each problem its rows in a file, with the rewards and faults of today's verifiers.

    Each problem has n rows, without n as many as the others. The file of a flag is refused
    otherwise; --out's own, which may be cut, counts by whole chunks of `size`."""
    require(not flag or path.is_file(), f"{flag}: there is no file {path}")
    found = read_rows(path) if path.exists() else {}
    groups = [found.get((problem["benchmark"], problem["id"]), []) for problem in problems]
    n = n or max(1, *map(len, groups))
    whole = next((i for i, rows in enumerate(groups) if len(rows) != n), len(groups))
    if whole < len(groups):
        if flag:
            raise ValueError(
                f"{flag}: {path} has {len(groups[whole])} completions of problem "
                f"{problems[whole]['id']} of {problems[whole]['benchmark']}, not {n}; its rows are "
                f"of {', '.join({str(x) for x, _ in found})}; --limit and --samples take fewer")
        whole -= whole % size
    groups = groups[:whole]
    graded = rewards.grade(
        problems[:whole], [[row["completion"] for row in rows] for rows in groups])
    return [[dict(row, reward=result.reward, fault=result.fault and str(result.fault))
             for row, result in zip(rows, results)] for rows, results in zip(groups, graded)]


def checksum_of_problems(problems):
    return zlib.crc32(json.dumps(problems, sort_keys=True, default=str).encode())


def checksum_of_weights(model):
    """-> a checksum of 64 pieces of each file of weights in a model's folder; the commit of an id
    of the Hub; None where there is neither: loading the model says so."""
    folder, checksum = Path(model), 0
    if not folder.exists():
        with suppress(Exception):  # the Hub's clients may raise anything
            sources.reach(model)
            from huggingface_hub import hf_hub_download
            return Path(hf_hub_download(model, "config.json")).parent.name
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        with open(path, "rb") as file:
            for place in range(0, size, size // 64 + 1):
                file.seek(place)
                checksum = zlib.crc32(file.read(2**16), checksum)
    return checksum or None

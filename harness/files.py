"""The files of a run or an evaluation, as far as torch is not needed for them."""

import fcntl
import json
import os
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

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
    """Makes the errors of a full disk, torch's and safetensors' too, one OSError that names the
    path: their own need not. aside: a whole file or folder by then, which is renamed to path."""
    try:
        yield
        if aside:
            aside.replace(path)
    except (OSError, RuntimeError, SafetensorError) as e:
        raise OSError(f"{path} cannot be written: {(str(e) or repr(e)).splitlines()[0]}") from None


def write(path, content):
    """Replaces a file, by a text or bytes, atomically. Raises OSError."""
    aside = path.with_name(f".{path.name}")
    with writing(path, aside):
        aside.unlink(missing_ok=True)
        with open(aside, "xb") as file:  # a new one, and not a link's
            file.write(content if isinstance(content, bytes) else content.encode())


def numbers(x):
    """x with None for nan and infinity, which JSON lacks."""
    return json.loads(json.dumps(x), parse_constant=lambda _: None)


def append(path, rows):
    """Adds rows to a file of JSON lines. Raises OSError."""
    with writing(path), open(path, "a") as file:
        file.writelines(json.dumps(numbers(row)) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def default_out(args):
    """The run's folder."""
    return Path(args.out or f"runs/{args.loss}-{args.steps_per_rollout}-{args.seed}")


def checkpoint_folders(out):
    """The checkpoints of a run, in their order."""
    return sorted((out / "checkpoints").glob("rollout_" + 6 * "[0-9]"))


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

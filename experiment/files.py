"""The files of a run or an evaluation, as far as nothing heavy is needed for them."""

import fcntl
import os
import re

LOCKED = set()  # folders that this process has locked, as (device, inode): names may change


def lock(out):
    """Keeps other processes out of a folder while this one lives. Raises BlockingIOError."""
    seen = out.stat()
    place = seen.st_dev, seen.st_ino
    if place not in LOCKED:
        folder = os.open(out, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        LOCKED.add(place)


def write(path, text):
    """In one piece: whoever reads finds the old text or the new one."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def checkpoint_folders(out):
    """The checkpoints of a run, in their order."""
    return sorted(path for path in (out / "checkpoints").glob("rollout_*")
                  if re.fullmatch(r"rollout_\d{6}", path.name) and path.is_dir())

"""A run's files, as far as nothing heavy is needed for them."""

import re


def write(path, text):
    """In one piece: whoever reads finds the old text or the new one."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def checkpoint_folders(out):
    """The checkpoints of a run, in their order."""
    return sorted(path for path in (out / "checkpoints").glob("rollout_*")
                  if re.fullmatch(r"rollout_\d{6}", path.name) and path.is_dir())

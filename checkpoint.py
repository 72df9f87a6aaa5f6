"""A run's folder, so that no run is ever lost: config.json, logs, checkpoints that are whole or not taken for one.

A checkpoint is an ordinary Hugging Face folder with the master weights, trainer.pt for what the model is not, and
checksums.json. There is no state of random generators in it: problems, sampling and shuffling are functions of
(seed, rollout). It is the same whatever the number of ranks, and continues on any other.
"""

import fcntl
import json
import os
import re
import shutil
import zlib

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)

import parallel

HELD = set()  # folders that this process has locked
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class RunFailed(RuntimeError):
    """The run cannot go on: one sentence for the user, exit code 1."""


def write(path, text):
    """In one piece, or not at all."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)


def lock(out):
    """Keeps other processes out of a run's folder for as long as this one lives. Raises BlockingIOError."""
    if out.resolve() not in HELD:
        folder = os.open(out, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        HELD.add(out.resolve())


def checksum(path):
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def folders(out):
    """The checkpoints of a run, in their order."""
    return sorted(p for p in (out / "checkpoints").glob("rollout_*") if re.fullmatch(r"rollout_\d{6}", p.name) and p.is_dir())


def save(out, rollout, policy, tokenizer, optimizer, keep, best, **state):
    """Writes a checkpoint aside and renames it, so that what has the name is whole; the last `keep` stay, and that of
    rollout `best`. Raises RunFailed where there is no room, or no permission: nothing that was there is touched then."""
    weights = {name: w.cpu() if parallel.rank() == 0 else None for name, w in parallel.weights(policy)}
    state.update(rollout=rollout, best=best, optimizer=get_optimizer_state_dict(policy, optimizer, options=WHOLE),
                 adapter={n: parallel.full(p).cpu() for n, p in policy.state_dict().items() if "lora_" in n})
    folder = out / "checkpoints" / f"rollout_{rollout:06d}"
    aside = folder.with_name("unfinished")

    def attempt():
        try:
            shutil.rmtree(aside, ignore_errors=True)
            policy.model.save_pretrained(aside, state_dict=weights)
            tokenizer.save_pretrained(aside)
            torch.save(state, aside / "trainer.pt")
            write(aside / "checksums.json", json.dumps({str(p.relative_to(aside)): checksum(p) for p in aside.rglob("*") if p.is_file()}))
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
            for old in folders(out)[:-keep]:
                if old != folder and (not best or old.name != f"rollout_{best['rollout']:06d}"):
                    shutil.rmtree(old.rename(aside))
        except (OSError, RuntimeError, SafetensorError) as e:  # torch and safetensors have errors of their own for a full disk
            shutil.rmtree(aside, ignore_errors=True)
            last = f"; --resume continues from {found[-1].name}" if (found := folders(out)) else ", and there is none before it"
            raise RunFailed(f"the checkpoint of rollout {rollout} cannot be written to {folder.parent} ({str(e).splitlines()[0]}){last}") from None
    parallel.first_says(attempt)


def damage(folder):
    """What is wrong with a checkpoint, None where it is as it was written."""
    try:
        for name, value in json.loads((folder / "checksums.json").read_text()).items():
            if checksum(folder / name) != value:
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError) as e:
        return str(e)


def newest(out):
    """The folder of the newest checkpoint that is whole, None where there is none. Those that are not are named, and get
    another name, so that they do not count as one of those kept."""
    for folder in reversed(folders(out)):
        if not (fault := damage(folder)):
            return folder
        aside = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        print(f"{folder} is damaged ({fault}): not used, renamed to {folder.rename(aside).name}")


def restore(folder, policy, optimizer):
    """Gives a checkpoint's optimizer state and adapter back, and returns the rest of trainer.pt. The weights are those
    that the policy was loaded with."""
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=False)
    options = StateDictOptions(full_state_dict=True, strict=False)
    if adapter := state.pop("adapter"):
        set_model_state_dict(policy, adapter, options=options)
    set_optimizer_state_dict(policy, optimizer, state.pop("optimizer"), options=options)
    return state


def rewind(out, rollout):
    """Takes what was logged after `rollout` out of the logs: it will be done again, with the same outcome. None is a start
    from nothing; the logs that there are stay, as .old."""
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        kept = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                if rollout is not None and json.loads(line)["rollout"] <= rollout:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # the last line, cut off while it was written
        if rollout is None and path.exists():
            path.replace(path.with_name(path.name + ".old"))
        write(path, "".join(kept))


def save_rollout(out, rollout, **content):
    """One rollout as one file, what analyze.py replay reads. Raises RunFailed."""
    path = out / "rollouts" / f"rollout_{rollout:06d}.pt"
    try:
        path.parent.mkdir(exist_ok=True)
        torch.save(dict(content, rollout=rollout), path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)
    except (OSError, RuntimeError) as e:
        raise RunFailed(f"{path} cannot be written: {str(e).splitlines()[0]}") from None

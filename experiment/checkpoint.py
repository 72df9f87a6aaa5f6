"""A run's folder: config.json, logs, and checkpoints that are whole or not used, so that no run is
ever lost.

A checkpoint is an ordinary Hugging Face folder with the master weights, trainer.pt for what the
model is not, and checksums.json. It holds no state of random generators: problems, sampling and
shuffling are functions of (seed, rollout). It is the same whatever the number of ranks, and a run
continues from it on any other number.
"""

import json
import shutil
import zlib

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from engine import parallel
from experiment.failures import RunFailed
from experiment.files import checkpoint_folders, write

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def checksum(path):
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def save(out, rollout, policy, tokenizer, optimizer, keep, best, recipe=None, card="", **state):
    """Writes a checkpoint aside and renames it, so that what has the name is whole. The last `keep`
    stay, and that of rollout best["rollout"]. recipe: the file of settings that goes on with the
    model, where there is one. card: the text of its README.md, on rank 0. Raises RunFailed where
    there is no room, or no permission: then nothing that was there is touched."""
    on_first = parallel.rank() == 0
    weights = {name: w.cpu() if on_first else None for name, w in parallel.weights(policy)}
    adapter = {name: parallel.full(p).cpu()
               for name, p in policy.state_dict().items() if "lora_" in name}
    state.update(rollout=rollout, best=best, adapter=adapter, optimizer=get_optimizer_state_dict(
        policy, optimizer, options=WHOLE))
    folder = out / "checkpoints" / f"rollout_{rollout:06d}"
    aside = folder.with_name("unfinished")

    def write_folder():
        shutil.rmtree(aside, ignore_errors=True)
        policy.model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        torch.save(state, aside / "trainer.pt")
        if recipe and recipe.is_file():
            shutil.copy(recipe, aside)
        files = [path for path in aside.rglob("*") if path.is_file()]
        write(aside / "README.md", card)  # without a checksum: it is there to be edited
        write(aside / "checksums.json",
              json.dumps({str(path.relative_to(aside)): checksum(path) for path in files}))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        best_name = f"rollout_{best['rollout']:06d}" if best else None
        for old in checkpoint_folders(out)[:-keep]:
            if old != folder and old.name != best_name:
                shutil.rmtree(old.rename(aside))

    def attempt():
        try:
            write_folder()
        except (OSError, RuntimeError, SafetensorError) as e:  # torch's, safetensors' full disk
            shutil.rmtree(aside, ignore_errors=True)
            there = checkpoint_folders(out)
            advice = (f"; --resume continues from {there[-1].name}" if there
                      else ", and there is none before it")
            raise RunFailed(f"the checkpoint of rollout {rollout} cannot be written to "
                            f"{folder.parent} ({str(e).splitlines()[0]}){advice}") from None
    parallel.on_rank0(attempt)


def damage(folder):
    """What is wrong with a checkpoint, None where it is as it was written."""
    try:
        for name, value in json.loads((folder / "checksums.json").read_text()).items():
            if checksum(folder / name) != value:
                return f"{name} is not as it was written"
    except (FileNotFoundError, ValueError, AttributeError) as e:
        return str(e)
    except OSError as e:
        raise RunFailed(f"{e.filename} cannot be read: {e.strerror}") from None


def newest(out):
    """The folder of the newest checkpoint that is whole, None where there is none. A damaged one is
    said and renamed, so that it does not count as one of those kept."""
    for folder in reversed(checkpoint_folders(out)):
        if not (fault := damage(folder)):
            return folder
        aside = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        print(f"{folder} is damaged ({fault}): it is not used, and renamed to "
              f"{folder.rename(aside).name}")


def restore(folder, policy, optimizer):
    """Gives optimizer and policy a checkpoint's moments and adapter, and returns the rest of
    trainer.pt. The policy was loaded with its weights before."""
    # mapped, not read: on a node every rank would have all ranks' moments in its memory
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=False, mmap=True)
    options = StateDictOptions(full_state_dict=True, strict=False)
    if adapter := state.pop("adapter"):
        set_model_state_dict(policy, adapter, options=options)
    set_optimizer_state_dict(policy, optimizer, state.pop("optimizer"), options=options)
    return state


def rewind(out, rollout):
    """Takes what was logged after `rollout` out of the logs: it will be done again, with the same
    outcome. None is a start from nothing; the logs that there are stay, as .old."""
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
    """One rollout as one file, which the analysis reads. Raises RunFailed."""
    path = out / "rollouts" / f"rollout_{rollout:06d}.pt"
    try:
        path.parent.mkdir(exist_ok=True)
        torch.save(dict(content, rollout=rollout), path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)
    except (OSError, RuntimeError) as e:
        raise RunFailed(f"{path} cannot be written: {str(e).splitlines()[0]}") from None

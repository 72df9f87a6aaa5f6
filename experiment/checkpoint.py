"""Checkpoints: ordinary Hugging Face folders with the master weights, and trainer.pt: optimizer,
method state, pending rollouts.

A checkpoint holds no state of random generators: problems, sampling and shuffling are functions of
(seed, rollout). It is the same for every number of ranks, and a run continues on any other number.
"""

import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple

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
from experiment.files import checkpoint_folders, default_out, write

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Resumed(NamedTuple):
    """The run that --resume continues, at its newest checkpoint."""

    flags: dict    # of its config.json
    folder: Path   # of the checkpoint: an ordinary model's
    state: dict    # trainer.pt


def read_pickle(path, **options):
    """-> the tensors and plain values of a file of torch.save. Raises ValueError for anything else:
    other pickles can run a program, so that a file of a stranger would."""
    try:
        return torch.load(path, weights_only=True, **options)
    except Exception as e:  # a damaged file may raise anything
        raise ValueError(f"{type(e).__name__}: it is damaged, or holds more than tensors and plain "
                         "values") from None


def resumed(args):
    """-> the Resumed of --resume, None where there is no checkpoint. Raises RunFailed for one that
    cannot be read."""
    folders = checkpoint_folders(default_out(args)) if args.resume else []
    if not folders:
        return None
    flags = json.loads((default_out(args) / "config.json").read_text())["flags"]
    try:  # mapped, not read: on a node every rank would have all ranks' moments in its memory
        state = read_pickle(folders[-1] / "trainer.pt", map_location="cpu", mmap=True)
    except ValueError as e:
        raise RunFailed(f"{folders[-1] / 'trainer.pt'} cannot be read ({e}): with this folder "
                        "renamed, --resume continues from the checkpoint before it") from None
    return Resumed(flags, folders[-1], state)


def restore(trainer, state):
    """Gives a Trainer, loaded with a checkpoint's weights, the rest of its state."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    if state["adapter"]:
        set_model_state_dict(trainer.policy, state["adapter"], options=options)
    # learning rate and weight decay follow the flags, which --force may have changed
    own = [{name: group[name] for name in ("initial_lr", "weight_decay")}
           for group in trainer.optimizer.param_groups]
    set_optimizer_state_dict(trainer.policy, trainer.optimizer, state["optimizer"],
                             options=options)
    trainer.schedule.last_epoch = state["optimizer_steps"]
    factor = trainer.schedule.lr_lambdas[0](state["optimizer_steps"])
    for group, values in zip(trainer.optimizer.param_groups, own, strict=True):
        group.update(values, lr=values["initial_lr"] * factor)
    if state["scaler"]:  # {} where the run was not in float16
        trainer.scaler.load_state_dict(state["scaler"])


def save(out, rollout, trainer, tokenizer, keep, best, recipe, card, **state):
    """Writes a checkpoint aside and renames it, so that a folder of its name is whole. The last
    `keep` stay, and that of rollout best["rollout"]. recipe: the model's recipe.json, which goes on
    with it. card: the text of README.md, on rank 0. Raises RunFailed where there is no room, or no
    permission: the checkpoints before it stay as they are."""
    on_first, policy = parallel.rank() == 0, trainer.policy
    weights = {name: w.cpu() if on_first else None for name, w in parallel.weights(policy)}
    adapter = {name: parallel.full(p).cpu()
               for name, p in policy.state_dict().items() if "lora_" in name}
    state.update(rollout=rollout, best=best, adapter=adapter, scaler=trainer.scaler.state_dict(),
                 optimizer_steps=trainer.schedule.last_epoch,
                 optimizer=get_optimizer_state_dict(policy, trainer.optimizer, options=WHOLE))
    folder = out / "checkpoints" / f"rollout_{rollout:06d}"
    aside = folder.with_name("unfinished")

    def write_folder():
        shutil.rmtree(aside, ignore_errors=True)
        policy.model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        torch.save(state, aside / "trainer.pt")
        if recipe.is_file():
            shutil.copy(recipe, aside)
        write(aside / "README.md", card)
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


def rewind(out, rollout):
    """Takes the records after `rollout` out of the logs: they will be written again, with the same
    content. None is a start from nothing. The logs before it, and damaged ones, stay as .old."""
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        whole = [line for line in lines[:-1] if is_before(line, math.inf)]
        if damaged := len(lines) - 1 - len(whole):
            parallel.say(f"{path}: {damaged} lines are no records; they stay in {path.name}.old")
        if path.exists() and (rollout is None or damaged):
            path.replace(path.with_name(path.name + ".old"))
        write(path, b"".join(line + b"\n" for line in whole if is_before(line, rollout)))


def is_before(line, rollout):
    """Is a log's line a whole record of a rollout up to this one?"""
    try:
        return rollout is not None and json.loads(line)["rollout"] <= rollout
    except (ValueError, KeyError, TypeError):
        return False  # the last line, cut off while it was written


def save_rollout(out, rollout, **content):
    """One rollout as one file, for the analysis. Raises RunFailed."""
    path = out / "rollouts" / f"rollout_{rollout:06d}.pt"
    try:
        path.parent.mkdir(exist_ok=True)
        torch.save(dict(content, rollout=rollout), path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)
    except (OSError, RuntimeError) as e:
        raise RunFailed(f"{path} cannot be written: {str(e).splitlines()[0]}") from None

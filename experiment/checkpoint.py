"""Checkpoints: ordinary Hugging Face folders with the master weights, and trainer.pt: optimizer,
method state, pending rollouts.

A checkpoint holds no state of random generators: problems, sampling and shuffling are functions of
(seed, rollout). It is the same for every number of ranks, and a run continues on any other number.
"""

import json
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
        try:
            policy.model.save_pretrained(aside, state_dict=weights)
            tokenizer.save_pretrained(aside)
            torch.save(state, aside / "trainer.pt")
            if recipe.is_file():
                shutil.copy(recipe, aside)
            write(aside / "README.md", card)
        except (OSError, RuntimeError, SafetensorError) as e:  # torch's, safetensors' full disk
            shutil.rmtree(aside, ignore_errors=True)
            raise RunFailed(f"{folder} cannot be written ({str(e).splitlines()[0]}); --resume "
                            "continues from the checkpoint before it") from None
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        best_name = f"rollout_{best['rollout']:06d}" if best else None
        for old in checkpoint_folders(out)[:-keep]:
            if old != folder and old.name != best_name:
                shutil.rmtree(old.rename(aside))
    parallel.on_rank0(write_folder)


def rewind(out, rollout):
    """Takes the records after `rollout` out of the logs: they will be written again, with the same
    content. None is a start from nothing; the logs before it stay as .old."""
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        if rollout is None and path.exists():
            path.replace(path.with_name(path.name + ".old"))
        # the last line may have been cut off while it was written
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        try:
            kept = [line + b"\n" for line in lines if json.loads(line)["rollout"] <= rollout]
        except (ValueError, LookupError, TypeError) as e:
            raise RunFailed(f"{path} is damaged ({e!r}): its lines are JSON objects; without the "
                            "others, --resume continues") from None
        write(path, b"".join(kept))


def save_rollout(out, rollout, **content):
    """One rollout as one file, for the analysis. Raises RunFailed."""
    path = out / "rollouts" / f"rollout_{rollout:06d}.pt"
    try:
        path.parent.mkdir(exist_ok=True)
        torch.save(dict(content, rollout=rollout), path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)
    except (OSError, RuntimeError) as e:
        raise RunFailed(f"{path} cannot be written: {str(e).splitlines()[0]}") from None

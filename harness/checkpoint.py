"""Checkpoints: ordinary Hugging Face folders with the master weights, and trainer.pt: the state of
the Trainer (adapters, optimizer, schedule) and of the Run (method state, pending rollouts, totals).

A checkpoint holds no state of random generators: problems, sampling and shuffling are functions of
(seed, rollout). It is the same for every number of ranks, and a run continues on any other number.
"""

import json
import shutil
from contextlib import contextmanager

import torch

from engine import parallel
from harness.failures import RunFailed
from harness.files import checkpoint_folders, default_out, write, writing


def read_pickle(path, **options):
    """-> the tensors and plain values of a file of torch.save. Raises ValueError for anything else:
    other pickles can run a program, so that a file of a stranger would."""
    try:
        return torch.load(path, weights_only=True, **options)
    except Exception as e:  # a damaged file may raise anything
        raise ValueError(f"{type(e).__name__}: it is damaged, or holds more than tensors and plain "
                         "values") from None


def resumed(args):
    """-> trainer.pt of the newest checkpoint of the run that --resume continues, a dict, with the
    checkpoint's `folder`; None without one. Raises RunFailed for a damaged one."""
    folders = checkpoint_folders(default_out(args)) if args.resume else []
    if not folders:
        return None
    folder = folders[-1]
    with reading(folder):  # mapped: on a node every rank would have all ranks' moments
        state = read_pickle(folder / "trainer.pt", map_location="cpu", mmap=True)
        if state["rollout"] != int(folder.name[-6:]):
            raise ValueError(f"it is of rollout {state['rollout']}")
        return dict(state, folder=folder)


@contextmanager
def reading(folder):
    """Makes an error of the content of a checkpoint's trainer.pt RunFailed."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # such a file may hold anything
        raise RunFailed(f"{folder}/trainer.pt cannot be read ({e!r}): if it is damaged, --resume "
                        "continues from the checkpoint before, once this folder is renamed"
                        ) from None


def save(out, trainer, tokenizer, recipe, keep, **state):
    """Writes a checkpoint aside and renames it, so that a folder of its name is whole. The last
    `keep` stay. state: of the run, with `rollout`, its number. recipe: the model's recipe.json,
    copied if there is one. Raises OSError, and then leaves the checkpoints before it."""
    weights = {name: parallel.rank() == 0 and w.cpu() for name, w in trainer.weights()
               if name not in trainer.policy.model.all_tied_weights_keys}  # the head's, of some
    state.update(trainer.state())
    aside = out / "checkpoints" / "unfinished"
    folder = aside.with_name(f"rollout_{state['rollout']:06d}")

    def write_folder():
        shutil.rmtree(aside, ignore_errors=True)  # a killed run's
        try:
            with writing(folder, aside):
                trainer.policy.model.save_pretrained(aside, state_dict=weights)
                tokenizer.save_pretrained(aside)
                torch.save(state, aside / "trainer.pt")
                if recipe.is_file():
                    shutil.copy(recipe, aside)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        for old in checkpoint_folders(out)[:-keep]:
            shutil.rmtree(old.rename(aside), ignore_errors=True)  # NFS keeps open files
    parallel.on_rank0(write_folder)


def rewind(out, rollout):
    """Takes the records after `rollout` out of the logs: they will be written again. None starts
    anew; the logs before it stay as .old."""
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        if rollout is None and path.exists():
            path.replace(path.with_name(path.name + ".old"))
        path.touch()
        try:
            kept = [line for line in path.read_bytes().splitlines(keepends=True)
                    if line.endswith(b"\n")  # else the process was killed while it wrote the line
                    and json.loads(line)["rollout"] <= rollout]
        except Exception as e:  # a damaged line may raise anything
            raise RunFailed(f"{path} is damaged ({e!r}): its lines are JSON objects; without the "
                            "others, --resume continues") from None
        write(path, b"".join(kept))


def save_rollout(out, rollout, **content):
    """One rollout as one file, for the analysis. Raises OSError."""
    path = out / "rollouts" / f"rollout_{rollout:06d}.pt"
    aside = path.with_suffix(".unfinished")
    with writing(path, aside):
        path.parent.mkdir(exist_ok=True)
        torch.save(dict(content, rollout=rollout), aside)

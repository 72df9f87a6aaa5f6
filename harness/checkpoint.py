"""Checkpoints: Hugging Face folders of weights, adapters merged, tokenizer and recipe.json, with
trainer.pt: a dict of `trainer`, Trainer.state (optimizer, adapters, ...), and `run`, OF_RUN.

A run continues bit for bit: weights are saved in float32, the token budget among the flags, and
problems, sampling and shuffling are functions of (seed, rollout) and an engine's number. On other
numbers of ranks it continues, too. flags.parse_args merges flags; `restore` takes over trainer.pt.
"""

import ast
import json
import shutil
from dataclasses import asdict

import torch

from engine import parallel
from engine.policy import Batch
from harness.failures import RunFailed, refusing, room_for
from harness.files import CODE, checkpoint_folders, reached, write, writing
from harness.flags import OF_A_CHECKPOINT, flags_of, settings_of
from losses import require

# flags, and one of load_data's checksums, that change rounding and draws, not the objective
CHANGEABLE = {"held-out problems", *(
    "rollouts eval_every eval_data eval_problems eval_samples save_every save_rollouts keep "
    "tokens_per_micro_batch share_prompts activation_checkpointing offload tp max_num_seqs "
    "gpu_memory_utilization deterministic allow_unsafe_code data_dir").split()}
OF_RUN = "flags rollout state totals first pending".split()  # a Run's attributes in trainer.pt


def differing(old, new):
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def save(run):
    """Writes a Run's checkpoint aside and renames it, so that a folder of its name is whole. The
    last --keep stay. Raises OSError, and then leaves the checkpoints before it."""
    trainer, settings = run.trainer, settings_of(run.args.model)
    settings |= {name: x for name in OF_A_CHECKPOINT if (x := run.flags[name]) is not None}
    weights = {name: parallel.rank() == 0 and w.cpu() for name, w in trainer.weights()  # all take
               if name not in trainer.policy.model.all_tied_weights_keys}  # a tied head's
    kept = {name: getattr(run, name) for name in OF_RUN}
    kept["pending"] = [(asdict(batch), *rest) for batch, *rest in run.pending]
    content = dict(run=kept, trainer=trainer.state())
    aside = run.out / "checkpoints" / "unfinished"
    folder = aside.with_name(f"rollout_{run.rollout:06d}")

    def write_folder():
        try:
            with writing(folder, aside):  # it renames aside to folder at its end
                trainer.policy.model.save_pretrained(aside, state_dict=weights)
                run.tokenizer.save_pretrained(aside)
                torch.save(content, aside / "trainer.pt")
                write(aside / "recipe.json", json.dumps(dict(settings=settings)))
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        for old in checkpoint_folders(run.out)[:-run.args.keep]:
            shutil.rmtree(old.rename(aside), ignore_errors=True)  # NFS keeps open files
    parallel.on_rank0(write_folder)


@refusing()
def compare_with_saved(args, checksums, roots):
    """Prints a resumed run's changed flags; refuses those that change training; --force allows all
    but model and lora_rank. roots: of files.reached. -> checksums; missing ones are the run's."""
    if not args.earlier.checkpoint:
        return checksums  # without a checkpoint it starts again, perhaps with other flags
    saved, now, known = args.earlier.flags, flags_of(args), args.earlier.checksums
    changes = {name: f"--{name} was {saved.get(name)} and is now {now.get(name)}"
               for name in differing(saved, now)}
    for name in {"model", "lora_rank"} & changes.keys():
        raise ValueError(f"{changes[name]}: the checkpoint's weights are those of the run; train "
                         "another with --model CHECKPOINT")
    changes |= {name: f"the {name} changed" for name, x in checksums.items()
                if x != (known.get(name) or x)}
    for name, tree in args.earlier.code.items():  # what method and verifiers reach of the file
        if places := differing(*(reached(x, roots) for x in (tree, ast.parse(CODE[name])))):
            changes[name] = f"{name} changed in {', '.join(sorted(places))}"
    needs_end = args.schedule == "cosine" or args.rollout_lag  # training depends on --rollouts
    refused = [text for name, text in changes.items()
               if name not in CHANGEABLE or (needs_end and name == "rollouts")]
    require(args.force or not refused, f"{'; '.join(refused)}: training depends on that; another "
            "--out begins anew, --force continues all the same")
    for text in changes.values():
        parallel.say(f"resuming, but {text}")
    return {**known, **checksums}


def finished(args):
    """Says so if the run that --resume names has more rollouts, or as many and its figure."""
    out, checkpoint = args.earlier.out, args.earlier.checkpoint
    last = int(checkpoint.name[-6:]) if checkpoint else 0
    if done := (last, (out / "curves.png").exists()) >= (args.rollouts, True):
        parallel.say(f"{out}: all {last} rollouts are done; a larger --rollouts continues")
    return done


def read_pickle(path, **options):
    """-> the tensors and plain values of a file of torch.save. Raises ValueError for anything else:
    other pickles can run a program, so that a file of a stranger would."""
    try:
        return torch.load(path, weights_only=True, **options)
    except Exception as e:  # a damaged file may raise anything
        raise ValueError(f"{type(e).__name__}: damaged, or more than tensors and values") from None


@room_for("loading")
def restore(args, trainer):
    """Gives a trainer the state of the last checkpoint. -> the rest of its trainer.pt, attributes
    of Run; None without a checkpoint. Raises RunFailed for a damaged one."""
    folder, device = args.earlier.checkpoint, parallel.device()
    if not folder:
        return None
    try:  # mapped: on a node every rank would have all ranks' moments
        content = read_pickle(folder / "trainer.pt", map_location="cpu", mmap=parallel.sharded())
        run = {name: content["run"][name] for name in OF_RUN}
        flags = run.pop("flags")  # to compare: those in force are config.json's
        require(run["rollout"] == int(folder.name[-6:]), f"it is of rollout {run['rollout']}")
        if any(getattr(args, name) != flags[name] for name in ("loss", "advantage")):
            run["state"] = {}  # another method's averages mean nothing
        run["pending"] = [(Batch(**batch).to(device), rewards.to(device), *rest)
                          for batch, rewards, *rest in run["pending"]]
        trainer.restore(content["trainer"])
        return run
    except torch.OutOfMemoryError:  # of the GPU
        raise
    except Exception as e:  # such a file may hold anything
        raise RunFailed(f"{folder}/trainer.pt cannot be read ({e!r}): if it is damaged, --resume "
                        "continues from the checkpoint before, once this folder is renamed; if "
                        "another version wrote it, its commit is in config.json") from None


def rewind(out, rollout):
    """Takes the records after `rollout` out of the logs: they will be written again. 0 starts anew;
    the logs before it stay as .old. What a killed run was writing, or removing, goes."""
    shutil.rmtree(out / "checkpoints" / "unfinished", ignore_errors=True)
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        if not rollout and path.exists():
            path.replace(f"{path}.old")
        path.touch()
        try:
            kept = [line for line in path.read_text().splitlines(keepends=True)
                    if line.endswith("\n")  # else the process was killed while it wrote the line
                    and json.loads(line)["rollout"] <= rollout]
        except Exception as e:  # a damaged line may raise anything
            raise RunFailed(f"{path} is damaged ({e!r}): its lines are JSON objects; without the "
                            "others, --resume continues") from None
        write(path, "".join(kept))

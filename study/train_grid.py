"""Trains the runs of study/results/grid.txt, several at a time, a core each, and keeps their
numbers in grid.jsonl beside it. ./run_all.sh grid calls it.

    python -m study.train_grid                            what is missing, in the order of the file
    python -m study.train_grid --only "countdown/*-16"    settings of such names alone
    python -m study.train_grid --plan                     what is missing, and how long it will take
    python -m study.train_grid --minutes 60               begins no run after so long

The same command again continues: runs that are finished are not trained again, and one that was
interrupted starts anew. A run is a process forked from this one, so that nothing is imported twice.
"""

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from experiment.files import lock, write
from study.grid import (
    FINISHED,
    GRID,
    left,
    missing,
    of_other_bases,
    read_finished,
    read_grid,
)

# metrics that are kept of every rollout of a run that is reported
SERIES = ("reward/mean", "policy/entropy", "policy/kl_old", "policy/ess", "clip/frac",
          "clip/capped_frac", "adv/mass_pos", "adv/mass_neg", "adv/fade_alpha", "adv/fade_delta",
          "optim/head_rank1_share", "optim/no_gradient", "sampler/logp_absdiff_mean")
# of a task's held-out puzzles: those that are reported, those that choose learning rates and flags,
# and those on which runs that are reported are validated
PARTS = dict(held_out=slice(0, 200), tune=slice(200, 250), final=slice(250, 300))


def claimed(folder):
    """-> the folder as a path, which belongs to this process from here on; what runs that were
    interrupted left there is gone. Exits where another process is at work in it."""
    folder = Path(folder).resolve()
    (folder / "finished").mkdir(parents=True, exist_ok=True)
    try:
        lock(folder)
    except BlockingIOError:
        sys.exit(f"{folder} is another process's at this moment; --folder names another")
    for path in folder.glob("run-*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder


def distinct_puzzles(task):
    """A task's held-out problems, one of each puzzle: prompts that differ in the order of the
    numbers alone are one puzzle. Their order is that of a hash, for puzzles that are found first
    are easier than those found last."""
    import data
    from study import worked
    puzzles = {}
    for problem in worked.held_out() if task == "worked" else data.load(task, "test"):
        answer = problem["answer"]
        puzzles.setdefault(f"{sorted(answer['nums'])} {answer['target']}", problem)
    order = sorted(puzzles, key=lambda puzzle: hashlib.sha256(f"order {puzzle}".encode()).digest())
    return [puzzles[puzzle] for puzzle in order]


def problem_file(task, part, folder):
    """-> the file of one of PARTS."""
    file = folder / f"{task}_{part}.jsonl"
    if not file.exists():
        write(file, "".join(json.dumps(p) + "\n" for p in distinct_puzzles(task)[PARTS[part]]))
    return file


# ---------------------------------------------------------------------------- one run


def rounded(x, digits=4):
    return None if x is None else float(f"{x:.{digits}g}")


def ranges(record):
    """-> the mean clip range over the tokens of a rollout's steps, and the largest of its bins;
    None where the method has none."""
    steps = [s for s in record.get("steps", [])
             if "clip/range/bin0" in s and s["policy/bin_frac/bin0"] is not None]
    if not steps:
        return None, None
    bins = range(sum(name.startswith("clip/range/bin") for name in steps[0]))
    # the bins of the statistics are those of the ranges where there are five
    mean = (statistics.fmean(sum(s[f"clip/range/bin{i}"] * s[f"policy/bin_frac/bin{i}"]
                                 for i in bins) for s in steps) if len(bins) == 5 else None)
    return mean, max(s[f"clip/range/bin{i}"] for s in steps for i in bins)


def numbers_of(out):
    """What is kept of a run's metrics.jsonl: its validation scores, and a series per metric."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    scores = {"mean": [], "pass": []}
    for record in records:
        for kind, values in scores.items():
            values += [[record["rollout"], rounded(value)] for name, value in record.items()
                       if name.startswith("eval/") and name.endswith(f"/{kind}@8")]
    records = [r for r in records if r["rollout"]]
    series = {name: [rounded(r.get(name)) for r in records] for name in SERIES}
    series["clip/range_mean"], series["clip/range_max"] = (
        [rounded(value) for value in column] for column in zip(*map(ranges, records), strict=True))
    series = {name: values for name, values in series.items() if any(v is not None for v in values)}
    seconds = statistics.median(r["time/rollout"] for r in records)
    return dict(validation=scores, series=series, seconds=rounded(seconds))


def evaluated(out, task, folder):
    """The score of a run's last checkpoint on the held-out problems that are reported."""
    import eval as evaluation
    held_out = problem_file(task, "held_out", folder)
    model = sorted((out / "checkpoints").glob("rollout_*"))[-1]
    evaluation.main(["--model", str(model), "--benchmarks", str(held_out), "--samples", "16",
                     "--sampler", "transformers", "--out", str(out / "eval")])
    result, = json.loads((out / "eval" / "eval.json").read_text())["results"].values()
    return {name: rounded(value) for name, value in result.items()
            if name.startswith(("mean@", "pass@"))}


def redirected(folder):
    """-> a folder for this process's run, and the file that its output goes to from here on."""
    out, log = folder / f"run-{os.getpid()}", folder / f"run-{os.getpid()}.log"
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    return out, log


def train_run(run, folder, bases):
    """A child's whole life: trains, evaluates what is reported, and keeps the numbers."""
    out, log = redirected(folder)
    import train
    validation = problem_file(run.task, run.role, folder)
    print(run.command(), flush=True)
    train.main([*shlex.split(run.command()), "--eval_data", str(validation), "--out", str(out)])
    kept = dict(id=run.id, **run._asdict(), command=run.command(), base=bases[run.task],
                **numbers_of(out))
    if run.role == "final":
        kept["held_out"] = evaluated(out, run.task, folder)
    else:
        del kept["series"]
    write(folder / "finished" / f"{os.getpid()}.json", json.dumps(kept))
    shutil.rmtree(out)
    log.unlink()


# ---------------------------------------------------------------------------- all of them


def collect(folder, finished, results):
    """Takes over what the children have finished, into grid.jsonl, too. -> how many"""
    files = sorted((folder / "finished").glob("*.json"))
    for file in files:
        run = json.loads(file.read_text())
        finished[run["id"]] = run
    if files:
        write(results, "".join(json.dumps(run) + "\n" for run in finished.values()))
        for file in files:
            file.unlink()
    return len(files)


def say(settings, finished):
    count, hours = left(settings, finished)
    print(f"{time.strftime('%H:%M:%S')} {len(finished)} runs are finished, {count} are left: about "
          f"{hours:.1f} core-hours", flush=True)


def wanted(args, settings, finished):
    patterns = (args.only or "*").split(",")
    return [run for run in missing(settings, finished)
            if any(fnmatch.fnmatch(run.setting, pattern) for pattern in patterns)]


def warm_up(tasks):
    """Imports what every run needs, for one core. -> {task: checksum of its base's weights}"""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")  # before torch is imported
    import matplotlib.pyplot  # noqa: F401
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import engine.hf_sampler  # noqa: F401
    import train  # noqa: F401
    from study import worked
    from study.grid import checksum
    from study.results import BASES
    torch.set_num_threads(1)
    if "worked" in tasks:
        worked.write_problems()
    return {task: checksum(Path(BASES[task], "model.safetensors")) for task in tasks}


def fork_all(next_runs, work, jobs, minutes=0):
    """Does work(run) in a process of its own for every run that next_runs() lists, `jobs` at a
    time; it is asked again whenever one has ended. Begins none after so many minutes (0: no
    limit). -> the runs that failed"""
    context, running, failed, began = multiprocessing.get_context("fork"), {}, [], time.time()
    while True:
        waiting = [run for run in next_runs() if run not in [*running.values(), *failed]]
        late = minutes and time.time() - began > 60 * minutes
        while waiting and len(running) < jobs and not late:
            run = waiting.pop(0)
            process = context.Process(target=work, args=(run,))
            process.start()
            running[process] = run
        if not running:
            return failed
        try:
            multiprocessing.connection.wait([process.sentinel for process in running])
        except KeyboardInterrupt:
            for process in running:
                process.kill()
            sys.exit("interrupted; the same command again continues")
        for process in [p for p in running if p.exitcode is not None]:
            run = running.pop(process)
            if process.exitcode:
                failed.append(run)
                print(f"failed: {run}, see run-{process.pid}.log", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default=GRID, help="the file of settings")
    parser.add_argument("--results", default=FINISHED, help="the file of finished runs")
    parser.add_argument("--folder", default="runs/grid", help="where runs are trained")
    parser.add_argument("--only", help="names of settings, with commas and * between")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--minutes", type=float, default=0, help="begin no run after so long")
    parser.add_argument("--plan", action="store_true", help="only say what is missing")
    args = parser.parse_args()
    try:
        settings, finished = read_grid(args.grid), read_finished(args.results)
    except (OSError, ValueError) as e:
        sys.exit(f"train_grid: {e}")
    if args.plan:
        runs = wanted(args, settings, finished)
        for name, count in Counter((run.setting, run.role) for run in runs).items():
            print(*name, count)
        say(settings, finished)
        return
    folder = claimed(args.folder)
    say(settings, finished)
    bases = warm_up({setting.task for setting in settings.values()})
    if sentence := of_other_bases(finished, bases):
        sys.exit(f"train_grid: {sentence}; begin anew with --results another.jsonl")

    def next_runs():
        if collect(folder, finished, Path(args.results)):
            say(settings, finished)
        return wanted(args, settings, finished)
    work = partial(train_run, folder=folder, bases=bases)
    if failed := fork_all(next_runs, work, args.jobs, args.minutes):
        sys.exit(f"train_grid: {len(failed)} runs failed; the same command again tries them again")
    from study.claims import Runs
    from study.results import settings_table
    print(settings_table(Runs(settings, finished)))


if __name__ == "__main__":
    main()

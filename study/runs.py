"""Trains the runs of study/plan.toml, several at a time, a core each, and adds their numbers to
study/results/PART.jsonl, a line each; the bases' scores are in bases.json. ./run_all.sh grid calls
it.

    python -m study.runs map                 what is missing of a part; without a name, of all
                                             but those of the task comparisons, which need Gemma
    python -m study.runs map --plan          the number of runs that are missing

The same command again continues: a run that was interrupted starts anew. A run is a process forked
from this one, so that nothing is imported twice. A line has a checksum of each definition that
its row and its verifier reach, without comments; where one is another today, nothing is trained
without --force, which keeps the line. Of the published lines those of gemma_fp8 have checksums, of
older code; the others have none, and are kept.
"""

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import resource
import shlex
import shutil
import sys
import time
import tomllib
import zlib
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import data
from examples import comparisons
from harness.files import append, checkpoint_folders, lock, numbers, write
from harness.log import scores

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Task(NamedTuple):
    """base: folder of the model that a run begins from; flags: of train.py and eval.py; training:
    more of train.py; samples: completions of each test puzzle; verifier: of its problems."""

    base: Path
    flags: str
    training: str
    samples: int = 16
    verifier: str = "countdown"


TOY = "--group_size 16 --eval_problems 100 --eval_samples 8"
TASKS = {  # worked is a file of problems and a base, see study/worked.py
    "countdown": Task(HERE.parent / "data/base", "", f"--data countdown {TOY}"),
    "worked": Task(HERE / "worked/base", "",
                   f"--model study/worked/base --data study/worked/train.jsonl {TOY}"),
    "comparisons": Task(
        HERE.parent / "models/gemma-3-270m",
        "--template none --max_prompt_tokens 128 --dtype float32 --stop </answer> --max_tokens 12",
        "--model models/gemma-3-270m --data {folder}/comparisons_train.jsonl --group_size 8 "
        "--shuffle groups --eval_problems 50 --eval_samples 4", samples=4, verifier="math")}
# of a task's held-out puzzles: those of the score, and those of a run's evaluations
PARTS = dict(test=slice(0, 200), validation=slice(200, 300))
# metrics that are kept: their mean over a run, and every fifth value
KEPT = ("reward/mean", "policy/entropy", "policy/kl_old", "policy/ess", "clip/frac",
        "clip/capped_frac", "adv/mass_pos", "adv/mass_neg", "adv/fade_alpha", "adv/fade_delta",
        "time/rollout")


class Planned(NamedTuple):
    """One run. lr: of all of its steps; flags: of train.py, the method's."""

    part: str
    name: str
    task: str
    steps: int
    lr: float
    seed: int
    rollouts: int
    puzzles: int
    evaluate_every: int
    flags: str

    @property
    def id(self):
        return f"{self.name} {self.task} {self.steps} {self.lr:g} {self.seed} {self.puzzles}"

    def command(self, folder):
        """The flags of train.py, but for its --out. folder: of the files of problems."""
        task = TASKS[self.task]
        return (f"{self.flags} --steps_per_rollout {self.steps} "
                f"--lr {self.lr:g} --seed {self.seed} --rollouts {self.rollouts} {task.flags} "
                f"{task.training.format(folder=folder)} --problems_per_rollout {self.puzzles} "
                f"--sampler transformers --save_every 0 --eval_every {self.evaluate_every} "
                f"--eval_data {folder}/{self.task}_validation.jsonl")


def read_plan(path=HERE / "plan.toml"):
    """{part: its Planned runs}. Raises KeyError for a part without one of the fields, TypeError for
    one of another shape."""
    plan = {}
    for part, of in tomllib.loads(Path(path).read_text()).items():
        first, last = of["seeds"]
        puzzles = of["puzzles"] if isinstance(of["puzzles"], list) else [of["puzzles"]]
        plan[part] = [
            Planned(part, name, of["task"], int(steps), lr, seed, of["rollouts"], n,
                    of["evaluate_every"], flags)
            for seed in range(first, last + 1) for steps, rates in of["rates"].items()
            for lr in rates for n in puzzles for name, flags in of["settings"].items()]
    return plan


def read_finished(part):
    """{id: run} of a part's finished runs."""
    path = RESULTS / f"{part}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {run["id"]: run for run in map(json.loads, lines)}


def read_bases():
    """{task: the scores of its base on the test puzzles}"""
    path = RESULTS / "bases.json"
    return json.loads(path.read_text()) if path.exists() else {}


def distinct_puzzles(task):
    """A task's held-out problems, one of each puzzle: prompts that differ in the order of the
    numbers alone are one puzzle. Their order is that of a hash."""
    from study import worked
    problems = (worked.held_out() if task == "worked" else data.load(task, "test")
                if task == "countdown" else [comparisons.problem(i, True) for i in range(320)])
    puzzles = {data.cluster(problem): problem for problem in reversed(problems)}  # the first each
    order = sorted(puzzles, key=lambda puzzle: hashlib.sha256(f"order {puzzle}".encode()).digest())
    return [puzzles[puzzle] for puzzle in order]


def write_problems(task, folder):
    """The files of problems of a task's runs: TASK_test.jsonl and so on, worked's own aside."""
    from study import worked
    if task == "worked":
        worked.write_problems()
    held_out = distinct_puzzles(task)
    files = {name: held_out[part] for name, part in PARTS.items()}
    if task == "comparisons":
        files["train"] = [comparisons.problem(i, False) for i in range(4000)]
    for name, problems in files.items():
        write(folder / f"{task}_{name}.jsonl", "".join(json.dumps(p) + "\n" for p in problems))


def four_digits(content):
    """The floats of what JSON can hold, rounded; None for nan and infinity."""
    return json.loads(json.dumps(numbers(content)), parse_float=lambda x: float(f"{float(x):.4g}"))


def ranges(steps):
    """-> the mean over a rollout's tokens of ACPO's clip range; None for another method."""
    found = [sum(s[f"clip/range/bin{i}"] * s[f"policy/bin_frac/bin{i}"] for i in range(5))
             for s in steps if "clip/range/bin0" in s and s.get("policy/bin_frac/bin0") is not None]
    return fmean(found) if found else None


def numbers_of(out):
    """The numbers of a run's metrics.jsonl that are kept."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    validation = [[r["rollout"], r[name]] for r in records for name in scores(r, "mean").values()]
    records = [r for r in records if r["rollout"]]
    columns = {name: [r.get(name) for r in records] for name in KEPT}
    columns["clip/range"] = [ranges(r.get("steps", [])) for r in records]
    columns = {name: x for name, x in columns.items() if None not in x}
    return four_digits(dict(
        validation=validation, mean={name: fmean(x) for name, x in columns.items()},
        trace={name: x[4::5] for name, x in columns.items()
               if not name.startswith(("time", "adv/mass"))}))


def score(model, task, out):
    """mean@n and pass@k of a model on a task's test puzzles: {name: score}, the largest k last."""
    import eval as evaluation
    n, puzzles, out = TASKS[task].samples, out.parent / f"{task}_test.jsonl", out / "eval"
    evaluation.main(["--model", str(model), "--benchmarks", str(puzzles), "--samples", str(n),
                     "--sampler", "transformers", *TASKS[task].flags.split(), "--out", str(out)])
    result, = json.loads((out / "eval.json").read_text())["results"].values()
    return four_digits({name: result[name] for name in (f"mean@{n}", "pass@4", f"pass@{n}")})


def score_base(task, out):
    """Scores a task's base; one at a time."""
    bases = {**read_bases(), task: score(TASKS[task].base, task, out)}
    write(RESULTS / "bases.json", json.dumps(bases) + "\n")


def train_run(run, out):
    """Trains, evaluates, and keeps the numbers. out: in the folder of the files of problems."""
    import train
    print(run.command(out.parent), flush=True)
    train.main([*shlex.split(run.command(out.parent)), "--out", str(out)])
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    base = zlib.crc32((TASKS[run.task].base / "model.safetensors").read_bytes())
    append(RESULTS / f"{run.part}.jsonl", [dict(
        id=run.id, **run._asdict(), base=base, code=code_of(run.flags, run.task),
        test=score(checkpoint_folders(out)[-1], run.task, out), core_seconds=round(spent),
        **numbers_of(out))])


@cache
def code_of(flags, task):
    """{definition: checksum} of the code of the row that these flags choose and of the verifier."""
    import train
    from harness import files
    args, _ = train.parse_args(shlex.split(flags))
    roots = [*args.roots, f"REWARDS[{TASKS[task].verifier!r}]"]
    return {name: zlib.crc32(text.encode()) for code in files.CODE.values()
            for name, text in files.reached(ast.parse(code), roots).items()}


def warm_up(tasks, folder):
    """Imports what every run needs, for one core, and writes the problems into a folder."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")  # before torch is imported
    import matplotlib.pyplot  # noqa: F401
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import engine.hf_sampler  # noqa: F401
    import train  # noqa: F401
    torch.set_num_threads(1)
    for task in tasks:
        if not TASKS[task].base.exists():
            sys.exit(f"study.runs: {TASKS[task].base} is missing: ./run_all.sh gemma makes it")
        write_problems(task, folder)


def child(work, run, folder):
    """A forked process's whole life: work(run, its own folder). What it prints goes into a file.
    Both are deleted at the end, and stay where it fails."""
    import torch
    torch.set_num_threads(1)  # one thread makes torch's pool anew, before several threads load
    out, log = folder / f"run-{os.getpid()}", folder / f"run-{os.getpid()}.log"
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    work(run, out)
    shutil.rmtree(out)
    log.unlink()


def fork_all(runs, work, folder, jobs):
    """A child for each of the runs, `jobs` at a time. -> the runs that failed"""
    context, waiting, running, failed = multiprocessing.get_context("fork"), [*runs], {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop(0)
            process = context.Process(target=child, args=(work, run, folder))
            process.start()
            running[process.sentinel] = process, run
        try:
            ended = multiprocessing.connection.wait([*running])
        except KeyboardInterrupt:
            for process, _ in running.values():
                process.kill()
            sys.exit("interrupted; the same command again continues")
        for sentinel in ended:
            process, run = running.pop(sentinel)
            process.join()  # its exit code comes a little later than its end
            if process.exitcode:
                failed.append(run)
                print(f"failed: {run}, see run-{process.pid}.log", flush=True)
        print(f"{time.strftime('%H:%M:%S')} {len(waiting) + len(running)} are left", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = read_plan()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(plan))
    parser.add_argument("--folder", default="runs/study", help="where runs are trained")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plan", action="store_true", help="only say what is missing")
    parser.add_argument("--force", action="store_true", help="keep finished runs of other code")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(plan):
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(plan)}")
    parts = args.parts or [part for part, of in plan.items() if of[0].task != "comparisons"]
    runs = [run for part in parts for run in plan[part]]
    lines = {part: read_finished(part) for part in parts}
    finished = {run: lines[run.part][run.id] for run in runs if run.id in lines[run.part]}
    missing = [run for run in runs if run not in finished]
    print(f"{len(missing)} runs are missing", flush=True)
    if args.plan:
        return
    folder, tasks = Path(args.folder).resolve(), {run.task for run in runs}
    try:
        lock(folder)
    except BlockingIOError:
        sys.exit(f"{folder} is another process's at this moment; --folder names another")
    for path in folder.glob("run-*"):  # of runs that were interrupted
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    warm_up(tasks, folder)
    others = {run: names for run, line in finished.items() if "code" in line and (
        names := {x for x, _ in line["code"].items() ^ code_of(run.flags, run.task).items()})}
    if others and not args.force:
        first, names = next(iter(others)), sorted(set.union(*others.values()))
        sys.exit(f"study.runs: {len(others)} finished runs, the first of them {first.id} in "
                 f"{first.part}, are of other code: {', '.join(names)} changed since. --force "
                 f"keeps them; without their lines in {RESULTS} they are trained again")
    failed = fork_all(sorted(tasks - {*read_bases()}), score_base, folder, jobs=1)
    failed += fork_all(sorted(missing, key=lambda run: run.seed), train_run, folder, args.jobs)
    if failed:
        sys.exit(f"study.runs: {len(failed)} runs failed; the same command again tries them again")


if __name__ == "__main__":
    main()

"""The sanity test of arXiv 2510.26788: a sound method solves in training nearly all of the problems
that the base solves sometimes.

    python -m study.sanity                 every row of METHODS: half an hour on two cores
    python -m study.sanity --only acpo,p3o

The problems are 32 of the embedded base's training puzzles of which it solves 20 to 80%. A method
has 100 rollouts of all of them, 16 completions each, 16 optimizer steps, to solve 95% of the
completions of a rollout: at the learning rate 2e-4, and at 5e-5 if it does not. The numbers go
into study/results/sanity.json.
"""

import argparse
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from study.train_grid import claimed, fork_all, redirected, rounded, warm_up, write

RESULTS = Path(__file__).parent / "results" / "sanity.json"
RATES = (2e-4, 5e-5)
PROBLEMS, SAMPLES, ENOUGH, BUDGET, PIECE = 32, 16, 0.95, 100, 20
# FADE's averages would stand still over 100 rollouts with the paper's 0.02
OWN = {"fade": "--fade_ema 0.2"}


def choose_problems(path):
    """Writes the problems: the first training puzzles of which the base solves 20 to 80%."""
    import data
    from data.recipe import BASE
    from engine.sampler import make_sampler
    from experiment.model import read_tokenizer
    candidates = [data.load("countdown", "train")[i] for i in range(8 * PROBLEMS)]
    tokenizer, eos, *_ = read_tokenizer(BASE, candidates, None)
    sampler = make_sampler("transformers", BASE, dtype="float32", max_length=64, eos=eos)
    groups = data.sample_groups(sampler, tokenizer, candidates, 64, seed=0, temperature=1.0,
                                max_tokens=16)
    kept = [group.problem for group in groups
            if 0.2 <= sum(reward == 1 for reward in group.rewards) / 64 <= 0.8]
    if len(kept) < PROBLEMS:
        sys.exit(f"sanity.py: the base solves only {len(kept)} puzzles sometimes")
    write(path, "".join(json.dumps(problem) + "\n" for problem in kept[:PROBLEMS]))


def train_run(run, folder):
    """A child's whole life: trains piece by piece until the problems are solved."""
    name, lr = run
    out, log = redirected(folder)
    import train
    solved = []
    for rollouts in range(PIECE, BUDGET + 1, PIECE):
        train.main(["--loss", name, *OWN.get(name, "").split(), "--lr", f"{lr:g}", "--data",
                    str(folder / "problems.jsonl"), "--problems_per_rollout", str(PROBLEMS),
                    "--group_size", str(SAMPLES), "--rollouts", str(rollouts), "--sampler",
                    "transformers", "--eval_every", "0", "--save_every", "0", "--rank_every", "0",
                    "--out", str(out), "--resume"])
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        solved = [rounded(record["reward/mean"]) for record in records]
        if max(solved) >= ENOUGH:
            break
    write(folder / "finished" / f"{name} {lr:g}.json", json.dumps(solved))
    shutil.rmtree(out)
    log.unlink()


def collect(folder, names):
    """Writes sanity.json of what is finished. -> the runs that are missing: of each method
    the next learning rate, until one has solved the problems"""
    methods, missing = {}, []
    for name in names:
        tries = []
        for lr in RATES:
            file = folder / "finished" / f"{name} {lr:g}.json"
            if not file.exists():
                missing.append((name, lr))
                break
            solved = json.loads(file.read_text())
            at = next((i for i, x in enumerate(solved, 1) if x >= ENOUGH), None)
            tries.append(dict(lr=lr, rollouts=at, best=max(solved)))
            if at:
                break
        if tries:
            methods[name] = tries
    if methods:
        write(RESULTS, json.dumps(dict(problems=PROBLEMS, budget=BUDGET, methods=methods),
                                  indent=1) + "\n")
    return missing


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of rows, with commas between")
    parser.add_argument("--folder", default="runs/sanity", help="where runs are trained")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    args = parser.parse_args()
    folder = claimed(args.folder)
    warm_up({"countdown"})
    from losses import METHODS
    if not (folder / "problems.jsonl").exists():
        choose_problems(folder / "problems.jsonl")
    names = args.only.split(",") if args.only else list(METHODS)
    failed = fork_all(partial(collect, folder, names), partial(train_run, folder=folder), args.jobs)
    if failed:
        sys.exit(f"sanity.py: {len(failed)} runs failed; the same command again tries them again")


if __name__ == "__main__":
    main()

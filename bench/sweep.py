"""A learning rate for a method and for its baseline alike, then their difference over fresh seeds.

    ./run_all.sh sweep fade
    ./run_all.sh sweep "fade --alpha_max 2" --baseline dr_grpo --seeds 6 --group_size 8
    ./run_all.sh sweep fade --dry_run        prints the commands

Both are trained from seed 0 with each of the --rates, and keep the rate with the best held-out
mean@n. At its rate each is trained with seeds 1 to --seeds, which chose no rate; the differences
are seed by seed, with Student's 95% interval of their mean. Other flags are train.py's, for all
runs alike. A finished run is not trained again.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train
from analysis import figures, runs
from experiment import failures

refuse = partial(failures.refuse, "sweep")
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]  # 2 to 10 seeds, 95%
OURS = {"--loss", "--lr", "--seed", "--rollouts", "--eval_every", "--out", "--resume"}


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="./run_all.sh sweep", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    flag = parser.add_argument
    flag("method", help="a row of losses.py, with flags of its own as in 'fade --alpha_max 2'")
    flag("--baseline", default="grpo", help="what it is compared with, written the same way")
    flag("--rates", help="with commas between; default a third, one and three times train.py's")
    flag("--seeds", type=int, choices=range(2, 11), default=4, metavar="N", help="from 2 to 10")
    flag("--rollouts", type=int, default=25, help="of each run")
    flag("--jobs", type=int, default=2, help="runs at a time")
    flag("--out", type=Path, default=Path("runs/sweep"), help="the folder of the runs' folders")
    flag("--dry_run", action="store_true", help="print the commands and stop")
    args, args.more = parser.parse_known_args(argv)
    if taken := OURS & {text.split("=")[0] for text in args.more}:
        refuse(f"{min(taken)} differs from run to run: --rates, --seeds, --rollouts and --out are "
               "the sweep's")
    if args.method.split() == args.baseline.split():
        refuse(f"{args.method} is compared with --baseline, which has to be another method")
    return args


def folder(args, method, rate, seed):
    """Other flags have another folder."""
    flags = " ".join([method, *args.more, f"{args.rollouts}"])
    return args.out / f"{re.sub(r'[^A-Za-z0-9._]+', '-', flags)}-{rate}-{seed}"


def flags(args, method, rate, seed):
    """train.py's, of one run. A method's flags go last, for they are its own."""
    return [*args.more, "--lr", rate, "--seed", str(seed), "--rollouts", str(args.rollouts),
            "--eval_every", str(args.rollouts), "--out", str(folder(args, method, rate, seed)),
            "--resume", "--loss", *method.split()]


def train_all(args, plan):
    """Trains (method, rate, seed) each, --jobs at a time. -> their held-out mean@n"""
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.jobs))}

    def run(setting):
        out = folder(args, *setting)
        if not (out / "curves.png").exists():
            done = subprocess.run([sys.executable, ROOT / "train.py", *flags(args, *setting)],
                                  env=env, capture_output=True, text=True)
            if done.returncode:
                return done.stderr.strip().splitlines()[-1]
        return runs.read(out)[0]["records"][-1]["mean@n"]
    with ThreadPoolExecutor(args.jobs) as pool:
        scores = {}
        for setting, score in zip(plan, pool.map(run, plan)):
            method, rate, seed = setting
            print(f"{method}, lr {rate}, seed {seed}: {score}", flush=True)
            scores[setting] = score
    if any(isinstance(score, str) for score in scores.values()):
        sys.exit("sweep: runs have failed; the same command trains these alone")
    return scores


def compare(scores, others):
    """-> the mean of scores - others, seed by seed, and low and high of Student's 95% interval"""
    gaps = [a - b for a, b in zip(scores, others, strict=True)]
    half = STUDENT[len(gaps) - 2] * statistics.stdev(gaps) / len(gaps) ** 0.5
    return statistics.fmean(gaps), statistics.fmean(gaps) - half, statistics.fmean(gaps) + half


def main(argv=None):
    args = parse_args(argv)
    methods, seeds = (args.method, args.baseline), range(1, args.seeds + 1)
    try:
        lr = train.parse_args([*args.more, "--loss", args.method.split()[0]])[0].lr
        rates = args.rates.split(",") if args.rates else [f"{lr * x:.2g}" for x in (1 / 3, 1, 3)]
        search = [(method, rate, 0) for rate in rates for method in methods]
        for setting in search:  # a wrong flag is said before a run
            train.parse_args([flag for flag in flags(args, *setting) if flag != "--resume"])
    except ValueError as e:
        refuse(e)
    best = dict.fromkeys(methods, "BEST")
    if not args.dry_run:
        scores = train_all(args, search)
        for method in methods:
            best[method] = max(rates, key=lambda rate: scores[method, rate, 0])
            if len(rates) > 1 and best[method] in (min(rates, key=float), max(rates, key=float)):
                print(f"{method}: the best rate, {best[method]}, is at the end of those tried; "
                      "--rates takes others")
    plan = [(method, best[method], seed) for seed in seeds for method in methods]
    if args.dry_run:
        for setting in search + plan:
            print("python train.py", *flags(args, *setting))
        return
    scores = train_all(args, plan)
    mine, theirs = ([scores[method, best[method], seed] for seed in seeds] for method in methods)
    mean, low, high = compare(mine, theirs)
    figures.curves(runs.grouped(run for setting in plan for run in runs.read(folder(args, *setting))),
                   args.out / "sweep.png")
    print(f"{methods[0]} (lr {best[methods[0]]}) {statistics.fmean(mine):.3f}, {methods[1]} (lr "
          f"{best[methods[1]]}) {statistics.fmean(theirs):.3f}: difference {mean:+.3f}, 95% "
          f"interval {low:+.3f} to {high:+.3f} over {len(seeds)} seeds, held-out mean@n after "
          f"{args.rollouts} rollouts; curves in {args.out / 'sweep.png'}")


if __name__ == "__main__":
    main()

"""A learning rate for a method and for its baseline alike, then their difference over fresh seeds.

    ./run_all.sh sweep fade
    ./run_all.sh sweep "fade --alpha_max 2" --baseline dr_grpo --seeds 6 --group_size 8
    ./run_all.sh sweep fade --dry_run        prints the commands

Both are trained from seed 0 with each of the --rates, and keep the one with the best held-out
mean@n. Each is then trained at its rate with seeds 1, 2, ..., which chose no rate; the differences
are seed by seed, with Student's 95% interval of their mean. Flags that are not the sweep's are
train.py's, for all runs alike. A finished run is not trained again; one of another losses.py,
verifier or problems is refused, and --force takes it as it is, or continues it.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean

import train
from analysis.__main__ import grouped
from harness import curves, failures
from study.rule import Interval

ROOT = Path(__file__).resolve().parent.parent
refuse = partial(failures.refuse, program="sweep")
OURS = {"--loss", "--lr", "--seed", "--rollouts", "--eval_every", "--out", "--resume"}


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="./run_all.sh sweep", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    flag = parser.add_argument
    flag("method", help="a row of losses.py, or with flags of its own 'fade --alpha_max 2'")
    flag("--baseline", default="grpo", help="what it is compared with, written the same way")
    flag("--rates", help="with commas between; default a third, 1, 3 and 9 times train.py's")
    flag("--seeds", type=int, choices=range(2, 11), default=4, metavar="N", help="from 2 to 10")
    flag("--rollouts", type=int, default=16, help="of each run")
    flag("--jobs", type=int, default=2, help="runs at a time")
    flag("--out", type=Path, default=Path("runs/sweep"), help="the folder of the runs' folders")
    flag("--force", action="store_true", help="train.py's, for all runs")
    flag("--dry_run", action="store_true", help="print the commands and stop")
    args, args.more = parser.parse_known_args(argv)
    if taken := OURS & {text.split("=")[0] for text in args.more}:
        refuse(f"{min(taken)} is no flag for all runs alike; the sweep has --rates, --seeds, "
               "--rollouts and --out")
    if args.method.split() == args.baseline.split():
        refuse(f"{args.method} is the --baseline, too: give another")
    if args.rates is None:
        lr = train.parse_args([*args.more, "--loss", args.method.split()[0]])[0].lr
        args.rates = ",".join(f"{lr * x:.2g}" for x in (1 / 3, 1, 3, 9))
    return args


def flags_of(args, method, rate, seed):
    rollouts = str(args.rollouts)
    return ["--loss", *method.split(), *args.more, "--lr", rate, "--seed", str(seed),
            "--rollouts", rollouts, "--eval_every", rollouts]


def command(args, method, rate, seed):
    """-> the command of a run, and its folder; other flags have another"""
    name = " ".join([method, *args.more, str(args.rollouts), "lr", rate, str(seed)])
    out = args.out / re.sub(r"[^\w.]+", "-", name)
    return ["train.py", *flags_of(args, method, rate, seed), "--out", str(out), "--resume",
            *["--force"] * args.force], out


def train_all(args, plan):
    """Trains each (method, rate, seed), --jobs at a time. -> {it: its held-out mean@n}"""
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.jobs)), **os.environ}

    def run(setting):
        argv, out = command(args, *setting)
        done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=env, capture_output=True,
                              text=True)  # of a finished run it compares, and trains nothing
        if done.returncode:
            return (done.stderr.strip() or f"ended with code {done.returncode}").splitlines()[-1]
        for line in re.findall("resuming, but .*", done.stdout):  # --force: an older run's score
            print(f"{out.name}: {line}")
        return curves.read(out)["records"][-1]["mean@n"]
    scores = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for (method, rate, seed), score in zip(plan, pool.map(run, plan)):
            print(f"{method}, lr {rate}, seed {seed}: {score}", flush=True)
            scores[method, rate, seed] = score
    if any(isinstance(score, str) for score in scores.values()):
        sys.exit("sweep: runs have failed; the same command trains these alone, another --out all")
    return scores


def main(argv=None):
    args = parse_args(argv)
    args.out = args.out.resolve()
    methods, rates = (args.method, args.baseline), args.rates.split(",")
    search = [(method, rate, 0) for rate in rates for method in methods]
    for setting in search:  # a wrong flag is said before a run
        train.parse_args(flags_of(args, *setting))
    best = dict.fromkeys(methods, "BEST")
    if not args.dry_run:
        scores = train_all(args, search)
        for method in methods:
            best[method] = max(rates, key=lambda rate: scores[method, rate, 0])
            if best[method] in (min(rates, key=float), max(rates, key=float)):
                print(f"{method}: {best[method]} is at the end of the --rates; try some beyond")
    plan = [(method, best[method], n + 1) for n in range(args.seeds) for method in methods]
    if args.dry_run:
        print(*(f"python {shlex.join(command(args, *s)[0])}" for s in search + plan), sep="\n")
        return
    scores = [*train_all(args, plan).values()]
    mine, theirs = scores[::2], scores[1::2]
    gap = Interval.of(a - b for a, b in zip(mine, theirs, strict=True))
    low, high = gap.ends()
    print(f"{args.method} {fmean(mine):.3f}, {args.baseline} {fmean(theirs):.3f}: held-out mean@n "
          f"after {args.rollouts} rollouts\ndifference {gap.mean:+.3f}, 95% interval {low:+.3f} to "
          f"{high:+.3f} over {gap.n} seeds")
    curves.draw_curves(grouped(curves.read(command(args, *s)[1]) for s in plan),
                       args.out / "sweep.png")
    print(f"written: {args.out / 'sweep.png'}")


if __name__ == "__main__":
    main()

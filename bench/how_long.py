"""How long a grid of runs will take, from a few rollouts of its first runs.

    python bench/how_long.py --runs 225 --jobs 2 --rollouts 20 --eval_every 20 RUN...
"""

import argparse
import json
import os
import statistics
from pathlib import Path

IMPORTS = 10  # seconds before config.json is there


def seconds_of(run):
    """-> seconds of a rollout, of an evaluation, and of all else in a run without evaluations."""
    flags = json.loads((run / "config.json").read_text())["flags"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sampling = max(record.get("time/sample", 0) for record in records[1:])
    completions = flags["problems_per_rollout"] * flags["group_size"]
    evaluation = sampling * flags["eval_problems"] * flags["eval_samples"] / completions
    wall = os.path.getmtime(run / "curves.png") - os.path.getctime(run / "config.json")
    rest = wall - sum(record["time/rollout"] for record in records) + IMPORTS
    return records[-1]["time/rollout"], evaluation, rest


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, required=True, help="runs that are left")
    parser.add_argument("--jobs", type=int, required=True, help="runs at a time")
    parser.add_argument("--rollouts", type=int, required=True, help="rollouts of a run")
    parser.add_argument("--eval_every", type=int, required=True)
    parser.add_argument("timed", nargs="+", type=Path, help="folders of the runs that were timed")
    args = parser.parse_args()
    rollout, evaluation, rest = map(statistics.mean, zip(*map(seconds_of, args.timed), strict=True))
    evaluations = 1 + args.rollouts // args.eval_every
    run = rest + args.rollouts * rollout + evaluations * evaluation
    print(f"{args.runs} runs of {args.rollouts} rollouts, {args.jobs} at a time: about "
          f"{args.runs * run / args.jobs / 3600:.1f} hours ({rollout:.1f} s a rollout, "
          f"{evaluation:.0f} s an evaluation; benchmarks not counted)")


if __name__ == "__main__":
    main()

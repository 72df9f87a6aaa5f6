"""Seconds per rollout on one rank and on two, by phase, the same work: what the second rank saves,
and what it costs.

    python bench/scaling.py [--ranks 2] [--threads 1]

On a CPU every rank has --threads threads, so that two ranks have twice the processor; on GPUs each
has its own. Other flags are train.py's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PHASES = ("sample", "logp", "update", "sync", "rollout")


def seconds_of(ranks, args, flags):
    """-> the median seconds of each phase of a run on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={ranks}", "train.py", f"--rollouts={args.rollouts}",
             "--eval_every=0", "--save_every=0", f"--out={folder}/run", *flags],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=dict(os.environ, OMP_NUM_THREADS=str(args.threads)))
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[2:]]
    return {name: statistics.median(r[f"time/{name}"] for r in records) for name in PHASES}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    args, flags = parser.parse_known_args()
    turns = [(seconds_of(1, args, flags), seconds_of(args.ranks, args, flags))
             for _ in range(args.turns)]
    print(f"medians of {args.turns} turns: s on 1 rank, on {args.ranks}, and 1 over {args.ranks}")
    for name in PHASES:
        one, many = ([phases[name] for phases in side] for side in zip(*turns, strict=True))
        ratios = [a / b for a, b in zip(one, many, strict=True)]
        print(f"{name:8} {statistics.median(one):.3f} {statistics.median(many):.3f} "
              f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

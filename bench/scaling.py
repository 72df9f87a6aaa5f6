"""Seconds per rollout on one rank and on two, by phase, the same work: what the second rank saves,
and what it costs.

    python bench/scaling.py [--ranks 2] [--threads 1]

On a CPU every rank has --threads threads, so that two ranks have twice the processor; on GPUs each
has its own.
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    args, flags = parser.parse_known_args()
    found = {1: [], args.ranks: []}
    for _ in range(args.turns):
        for ranks in found:
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--standalone",
                        "--nproc_per_node",
                        str(ranks),
                        "train.py",
                        "--rollouts",
                        str(args.rollouts),
                        "--eval_every",
                        "0",
                        "--save_every",
                        "0",
                        "--out",
                        folder + "/run",
                        *flags,
                    ],
                    cwd=ROOT,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=dict(os.environ, OMP_NUM_THREADS=str(args.threads)),
                )
                records = [
                    json.loads(line)
                    for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
                ][2:]
                found[ranks].append(
                    {name: statistics.median(r[f"time/{name}"] for r in records) for name in PHASES}
                )
    for ranks, turns in found.items():
        print(
            f"{ranks} rank(s): "
            + ", ".join(
                f"{name} {statistics.median(t[name] for t in turns):.3f}" for name in PHASES
            )
            + " s"
        )
    ratios = {
        name: [a[name] / b[name] for a, b in zip(found[1], found[args.ranks])] for name in PHASES
    }
    print(
        f"1 over {args.ranks}: "
        + ", ".join(f"{name} {statistics.median(r):.2f}" for name, r in ratios.items())
        + f"  (turns, rollout: {', '.join(f'{r:.2f}' for r in ratios['rollout'])})"
    )


if __name__ == "__main__":
    main()

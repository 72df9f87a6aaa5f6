"""Kills a run at random moments and resumes it each time: does it end as the run that nothing
interrupted?

    python bench/kill.py                         20 SIGKILLs over 30 rollouts of fade, with vLLM
    python bench/kill.py --ranks 2 --loss grpo   under torchrun; all its processes are killed
    python bench/kill.py --disks 64k 11m 35m     full disks in place of the kills, as root

Compared are the final weights, bit for bit, metrics.jsonl but for what a clock measured, and
samples.jsonl.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEASURED = ("time/", "perf/", "seconds", "grader/seconds")


def start(args, out):
    script = [
        str(ROOT / "train.py"),
        "--loss",
        args.loss,
        "--rollouts",
        str(args.rollouts),
        "--problems_per_rollout",
        "16",
        "--save_every",
        "1",
        "--eval_every",
        "10",
        "--eval_problems",
        "32",
        "--sampler",
        args.sampler,
        "--out",
        str(out),
        "--resume",
    ]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        if args.ranks > 1
        else []
    )
    return subprocess.Popen(
        [sys.executable, *launcher, *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(os.environ, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // args.ranks))),
    )


def ending(out):
    rows = [
        {k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)}
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    last = max((out / "checkpoints").glob("rollout_*"))
    return (
        (last / "model.safetensors").read_bytes(),
        rows,
        (out / "samples.jsonl").read_text(),
        last.name,
    )


def fill(args, whole, disk, size):
    """Fills a disk with a run, resumes it with room. Is its end that of the folder whole?"""
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        process = start(args, disk / "run")
        told = process.communicate()[0].decode().strip()
        print(f"{size}: exit code {process.returncode}, {told.splitlines()[-1]}")
        subprocess.run(["mount", "-o", "remount,size=2g", disk], check=True)
        process = start(args, disk / "run")
        after = process.communicate()[0].decode()
        if process.returncode:
            sys.exit(after[-3000:])
        same = ending(whole) == ending(disk / "run")
        print(f"{size}: resumed with room, all identical: {same}", flush=True)
        return same and "Traceback" not in told
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--loss", default="fade")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sampler", default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disks", nargs="+", metavar="SIZE")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, out = Path(folder, "whole"), Path(folder, "killed")
        process = start(args, whole)
        told, _ = process.communicate()
        if process.returncode:
            sys.exit(told.decode()[-3000:])
        if args.disks:
            sys.exit(not all([fill(args, whole, Path(folder, size), size) for size in args.disks]))
        once = (
            json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
            / args.rollouts
        )  # of one rollout
        log, last = out / "metrics.jsonl", []

        def logged():
            return log.read_text().count("\n") if log.exists() else 0

        for _ in range(args.kills):
            process, first = start(args, out), logged()
            for _ in range(
                rng.choice([0, 1, 1, 2])
            ):  # records that it may still write; none: killed while it starts
                while process.poll() is None and logged() == first:
                    time.sleep(0.01)
                first = logged()
            time.sleep(rng.uniform(0, 1) * once)
            if process.poll() is not None:
                if process.returncode:
                    sys.exit(process.stdout.read().decode()[-3000:])
                break  # it got to the end
            subprocess.run(
                ["pkill", "-KILL", "-f", str(out)], check=True
            )  # torchrun's workers have sessions of their own
            process.communicate()
            last.append(logged() - 1)
        process = start(args, out)
        told, _ = process.communicate()
        if process.returncode:
            sys.exit(told.decode()[-3000:])
        (a, b, c, name), (d, e, f, other) = ending(whole), ending(out)
        print(
            f"{args.loss}, {args.ranks} rank(s), {args.sampler}: {len(last)} kills, last logged "
            f"rollouts {last}"
        )
        print(
            f"final weights identical: {a == d}; metrics.jsonl: {b == e}; "
            f"samples.jsonl: {c == f}; both end with {name}: {name == other}"
        )
        sys.exit(not (a == d and b == e and c == f and name == other))


if __name__ == "__main__":
    main()

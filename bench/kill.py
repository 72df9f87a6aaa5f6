"""Kills a run at random moments and resumes it each time: does it end as the run that nothing
interrupted?

    python bench/kill.py                         20 SIGKILLs over 30 rollouts of fade, with vLLM
    python bench/kill.py --ranks 2 --loss grpo   under torchrun; all its processes are killed
    python bench/kill.py --disks 64k 11m 35m     full disks in place of the kills, as root

Other flags are train.py's. Compared are the final weights, bit for bit, metrics.jsonl but for what
a clock measured, and samples.jsonl.
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
MEASURED = "time/", "perf/", "seconds"


def start(args, out):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    flags = [f"--loss={args.loss}", f"--rollouts={args.rollouts}", f"--sampler={args.sampler}",
             "--problems_per_rollout=16", "--save_every=1", "--eval_every=10", "--eval_problems=32",
             *args.given, f"--out={out}", "--resume"]
    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    return subprocess.Popen(
        [sys.executable, *launcher * (args.ranks > 1), str(ROOT / "train.py"), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=dict(os.environ, OMP_NUM_THREADS=str(threads)))


def finish(process):
    """Waits for a run; ends with its last words where it failed."""
    said = process.communicate()[0]
    if process.returncode:
        sys.exit(said[-3000:])


def ending(out):
    last = max((out / "checkpoints").glob("rollout_*"))
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {"weights": (last / "model.safetensors").read_bytes(), "last checkpoint": last.name,
            "samples.jsonl": (out / "samples.jsonl").read_text(),
            "metrics.jsonl": [{k: v for k, v in record.items() if not k.startswith(MEASURED)}
                              for record in records]}


def fill(args, whole, disk, size):
    """Fills a disk with a run, resumes it with room. Is its end that of the folder whole?"""
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        process = start(args, disk / "run")
        said = process.communicate()[0].strip()
        print(f"{size}: exit code {process.returncode}, {said.splitlines()[-1]}")
        subprocess.run(["mount", "-o", "remount,size=2g", disk], check=True)
        finish(start(args, disk / "run"))
        same = ending(whole) == ending(disk / "run")
        print(f"{size}: resumed with room, all identical: {same}", flush=True)
        return same and "Traceback" not in said
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def kill(args, out, seconds):
    """Kills the run --kills times -> the last rollout in the log each time. seconds: of one."""
    rng, log, last = random.Random(args.seed), out / "metrics.jsonl", []

    def logged():
        return log.read_text().count("\n") if log.exists() else 0
    for _ in range(args.kills):
        process, first = start(args, out), logged()
        # records that it may still write; none: killed while it starts
        for _ in range(rng.choice([0, 1, 1, 2])):
            while process.poll() is None and logged() == first:
                time.sleep(0.01)
            first = logged()
        time.sleep(rng.uniform(0, 1) * seconds)
        if process.poll() is not None:  # it got to the end
            finish(process)
            break
        # by its folder: torchrun's workers have sessions of their own
        subprocess.run(["pkill", "-KILL", "-f", str(out)], check=True)
        process.communicate()
        last.append(logged() - 1)
    finish(start(args, out))
    return last


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--loss", default="fade")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sampler", default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disks", nargs="+", metavar="SIZE")
    args, args.given = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, out = Path(folder, "whole"), Path(folder, "killed")
        finish(start(args, whole))
        if args.disks:
            sys.exit(not all([fill(args, whole, Path(folder, size), size) for size in args.disks]))
        record = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
        last = kill(args, out, record["seconds"] / args.rollouts)
        print(f"{args.loss}, {args.ranks} rank(s), {args.sampler}: {len(last)} kills, last logged "
              f"rollouts {last}")
        wanted, found = ending(whole), ending(out)
        same = {name: wanted[name] == found[name] for name in wanted}
        print("identical: " + ", ".join(f"{name} {value}" for name, value in same.items()))
        sys.exit(not all(same.values()))


if __name__ == "__main__":
    main()

"""Figures and tables from the runs' metrics.jsonl.

    python analyze.py curves runs/fade-16-0 runs/grpo-16-0 --out curves.png
    python analyze.py table runs/*
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend first: there may be no screen)

PANELS = [("mean@n", "held-out mean@n"), ("pass@n", "held-out pass@n"), ("reward/mean", "reward"),
          ("policy/entropy", "entropy (nats)"), ("clip/frac", "share of tokens clipped"), ("policy/kl_old", "KL within the rollout")]


def read(run):
    """The records of a run, in order. "mean@n" and "pass@n" stand in them for the largest n that was evaluated."""
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    for record in records:
        for name in [k for k in record if "@" in k]:  # in the order of n
            record[name.split("/")[-1].split("@")[0] + "@n"] = record[name]
    return records


def curves(runs, out):
    """The run of a few numbers over the rollouts, a line for each run."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    for run in runs:
        records = read(run)
        for axis, (name, label) in zip(axes.flat, PANELS):
            points = [(r["rollout"], r[name]) for r in records if r.get(name) is not None]
            axis.plot(*zip(*points), marker="." if "@" in name else None, label=Path(run).name)
            axis.set(xlabel="rollout", ylabel=label)
            axis.grid(alpha=0.3)
    axes.flat[2].legend(fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def table(runs, out):
    """A line for each method and steps per rollout: at the end of the runs, means over seeds with the least and most."""
    groups = {}
    for run in runs:
        flags = json.loads(Path(run, "config.json").read_text())["flags"]
        groups.setdefault((flags["loss"], flags["steps_per_rollout"]), []).append(read(run))

    def cell(values):
        middle = f"{sum(values) / len(values):.3f}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.3f}-{max(values):.3f})"
    lines = ["| method | steps | seeds | mean@n | pass@n | entropy | clipped | s/rollout |", "|---|---|---|---|---|---|---|---|"]
    for (loss, steps), members in groups.items():
        last = [records[-1] for records in members]
        columns = [[r[name] for r in last] for name in ("mean@n", "pass@n", "policy/entropy")]
        columns += [[sum(r["clip/frac"] for r in records[1:]) / len(records[1:]) for records in members],
                    [sorted(r["time/rollout"] for r in records[1:])[len(records) // 2] for records in members]]
        lines.append(f"| {loss} | {steps} | {len(members)} | " + " | ".join(map(cell, columns)) + " |")
    Path(out).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "table"))
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", help="the file to write (curves.png, table.md)")
    args = parser.parse_args()
    if missing := [run for run in args.runs if not Path(run, "metrics.jsonl").exists()]:
        sys.exit(f"analyze.py: {missing[0]} holds no run: it has no metrics.jsonl")
    if args.what == "curves":
        curves(args.runs, args.out or "curves.png")
    else:
        table(args.runs, args.out or "table.md")

"""Figures and tables from the runs' metrics.jsonl.

    python analyze.py curves runs/fade-16-0 runs/grpo-16-0 --out curves.png
    python analyze.py table runs/*
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend first: there may be no screen)

PANELS = [("mean@n", "held-out mean@n"), ("pass@n", "held-out pass@n"), ("reward/mean", "reward"),
          ("policy/entropy", "entropy (nats)"), ("clip/frac", "share of tokens clipped"), ("policy/kl_old", "KL within the rollout")]


def read(run):
    """The records of a run, in order, a last line that was cut off left out. "mean@n" and "pass@n" stand in them for
    the largest n that was evaluated."""
    lines = Path(run, "metrics.jsonl").read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines]
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


def pass_at_k_curves(results, out):
    """results: {name: {k: pass@k}}; k on a logarithmic axis."""
    figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for name, curve in results.items():
        axis.plot(*zip(*curve.items()), marker=".", label=name)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="k", ylabel="pass@k", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def table(runs, out):
    """A line for each method and steps per rollout (and what else differs): at the end of the runs, means over seeds with
    the least and most."""
    groups = {}
    for run in runs:
        flags = json.loads(Path(run, "config.json").read_text())["flags"]
        groups.setdefault(json.dumps({k: v for k, v in flags.items() if k not in ("seed", "out")}), []).append((flags, read(run)))

    def cell(values):
        values = [v for v in values if v is not None]
        if not values:
            return "-"
        middle = f"{statistics.mean(values):.3f}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.3f}-{max(values):.3f})"
    lines = ["| method | steps | seeds | mean@n | pass@n | entropy | clipped | s/rollout |", "|---|---|---|---|---|---|---|---|"]
    for members in groups.values():
        rollouts = [[r for r in records if r["rollout"]] for _, records in members]
        ends = [[next((r[name] for r in reversed(records) if r.get(name) is not None), None) for _, records in members]
                for name in ("mean@n", "pass@n", "policy/entropy")]
        over = [[f([r[name] for r in records if r.get(name) is not None] or [math.nan]) for records in rollouts]
                for f, name in ((statistics.mean, "clip/frac"), (statistics.median, "time/rollout"))]
        lines.append(f"| {members[0][0]['loss']} | {members[0][0]['steps_per_rollout']} | {len(members)} | " + " | ".join(map(cell, ends + over)) + " |")
    Path(out).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "table"))
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", help="the file to write (curves.png, table.md)")
    args = parser.parse_args()
    args.runs = [run for run in args.runs if Path(run).is_dir() or not Path(run).exists()]  # runs/* has figures too
    if missing := [run for run in args.runs if not (Path(run, "metrics.jsonl").exists() and Path(run, "config.json").exists())]:
        sys.exit(f"analyze.py: {missing[0]} holds no run: it has no metrics.jsonl and config.json")
    if args.what == "curves":
        curves(args.runs, args.out or "curves.png")
    else:
        table(args.runs, args.out or "table.md")

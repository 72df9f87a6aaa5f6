"""Figures and tables from the runs' metrics.jsonl.

    python analyze.py curves runs/fade-16-0 runs/grpo-16-0 --out curves.png
    python analyze.py table runs/*
    python analyze.py replay runs/fade-16-0/rollouts/rollout_000008.pt --model runs/fade-16-0/checkpoints/rollout_000008
"""

import argparse
import json
import math
import pickle
import statistics
import sys
from pathlib import Path

import matplotlib
import torch

import parallel
import policy
from losses import AXES, METHODS, group_advantages, row

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


def replay(path, out, model=None, methods=None):
    """The gradients of the methods on one rollout that --save_rollouts kept, all of it as one optimizer step: loss, gradient
    norm, clip fraction of each (its flags at their defaults, the run's own method with the run's), and the cosine between
    every two.

    model: a checkpoint before the rollout was learnt from gives ratios of 1, a later one spreads them. Default: the
    model that the run began with."""
    saved = torch.load(path, map_location=parallel.device(), weights_only=False)
    flags, whole = saved["flags"], policy.Batch(**saved["batch"])
    probe = whole.rows(torch.arange(4) % len(whole.ids))
    chosen = policy.load(model or flags["model"], None, probe, budget=flags["tokens_per_micro_batch"], temperature=flags["temperature"],
                         dtype=flags["dtype"])
    gradients, table_rows = {}, {}
    for name in methods or METHODS:
        own = name == flags["loss"]
        method = row(name, **{axis: flags[axis] for axis in AXES if own})
        hp = saved["hp"] if own else method.flags
        try:
            advantages = group_advantages(method, saved["rewards"], dict(saved["state"]), **hp)
        except ValueError as e:
            print(f"{name} is left out: {e}")
            continue
        whole.advantages = advantages.view(-1, 1).expand(whole.mask.shape)
        chosen.zero_grad()
        told = [policy.backward(chosen, whole, method, hp, flags["max_tokens"], only) for only in method.passes]
        gradients[name] = torch.cat([p.grad.flatten().cpu() for p in chosen.parameters()])
        table_rows[name] = dict(loss=sum(t["loss"].item() for t in told), grad_norm=gradients[name].norm().item(),
                          **{k: statistics.mean(t[k].item() for t in told) for k in ("clip_frac", "approx_kl", "ess")})
    names = list(table_rows)
    def dot(a, b):  # a float32 sum over all parameters is off by 1e-4 and more
        return (gradients[a] * gradients[b]).sum(dtype=torch.float64)
    cosine = [[(dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).item() for b in names] for a in names]
    Path(out).with_suffix(".json").write_text(json.dumps(dict(rollout=saved["rollout"], model=str(model or flags["model"]), methods=table_rows, cosine=cosine), indent=1))
    print("| method | loss | gradient norm | clipped | KL | ess |\n|---|---|---|---|---|---|")
    for name, told in table_rows.items():
        print(f"| {name} | {told['loss']:.4g} | {told['grad_norm']:.4g} | {told['clip_frac']:.4f} | {told['approx_kl']:.4g} | {told['ess']:.4f} |")
    figure, axis = plt.subplots(figsize=(1.5 + 0.45 * len(names),) * 2, layout="constrained")
    axis.imshow(cosine, vmin=-1, vmax=1, cmap="RdBu")
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    for i, line in enumerate(cosine):
        for j, value in enumerate(line):
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="white" if abs(value) > 0.6 else "black")
    axis.set_title(f"cosine of the gradients, rollout {saved['rollout']}", fontsize=9)
    figure.savefig(out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "table", "replay"))
    parser.add_argument("paths", nargs="+", help="folders of runs; for replay, one rollout's file")
    parser.add_argument("--out", help="the file to write (curves.png, table.md, replay.png with replay.json)")
    parser.add_argument("--model", help="replay: the model to take gradients at")
    parser.add_argument("--methods", help="replay: names with commas between; default all")
    args = parser.parse_args()
    if args.what == "replay":
        methods = args.methods.split(",") if args.methods else None
        if unknown := set(methods or ()) - set(METHODS):
            sys.exit(f"analyze.py: --methods: no such method: {', '.join(unknown)}; there are {', '.join(METHODS)}")
        try:
            replay(args.paths[0], args.out or "replay.png", args.model, methods)
        except (OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError, RuntimeError) as e:
            sys.exit(f"analyze.py: {args.paths[0]} or the model cannot be used: {(str(e) or type(e).__name__).splitlines()[0]}")
        sys.exit()
    if args.model or args.methods:
        sys.exit("analyze.py: --model and --methods are for replay")
    runs = [run for run in args.paths if Path(run).is_dir() or not Path(run).exists()]  # runs/* has figures too
    if missing := [run for run in runs if not (Path(run, "metrics.jsonl").exists() and Path(run, "config.json").exists())]:
        sys.exit(f"analyze.py: {missing[0]} holds no run: it has no metrics.jsonl and config.json")
    if args.what == "curves":
        curves(runs, args.out or "curves.png")
    else:
        table(runs, args.out or "table.md")

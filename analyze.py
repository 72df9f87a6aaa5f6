"""Tables, figures and the anatomy of updates, from the folders of runs and from kept rollouts.

    python analyze.py curves runs/*                       a few numbers over the rollouts
    python analyze.py table runs/*                        a line for each method, with intervals over seeds
    python analyze.py passk runs/*                        pass@k before and after
    python analyze.py fade runs/*                         gradient masses, controllers, entropy, rank of the head's change
    python analyze.py p3o runs/*                          effective sample size, capped tokens, KL within a rollout
    python analyze.py keep runs/* --out results.jsonl     the runs' numbers in one small file, which all of these read too

    python train.py --loss grpo --rollouts 1 --save_rollouts --eval_every 0 --out runs/kept
    python analyze.py steps runs/kept/rollouts/rollout_000001.pt      ratios, gradient sizes and clipping, step by step
    python analyze.py subsets runs/kept/rollouts/rollout_000001.pt    which tokens make the gradient, and its direction
    python analyze.py entropy runs/kept/rollouts/rollout_000001.pt    predicted against measured change of entropy
    python analyze.py replay runs/kept/rollouts/rollout_000001.pt     the gradients of all methods on one rollout
    python analyze.py theory                                          ACPO's Proposition 1 against a Monte Carlo

A rollout can be looked at with any Hugging Face model: --model, by default the one that its run began with; for a later rollout
that should be the checkpoint before it. Runs whose flags differ in nothing but the seed are one line.
"""

import argparse
import fnmatch
import json
import math
import pickle
import statistics
import sys
from pathlib import Path

import torch

import anatomy
import figures
import log
from eval import interval
from losses import METHODS, gradient_mass, group_advantages, row

# what `keep` keeps of a record, and of its optimizer steps
KEPT = ("eval/", "reward/mean", "policy/entropy", "policy/kl_old", "policy/ess", "clip/frac", "clip/capped_frac", "adv/mass", "adv/fade",
        "optim/head_rank1_share", "sampler/logp_absdiff_mean", "time/rollout")
PROFILE = ("policy/ess", "policy/kl_old", "policy/bin_frac/", "clip/frac", "clip/capped_frac", "clip/range/")


def read(path):
    """The runs of a path: a run's folder, or a file that `keep` wrote. Each is a dict: name (the folder's, less the seed), seed,
    flags, records (of the rollouts, in order, a last line that was cut off left out) and profile (the optimizer steps of a rollout,
    means over the rollouts). "mean@n" and "pass@n" stand in a record for the largest n that was evaluated."""
    path = Path(path)
    if path.is_file():
        runs = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        flags = json.loads((path / "config.json").read_text())["flags"]
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().split("\n")[:-1]]
        runs = [dict(name=path.name.removesuffix(f"-{flags['seed']}"), seed=flags["seed"], flags=flags, records=records, profile=profile(records))]
    for record in (r for run in runs for r in run["records"]):
        for name in [k for k in record if "@" in k]:  # in the order of n
            record[name.split("/")[-1].split("@")[0] + "@n"] = record[name]
    return runs


def profile(records):
    """[{step, metric: mean over the rollouts}] of the optimizer steps within a rollout."""
    steps = [r["steps"] for r in records if r.get("steps")]
    found = []
    for i in range(min(map(len, steps), default=0)):
        names = [k for k in steps[0][i] if k.startswith(PROFILE)]
        means = {k: statistics.fmean(s[i][k] for s in steps if s[i].get(k) is not None) for k in names if any(s[i].get(k) is not None for s in steps)}
        means["share"] = means.get("clip/frac", 0) + means.get("clip/capped_frac", 0)
        found.append(dict(step=i + 1, **means))
    return found


def grouped(runs):
    """{label: [run]}: runs with the same flags but for the seed, in the order given; a label that is taken gets a number."""
    same = {}
    for run in runs:
        same.setdefault(json.dumps({k: v for k, v in run["flags"].items() if k not in ("seed", "out")}), []).append(run)
    groups = {}
    for members in same.values():
        label = members[0]["name"]
        groups[label if label not in groups else f"{label} ({len(groups) + 1})"] = members
    return groups


def bootstrap(values):
    """-> mean, low, high of one value per seed, by eval.interval."""
    return statistics.fmean(values), *interval(values, draws=10_000)


def last(run, name):
    """The run's last value of a metric, None where there is none. What the base scored before training is no result of the run."""
    return next((r[name] for r in reversed(run["records"]) if r["rollout"] and r.get(name) is not None), None)


def average(run, name, f=statistics.fmean):
    """Over its rollouts; None where there is none."""
    values = [r[name] for r in run["records"] if r["rollout"] and r.get(name) is not None]
    return f(values) if values else None


COLUMNS = [("mean@n", lambda run: last(run, "mean@n")), ("pass@n", lambda run: last(run, "pass@n")),
           ("entropy", lambda run: last(run, "policy/entropy")), ("clipped", lambda run: average(run, "clip/frac")),
           ("s/rollout", lambda run: average(run, "time/rollout", statistics.median))]


def cell(values):
    """0.512 (0.496-0.531): the mean and its interval; "-" where there is nothing."""
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    mean, low, high = bootstrap(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ({low:.3f}-{high:.3f})"


def table(runs):
    """A line for each method and steps per rollout (and what else differs): at the end of the runs, means over seeds with 95%
    bootstrap intervals."""
    lines = ["| run | method | steps | rollouts | seeds | " + " | ".join(name for name, _ in COLUMNS) + " |", "|---" * (5 + len(COLUMNS)) + "|"]
    for label, members in grouped(runs).items():
        flags, done = members[0]["flags"], sorted({run["records"][-1]["rollout"] if run["records"] else 0 for run in members})
        lines.append(f"| {label} | {flags['loss']} | {flags['steps_per_rollout']} | {'-'.join(map(str, done[:1] + done[1:][-1:]))} | {len(members)} | "
                     + " | ".join(cell([f(run) for run in members]) for _, f in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def pass_at_k(groups):
    """{label: {k: (pass@k, low, high)}} at the end of the runs, and as "base" (of each model and held-out set) at their beginning."""
    def curve(records):
        found = [{int(k.split("@")[1]): v for k, v in record.items() if "/pass@" in k} for record in records]
        return {k: bootstrap([f[k] for f in found]) for k in found[0] if all(k in f for f in found)} if found else {}
    first, ends = {}, {}
    for label, runs in groups.items():
        evaluated = [[r for r in run["records"] if any("/pass@" in k for k in r)] for run in runs]
        ends[label] = curve([records[-1] for records in evaluated if records and records[-1]["rollout"]])
        for run, records in zip(runs, evaluated):
            if records and records[0]["rollout"] == 0:
                of = " ".join(Path(str(run["flags"].get(k))).name for k in ("model", "data", "eval_data") if run["flags"].get(k))
                first.setdefault(of, []).append(records[0])
    return {**{"base" if len(first) == 1 else f"base {of}": curve(records) for of, records in first.items()}, **ends}


def balanced(mass):
    return lambda p: (mass(p, 1 - p),) * 2


# FADE's gradient masses of a group with solve rate p of binary rewards, for infinitely large groups: p -> m_S, m_F. fade as it
# begins, at a solve rate of 1/2: alpha = 3/2, delta = 1
MASSES = dict(raw=lambda p: (p, 0.0), centred=balanced(lambda p, q: p * q), leave_one_out=balanced(lambda p, q: p * q),
              zscore=balanced(lambda p, q: math.sqrt(p * q)), asym=lambda p: (p * (1 - p), p * (1 - p) / 2),
              power=balanced(lambda p, q: p * q**2), fade=balanced(lambda p, q: p * q**1.5), maxrl=balanced(lambda p, q: q),
              passk=balanced(lambda p, q: p * q**2 / math.sqrt(1 - q**4)))


def masses(size=16):
    """{advantage: theory and measured [(solve rate, m_S, m_F)]}, measured on groups of `size` with 1, 2, ... successes."""
    groups = [torch.tensor([[1.0] * k + [0.0] * (size - k)]) for k in range(1, size)]
    told = {}
    for name, theory in MASSES.items():
        method = row("dr_grpo", advantage=name)
        still = dict(fade_ema=0.0) if "fade_ema" in method.flags else {}
        found = [(r.mean().item(), *gradient_mass(group_advantages(method, r, dict(entropy=1.0), **still))) for r in groups]
        told[name] = dict(theory=[(i / 100, *theory(i / 100)) for i in range(1, 100)], measured=found)
    return told


def rounded(value):
    """To 4 significant digits, in lists and dicts too."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def keep(runs, out):
    """The runs' numbers in one file, a line for each run; of paths only the last part."""
    lines = []
    for run in runs:
        records = [{k: v for k, v in r.items() if (k == "rollout" or k.startswith(KEPT)) and not k.endswith("@n")} for r in run["records"]]
        flags = {k: v for k, v in run["flags"].items() if v is not None and v is not False and k not in ("out", "data_dir")}
        flags["model"] = Path(flags.get("model", "")).name
        lines.append(json.dumps(dict(run, flags=flags, records=rounded(records), profile=rounded(run["profile"]))))
    Path(out).write_text("\n".join(lines) + "\n")


def of_runs(args):
    """Commands on runs."""
    paths = []
    for path in map(Path, args.paths):  # a folder of runs stands for them; figures and logs lie beside runs
        inside = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        paths += inside if inside and not (path / "metrics.jsonl").exists() else [path] if path.suffix not in (".png", ".md", ".log", ".json") else []
    if missing := [p for p in paths if not (p.is_file() or (p / "metrics.jsonl").exists() and (p / "config.json").exists())]:
        sys.exit(f"analyze.py: {missing[0]} holds no run: it has no metrics.jsonl and config.json")
    try:
        runs = [run for path in paths for run in read(path)]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        sys.exit(f"analyze.py: a file of the runs cannot be read: {type(e).__name__}: {e}")
    runs = [run for run in runs if not args.only or any(fnmatch.fnmatch(run["name"], pattern) for pattern in args.only.split(","))]
    if not runs:
        sys.exit(f"analyze.py: no run in {' '.join(args.paths)}" + (f" is named like {args.only}" if args.only else ""))
    out, groups = args.out or dict(table="table.md", keep="runs.jsonl").get(args.what, f"{args.what}.png"), grouped(runs)
    if args.what == "table":
        Path(out).write_text(table(runs))
        print(Path(out).read_text(), end="")
    elif args.what == "keep":
        keep(runs, out)
    elif args.what == "passk":
        results = pass_at_k(groups)
        if not all(results.values()) or len(results) == len(groups):
            sys.exit("analyze.py: passk needs runs that were evaluated at their beginning and end (--eval_every), with some k in common")
        figures.passk(results, out, f"{figures.seeds_of(groups).split(',')[0]}, band: 95% bootstrap interval")
    elif args.what == "fade":
        figures.fade(groups, masses(), out)
    else:
        getattr(figures, args.what)(groups, out)
    print(out)


def of_rollout(args):
    """Commands on a kept rollout, and theory, which needs none."""
    out = Path(args.out or f"{args.what}.png")
    try:
        told = anatomy.COMMANDS[args.what](args)
    except (OSError, EOFError, ValueError, LookupError, TypeError, pickle.UnpicklingError, RuntimeError) as e:
        sys.exit(f"analyze.py: {args.paths[0]} or the model cannot be used: {(str(e) or type(e).__name__).splitlines()[0]}")
    out.with_suffix(".json").write_text(json.dumps(log.numbers(told), indent=1))
    getattr(figures, args.what)(told, out)
    print(anatomy.text(args.what, told))
    print(f"{out} and {out.with_suffix('.json')}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "table", "passk", "fade", "p3o", "keep", *anatomy.COMMANDS))
    parser.add_argument("paths", nargs="*", help="folders of runs, or files of keep; for the anatomy, one rollout's file")
    parser.add_argument("--out", help="the file to write; a rollout's numbers go into a .json beside it")
    parser.add_argument("--only", help="runs: names with commas between, * for anything")
    parser.add_argument("--model", help="rollout: the model to begin with")
    parser.add_argument("--methods", help="replay: names with commas between; default all")
    parser.add_argument("--lr", type=float, help="steps, subsets, entropy: another learning rate than the run's")
    parser.add_argument("--steps", type=int, help="steps: optimizer steps on the rollout; subsets: those before the gradients are taken (default half)")
    parser.add_argument("--layers", type=int, help="subsets: transformer blocks looked at, evenly over the depth (8)")
    parser.add_argument("--k", type=int, help="subsets: dimension of the subspaces; default 128, or an eighth of a smaller matrix")
    args = parser.parse_args(argv)
    own = dict(steps=("model", "lr", "steps"), subsets=("model", "lr", "steps", "layers", "k"), entropy=("model", "lr"),
               replay=("model", "methods"), theory=()).get(args.what, ("only",))
    given = {k: v for k, v in vars(args).items() if v is not None and k not in ("what", "paths", "out")}
    if others := [f"--{k}" for k in given if k not in own]:
        parser.error(f"{', '.join(others)}: not used by {args.what}")
    if low := [f"--{k}" for k in ("lr", "layers", "k", "steps") if given.get(k, 1) <= 0 and (k, args.what) != ("steps", "subsets")]:
        parser.error(f"{', '.join(low)} must be above 0")
    of_one = args.what in anatomy.COMMANDS
    if len(args.paths) != (0 if args.what == "theory" else 1 if of_one else max(1, len(args.paths))):
        parser.error(f"{args.what} takes {'no path' if args.what == 'theory' else 'the file of one rollout' if of_one else 'runs'}")
    if unknown := set((args.methods or "grpo").split(",")) - set(METHODS):
        parser.error(f"--methods: no such method: {', '.join(unknown)}; there are {', '.join(METHODS)}")
    (of_rollout if of_one else of_runs)(args)


if __name__ == "__main__":
    main()

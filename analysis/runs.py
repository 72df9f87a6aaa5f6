"""The numbers of runs: read from folders, grouped over seeds, as a table, kept in one file."""

import json
import statistics
from pathlib import Path

from eval import interval
from experiment.tables import markdown_table

# what `keep` keeps of a record
KEPT = ("eval/", "reward/mean", "policy/entropy", "policy/kl_old", "policy/ess", "clip/frac",
        "clip/capped_frac", "adv/mass", "adv/fade", "optim/head_rank1_share",
        "sampler/logp_absdiff_mean", "time/rollout")
# what a profile has of an optimizer step
PROFILE = ("policy/ess", "policy/kl_old", "policy/bin_frac/", "clip/frac", "clip/capped_frac",
           "clip/range/")


def find_runs(paths):
    """-> the folders of runs, and files of `keep`, that paths stand for: a folder of runs stands
    for all of them. Figures, tables and logs lie beside runs and are left out."""
    found = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        if inside and not (path / "metrics.jsonl").exists():
            found += inside
        elif path.suffix not in (".png", ".md", ".log", ".json"):
            found.append(path)
    return found


def is_run(path):
    """Is it a run's folder, or a file that `keep` may have written?"""
    return path.is_file() or (
        (path / "metrics.jsonl").exists() and (path / "config.json").exists())


def read(path):
    """The runs of a path: a run's folder, or a file that `keep` wrote.

    Each is a dict: name (the folder's, less the seed), seed, flags, records (of the rollouts, in
    order) and profile (the optimizer steps of a rollout, means over the rollouts). "mean@n" and
    "pass@n" stand in a record for the largest n that was evaluated."""
    path = Path(path)
    if path.is_file():
        runs = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        flags = json.loads((path / "config.json").read_text())["flags"]
        # a run that was killed may have cut its last line off: it has no line end
        lines = (path / "metrics.jsonl").read_text().split("\n")[:-1]
        records = [json.loads(line) for line in lines]
        runs = [dict(name=path.name.removesuffix(f"-{flags['seed']}"), seed=flags["seed"],
                     flags=flags, records=records, profile=profile(records))]
    for run in runs:
        for record in run["records"]:
            for name in [k for k in record if "@" in k]:  # in the order of n
                record[name.split("/")[-1].split("@")[0] + "@n"] = record[name]
    return runs


def profile(records):
    """[{step, metric: mean over the rollouts}] of the optimizer steps within a rollout."""
    rollouts = [r["steps"] for r in records if r.get("steps")]
    steps = []
    for i in range(min(map(len, rollouts), default=0)):
        means = {}
        for name in rollouts[0][i]:
            values = [r[i][name] for r in rollouts if r[i].get(name) is not None]
            if name.startswith(PROFILE) and values:
                means[name] = statistics.fmean(values)
        # an objective either clips or caps
        means["share"] = means.get("clip/frac", 0) + means.get("clip/capped_frac", 0)
        steps.append(dict(step=i + 1, **means))
    return steps


def grouped(runs):
    """{label: [run]}: runs whose flags differ in nothing but the seed, in the order given.

    A label that is taken gets a number."""
    by_flags = {}
    for run in runs:
        flags = {k: v for k, v in run["flags"].items() if k not in ("seed", "out")}
        by_flags.setdefault(json.dumps(flags), []).append(run)
    groups = {}
    for members in by_flags.values():
        label = members[0]["name"]
        groups[label if label not in groups else f"{label} ({len(groups) + 1})"] = members
    return groups


def bootstrap(values):
    """-> mean, low, high of one value per seed, by eval.interval."""
    return statistics.fmean(values), *interval(values, draws=10_000)


def last(run, name):
    """The run's last value of a metric, None where there is none.

    What the base scored before training is no result of the run."""
    return next((r[name] for r in reversed(run["records"])
                 if r["rollout"] and r.get(name) is not None), None)


def average(run, name, f=statistics.fmean):
    """The mean of a metric over the run's rollouts, or another f; None where there is none."""
    values = [r[name] for r in run["records"] if r["rollout"] and r.get(name) is not None]
    return f(values) if values else None


# ---------------------------------------------------------------------------- tables

COLUMNS = {"mean@n": lambda run: last(run, "mean@n"),
           "pass@n": lambda run: last(run, "pass@n"),
           "entropy": lambda run: last(run, "policy/entropy"),
           "clipped": lambda run: average(run, "clip/frac"),
           "s/rollout": lambda run: average(run, "time/rollout", statistics.median)}


def cell(values):
    """0.512 (0.496-0.531): the mean and its interval; "-" where there is nothing."""
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    mean, low, high = bootstrap(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ({low:.3f}-{high:.3f})"


def table(runs):
    """A line for each group of runs: what they had at their end, means over seeds with 95%
    bootstrap intervals."""
    rows = []
    for label, members in grouped(runs).items():
        flags = members[0]["flags"]
        done = sorted({run["records"][-1]["rollout"] if run["records"] else 0 for run in members})
        rollouts = str(done[0]) if len(done) == 1 else f"{done[0]}-{done[-1]}"
        rows.append([label, flags["loss"], str(flags["steps_per_rollout"]), rollouts,
                     str(len(members)), *(cell(map(f, members)) for f in COLUMNS.values())])
    head = ("run", "method", "steps", "rollouts", "seeds", *COLUMNS)
    return markdown_table(head, rows) + "\n"


def pass_at_k(groups):
    """{label: {k: (pass@k, low, high)}} at the end of the runs, and as "base" (of each model and
    held-out set) at their beginning."""
    first, results = {}, {}
    for label, runs in groups.items():
        evaluated = [[r for r in run["records"] if any("/pass@" in k for k in r)] for run in runs]
        results[label] = pass_at_k_curve([records[-1] for records in evaluated
                                          if records and records[-1]["rollout"]])
        for run, records in zip(runs, evaluated, strict=True):
            if records and records[0]["rollout"] == 0:
                names = [Path(str(run["flags"].get(k))).name for k in ("model", "data", "eval_data")
                         if run["flags"].get(k)]
                first.setdefault(" ".join(names), []).append(records[0])
    base = {"base" if len(first) == 1 else f"base {names}": pass_at_k_curve(records)
            for names, records in first.items()}
    return {**base, **results}


def pass_at_k_curve(records):
    """{k: (pass@k, low, high)} of one record per seed, for the k that all of them have."""
    curves = [{int(k.split("@")[1]): v for k, v in record.items() if "/pass@" in k}
              for record in records]
    common = [k for k in curves[0] if all(k in curve for curve in curves)] if curves else []
    return {k: bootstrap([curve[k] for curve in curves]) for k in common}


# ---------------------------------------------------------------------------- keep


def rounded(value):
    """To 4 significant digits, in lists and dicts too."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def keep(runs, out):
    """Writes the runs' numbers into one file, a line for each run; of paths only the last part."""
    lines = []
    for run in runs:
        # "mean@n" and "pass@n" are made again by read
        records = [{k: v for k, v in r.items()
                    if k == "rollout" or k.startswith(KEPT) and not k.endswith("@n")}
                   for r in run["records"]]
        flags = {k: v for k, v in run["flags"].items()
                 if v is not None and v is not False and k not in ("out", "data_dir")}
        flags["model"] = Path(flags.get("model", "")).name
        lines.append(json.dumps(dict(run, flags=flags, records=rounded(records),
                                     profile=rounded(run["profile"]))))
    Path(out).write_text("\n".join(lines) + "\n")

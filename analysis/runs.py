"""The numbers of runs: read from their folders, grouped over seeds, as a table and as pass@k."""

import json
import re
import statistics
import sys
from math import nan
from operator import itemgetter
from pathlib import Path

from harness.stats import interval
from harness.tables import markdown_table

NORMAL = 1.96  # standard errors to either side of a 95% interval


# ---------------------------------------------------------------------------- reading

def read(path):
    """[the run] of a folder of train.py: a dict of its name (the folder's, less the seed), seed,
    flags, records (of the rollouts, in order) and steps (records of the optimizer steps). A
    record's "mean@n" and "pass@n" are those of the largest n, with their standard errors,
    "mean@n_stderr" and "pass@n_stderr"."""
    path = Path(path)
    flags = json.loads((path / "config.json").read_text())["flags"]
    # a run that was killed may have cut its last line off: it has no line end
    lines = (path / "metrics.jsonl").read_text().split("\n")[:-1]
    records = list(map(json.loads, lines))
    for record in records:
        for kind in ("mean", "pass"):
            if names := scores(record, kind):
                name = names[max(names)]
                record.update({f"{kind}@n": record[name],
                               f"{kind}@n_stderr": record.get(f"{name}_stderr")})
    steps = [dict(step, step=i) for record in records
             for i, step in enumerate(record.get("steps", ()), 1)]
    name = path.resolve().name.removesuffix(f"-{flags['seed']}")
    return [dict(name=name, seed=flags["seed"], flags=flags, records=records, steps=steps)]


def scores(record, kind):
    """{n: name} of a record's scores, as {16: "eval/countdown/mean@16"}."""
    found = (re.fullmatch(rf"eval/.+/{kind}@(\d+)", name) for name in record)
    return {int(match[1]): match[0] for match in found if match}


# ---------------------------------------------------------------------------- over seeds

def grouped(runs):
    """{label: [run]}: runs whose flags differ in no more than seed and folder, in their order; of
    each seed the longest, of equally long ones the last. A second such label gets a number."""
    by_flags, groups = {}, {}
    for run in runs:
        # the last goes by a machine's memory
        flags = dict(run["flags"], seed=None, out=None, tokens_per_micro_batch=None)
        seeds = by_flags.setdefault(json.dumps(flags), {})
        if run["seed"] in seeds:
            print(f"analysis: {run['name']} (seed {run['seed']}) is given twice; a seed of a "
                  "setting counts once, by its longest run", file=sys.stderr)
        same = run, seeds.get(run["seed"], run)
        seeds[run["seed"]] = max(same, key=lambda run: len(run["records"]))
    for seeds in by_flags.values():
        label = next(iter(seeds.values()))["name"]
        groups[label if label not in groups else f"{label} ({len(groups) + 1})"] = [*seeds.values()]
    return groups


def over(records, name, ends):
    """-> mean, low, high of a metric: low and high are ends(values), of one record NORMAL standard
    errors over the problems to either side, or nan where none was logged."""
    values = [record[name] for record in records]
    low, high = ends(values)
    if len(values) == 1:
        error = records[0].get(f"{name}_stderr")
        half = nan if error is None else NORMAL * error
        low, high = low - half, high + half
    return statistics.fmean(values), low, high


def values(run, name):
    """A metric's values over the rollouts; the base's score before training is none of them."""
    return [r[name] for r in run["records"] if r["rollout"] and r.get(name) is not None]


last = itemgetter(-1)
# column: metric, and its number of a run from the values over the rollouts
COLUMNS = {"mean@n": ("mean@n", last), "pass@n": ("pass@n", last),
           "entropy": ("policy/entropy", last), "clipped": ("clip/frac", statistics.fmean),
           "s/rollout": ("time/rollout", statistics.median)}

# the console has it under the table
NOTES = """\
mean@n: share of right completions of the held-out problems. pass@n: share of the problems of which
at least one in n completions is right. Both are of the last evaluation, and compare only where
"held out", the problems x n, is the same. entropy: of the last rollout, in nats per token. clipped:
mean share of tokens that the clip took the gradient from. s/rollout: median of the seconds.
In brackets: 95% bootstrap interval over the seeds, too narrow with fewer than five seeds; of one
seed there is none, and another seed may order the lines otherwise.
Look at mean@n and pass@n together: where the first rises and the second falls, training has made
the model surer, not more able.
"""


def cell(found):
    """0.512 (0.496-0.531): the mean over seeds and its interval; "-" without a value."""
    if not found:
        return "-"
    mean, (low, high) = statistics.fmean(found), interval(found)
    return f"{mean:.3f}" if len(found) == 1 else f"{mean:.3f} ({low:.3f}-{high:.3f})"


def table(groups):
    """A line for each group of runs: numbers at the end, means over seeds with 95% intervals."""
    rows = []
    for label, members in groups.items():
        flags = members[0]["flags"]
        done = [max((record["rollout"] for record in run["records"]), default=0) for run in members]
        held_out = f"{Path(flags['eval_data'] or flags['data']).name}, " \
                   f"{flags['eval_problems']} x {flags['eval_samples']}"
        rows.append([label, flags["loss"], flags["steps_per_rollout"],
                     "-".join(map(str, sorted({min(done), max(done)}))), len(members),
                     held_out if flags["eval_every"] else "-",
                     *(cell([of(x) for run in members if (x := values(run, name))])
                       for name, of in COLUMNS.values())])
    head = ("run", "method", "steps", "rollouts", "seeds", "held out", *COLUMNS)
    return markdown_table(head, rows) + "\n"


def pass_at_k(groups):
    """{label: {k: (pass@k, low, high)}} at the end of the runs, where they were evaluated after
    training, and as "base MODEL DATA" before it, for each seed once. k: those that all seeds have.
    The interval is a bootstrap's over the seeds, of one seed over the problems."""
    before, after = {}, {}
    for label, runs in groups.items():
        for run in runs:
            names = " ".join(filter(None, map(run["flags"].get, ("model", "data", "eval_data"))))
            for record in run["records"]:
                if "pass@n" in record:
                    curves, key = (after, label) if record["rollout"] else (before, f"base {names}")
                    curves.setdefault(key, {})[run["seed"]] = record
    return {label: {k: over(records, name, interval)
                    for k, name in scores(records[0], "pass").items()
                    if all(name in record for record in records)}
            for label, of in {**before, **after}.items() for records in [[*of.values()]]}

"""The numbers of runs: read from folders, grouped over seeds, as a table, kept in one file."""

import json
import re
import statistics
from math import nan
from pathlib import Path

from experiment.stats import interval
from experiment.tables import markdown_table

# eval/<data>/mean@16, and its standard error over the problems, eval/<data>/mean@16_stderr
EVALUATED = re.compile(r"eval/.+/(\w+)@(\d+)(_stderr)?")
NORMAL = 1.96  # so many standard errors to either side are a 95% interval
# what `keep` keeps of a record
KEPT = ("eval/", "reward/mean", "policy/entropy", "policy/kl_old", "policy/ess", "clip/frac",
        "clip/capped_frac", "clip/range", "adv/mass", "adv/fade", "optim/head_rank1_share",
        "sampler/logp_absdiff_mean", "time/rollout")
# what a profile has of an optimizer step
PROFILE = ("policy/ess", "policy/kl_old", "policy/bin_frac/", "clip/frac", "clip/capped_frac",
           "clip/range/")


def find_runs(paths):
    """-> the folders of runs, and files of `keep`, that paths stand for: a folder of runs stands
    for all of them. Figures, pages, tables and logs lie beside runs and are left out."""
    found = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        if inside and not (path / "metrics.jsonl").exists():
            found += inside
        elif path.suffix not in (".png", ".pdf", ".svg", ".html", ".md", ".log", ".txt", ".json"):
            found.append(path)
    return found


def is_run(path):
    """Is it a run's folder, or a file that begins as those of `keep`?"""
    if path.is_file():
        with path.open(errors="replace") as file:
            return '"records"' in file.readline()
    return (path / "metrics.jsonl").exists() and (path / "config.json").exists()


def parsed(text, place):
    """The JSON object in the text. Raises ValueError, with the place, for another text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no JSON object")
    return value


def read(path):
    """The runs of a path: a run's folder, or a file that `keep` wrote. Raises OSError, and
    ValueError for files that neither train.py nor `keep` wrote.

    Each is a dict: name (the folder's, less the seed), seed, flags, records (of the rollouts, in
    order), profile (the optimizer steps of a rollout, means over the rollouts), path, and id, by
    which a run and its line in a file of `keep` are known to be the same (old ones have none).
    "mean@n" and "pass@n" stand in a record for the largest n that was evaluated, "mean@n_stderr"
    and "pass@n_stderr" for their standard errors."""
    path = Path(path)
    runs = read_kept(path) if path.is_file() else [read_folder(path)]
    for run in runs:
        run["path"] = path
        for record in run["records"]:
            record.update(of_largest_n(record))
            record.update(clip_ranges(record))
    return runs


def read_kept(path):
    """The runs of a file that `keep` wrote."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: `python -m analysis keep` did not write it") from None
    runs = [parsed(line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]
    for i, run in enumerate(runs, 1):
        if not {"name", "seed", "flags", "records", "profile"} <= run.keys():
            raise ValueError(f"{path}, line {i} is no run: `python -m analysis keep` did not "
                             "write it")
    return runs


def read_folder(path):
    """The run of a folder."""
    config = parsed((path / "config.json").read_text(), path / "config.json")
    flags = config.get("flags")
    if not isinstance(flags, dict) or not {"seed", "loss", "steps_per_rollout"} <= flags.keys():
        raise ValueError(f"{path / 'config.json'} lacks flags that every run has")
    # a run that was killed may have cut its last line off: it has no line end
    lines = (path / "metrics.jsonl").read_text().split("\n")[:-1]
    records = [parsed(line, f"{path / 'metrics.jsonl'}, line {i}")
               for i, line in enumerate(lines, 1)]
    run = dict(name=path.resolve().name.removesuffix(f"-{flags['seed']}"), seed=flags["seed"],
               flags=flags, records=records, profile=profile(records))
    if "id" in config:
        run["id"] = config["id"]
    return run


def of_largest_n(record):
    """{"mean@n", "pass@n"}: a record's values of the largest n, and of the same n the standard
    errors over the problems, "mean@n_stderr" and "pass@n_stderr", where they were logged."""
    largest = {}
    for name in record:
        match = EVALUATED.fullmatch(name)
        if match and not match[3] and int(match[2]) >= largest.get(match[1], (0, None))[0]:
            largest[match[1]] = int(match[2]), name
    found = {}
    for kind, (_, name) in largest.items():
        found[f"{kind}@n"] = record[name]
        if f"{name}_stderr" in record:
            found[f"{kind}@n_stderr"] = record[f"{name}_stderr"]
    return found


def clip_ranges(record):
    """ACPO's clip ranges over the optimizer steps of a rollout: "clip/range_mean", weighted by the
    tokens of each bin (Clip=Avg), and "clip/range_max", the largest of a bin that has tokens
    (Clip-High=Max). A record of `keep` has no steps, but has these already."""
    found = []  # (range, share of the step's tokens)
    for step in record.get("steps") or ():
        ranges = {name.rsplit("/", 1)[1]: x for name, x in step.items()
                  if name.startswith("clip/range/")}
        shares = {name.rsplit("/", 1)[1]: x for name, x in step.items()
                  if name.startswith("policy/bin_frac/")}
        if ranges.keys() != shares.keys():  # --bins other than those that are logged
            return {}
        # a step without an advantage has no shares
        found += [(ranges[name], share) for name, share in shares.items() if share is not None]
    if not found:
        return {}
    total = sum(share for _, share in found)
    return {"clip/range_mean": sum(x * share for x, share in found) / total,
            "clip/range_max": max(x for x, share in found if share)}


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


def setting(run):
    """A run's flags as one text, but for the seed and the folder."""
    return json.dumps({k: v for k, v in run["flags"].items() if k not in ("seed", "out")})


def distinct(runs):
    """-> the runs with each seed of a setting once, in the order given, and the pairs (a run that
    is used, another of its seed that is not).

    The run with more records is used; of equally long ones a folder rather than a file of `keep`,
    and then the one given last. A folder and its line in a file of `keep` have one id."""
    left_out = []
    for identity in (lambda run: run.get("id", id(run)),
                     lambda run: (setting(run), run["seed"])):
        by_length = sorted(runs, key=lambda r: (len(r["records"]), not r["path"].is_file()))
        used = {identity(run): run for run in by_length}
        left_out += [(used[identity(run)], run) for run in runs
                     if used[identity(run)] is not run]
        runs = [run for run in runs if used[identity(run)] is run]
    return runs, left_out


def grouped(runs):
    """{label: [run]}: runs whose flags differ in nothing but the seed, in the order given.

    A label that is taken gets a number."""
    by_flags = {}
    for run in runs:
        by_flags.setdefault(setting(run), []).append(run)
    groups = {}
    for members in by_flags.values():
        label = members[0]["name"]
        groups[label if label not in groups else f"{label} ({len(groups) + 1})"] = members
    return groups


def bootstrap(values):
    """-> mean, low, high of one value per seed, by stats.interval."""
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


# what is said under the table on the console
NOTES = """\
mean@n is the share of right completions of the held-out problems, and pass@n the share of problems
of which at least one in n completions is right: both are those of the last evaluation, and compare
only where "held out", the problems x n, is the same. entropy is that of the last rollout, in nats
per token; clipped is the mean share of tokens that the clip took the gradient from; s/rollout is
the median of the seconds.
Look at mean@n and pass@n together: where the first rises and the second falls, training has made
the model surer, not more able.
"""
OF_SEVERAL = """\
In brackets stands a 95% bootstrap interval over the seeds, which is too narrow with fewer than five
seeds; intervals that overlap decide nothing.
"""
OF_ONE = "No line has more than one seed: another seed may order the lines otherwise.\n"


def table_notes(runs):
    """What the columns of the table are, and what to look for."""
    return NOTES + (OF_SEVERAL if max(map(len, grouped(runs).values())) > 1 else OF_ONE)


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
                     str(len(members)), held_out(flags),
                     *(cell(map(f, members)) for f in COLUMNS.values())])
    head = ("run", "method", "steps", "rollouts", "seeds", "held out", *COLUMNS)
    return markdown_table(head, rows) + "\n"


def held_out(flags):
    """countdown, 256 x 16: what was evaluated on, problems and completions of each."""
    name = Path(flags.get("eval_data") or flags.get("data") or "-").name
    if not flags.get("eval_every", 1) or "eval_problems" not in flags:
        return "-"
    return f"{name}, {flags.get('eval_problems')} x {flags.get('eval_samples')}"


def evaluations(run):
    """The run's records that have pass@k."""
    return [r for r in run["records"] if any("/pass@" in k for k in r)]


def is_evaluated(run):
    """Was the run evaluated after some training?"""
    records = evaluations(run)
    return bool(records) and records[-1]["rollout"] > 0


def pass_at_k(groups):
    """{label: {k: (pass@k, low, high)}} at the end of the runs, and as "base" (of each model and
    held-out set) at their beginning, for each seed once."""
    first, results = {}, {}
    for label, runs in groups.items():
        results[label] = pass_at_k_curve([evaluations(run)[-1] for run in runs
                                          if is_evaluated(run)])
        for run in runs:
            records = evaluations(run)
            if records and records[0]["rollout"] == 0:
                names = [Path(str(run["flags"].get(k))).name for k in ("model", "data", "eval_data")
                         if run["flags"].get(k)]
                first.setdefault(" ".join(names), {})[run["seed"]] = records[0]
    base = {"base" if len(first) == 1 else f"base {names}": pass_at_k_curve(list(by_seed.values()))
            for names, by_seed in first.items()}
    return {**base, **results}


def pass_at_k_curve(records):
    """{k: (pass@k, low, high)} of one record per seed, for the k that all of them have: the
    interval is a bootstrap's over the seeds. One record alone has 1.96 standard errors over the
    problems to either side, nan where none were logged."""
    curves = []
    for record in records:
        matches = filter(None, map(EVALUATED.fullmatch, record))
        curves.append({int(m[2]): m[0] for m in matches if m[1] == "pass" and not m[3]})
    common = [k for k in curves[0] if all(k in curve for curve in curves)] if curves else []
    if len(records) == 1:
        return {k: one_seed(records[0], curves[0][k]) for k in common}
    return {k: bootstrap([record[curve[k]] for record, curve in zip(records, curves, strict=True)])
            for k in common}


def one_seed(record, name):
    """-> a metric of one run, and 1.96 standard errors over the problems to either side, nan where
    none were logged."""
    value, error = record[name], record.get(f"{name}_stderr")
    half = nan if error is None else NORMAL * error
    return value, value - half, value + half


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
        # "mean@n", "pass@n" and their standard errors are made again by read
        records = [{k: v for k, v in r.items() if k == "rollout" or k.startswith(KEPT)}
                   for r in run["records"]]
        flags = {k: v for k, v in run["flags"].items()
                 if v is not None and v is not False and k not in ("out", "data_dir")}
        flags["model"] = Path(flags.get("model", "")).name
        kept = dict(run, flags=flags, records=rounded(records), profile=rounded(run["profile"]))
        del kept["path"]
        lines.append(json.dumps(kept))
    Path(out).write_text("\n".join(lines) + "\n")

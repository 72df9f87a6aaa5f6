"""pass@k of runs before and after training."""

from matplotlib.scale import LogScale

from analysis.__main__ import interval
from harness import curves

CAPTION = "band: Student's 95% over seeds; of one seed 1.96 errors over problems"


def pass_at_k(groups):
    """{label: {k: (pass@k, low, high)}} at the end of the runs, where they were evaluated after
    training, and as "base MODEL DATA" before it, for each seed and temperature once. k: those that
    all seeds have. The interval is over the seeds, of one seed over the problems."""
    before, after = {}, {}
    for label, runs in groups.items():
        for run in runs:
            flags = run["flags"]
            names = " ".join(filter(None, map(flags.get, ("model", "data", "eval_data"))))
            names += f", T = {flags['temperature']:g}" * (flags["temperature"] != 1)
            for record in run["records"]:
                if "pass@n" in record:
                    found, key = (after, label) if record["rollout"] else (before, f"base {names}")
                    found.setdefault(key, {})[run["seed"]] = record
    return {label: {k: over_seeds(records, name)
                    for k, name in curves.scores(records[0], "pass").items()
                    if all(name in record for record in records)}
            for label, of in {**before, **after}.items() for records in [[*of.values()]]}


def over_seeds(records, name):
    """-> mean, low, high of a score: Student's interval, of one seed as curves.over."""
    mean, *ends = curves.over(records, name)
    return mean, *(interval([r[name] for r in records]) if len(records) > 1 else ends)


def draw_passk(results, out):
    """results: of pass_at_k."""
    lines = {name: [(k, *value) for k, value in curve.items()] for name, curve in results.items()}
    curves.draw({"pass@k": lines}, out, CAPTION, "k", ylim=(0, 1), xscale=LogScale(None, base=2))

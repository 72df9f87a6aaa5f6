"""The figure of a run: its numbers, read from its folder, and the curves."""

import json
from math import nan
from statistics import fmean

import matplotlib.pyplot as plt

from harness.files import writing
from harness.log import scores

plt.switch_backend("agg")  # there may be no screen
plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 7,
                     "savefig.dpi": 150, "figure.constrained_layout.use": True})

NORMAL = 1.96  # standard errors to either side of a 95% interval
PANELS = {  # metric: label of its panel
    "mean@n": "held-out mean@n", "pass@n": "held-out pass@n", "reward/mean": "reward",
    "policy/entropy": "entropy (nats)", "clip/frac": "share of tokens clipped",
    "policy/kl_old": "KL within the rollout (nats)"}


def read(path):
    """The run of a folder of train.py: a dict of its name (the folder's, less the seed), seed,
    flags, records (of the rollouts, in order) and steps (records of the optimizer steps). A
    record's "mean@n", "mean@n_stderr", "pass@n" and "pass@n_stderr" are those of the largest n."""
    flags = json.loads((path / "config.json").read_text())["flags"]
    # a run that was killed may have cut its last line off: it has no line end
    records = [json.loads(x) for x in (path / "metrics.jsonl").read_text().split("\n")[:-1]]
    for record in records:
        for kind in ("mean", "pass"):
            if names := scores(record, kind):
                name = names[max(names)]
                record[f"{kind}@n"] = record[name]
                record[f"{kind}@n_stderr"] = record.get(f"{name}_stderr")
    steps = [dict(step, step=i) for record in records
             for i, step in enumerate(record.get("steps", ()), 1)]
    name = f"{path.resolve().name}-".replace(f"-{flags['seed']}-", "-", 1)[:-1]  # or before EXTRA's
    return dict(name=name, seed=flags["seed"], flags=flags, records=records, steps=steps)


def over(records, name):
    """-> mean, low, high of a metric: low and high are the least and the most, of one record NORMAL
    standard errors over the problems to either side, or nan where none was logged."""
    values = [record[name] for record in records]
    mean, error = fmean(values), records[0].get(f"{name}_stderr")
    if values[1:]:
        return mean, min(values), max(values)
    half = nan if error is None else NORMAL * error
    return mean, mean - half, mean + half


def save(figure, out, caption):
    figure.supxlabel(caption, fontsize=7, color="0.3")
    with writing(out) as aside:
        figure.savefig(aside)
    plt.close(figure)


def draw(panels, out, caption, xlabel, **axes):
    """A panel for each of {label: {name of a line: [(x, y, low, high)]}}. A line has one colour in
    all panels, and a band from low to high where these are not nan."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(1 + 3.4 * columns, 0.6 + 2.8 * rows),
                                squeeze=False)
    shown = {}
    for axis, (label, lines) in zip(grid.flat, panels.items()):
        for i, (name, points) in enumerate(lines.items()):
            if points:
                x, y, low, high = zip(*points)
                shown[name], = axis.plot(x, y, ".-", ms=3, lw=1.2, color=f"C{i}")
                axis.fill_between(x, low, high, color=f"C{i}", alpha=0.15, lw=0)
        axis.set(xlabel=xlabel, ylabel=label, **axes)
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=2 * columns)
    save(figure, out, caption)


def line_of(records, name, x):
    """[(x, mean, low, high)] of a metric, over the records of one x as `over`."""
    found = {}
    for record in records:
        if record.get(name) is not None:
            found.setdefault(record[x], []).append(record)
    return [(place, *over(same, name)) for place, same in sorted(found.items())]


def draw_curves(groups, out, panels=PANELS, kept="records", x="rollout"):
    """Panels of {label: [run]} over rollouts; kept="steps": over a rollout's optimizer steps x."""
    records = {f"{group}, {len(runs)} seeds" if len(runs) > 1 else group:
               [record for run in runs for record in run[kept]] for group, runs in groups.items()}
    draw({label: {line: line_of(its, name, x) for line, its in records.items()}
          for name, label in panels.items()}, out,
         "mean over seeds, of an optimizer step also over rollouts, band: least and most\n"
         "held-out scores of one seed, band: 1.96 standard errors over problems", x)

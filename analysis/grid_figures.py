"""The figures of RESULTS.md that show the grid's runs; analysis/figures.py has those of single
runs and rollouts."""

import statistics

from analysis.claims import BEST, END, PASS
from analysis.figures import plt, save
from analysis.grid import RATES, tuning_runs, validation


def scores_by_rate(setting, finished):
    """{learning rate: mean validation score over the tuning seeds, of its best alternative}; none
    while runs are missing."""
    scores = {}
    for run in tuning_runs(setting, finished):
        if run.id not in finished:
            return {}
        scores.setdefault(run.lr, {}).setdefault(run.flags, []).append(
            validation(finished[run.id]))
    return {lr: max(map(statistics.fmean, scores[lr].values())) for lr in sorted(scores)}


def plateau(scores, within=0.02):
    """How many of the learning rates come within so much of the best."""
    return sum(score > max(scores.values()) - within for score in scores.values())


def add_legend(axis):
    """Where something is drawn: runs may be missing still."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend()


def rates(panels, runs, out):
    """Validation score against learning rate. panels: {title: [names of tuned settings]}."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4), squeeze=False,
                                sharey=True)
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name in names:
            scores = scores_by_rate(runs.settings[name], runs.finished)
            if scores:
                axis.plot(list(scores), list(scores.values()), marker=".", lw=1.2,
                          label=name.split("/")[1])
        axis.set(xscale="log", xlabel="learning rate", title=title)
        ticks = (*RATES[16], 2 * RATES[16][-1])
        axis.set_xticks(ticks, [f"{lr:g}" for lr in ticks])
        axis.minorticks_off()
        add_legend(axis)
    axes[0, 0].set(ylabel="validation mean@8")
    save(figure, out, "mean of the last two evaluations and of two seeds; where a setting has "
                      "alternatives, the best of them")


def dots(names, runs, out):
    """Best validation and final scores of settings, with Student's intervals over seeds."""
    names = [name for name in names if name in runs.final]
    figure, axes = plt.subplots(1, 3, figsize=(10, 1.2 + 0.24 * len(names)), sharey=True)
    for axis, score in zip(axes, (BEST, END, PASS), strict=True):
        for i, name in enumerate(names):
            x = runs.mean(name, score)
            axis.errorbar(x.mean, -i, xerr=x.half_width, fmt="o", ms=3, lw=1,
                          color="C0" if name.endswith("-16") else "C1")
        axis.set(xlabel=score)
    axes[0].set_yticks([-i for i in range(len(names))], names)
    save(figure, out, "mean and 95% interval over seeds (Student's); blue 16 steps, orange 2")


def band(axis, values, label, color, places):
    """The mean over seeds of a series [seed][place], and its least and most."""
    columns = [[x for x in column if x is not None] for column in zip(*values, strict=True)]
    points = [(place, statistics.fmean(c), min(c), max(c))
              for place, c in zip(places, columns, strict=True) if c]
    xs, mean, low, high = zip(*points, strict=True)
    axis.plot(xs, mean, lw=1.2, label=label, color=color)
    axis.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)


def courses(names, metrics, runs, out):
    """How settings went: a panel for each of {metric: its label}; "validation" is the score on the
    validation problems, anything else a series."""
    names = [name for name in names if name in runs.final]
    figure, axes = plt.subplots(1, len(metrics), figsize=(3.8 * len(metrics), 3.6), squeeze=False)
    for axis, (metric, label) in zip(axes[0], metrics.items(), strict=True):
        for i, name in enumerate(names):
            of_seeds = list(runs.final[name].values())
            if metric == "validation":
                points = [run["validation"]["mean"] for run in of_seeds]
                places = [at for at, _ in points[0]]
                values = [[x for _, x in seed] for seed in points]
            else:
                values = [run["series"].get(metric) for run in of_seeds]
                if None in values:
                    continue
                places = range(1, len(values[0]) + 1)
            band(axis, values, name.split("/")[1], f"C{i}", places)
        axis.set(xlabel="rollout", ylabel=label)
    add_legend(axes[0, 0])
    save(figure, out, "mean over seeds; band: least and most")


def passk(names, runs, out):
    """pass@k at the end, with Student's intervals over seeds."""
    names = [name for name in names if name in runs.final]
    figure, axis = plt.subplots(figsize=(5.5, 4))
    for i, name in enumerate(names):
        ks = [1, 2, 4, 8, 16]
        points = [runs.mean(name, f"pass@{k}") for k in ks]
        axis.plot(ks, [x.mean for x in points], marker=".", lw=1.2, label=name.split("/")[1])
        axis.fill_between(ks, [x.low for x in points], [x.high for x in points], alpha=0.15, lw=0,
                          color=f"C{i}")
    axis.set_xscale("log", base=2)
    axis.set(xlabel="k", ylabel="pass@k")
    add_legend(axis)
    save(figure, out, "mean and 95% interval over seeds (Student's)")

"""The figures of RESULTS.md, of the grid's runs and of what analysis/figures.py has none of."""

import statistics

from analysis.figures import plt, save
from study.claims import BEST, END, PASS
from study.grid import RATES, tuning_runs, validation


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


# ---------------------------------------------------------------------------- of updates


def steps(result, out):
    """Ratio spread, ratios and the two sides of ACPO's Remark 1 along the steps of a rollout, and
    the statistics of its tokens."""
    figure = plt.figure(figsize=(11, 7.2))
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    left, middle, right = above.subplots(1, 3)
    for taken, points in result["spread"].items():
        left.plot(*zip(*points, strict=True), ".-", lw=0.8, ms=3,
                  label=f"after {taken}: slope {result['slope'][taken]:.2f}")
    left.set(xlabel="log(1 - pi)", ylabel="log std(rho)")
    left.legend()
    side_labels = dict(low="pi <= 0.2", high="pi > 0.8")
    for side, ratios in result["ratios"].items():
        middle.stairs(ratios["density"], ratios["edges"],
                      label=f"{side_labels[side]}: std {ratios['std']:.3f}")
    middle.set(xlabel="rho after the last step", ylabel="density", yscale="log")
    middle.legend()
    for side, label in dict(low="pi <= 0.2", high="pi >= 0.8").items():
        # the keys are texts where the numbers come from a JSON file
        points = [(int(taken), sides[side]["size"], 2 * sides[side]["error"])
                  for taken, sides in result["reversal"].items()
                  if sides[side]["size"] is not None]
        right.errorbar(*zip(*points, strict=True), fmt="o-", ms=3, lw=1, capsize=2, label=label)
    right.set(xlabel="optimizer steps on the rollout",
              ylabel="|mean of G|, uniform in pi (eq. 54, 55)")
    right.legend(title="2 standard errors")
    draw_token_statistics(figure, below, result["tables"])
    save(figure, out, f"rollout {result['rollout']}, {result['method']}, learning rate "
                      f"{result['lr']:g}; bins of the token's probability, a fifth each")


def draw_token_statistics(figure, part, tables):
    """A panel for each number; a column for each optimizer step, a row for each kind of token."""
    panels = (("tokens", "tokens"), ("clipped", "share clipped"),
              ("weight", "weight on log pi over |A|"), ("gradient", "share of |G|"))
    kinds = [f"{'A < 0' if line['sign'] < 0 else 'A > 0'}, bin {line['bin']}"
             for line in tables[0]]
    for axis, (name, label) in zip(part.subplots(1, 4, sharey=True), panels, strict=True):
        grid = [[float("nan") if table[i][name] is None else table[i][name] for table in tables]
                for i in range(len(kinds))]
        image = axis.imshow(grid, aspect="auto", cmap="viridis",
                            extent=(0.5, len(tables) + 0.5, len(grid) - 0.5, -0.5))
        axis.set(title=label, xlabel="optimizer step")
        axis.grid(False)
        figure.colorbar(image, ax=axis, shrink=0.8)
        axis.set_yticks(range(len(grid)), kinds, fontsize=7)


def subsets(result, out):
    """Length and direction of the gradients of subsets of the tokens, by all tokens (bars) and by
    the selected ones (diamonds)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    names = list(result["subsets"])[1:]  # the first is the full gradient
    for axis, key, label in ((left, "norm", "gradient norm over the full one's"),
                             (right, "angle", "mean principal angle to it (degrees)")):
        for i, name in enumerate(names):
            subset = result["subsets"][name]
            points = [matrix[key] for matrix in subset["matrices"].values()]
            axis.barh(-i, subset[key], color="C0")
            axis.plot(points, [-i] * len(points), ".", color="0.3", ms=2)
            if subset.get(f"{key}_selected") is not None:
                axis.plot(subset[f"{key}_selected"], -i, "D", color="C1", ms=4)
        axis.set(xlabel=label)
    left.set_yticks([-i for i in range(len(names))], names)
    save(figure, out, f"rollout {result['rollout']}, {result['method']}, "
                      f"after {result['after']} steps; points: one weight matrix each; bars: "
                      "divided by all tokens, diamonds: by the selected")


def entropy(result, out):
    """Three predictions of the entropy's change against what was measured."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    panels = (("predicted", "$(m_S - m_F) H - Cov(A, \\log\\pi)$"),
              ("covariance", "$-Cov(A, \\log\\pi)$"),
              ("reversed", "$-(m_S - m_F) H - Cov(A, \\log\\pi)$"))
    for axis, (key, label) in zip(axes, panels, strict=True):
        for name, v in result["advantages"].items():
            axis.plot(v[key], v["measured"], "o", ms=4)
            axis.annotate(name, (v[key], v["measured"]), fontsize=6, xytext=(3, 2),
                          textcoords="offset points")
        axis.set(xlabel=f"{label}, over mean |A|",
                 title=f"correlation {result[f'correlation_{key}']:.2f}")
    axes[0].set_ylabel("measured change of entropy (nats)")
    save(figure, out, f"rollout {result['rollout']}, one point an advantage, "
                      f"learning rate {result['lr']:g}")


def theory(lines, out, scans=()):
    """ACPO's Proposition 1: two equations and a Monte Carlo of what they are of; and the scans of
    Remark 1 over kappa."""
    figure, axes = plt.subplots(1, 2 if scans else 1, figsize=(11 if scans else 5.5, 4),
                                squeeze=False)
    axis = axes[0, 0]
    xs = [line["s"] for line in lines]
    means, errors = [line["monte_carlo"] for line in lines], [2 * line["error"] for line in lines]
    axis.errorbar(xs, means, errors, fmt="ko", ms=4, label="Monte Carlo (2 standard errors)")
    for eq in ("eq53", "eq56"):
        axis.plot(xs, [line[eq] for line in lines], label=f"eq. {eq[2:]}")
    axis.set(xscale="log", xlabel="s, std of the ratio",
             ylabel="$\\sqrt{2\\pi}$ E[G] / ((1 - pi) $\\sigma_A$)")
    axis.legend()
    for i, scan in enumerate(scans):
        for eq, style in ((53, "-"), (56, "--")):
            points = [(line["kappa"], line[f"log10_{eq}"]) for line in scan["lines"]]
            axes[0, 1].plot(*zip(*points, strict=True), f".{style}", color=f"C{i}", ms=3,
                            label=f"eq. {eq}, clip {scan['low']:g} / {scan['high']:g}")
    if scans:
        axes[0, 1].axhline(0, color="0.4", lw=0.7)
        axes[0, 1].set(xscale="log", yscale="symlog", xlabel="kappa",
                       ylabel="log10 of low / high (eq. 54 / eq. 55)")
        axes[0, 1].legend()
    save(figure, out, "left: ACPO's Proposition 1, clip range 0.2 on both sides"
                      + ("; right: Remark 1, a reversal is below 0" if scans else ""))

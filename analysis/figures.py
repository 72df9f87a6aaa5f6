"""The figures: numbers in, a file out. The other modules make the numbers."""

import matplotlib.pyplot as plt
from matplotlib.scale import LogScale

from analysis.runs import over
from harness.files import writing

plt.switch_backend("agg")  # there may be no screen
plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 7,
                     "savefig.dpi": 150, "figure.constrained_layout.use": True})

# command: {metric: label of its panel}
PANELS = dict(
    curves={"mean@n": "held-out mean@n", "pass@n": "held-out pass@n", "reward/mean": "reward",
            "policy/entropy": "entropy (nats)", "clip/frac": "share of tokens clipped",
            "policy/kl_old": "KL within the rollout (nats)"},
    fade={"adv/mass_pos": "mass on successes, $m_S$", "adv/mass_neg": "mass on failures, $m_F$",
          "policy/entropy": "entropy (nats)", "adv/fade_alpha": "FADE's alpha",
          "adv/fade_delta": "FADE's delta", "reward/mean": "reward"},
    p3o={"policy/ess": "effective sample size", "clip/capped_frac": "share of tokens capped",
         "clip/frac": "share of tokens clipped", "policy/ratio_max": "largest ratio",
         "policy/kl_old": "KL to the rollout's policy (nats)", "policy/entropy": "entropy (nats)"})
ERRORS = "band: 1.96 standard errors over problems to either side"
OF_SEEDS = ("mean over seeds, over an optimizer step also over rollouts, band: least and most; "
            f"held-out scores of one seed, {ERRORS}")
OF_PASSK = f"mean over seeds, band: 95% bootstrap interval; of one seed, {ERRORS}"


def save(figure, out, caption):
    figure.supxlabel(caption, fontsize=7, color="0.3")
    aside = out.with_name(f".{out.name}")
    with writing(out, aside):
        figure.savefig(aside, format=out.suffix[1:] or "png")
    plt.close(figure)


def draw(panels, out, caption, xlabel, **axes):
    """A panel for each of {label: {name of a line: [(x, y, low, high)]}}. A line has one colour in
    all panels, and a band from low to high where these are not nan."""
    columns = min(3, len(panels))
    rows = len(panels) // columns
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
    """[(x, mean, low, high)] of a metric: the least and the most of the records of one x, of one
    record as runs.over."""
    found = {}
    for record in records:
        if record.get(name) is not None:
            found.setdefault(record[x], []).append(record)
    return [(place, *over(same, name, lambda values: (min(values), max(values))))
            for place, same in sorted(found.items())]


def curves(groups, out, kind="curves", metric=None):
    """The panels of a kind, or one metric's, over the rollouts, for p3o over the optimizer steps of
    a rollout. groups: {label: [run]}."""
    kept, x = ("steps", "step") if kind == "p3o" else ("records", "rollout")
    panels = {metric: metric} if metric else PANELS[kind]
    drawn = {label: {f"{group}, {len(runs)} seeds" if len(runs) > 1 else group:
                     line_of([record for run in runs for record in run[kept]], name, x)
                     for group, runs in groups.items()}
             for name, label in panels.items()}
    draw(drawn, out, OF_SEEDS, x)


def passk(results, out):
    """results: {name: {k: (pass@k, low, high)}}."""
    lines = {name: [(k, *value) for k, value in curve.items()] for name, curve in results.items()}
    draw({"pass@k": lines}, out, OF_PASSK, "k", ylim=(0, 1), xscale=LogScale(None, base=2))

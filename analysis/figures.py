"""The figures, a few lines each: numbers in, a file out. The other modules make the numbers."""

import math
import statistics

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend first: there may be no screen)

from analysis.runs import one_seed  # noqa: E402

plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 7,
                     "savefig.dpi": 150, "figure.constrained_layout.use": True})

PANELS = [("mean@n", "held-out mean@n"), ("pass@n", "held-out pass@n"), ("reward/mean", "reward"),
          ("policy/entropy", "entropy (nats)"), ("clip/frac", "share of tokens clipped"),
          ("policy/kl_old", "KL within the rollout (nats)")]


ERRORS = "band: 1.96 standard errors over problems to either side"


def save(figure, out, caption=None):
    if caption:
        figure.supxlabel(caption, fontsize=7, color="0.3")
    figure.savefig(out)
    plt.close(figure)


# ---------------------------------------------------------------------------- of runs


def seeds_of(groups, band="band: least and most"):
    """The part of a caption that says what lines and bands over seeds are."""
    counts = sorted({len(runs) for runs in groups.values()})
    if counts == [1]:
        return "1 seed"
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean over {seeds} seeds, {band}"


def lines_of(groups, name, records, x):
    """Yields (label, [(x, mean, low, high)]) of each group of runs that has the records' `name`.

    Low and high are the least and the most of several runs. Those of one run alone are 1.96
    standard errors over problems away, nan where none were logged."""
    for label, runs in groups.items():
        points, line = {}, []
        for run in runs:
            for record in run[records]:
                if record.get(name) is not None:
                    points.setdefault(record[x], []).append(record)
        for place, found in sorted(points.items()):
            values = [record[name] for record in found]
            band = one_seed(found[0], name)[1:] if len(runs) == 1 else (min(values), max(values))
            line.append((place, statistics.fmean(values), *band))
        if line:
            yield label, line


def draw_groups(axis, groups, name, records="records", x="rollout"):
    """Draws the records' `name` over x, a line and a band for each group of runs."""
    places = {label: i for i, label in enumerate(groups)}  # not all groups may have the number
    for label, points in lines_of(groups, name, records, x):
        xs, means, low, high = zip(*points, strict=True)
        color = f"C{places[label]}"
        axis.plot(xs, means, lw=1.2, label=label, color=color, marker="." if "@" in name else None)
        if any(map(math.isfinite, low)):
            axis.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)


def curves(groups, out):
    """A few numbers over the rollouts. groups: {label: [run]}."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6))
    for axis, (name, label) in zip(axes.flat, PANELS, strict=True):
        draw_groups(axis, groups, name)
        axis.set(xlabel="rollout", ylabel=label)
    figure.legend(*axes.flat[2].get_legend_handles_labels(), loc="outside upper center", ncols=7)
    save(figure, out, curves_caption(groups))


def have_errors(groups):
    """Has a run that is the only one of its group standard errors of its held-out scores?"""
    alone = {label: runs for label, runs in groups.items() if len(runs) == 1}
    points = [point for name in ("mean@n", "pass@n")
              for _, line in lines_of(alone, name, "records", "rollout") for point in line]
    return any(math.isfinite(low) for *_, low, _ in points)


def curves_caption(groups):
    """Of several seeds all panels have a band, of one seed the held-out ones, if any."""
    caption = seeds_of(groups)
    if have_errors(groups):
        of = "" if caption == "1 seed" else " of 1 seed"
        caption += f"; held-out panels{of}, {ERRORS}"
    return caption


def passk_caption(groups):
    caption = seeds_of(groups, "band: 95% bootstrap interval over seeds")
    if have_errors(groups):
        caption += f", {ERRORS}" if caption == "1 seed" else f"; of 1 seed, {ERRORS}"
    return caption


def passk(results, out, caption=None):
    """results: {name: {k: pass@k, or (pass@k, low, high)}}; k on a logarithmic axis. There is no
    band where low and high are nan."""
    figure, axis = plt.subplots(figsize=(5.5, 4))
    for name, curve in results.items():
        values = [v if isinstance(v, tuple) else (v, v, v) for v in curve.values()]
        mean, low, high = zip(*values, strict=True)
        line, = axis.plot(list(curve), mean, marker=".", lw=1.2, label=name)
        axis.fill_between(list(curve), low, high, color=line.get_color(), alpha=0.15, lw=0)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="k", ylabel="pass@k", ylim=(0, 1))
    axis.legend()
    save(figure, out, caption)


def fade(groups, masses, out):
    """FADE's two axes.

    masses: {advantage: {"theory": [(p, m_S, m_F)], "measured": the same}}, p the group's solve
    rate."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4))
    draw_masses(axes[0, :2], masses)
    panels = ((axes[0, 2], "adv/fade_alpha", "alpha (solid), delta (dashed)"),
              (axes[1, 0], "policy/entropy", "entropy (nats)"),
              (axes[1, 1], "optim/head_rank1_share", "rank-1 share of the LM head's change"),
              (axes[1, 2], "reward/mean", "reward"))
    for axis, name, label in panels:
        draw_groups(axis, groups, name)
        axis.set(xlabel="rollout", ylabel=label)
    for runs in groups.values():
        for run in runs:
            points = [(r["rollout"], r["adv/fade_delta"]) for r in run["records"]
                      if r.get("adv/fade_delta") is not None]
            if points:
                axes[0, 2].plot(*zip(*points, strict=True), "--", lw=0.7, color="0.4")
    axes[1, 0].legend()
    save(figure, out, "above: lines from the formulas, points from groups of 16; "
                      f"below and right: {seeds_of(groups)}")


def draw_masses(axes, masses):
    """The masses on successes on the first axis, those on failures on the second."""
    labels = ("mass on successes, $m_S$", "mass on failures, $m_F$")
    for column, (axis, label) in enumerate(zip(axes, labels, strict=True), 1):
        for i, (name, points) in enumerate(masses.items()):
            theory, measured = ([(row[0], row[column]) for row in points[kind]]
                                for kind in ("theory", "measured"))
            axis.plot(*zip(*theory, strict=True), color=f"C{i}", lw=1, label=name)
            axis.plot(*zip(*measured, strict=True), ".", color=f"C{i}", ms=3)
        axis.set(xlabel="solve rate of the group", ylabel=label, yscale="log", ylim=(0.003, 1.3))
    axes[1].legend()


def p3o(groups, out):
    """Effective sample size, capped or clipped tokens and KL within a rollout, means over the
    rollouts."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    panels = (("policy/ess", "effective sample size"),
              ("share", "share of tokens capped or clipped"),
              ("policy/kl_old", "KL to the rollout's policy (nats)"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        draw_groups(axis, groups, name, "profile", "step")
        axis.set(xlabel="optimizer step of the rollout", ylabel=label)
    axes[2].set(yscale="log", ylim=(1e-4, None))
    axes[0].legend()
    save(figure, out, f"means over the rollouts; {seeds_of(groups)}")


# ---------------------------------------------------------------------------- of a rollout


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


def replay(result, out):
    """The cosines between the gradients of the methods."""
    names = list(result["methods"])
    figure, axis = plt.subplots(figsize=(1.5 + 0.45 * len(names),) * 2)
    axis.imshow(result["cosine"], vmin=-1, vmax=1, cmap="RdBu")
    axis.grid(False)
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    for i, row in enumerate(result["cosine"]):
        for j, value in enumerate(row):
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6,
                      color="white" if abs(value) > 0.6 else "black")
    axis.set_title(f"cosine of the gradients, rollout {result['rollout']}")
    save(figure, out)

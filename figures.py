"""The figures, a few lines each: numbers in, a file out. What makes the numbers is in analyze.py and anatomy.py."""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend first: there may be no screen)

plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 7, "savefig.dpi": 150, "figure.constrained_layout.use": True})

PANELS = [("mean@n", "held-out mean@n"), ("pass@n", "held-out pass@n"), ("reward/mean", "reward"),
          ("policy/entropy", "entropy (nats)"), ("clip/frac", "share of tokens clipped"), ("policy/kl_old", "KL within the rollout (nats)")]


def save(figure, out, caption=None):
    if caption:
        figure.supxlabel(caption, fontsize=7, color="0.3")
    figure.savefig(out)
    plt.close(figure)


def seeds_of(groups):
    numbers = sorted({len(runs) for runs in groups.values()})
    return f"mean over {' to '.join(map(str, numbers[:1] + numbers[1:][-1:]))} seed{'s' if numbers != [1] else ''}" + (
        ", band: least and most" if numbers != [1] else "")


def over(axis, groups, name, records="records", x="rollout"):
    """Draws records' `name` over x for each group of runs: the mean, and a band from the least to the most."""
    for label, runs in groups.items():
        points = {}
        for run in runs:
            for record in run[records]:
                if record.get(name) is not None:
                    points.setdefault(record[x], []).append(record[name])
        if points:
            xs, ys = zip(*sorted(points.items()))
            line, = axis.plot(xs, [sum(y) / len(y) for y in ys], marker="." if "@" in name else None, lw=1.2, label=label)
            if max(map(len, ys)) > 1:
                axis.fill_between(xs, list(map(min, ys)), list(map(max, ys)), color=line.get_color(), alpha=0.15, lw=0)


def curves(groups, out):
    """The run of a few numbers over the rollouts. groups: {label: [run]}."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6))
    for axis, (name, label) in zip(axes.flat, PANELS):
        over(axis, groups, name)
        axis.set(xlabel="rollout", ylabel=label)
    figure.legend(*axes.flat[2].get_legend_handles_labels(), loc="outside upper center", ncols=7)
    save(figure, out, seeds_of(groups))


def passk(results, out, caption=None):
    """results: {name: {k: pass@k, or (pass@k, low, high)}}; k on a logarithmic axis."""
    figure, axis = plt.subplots(figsize=(5.5, 4))
    for name, curve in results.items():
        values = [v if isinstance(v, tuple) else (v, v, v) for v in curve.values()]
        mean, low, high = zip(*values)
        line, = axis.plot(list(curve), mean, marker=".", lw=1.2, label=name)
        axis.fill_between(list(curve), low, high, color=line.get_color(), alpha=0.15, lw=0)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="k", ylabel="pass@k", ylim=(0, 1))
    axis.legend()
    save(figure, out, caption)


def fade(groups, masses, out):
    """FADE's two axes. masses: {advantage: {"theory": [(p, m_S, m_F)], "measured": the same}}, p the group's solve rate."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4))
    for i, (name, found) in enumerate(masses.items()):
        for axis, column in zip(axes[0], (1, 2)):
            axis.plot(*zip(*[(row[0], row[column]) for row in found["theory"]]), color=f"C{i}", lw=1, label=name)
            axis.plot(*zip(*[(row[0], row[column]) for row in found["measured"]]), ".", color=f"C{i}", ms=3)
    for axis, label in zip(axes[0], ("mass on successes, $m_S$", "mass on failures, $m_F$")):
        axis.set(xlabel="solve rate of the group", ylabel=label, yscale="log", ylim=(0.003, 1.3))
    axes[0, 1].legend()
    for axis, name, label in ((axes[0, 2], "adv/fade_alpha", "alpha (solid), delta (dashed)"), (axes[1, 0], "policy/entropy", "entropy (nats)"),
                              (axes[1, 1], "optim/head_rank1_share", "rank-1 share of the LM head's change"),
                              (axes[1, 2], "reward/mean", "reward")):
        over(axis, groups, name)
        axis.set(xlabel="rollout", ylabel=label)
    for label, runs in groups.items():
        for run in runs:
            points = [(r["rollout"], r["adv/fade_delta"]) for r in run["records"] if r.get("adv/fade_delta") is not None]
            if points:
                axes[0, 2].plot(*zip(*points), "--", lw=0.7, color="0.4")
    axes[1, 0].legend()
    save(figure, out, f"above: lines from the formulas, points from groups of 16; below and right: {seeds_of(groups)}")


def p3o(groups, out):
    """Effective sample size, capped or clipped tokens and KL within a rollout, means over the rollouts."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for axis, name, label in zip(axes, ("policy/ess", "share", "policy/kl_old"), ("effective sample size", "share of tokens capped or clipped", "KL to the rollout's policy (nats)")):
        over(axis, groups, name, "profile", "step")
        axis.set(xlabel="optimizer step of the rollout", ylabel=label)
    axes[2].set(yscale="log", ylim=(1e-4, None))
    axes[0].legend()
    save(figure, out, f"means over the rollouts; {seeds_of(groups)}")


def dots(panels, out, caption=None):
    """panels: {title: {label: (mean, low, high)}}, a row for each label, the same rows in all."""
    labels = list(next(iter(panels.values())))
    figure, axes = plt.subplots(1, len(panels), figsize=(2.2 + 2.8 * len(panels), 0.9 + 0.24 * len(labels)), sharey=True, squeeze=False)
    for axis, (title, values) in zip(axes[0], panels.items()):
        for i, label in enumerate(labels):
            mean, low, high = values[label]
            axis.errorbar(mean, -i, xerr=[[mean - low], [high - mean]], fmt="o", ms=3, color="C0" if "16" in label.split() or len(label.split()) == 1 else "C1", lw=1)
        axis.set(xlabel=title)
    axes[0, 0].set_yticks([-i for i in range(len(labels))], labels)
    save(figure, out, caption)


def steps(told, out):
    """Ratio spread, ratios and gradient sizes along the steps of a rollout, and the table of its tokens."""
    figure = plt.figure(figsize=(11, 7.2))
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    left, middle, right = above.subplots(1, 3)
    for taken, points in told["spread"].items():
        left.plot(*zip(*points), ".-", lw=0.8, ms=3, label=f"after {taken}: slope {told['slope'][taken]:.2f}")
    left.set(xlabel="log(1 - pi)", ylabel="log std(rho)")
    left.legend()
    for name, found in told["ratios"].items():
        middle.stairs(found["density"], found["edges"], label=f"{dict(low='pi <= 0.2', high='pi > 0.8')[name]}: std {found['std']:.3f}")
    middle.set(xlabel="rho after the last step", ylabel="density", yscale="log")
    middle.legend()
    taken = list(told["dominance"])
    for name, label in (("low", "pi <= 0.2"), ("high", "pi > 0.8")):
        right.plot([int(t) for t in taken], [told["dominance"][t][name]["mean"] for t in taken], "o-", ms=3, label=f"mean |G|, {label}")
    right.set(xlabel="optimizer steps on the rollout", ylabel="mean |G| of a token", yscale="log")
    right.legend()
    tables = told["tables"]
    for axis, (name, label) in zip(below.subplots(1, 4, sharey=True), (("tokens", "tokens"), ("clipped", "share clipped"), ("weight", "weight on log pi over |A|"), ("gradient", "share of |G|"))):
        grid = [[float("nan") if table[i][name] is None else table[i][name] for table in tables] for i in range(len(tables[0]))]
        shown = axis.imshow(grid, aspect="auto", cmap="viridis", extent=(0.5, len(tables) + 0.5, len(grid) - 0.5, -0.5))
        axis.set(title=label, xlabel="optimizer step")
        axis.grid(False)
        figure.colorbar(shown, ax=axis, shrink=0.8)
        axis.set_yticks(range(len(grid)), [f"{'A < 0' if t['sign'] < 0 else 'A > 0'}, bin {t['bin']}" for t in tables[0]], fontsize=7)
    save(figure, out, f"rollout {told['rollout']}, {told['method']}, learning rate {told['lr']:g}; bins of the token's probability, a fifth each")


def subsets(told, out):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    names = list(told["subsets"])[1:]
    for axis, key, label in ((left, "norm", "gradient norm over the full one's"), (right, "angle", "mean principal angle to it (degrees)")):
        for i, name in enumerate(names):
            axis.barh(-i, told["subsets"][name][key], color="C0")
            axis.plot([m[key] for m in told["subsets"][name]["matrices"].values()], [-i] * len(told["subsets"][name]["matrices"]), ".", color="0.3", ms=2)
        axis.set(xlabel=label)
    left.set_yticks([-i for i in range(len(names))], names)
    save(figure, out, f"rollout {told['rollout']}, {told['method']}, after {told['after']} steps; points: one weight matrix each")


def entropy(told, out):
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for axis, key, label in zip(axes, ("predicted", "covariance", "reversed"), (
            "$(m_S - m_F) H - Cov(A, \\log\\pi)$", "$-Cov(A, \\log\\pi)$", "$-(m_S - m_F) H - Cov(A, \\log\\pi)$")):
        for name, v in told["advantages"].items():
            axis.plot(v[key], v["measured"], "o", ms=4)
            axis.annotate(name, (v[key], v["measured"]), fontsize=6, xytext=(3, 2), textcoords="offset points")
        axis.set(xlabel=f"{label}, over mean |A|", title=f"correlation {told[f'correlation_{key}']:.2f}")
    axes[0].set_ylabel("measured change of entropy (nats)")
    save(figure, out, f"rollout {told['rollout']}, one point an advantage, learning rate {told['lr']:g}")


def theory(told, out):
    figure, axis = plt.subplots(figsize=(5.5, 4))
    xs = [line["s"] for line in told]
    axis.errorbar(xs, [line["monte_carlo"] for line in told], [2 * line["error"] for line in told], fmt="ko", ms=4, label="Monte Carlo (2 standard errors)")
    for eq in ("eq53", "eq56"):
        axis.plot(xs, [line[eq] for line in told], label=f"eq. {eq[2:]}")
    axis.set(xscale="log", xlabel="s, std of the ratio", ylabel="$\\sqrt{2\\pi}$ E[G] / ((1 - pi) $\\sigma_A$)")
    axis.legend()
    save(figure, out, "ACPO's Proposition 1, clip range 0.2 on both sides")


def replay(told, out):
    names, cosine = list(told["methods"]), told["cosine"]
    figure, axis = plt.subplots(figsize=(1.5 + 0.45 * len(names),) * 2)
    axis.imshow(cosine, vmin=-1, vmax=1, cmap="RdBu")
    axis.grid(False)
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    for i, line in enumerate(cosine):
        for j, value in enumerate(line):
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="white" if abs(value) > 0.6 else "black")
    axis.set_title(f"cosine of the gradients, rollout {told['rollout']}")
    save(figure, out)

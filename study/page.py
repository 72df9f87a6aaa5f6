"""RESULTS.md, study/results/claims.csv and map.png, from the numbers in study/results: the runs of
plan.toml, what rule.py says of the claims of claims.toml, and the updates of mechanism.py."""

import csv
import json
import statistics

from analysis.figures import plt, save
from experiment.files import write
from experiment.tables import markdown_table
from study import mechanism, rule
from study.runs import HERE, RESULTS, read_bases, read_plan

BESIDE = dict(own="mean@16 at each one's own rate", best="best validation score")
MAP = ("grpo", "dapo", "acpo", "cispo_gated", "cispo", "p3o", "dr_grpo", "power", "fade")
TRACES = (  # what shows whether a method adapts: a metric, its name, and settings that have it
    ("clip/range", "ACPO's mean clip range", ("acpo",)),
    ("clip/frac", "share of tokens clipped", ("acpo", "dapo", "cispo_gated")),
    ("policy/ess", "effective sample size", ("grpo", "p3o", "p3o_stale", "p3o_cold",
                                             "p3o_cold_trainer")),
    ("adv/fade_alpha", "FADE's alpha", ("fade", "fade_alpha")),
    ("adv/fade_delta", "FADE's delta", ("fade", "fade_delta")))


# ---------------------------------------------------------------------------- numbers as text


def signed(x, level, digits=4):
    low, high = x.ends(level)
    return f"{x.mean:+.{digits}f} ({low:+.{digits}f}, {high:+.{digits}f})"


def plain(values, digits=3):
    """Mean +- standard error."""
    x = rule.Interval.of(values)
    return f"{x.mean:.{digits}f} +- {x.error:.{digits}f}"


def digits_of(row):
    return 1 if row.score == "peak" else 4


# ---------------------------------------------------------------------------- tables


def claims_table(rows, gain):
    """A line for each claim, with what stands beside it in its own line."""
    lines = []
    for row in rows:
        words = row.claim["words"] if not row.beside else f"- {BESIDE[row.beside]}"
        lines.append((row.claim["paper"] if not row.beside else "", words,
                      signed(row.interval, row.level, digits_of(row)),
                      f"{100 * row.interval.mean / gain:+.0f}%" if row.in_units_of_gain else "",
                      row.verdict(gain)))
    return markdown_table(("paper", "claim", "difference", "of the gain", "verdict"), lines)


def map_table(runs, kind="test"):
    """mean@16 of each method at each rate with 2 and with 16 steps, and at its own rate."""
    rates = {steps: sorted({lr for (task, _, s), setting in runs.of.items() for lr in setting
                            if s == steps and task == "countdown"}) for steps in (16, 2)}
    lines = []
    for name in MAP:
        cells = []
        for steps, of in rates.items():
            setting = runs.of["countdown", name, steps]
            cells += [plain([rule.score(run, kind) for run in setting[lr].values()])
                      if len(setting.get(lr, ())) > 1 else "-" for lr in of]
            cells.append(f"{rule.own_rate(setting)[1]:.1e}" if len(setting) == 3 else "-")
        lines.append((name, *cells))
    head = [f"{steps} steps, {lr:g}" if i < len(of) else f"{steps} steps: own rate"
            for steps, of in rates.items() for i, lr in enumerate([*of, None])]
    return markdown_table(("method", *head), lines)


def traces_table(runs):
    """Where the quantities went that methods adapt to: the mean over runs, and the least and the
    most of the rollouts that are kept (every fifth)."""
    lines = []
    for metric, label, names in TRACES:
        for (task, name, steps), setting in sorted(runs.of.items()):
            found = [x for seeds in setting.values() for run in seeds.values()
                     for x in run["trace"].get(metric, ())]
            if name in names and found:
                lines.append((label, name, task, str(steps), f"{statistics.fmean(found):.3g}",
                              f"{min(found):.3g} to {max(found):.3g}"))
    return markdown_table(("quantity", "setting", "task", "steps", "mean", "range"), lines)


def write_csv(rows, gain, updates_rows):
    with open(RESULTS / "claims.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("paper", "claim", "beside", "score", "mean", "standard error", "seeds", "p",
                      "level", "low", "high", "verdict"))
        for row in rows:
            x = row.interval
            out.writerow((row.claim["paper"], row.claim["words"], row.beside, row.score,
                          *(f"{v:.5g}" for v in (x.mean, x.error, x.n, x.p, row.level,
                                                 *x.ends(row.level))), row.verdict(gain)))
        for row in updates_rows:
            out.writerow((row.place, row.claim, "", "", row.measured, *[""] * 6, row.verdict))


# ---------------------------------------------------------------------------- the map as a figure


def draw_map(runs, base, file):
    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    panels = ((axes[0], 16, "test"), (axes[1], 2, "test"), (axes[2], 16, "pass"))
    for axis, steps, kind in panels:
        for i, name in enumerate(MAP):
            setting = runs.of["countdown", name, steps]
            points = [(lr, rule.Interval.of(rule.score(run, kind) for run in setting[lr].values()))
                      for lr in sorted(setting) if len(setting[lr]) > 1]
            if points:
                axis.errorbar([lr * (1 + 0.012 * (i - 4)) for lr, _ in points],
                              [x.mean for _, x in points], [x.error for _, x in points],
                              marker=".", lw=1, capsize=2, label=name, color=f"C{i}")
        axis.axhline(base[rule.SCORES[kind]], color="0.5", lw=0.8, ls=":")
        axis.set(xscale="log", xlabel="learning rate", title=f"{steps} steps per rollout",
                 ylabel=f"{rule.SCORES[kind]} on the test puzzles")
        rates = sorted({lr for (_, _, s), of in runs.of.items() for lr in of if s == steps})
        axis.set_xticks(rates, [f"{lr:g}" for lr in rates])
        axis.minorticks_off()
    axes[0].legend(fontsize=7)
    save(figure, file, "mean and standard error over seeds; dotted: the base")


# ---------------------------------------------------------------------------- the page


def numbers(runs, rows, gain, bases):
    """What the sentences of RESULTS.in.md name."""
    primary = [row for row in rows if not row.beside and row.score == "test"]
    seen = statistics.median(rule.detectable(row) for row in primary)
    seeds = {seed for of in runs.of.values() for by in of.values() for seed in by}
    plan = read_plan()["map"]
    return dict(
        seeds=len(seeds), family=len(rows), rollouts=plan[0].rollouts, puzzles=plan[0].puzzles,
        gain=f"{gain:.3f}", margin=f"{rule.MARGIN * gain:.4f}", seen=f"{seen:.4f}",
        seen_share=f"{100 * seen / gain:.0f}%",
        **{f"{task}_{name.replace('@', '_')}": f"{value:.3f}"
           for task, scores in bases.items() for name, value in scores.items()},
        **{f"{row.claim['id']}{'_' * bool(row.beside)}{row.beside}":
           signed(row.interval, row.level, digits_of(row)) for row in rows},
        **{f"{row.claim['id']}_verdict": row.verdict(gain) for row in rows if not row.beside})


def write_results():
    """-> the files that it wrote. Raises ValueError where a claim's runs are not all trained."""
    runs, bases = rule.Runs(["map", "advantages"]), read_bases()
    gain = rule.gain(runs, bases["countdown"]["mean@16"])
    rows, missing = rule.rows()
    if missing:
        raise ValueError(f"the runs of {len(missing)} claims are not all trained, as those of "
                         f"{missing[0]['words']!r}: python -m study.runs")
    updates = json.loads((RESULTS / "updates.json").read_text())
    of_updates = mechanism.rows(updates)
    draw_map(runs, bases["countdown"], RESULTS / "map.png")
    mechanism.draw(updates, RESULTS / "mechanism.png")
    write_csv(rows, gain, of_updates)
    text = (HERE / "RESULTS.in.md").read_text().format(
        claims=claims_table(rows, gain), map=map_table(runs),
        traces=traces_table(rule.Runs(part for part in read_plan()
                                      if part not in ("pilot", "averages"))),
        mechanism=markdown_table(("place", "claim", "paper", "measured", "verdict"), of_updates),
        **numbers(runs, rows, gain, bases))
    page = HERE.parent / "RESULTS.md"
    write(page, text)
    return [page, *(RESULTS / name for name in ("claims.csv", "map.png", "mechanism.png"))]

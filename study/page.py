"""RESULTS.md, study/results/claims.csv and two figures, from the numbers in study/results: the runs
of plan.toml, what rule.py says of the claims of claims.toml, and the updates of mechanism.py."""

import csv
import json
import re
import statistics

from analysis.figures import plt, save
from harness.files import write
from harness.tables import markdown_table
from study import mechanism, rule
from study.anatomy import UPDATES
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


def signed(row):
    """'+0.012 (-0.003, +0.027)': a row's mean and its corrected interval."""
    return "{:+.3f} ({:+.3f}, {:+.3f})".format(row.interval.mean, *row.interval.ends(row.level))


def by_seed(row):
    """'-0.020 to -0.018': the least and the most of the claim's numbers of a seed."""
    of = rule.values(rule.Runs(row.claim["parts"]), row.claim["contrasts"], row.score,
                     row.claim["over"])
    return f"{min(of.values()):+.3f} to {max(of.values()):+.3f}"


def claims_table(rows, gain):
    """A line for each claim, and one for each number that stands beside it."""
    lines = []
    for row in rows:
        share = f"{100 * row.interval.mean / gain:+.0f}%" if row.in_units_of_gain else ""
        first = ("", f"- {BESIDE[row.beside]}") if row.beside else (
            row.claim["paper"], row.claim["words"])
        lines.append((*first, signed(row), share, row.verdict(gain)))
    return markdown_table(("paper", "claim", "difference", "of the gain", "verdict"), lines)


def settings_of(runs, steps):
    """{name: {rate: {seed: run}}} of the map's methods, and their rates."""
    settings = {name: runs.of["countdown", name, steps] for name in MAP}
    return settings, sorted({lr for setting in settings.values() for lr in setting})


def map_table(runs):
    """mean@16 of each method at each rate, with 16 and with 2 steps, and its own rate."""
    lines, head = [(name,) for name in MAP], ["method"]
    for steps in (16, 2):
        settings, rates = settings_of(runs, steps)
        head += [*(f"{steps} steps, {lr:g}" for lr in rates), "own rate"]
        for i, setting in enumerate(settings.values()):
            found = [[rule.score(run, "test") for run in setting.get(lr, {}).values()]
                     for lr in rates]
            cells = [f"{x.mean:.3f} +- {x.error:.3f}" for x in map(rule.Interval.of, found)
                     ] if min(map(len, found)) > 1 else [""] * len(rates)
            lines[i] += *cells, f"{rule.own_rate(setting)[1]:.1e}" if cells[0] else ""
    return markdown_table(head, lines)


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
        out.writerow(("paper", "claim", "beside", "score", "measured", "standard error", "seeds",
                      "p", "level", "low", "high", "verdict"))
        for row in rows:
            x = row.interval
            out.writerow((row.claim["paper"], row.claim["words"], row.beside, row.score,
                          *(f"{v:.5g}" for v in (x.mean, x.error, x.n, x.p, row.level,
                                                 *x.ends(row.level))), row.verdict(gain)))
        for row in updates_rows:
            out.writerow((row.place, row.claim, *[""] * 2, row.measured, *[""] * 6, row.verdict))


def draw_map(runs, base, file):
    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    for axis, (steps, kind) in zip(axes, ((16, "test"), (2, "test"), (16, "pass")), strict=True):
        settings, rates = settings_of(runs, steps)
        for i, (name, setting) in enumerate(settings.items()):
            points = [(lr * (1 + 0.012 * (i - 4)), rule.Interval.of(
                rule.score(run, kind) for run in setting[lr].values()))
                for lr in rates if len(setting.get(lr, ())) > 1]
            axis.errorbar([lr for lr, _ in points], [x.mean for _, x in points],
                          [x.error for _, x in points], marker=".", lw=1, capsize=2, label=name)
        axis.axhline(base[rule.SCORES[kind]], color="0.5", lw=0.8, ls=":")
        axis.set(xscale="log", xlabel="learning rate", title=f"{steps} steps per rollout",
                 ylabel=f"{rule.SCORES[kind]} on the test puzzles")
        axis.set_xticks(rates, [f"{lr:g}" for lr in rates])
        axis.minorticks_off()
    axes[0].legend(fontsize=7)
    save(figure, file, "mean and standard error over seeds; dotted: the base")


def numbers(rows, missing, gain, base):
    """What the sentences of RESULTS.in.md name."""
    primary = [row for row in rows if not row.beside and row.score == "test"]
    of_claims = sorted(map(rule.detectable, primary))
    seen = statistics.median(of_claims)
    planned = len({run.seed for run in read_plan()["map"]})
    return dict(
        seeds=f"{min(row.interval.n for row in primary)} of {planned}", family=len(rows),
        gain=f"{gain:.3f}", margin=f"{rule.MARGIN * gain:.4f}", base=base["mean@16"],
        base_pass=base["pass@16"], seen=f"{seen:.3f}", seen_share=f"{100 * seen / gain:.0f}%",
        seen_range=" to ".join(f"{100 * x / gain:.0f}%" for x in (of_claims[0], of_claims[-1])),
        missing=f"\nNot trained yet: {'; '.join(c['words'] for c in missing)}.\n" * bool(missing),
        **{row.claim["id"] + row.beside: signed(row) for row in rows},
        **{f"{row.claim['id']}_seeds": by_seed(row) for row in primary
           if row.claim["id"] == "acpo_grpo"},
        **{f"{row.claim['id']}_verdict": row.verdict(gain) for row in rows if not row.beside})


def write_results():
    """-> the files that it wrote; of claims whose runs are not all trained the page says so."""
    runs, base = rule.Runs(["map", "advantages"]), read_bases()["countdown"]
    gain = rule.gain(runs, base["mean@16"])
    rows, missing = rule.rows()
    updates = json.loads(UPDATES.read_text())
    of_updates = mechanism.rows(updates)
    draw_map(runs, base, RESULTS / "map.png")
    mechanism.draw(updates, RESULTS / "mechanism.png")
    write_csv(rows, gain, of_updates)
    page = HERE.parent / "RESULTS.md"
    write(page, (HERE / "RESULTS.in.md").read_text().format(
        claims=claims_table(rows, gain), map=map_table(runs),
        traces=traces_table(rule.Runs(part for part in read_plan()
                                      if not re.search("pilot|gemma|averages", part))),
        mechanism=markdown_table(("place", "claim", "paper", "measured", "verdict"), of_updates),
        tokens=mechanism.few_tokens(updates), **numbers(rows, missing, gain, base)))
    return [page, *(RESULTS / name for name in ("claims.csv", "map.png", "mechanism.png"))]

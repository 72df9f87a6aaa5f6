"""RESULTS.md, the tables behind it (study/results/tables.md), claims.csv and the figures, from the
numbers in study/results: the runs of plan.toml, what rule.py says of the claims of claims.toml, and
the updates of mechanism.py.

There are two models: the toy (data/base and study/worked/base), and Gemma 3 270M."""

import csv
import json
import math
import statistics
from collections import Counter

from harness.curves import plt, save
from harness.files import write
from harness.tables import markdown_table
from study import mechanism, rule
from study.runs import HERE, RESULTS, read_bases, read_plan
from study.updates import UPDATES, UPDATES_OF_GEMMA

BESIDE = dict(own="mean@16 at each one's own rate", best="best validation score")
MAP = ("grpo", "dapo", "acpo", "cispo_gated", "cispo", "p3o", "dr_grpo", "power", "fade")
GRID = (("countdown", 16), ("countdown", 2), ("comparisons", 16), ("comparisons", 4))
SUMMARY = dict(acpo_grpo="ACPO", p3o_grpo="P3O", fade_grpo="FADE")
LEAD = 0.033  # ACPO's over DAPO in its table 1, as a share of the gain there
CASES = {  # P3O's own: a part of the plan, its steps per rollout, its words
    "hot": (16, "sampler at T = 1.2"), "old": (2, "data eight rollouts old"),
    "fp8": (16, "sampler in FP8")}
RIVALS = {"grpo_{}": "GRPO", "grpo_{}_sampler": "ratio against the sampler",
          "decoupled_{}": "ratio decoupled", "grpo_{}_masked": "sequences masked",
          "dapo_{}": "DAPO"}
UPDATES_SHOWN = {  # the claim of a row of mechanism.py: its words in RESULTS.md
    "std(rho) at pi <= 0.2 over that at pi > 0.8": "ratios spread most where tokens are unlikely",
    "size of G_L less that of G_H after 1 of 16 steps":
        "unlikely tokens dominate the gradient after 1 of 16 steps",
    "size of G_L less that of G_H after 16 of 16 steps": "likely tokens dominate it after 16 of 16",
    "size of G_L less that of G_H after 64 of 64 steps": "the same after 64 of 64",
    "mean pi, clipped less passed tokens": "clipped tokens are unlikely",
    "entropy where pi < 0.2, clipped less passed tokens":
        "clipped tokens among the unlikely have low entropy",
    "share clipped, top fifth by entropy less other fifths":
        "tokens of high entropy are clipped less",
    "norm, no clip": "without a clip the gradient is 200 times as long (toy: 1.2 times)"}
TRACES = (  # what shows whether a method adapts: a metric, its name, and settings that have it
    ("clip/range", "ACPO's mean clip range", ("acpo",)),
    ("clip/frac", "share of tokens clipped", ("acpo", "dapo", "cispo_gated")),
    ("policy/ess", "effective sample size", ("grpo", "p3o", "p3o_stale", "p3o_cold",
                                             "p3o_cold_trainer", *(f"p3o_{x}" for x in CASES))),
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


def cells_of(row, gain):
    """A row's difference, its share of the gain, and the verdict."""
    share = f"{100 * row.interval.mean / gain:+.0f}%" if row.in_units_of_gain else ""
    return signed(row), share, row.verdict(gain)


def claims_table(rows, gain, of_gemma, gemma_gain):
    """A line for each claim, and one for each number that stands beside it."""
    lines, cells = [], {(row.claim["id"], row.beside): cells_of(row, gemma_gain)
                        for row in of_gemma}
    for row in rows:
        first = ("", f"- {BESIDE[row.beside]}") if row.beside else (
            row.claim["paper"], row.claim["words"])
        lines.append((*first, *cells_of(row, gain),
                      *cells.get((row.claim["id"], row.beside), [""] * 3)))
    head = "difference", "of the gain", "verdict"
    return markdown_table(("paper", "claim", *head, *(f"Gemma: {x}" for x in head)), lines)


def settings_of(runs, steps, task="countdown"):
    """{name: {rate: {seed: run}}} of the map's methods, and their rates."""
    settings = {name: runs.of[task, name, steps] for name in MAP}
    return settings, sorted({lr for setting in settings.values() for lr in setting})


def map_table(runs):
    """mean@n of each method at each rate, and with three rates its own rate."""
    lines, head = [(name,) for name in MAP], ["method"]
    for task, steps in GRID:
        settings, rates = settings_of(runs, steps, task)
        own = ["own rate"] * (task == "countdown")
        model = "Gemma, " * (task == "comparisons")
        head += [*(f"{model}{steps} steps, {lr:g}" for lr in rates), *own]
        for i, setting in enumerate(settings.values()):
            found = [[rule.score(run, "test") for run in setting.get(lr, {}).values()]
                     for lr in rates]
            cells = [f"{x.mean:.3f} +- {x.error:.3f}" for x in map(rule.Interval.of, found)
                     ] if rates and min(map(len, found)) > 1 else [""] * len(rates)
            lines[i] += *cells, *(f"{rule.own_rate(setting)[1]:.1e}" if cells[0] else ""
                                  for _ in own)
    return markdown_table(head, lines)


def traces_table(runs):
    """Where the quantities went that methods adapt to: the mean over runs and their rollouts, and
    the least and the most of the runs' means and of the rollouts that are kept (every fifth)."""
    lines = []
    for metric, label, names in TRACES:
        for (task, name, steps), setting in sorted(runs.of.items()):
            of = [run for seeds in setting.values() for run in seeds.values()
                  if metric in run["mean"]]  # without a gradient in some rollout it is not
            if name in names and of:
                means = [run["mean"][metric] for run in of]
                found = means + [x for run in of for x in run["trace"].get(metric, ())]
                lines.append((label, name, task, str(steps), f"{statistics.fmean(means):.3g}",
                              f"{min(found):.3g} to {max(found):.3g}"))
    return markdown_table(("quantity", "setting", "task", "steps", "mean", "range"), lines)


def write_csv(models, updates_rows):
    """models: {name: (its rows, its gain)}"""
    with open(RESULTS / "claims.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("model", "paper", "claim", "beside", "score", "measured", "standard error",
                      "seeds", "p", "level", "low", "high", "verdict"))
        for model, (rows, gain) in models.items():
            for row in rows:
                x = row.interval
                numbers = x.mean, x.error, x.n, x.p, row.level, *x.ends(row.level)
                out.writerow((model, row.claim["paper"], row.claim["words"], row.beside, row.score,
                              *(f"{v:.5g}" for v in numbers), row.verdict(gain)))
        for row in updates_rows:
            for model, measured, verdict in (("toy", row.measured, row.verdict),
                                             ("gemma", row.gemma, row.gemma_verdict)):
                if measured:
                    out.writerow((model, row.place, row.claim, *[""] * 2, measured, *[""] * 6,
                                  verdict))


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
        axis.axhline(rule.of_test(base, kind), color="0.5", lw=0.8, ls=":")
        axis.set(xscale="log", xlabel="learning rate", title=f"{steps} steps per rollout",
                 ylabel=f"{rule.SCORES[kind]}16 on the test puzzles")
        axis.set_xticks(rates, [f"{lr:g}" for lr in rates])
        axis.minorticks_off()
    axes[0].legend(fontsize=7)
    save(figure, file, "mean and standard error over seeds; dotted: the base")


def draw_summary(models, file):
    """The differences from GRPO. models: {name: (rows, gain)}"""
    figure, axis = plt.subplots(figsize=(7, 2.6))
    for i, (model, (rows, gain)) in enumerate(models.items()):
        of = {row.claim["id"]: row for row in rows if not row.beside and row.score == "test"}
        for y, name in enumerate(SUMMARY):
            low, high = (x / gain for x in of[name].interval.ends(of[name].level))
            axis.plot([low, high], [-y - 0.2 * i] * 2, f"C{i}", lw=2,
                      label=None if y else model.capitalize())
            axis.plot([of[name].interval.mean / gain], [-y - 0.2 * i], f"C{i}o")
    axis.axvline(0, color="0.3", lw=0.8)
    axis.axvspan(-LEAD, LEAD, color="0.9")
    axis.set_yticks([-y - 0.1 for y in range(len(SUMMARY))], SUMMARY.values())
    axis.set(xlabel="difference from GRPO, as a share of what GRPO gains")
    axis.legend()
    save(figure, file, "corrected 95% intervals over eight seeds; grey: the size of ACPO's lead "
                       "over DAPO in its paper")


def over_rates(setting, kind="test"):
    """'0.321 +- 0.004': a setting's score, its mean over the rates, and the error over seeds."""
    seeds = set.intersection(*map(set, setting.values())) if setting else ()
    if len(seeds) < 2:
        return ""
    x = rule.Interval.of(statistics.fmean(rule.score(of[seed], kind) for of in setting.values())
                         for seed in seeds)
    return f"{x.mean:.3f} +- {x.error:.3f}"


def cases_table(rows, gain, *columns):
    """P3O and what it is compared with in each of CASES; some columns, or all."""
    runs, lines = rule.Runs([*CASES, "map"]), []
    of = {row.claim["id"]: row for row in rows if not row.beside}
    for case, (steps, words) in CASES.items():
        claim, settings = of.get(f"p3o_{case}"), runs.of["countdown", f"p3o_{case}", steps]
        lines.append({
            "case": words, "P3O": over_rates(settings),
            **{rival: over_rates(runs.of["countdown", name.format(case), steps])
               for name, rival in RIVALS.items()},
            "P3O less the GRPOs": signed(claim) if claim else "",
            "verdict": claim.verdict(gain) if claim else "",
            "sample size": over_rates(settings, "policy/ess"),
            "without the case": over_rates(runs.of["countdown", "p3o", steps], "policy/ess")})
    columns = columns or lines[0]
    return markdown_table(columns, [[line[name] for name in columns] for line in lines])


def certain_table(rows, gain, of_gemma, gemma_gain):
    """The claims with a verdict on either model."""
    of = {row.claim["id"]: row.verdict(gemma_gain) for row in of_gemma if not row.beside}
    lines = [(row.claim["paper"], row.claim["words"], row.verdict(gain),
              of.get(row.claim["id"], "")) for row in rows if not row.beside]
    return markdown_table(("paper", "claim", "toy", "Gemma"), [
        line for line in lines if {*line[2:]} - {"not certain", ""}])


def updates_table(rows):
    return markdown_table(("claim", "toy", "Gemma"), [
        (UPDATES_SHOWN[row.claim], row.verdict, row.gemma_verdict)
        for row in rows if row.claim in UPDATES_SHOWN])


def draw_gemma(runs, file):
    """Gemma's validation scores over rollouts, the mean over seeds and its 95% interval."""
    figure, axis = plt.subplots(figsize=(6.5, 4))
    for i, name in enumerate(("grpo", "acpo", "p3o", "fade")):
        seeds = [run["validation"] for setting in runs.of["comparisons", name, 16].values()
                 for run in setting.values()]
        if len(seeds) < 2:
            continue
        rollouts = [rollout for rollout, _ in seeds[0]]
        of = [rule.Interval.of(x) for x in zip(*([x for _, x in run] for run in seeds),
                                               strict=True)]
        low, high = zip(*(x.ends() for x in of), strict=True)
        axis.plot(rollouts, [x.mean for x in of], f"C{i}.-", label=f"{name}, {len(seeds)} seeds")
        axis.fill_between(rollouts, low, high, color=f"C{i}", alpha=0.12, lw=0)
    axis.set(xlabel="rollouts", ylabel="mean@4 on 50 held-out problems")
    axis.legend()
    save(figure, file, "Gemma 3 270M on comparisons, 16 steps per rollout; bands: 95% intervals "
                       "over seeds")


def numbers(rows, missing, gain, base, suffix=""):
    """What the sentences of RESULTS.in.md and tables.in.md name, of one model."""
    primary = [row for row in rows if not row.beside and row.score == "test"]
    verdicts = Counter(row.verdict(gain) for row in rows if not row.beside)
    three = {row.claim["id"]: f"{100 * rule.detectable(row) / gain:.0f}%" for row in primary}
    of_claims = sorted(map(rule.detectable, primary)) or [math.nan]
    seen = statistics.median(of_claims)
    found = dict(
        seeds=min((row.interval.n for row in rows), default=0), family=len(rows),
        gain=f"{gain:.3f}", after=f"{rule.of_test(base, 'test') + gain:.3f}",
        counted=f"{sum(verdicts.values())} (" + ", ".join(
            f"{n} *{name}*" for name, n in sorted(verdicts.items())) + ")",
        seen_three=", ".join(three.get(name, "-") for name in SUMMARY),
        margin=f"{rule.MARGIN * gain:.4f}", base=f"{rule.of_test(base, 'test'):.3f}",
        base_pass=rule.of_test(base, "pass"), seen=f"{seen:.3f}",
        seen_share=f"{100 * seen / gain:.0f}%",
        seen_range=" to ".join(f"{100 * x / gain:.0f}%" for x in (of_claims[0], of_claims[-1])),
        missing=f"\nNot trained yet: {'; '.join(c['words'] for c in missing)}.\n" * bool(missing),
        **{row.claim["id"] + row.beside: signed(row) for row in rows},
        **{f"{row.claim['id']}_seeds": by_seed(row) for row in primary
           if row.claim["id"] == "acpo_grpo"},
        **{f"{row.claim['id']}_verdict": row.verdict(gain) for row in rows if not row.beside})
    return {f"{name}{suffix}": x for name, x in found.items()}


def write_results():
    """-> the files that it wrote; of claims whose runs are not all trained the page says so."""
    runs, bases = rule.Runs(["map", "advantages", *rule.GEMMA]), read_bases()
    base, gemma_base = bases["countdown"], bases["comparisons"]
    gain = rule.gain(runs, rule.of_test(base, "test"))
    gemma_gain = rule.gain(runs, rule.of_test(gemma_base, "test"), task="comparisons")
    rows, missing = rule.rows()
    of_gemma, missing_of_gemma = rule.rows(rule.read_claims(gemma=True))
    updates, gemma = (json.loads(path.read_text()) for path in (UPDATES, UPDATES_OF_GEMMA))
    of_updates = mechanism.rows(updates, gemma)
    draw_map(runs, base, RESULTS / "map.png")
    draw_gemma(runs, RESULTS / "gemma.png")
    mechanism.draw(updates, gemma, RESULTS / "mechanism.png")
    models = dict(toy=(rows, gain), gemma=(of_gemma, gemma_gain))
    write_csv(models, of_updates)
    draw_summary(models, RESULTS / "summary.png")
    fields = dict(
        certain=certain_table(rows, gain, of_gemma, gemma_gain), updates=updates_table(of_updates),
        cases=cases_table(rows, gain, "case", "P3O", "GRPO", "P3O less the GRPOs", "verdict"),
        all_cases=cases_table(rows, gain),
        claims=claims_table(rows, gain, of_gemma, gemma_gain), map=map_table(runs),
        traces=traces_table(rule.Runs({part for part in read_plan() if "pilot" not in part} - {
            "averages", "gemma_half", "gemma_fp8_rest"})),  # of which the last is not whole
        mechanism=markdown_table(("place", "claim", "paper", "measured", "verdict", "Gemma",
                                  "verdict"), of_updates),
        tokens=mechanism.few_tokens(updates), **numbers(rows, missing, gain, base),
        **numbers(of_gemma, missing_of_gemma, gemma_gain, gemma_base, "_gemma"))
    pages = {"RESULTS.in.md": HERE.parent / "RESULTS.md", "tables.in.md": RESULTS / "tables.md"}
    for template, path in pages.items():
        write(path, (HERE / template).read_text().format(**fields))
    return [*pages.values(), *(RESULTS / name for name in (
        "claims.csv", "summary.png", "map.png", "gemma.png", "mechanism.png"))]

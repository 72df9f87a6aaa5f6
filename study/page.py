"""RESULTS.md, the tables behind it (study/results/tables.md), claims.csv and the figures, from the
numbers in study/results: the runs of plan.toml, what rule.py says of the claims of claims.toml, and
the updates of mechanism.py.

There are two models: the toy (data/base and study/worked/base), and Gemma 3 270M."""

import csv
import json
from collections import Counter
from statistics import fmean, median
from typing import NamedTuple

from harness.curves import plt, save
from harness.files import write, writing
from harness.stats import markdown_table
from study import mechanism, rule
from study.runs import HERE, RESULTS, read_bases
from study.updates import UPDATES, UPDATES_OF_GEMMA

BESIDE = dict(own="mean@16 at each one's own rate", best="best validation score")
MAP = ("grpo", "dapo", "acpo", "cispo_gated", "cispo", "p3o", "dr_grpo", "power", "fade")
GRID = (("countdown", 16), ("countdown", 2), ("comparisons", 16), ("comparisons", 4))
SUMMARY = dict(acpo_grpo="ACPO", p3o_grpo="P3O", fade_grpo="FADE")
LEAD = 0.033  # ACPO's over DAPO in its table 1, as a share of the gain there
CASES = dict(  # P3O's own: a part of the plan, its steps per rollout, its words
    hot=(16, "sampler at T = 1.2"), old=(2, "data eight rollouts old"), fp8=(16, "sampler in FP8"))
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


class Model(NamedTuple):
    """What the rule says of one model. missing: the claims whose runs are not all trained; base:
    its scores before training; gain: what GRPO adds to them."""

    rows: list
    missing: list
    base: dict
    gain: float

    @property
    def claims(self):
        """{id: the claim's Row}, without what stands beside it."""
        return {row.claim["id"]: row for row in self.rows if not row.beside}

    def cells(self, row):
        """A row's difference, its share of the gain, and the verdict."""
        share = f"{100 * row.interval.mean / self.gain:+.0f}%" if row.in_units_of_gain else ""
        return signed(row), share, row.verdict(self.gain)


def signed(row):
    """'+0.012 (-0.003, +0.027)': a row's mean and its corrected interval."""
    return "{:+.3f} ({:+.3f}, {:+.3f})".format(row.interval.mean, *row.interval.ends(row.level))


def mean_and_error(values):
    """'0.321 +- 0.004' over seeds; nothing for fewer than two."""
    values = list(values)
    return "{:.3f} +- {:.3f}".format(*rule.Interval.of(values)) if len(values) > 1 else ""


def claims_table(toy, gemma):
    """A line for each claim, and one for each number that stands beside it."""
    lines, cells = [], {(row.claim["id"], row.beside): gemma.cells(row) for row in gemma.rows}
    for row in toy.rows:
        first = ("", f"- {BESIDE[row.beside]}") if row.beside else (
            row.claim["paper"], row.claim["words"])
        lines.append((*first, *toy.cells(row),
                      *cells.get((row.claim["id"], row.beside), [""] * 3)))
    head = "difference", "of the gain", "verdict"
    return markdown_table(("paper", "claim", *head, *(f"Gemma: {x}" for x in head)), lines)


def settings_of(runs, steps, task="countdown"):
    """{name: {rate: {seed: run}}} of the map's methods, and their rates."""
    settings = {name: runs[task, name, steps] for name in MAP}
    return settings, sorted({lr for setting in settings.values() for lr in setting})


def map_table(runs):
    """mean@n of each method at each rate, and with three rates its own rate."""
    lines, head = [[name] for name in MAP], ["method"]
    for task, steps in GRID:
        settings, rates = settings_of(runs, steps, task)
        model = "Gemma, " * (task == "comparisons")
        head += [f"{model}{steps} steps, {lr:g}" for lr in rates]
        head += ["own rate"] * (task == "countdown")
        for line, setting in zip(lines, settings.values(), strict=True):
            line += [mean_and_error(rule.score(run, "test") for run in setting.get(lr, {}).values())
                     for lr in rates]
            if task == "countdown":
                line.append(f"{rule.own_rate(setting)[1]:.1e}" if len(setting) == 3 else "")
    return markdown_table(head, lines)


def traces_table(runs):
    """Where the quantities went that methods adapt to: the mean over runs and their rollouts, and
    the least and the most of the runs' means and of the rollouts that are kept (every fifth)."""
    lines = []
    for metric, label, names in TRACES:
        for (task, name, steps), setting in sorted(runs.items()):
            of = [run for seeds in setting.values() for run in seeds.values()
                  if metric in run["mean"]]  # without a gradient in some rollout it is not
            if name in names and of:
                means = [run["mean"][metric] for run in of]
                found = means + [x for run in of for x in run["trace"].get(metric, ())]
                lines.append((label, name, task, str(steps), f"{fmean(means):.3g}",
                              f"{min(found):.3g} to {max(found):.3g}"))
    return markdown_table(("quantity", "setting", "task", "steps", "mean", "range"), lines)


def write_csv(models, updates_rows):
    """models: {name: its Model}"""
    lines = [("model", "paper", "claim", "beside", "score", "measured", "standard error", "seeds",
              "p", "level", "low", "high", "verdict")]
    for model, of in models.items():
        for row in of.rows:
            x = row.interval
            numbers = x.mean, x.error, x.n, x.p, row.level, *x.ends(row.level)
            lines.append((model, row.claim["paper"], row.claim["words"], row.beside, row.score,
                          *(f"{v:.5g}" for v in numbers), row.verdict(of.gain)))
    for row in updates_rows:
        for model, measured, verdict in (("toy", row.measured, row.verdict),
                                         ("gemma", row.gemma, row.gemma_verdict)):
            if measured:
                lines.append((model, row.place, row.claim, *[""] * 2, measured, *[""] * 6, verdict))
    with writing(RESULTS / "claims.csv") as aside, open(aside, "w", newline="") as file:
        csv.writer(file).writerows(lines)


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
    """The differences from GRPO. models: {name: its Model}"""
    figure, axis = plt.subplots(figsize=(7, 2.6))
    for i, (model, of) in enumerate(models.items()):
        for y, row in enumerate(of.claims[name] for name in SUMMARY):
            low, high = (x / of.gain for x in row.interval.ends(row.level))
            axis.plot([low, high], [-y - 0.2 * i] * 2, f"C{i}", lw=2,
                      label=None if y else model.capitalize())
            axis.plot([row.interval.mean / of.gain], [-y - 0.2 * i], f"C{i}o")
    axis.axvline(0, color="0.3", lw=0.8)
    axis.axvspan(-LEAD, LEAD, color="0.9")
    axis.set_yticks([-y - 0.1 for y in range(len(SUMMARY))], SUMMARY.values())
    axis.set(xlabel="difference from GRPO, as a share of what GRPO gains")
    axis.legend()
    save(figure, file, "corrected 95% intervals over eight seeds; grey: the size of ACPO's lead "
                       "over DAPO in its paper")


def cases_table(toy, *columns):
    """P3O and what it is compared with in each of CASES; some columns, or all."""
    runs, lines = rule.read_runs([*CASES, "map"]), []
    for case, (steps, words) in CASES.items():
        def over_rates(name, kind="test"):
            found = rule.by_seed(runs, "countdown", f"{name}/{steps}", kind) or {}
            return mean_and_error(found.values())
        claim = toy.claims[f"p3o_{case}"]
        lines.append({
            "case": words, "P3O": over_rates(f"p3o_{case}"),
            **{rival: over_rates(name.format(case)) for name, rival in RIVALS.items()},
            "P3O less the GRPOs": signed(claim), "verdict": claim.verdict(toy.gain),
            "sample size": over_rates(f"p3o_{case}", "policy/ess"),
            "without the case": over_rates("p3o", "policy/ess")})
    columns = columns or lines[0]
    return markdown_table(columns, [[line[name] for name in columns] for line in lines])


def certain_table(toy, gemma):
    """The claims with a verdict on either model."""
    of_gemma = {name: row.verdict(gemma.gain) for name, row in gemma.claims.items()}
    lines = [(row.claim["paper"], row.claim["words"], row.verdict(toy.gain),
              of_gemma.get(name, "")) for name, row in toy.claims.items()]
    return markdown_table(("paper", "claim", "toy", "Gemma"), [
        line for line in lines if {*line[2:]} - {"not certain", ""}])


def draw_gemma(runs, file):
    """Gemma's validation scores over rollouts, the mean over seeds and its 95% interval."""
    figure, axis = plt.subplots(figsize=(6.5, 4))
    for i, name in enumerate(("grpo", "acpo", "p3o", "fade")):
        seeds = [run["validation"] for setting in runs["comparisons", name, 16].values()
                 for run in setting.values()]
        of = {scores[0][0]: rule.Interval.of(x for _, x in scores)
              for scores in zip(*seeds, strict=True)}
        low, high = zip(*(x.ends() for x in of.values()), strict=True)
        axis.plot([*of], [x.mean for x in of.values()], f"C{i}.-",
                  label=f"{name}, {len(seeds)} seeds")
        axis.fill_between([*of], low, high, color=f"C{i}", alpha=0.12, lw=0)
    axis.set(xlabel="rollouts", ylabel="mean@4 on 50 held-out problems")
    axis.legend()
    save(figure, file, "Gemma 3 270M on comparisons, 16 steps per rollout; bands: 95% intervals "
                       "over seeds")


def numbers(model, suffix=""):
    """What the sentences of RESULTS.in.md and tables.in.md name, of one model."""
    base, gain = rule.of_test(model.base, "test"), model.gain
    verdicts = {name: row.verdict(gain) for name, row in model.claims.items()}
    counts = sorted(Counter(verdicts.values()).items())
    seen = {name: row.interval.half(row.level) for name, row in model.claims.items()
            if row.score == "test"}
    middle, least, most = median(seen.values()), min(seen.values()), max(seen.values())

    def share(x):
        return f"{100 * x / gain:.0f}%"
    found = dict(
        family=len(model.rows), gain=f"{gain:.3f}", after=f"{base + gain:.3f}",
        counted=f"{len(verdicts)} ({', '.join(f'{n} *{name}*' for name, n in counts)})",
        seen_three=", ".join(share(seen[name]) for name in SUMMARY),
        margin=f"{rule.MARGIN * gain:.4f}", base=f"{base:.3f}",
        base_pass=rule.of_test(model.base, "pass"), seen=f"{middle:.3f}", seen_share=share(middle),
        seen_range=f"{share(least)} to {share(most)}",
        missing="\nNot trained yet: {}.\n".format("; ".join(
            claim["words"] for claim in model.missing)) if model.missing else "",
        **{row.claim["id"] + row.beside: signed(row) for row in model.rows},
        **{f"{name}_verdict": verdict for name, verdict in verdicts.items()})
    return {f"{name}{suffix}": x for name, x in found.items()}


def write_results():
    """-> the files that it wrote; of claims whose runs are not all trained the page says so."""
    runs, bases = rule.read_runs(["map", "advantages", *rule.GEMMA]), read_bases()
    toy, gemma = (Model(*rule.rows(of_gemma), bases[task], rule.gain(runs, task, bases[task]))
                  for task, of_gemma in (("countdown", False), ("comparisons", True)))
    models = dict(toy=toy, gemma=gemma)
    updates, updates_gemma = (json.loads(x.read_text()) for x in (UPDATES, UPDATES_OF_GEMMA))
    of_updates = mechanism.rows(updates, updates_gemma)
    met, low = zip(*(step for seed in updates["seeds"] for step in seed["met"]), strict=True)
    draw_map(runs, toy.base, RESULTS / "map.png")
    draw_gemma(runs, RESULTS / "gemma.png")
    mechanism.draw(updates, updates_gemma, RESULTS / "mechanism.png")
    write_csv(models, of_updates)
    draw_summary(models, RESULTS / "summary.png")
    of_seeds = rule.values(rule.read_runs(["map"]),
                           toy.claims["acpo_grpo"].claim["contrasts"]).values()
    fields = dict(
        certain=certain_table(toy, gemma), updates=markdown_table(("claim", "toy", "Gemma"), [
            (UPDATES_SHOWN[row.claim], row.verdict, row.gemma_verdict)
            for row in of_updates if row.claim in UPDATES_SHOWN]),
        cases=cases_table(toy, "case", "P3O", "GRPO", "P3O less the GRPOs", "verdict"),
        all_cases=cases_table(toy), claims=claims_table(toy, gemma),
        map=map_table(runs), acpo_grpo_seeds=f"{min(of_seeds):+.3f} to {max(of_seeds):+.3f}",
        traces=traces_table(rule.read_runs({*rule.GEMMA, *(
            part for claim in rule.read_claims(gemma=False) for part in claim["parts"])})),
        mechanism=markdown_table(("place", "claim", "paper", "measured", "verdict", "Gemma",
                                  "verdict"), of_updates),
        met=fmean(met), met_least=min(met), met_most=max(met),
        low=fmean(low), low_least=min(low), low_most=max(low),
        **numbers(toy), **numbers(gemma, "_gemma"))
    pages = {"RESULTS.in.md": HERE.parent / "RESULTS.md", "tables.in.md": RESULTS / "tables.md"}
    for template, path in pages.items():
        write(path, (HERE / template).read_text().format(**fields))
    return [*pages.values(), *(RESULTS / name for name in (
        "claims.csv", "summary.png", "map.png", "gemma.png", "mechanism.png"))]

"""RESULTS.md and its figures, from results/runs.jsonl and results/anatomy.json: what the papers
claim, and what the runs say.

    ./run_all.sh grid                       the runs, the anatomy, RESULTS.md: hours
    ./run_all.sh results                    RESULTS.md alone, from the numbers kept in results/
    python -m analysis results --measure    first the anatomy of the first rollout of five seeds
                                            again: minutes
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from analysis import anatomy, figures, runs, theory
from analysis.rollout import open_rollout
from experiment.tables import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
SEEDS = range(5)
# asym has delta 2 and is success-biased
METHODS = ("grpo", "dr_grpo", "dapo", "cispo", "acpo", "p3o", "fade", "asym", "power")
GRID = "./run_all.sh grid"


# ---------------------------------------------------------------------------- measuring


def measure():
    """Writes results/anatomy.json: the anatomy of each seed's first rollout, in the grid's
    settings."""
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            out = Path(folder, str(seed))
            subprocess.run(
                [sys.executable, "train.py", "--loss", "grpo", "--rollouts", "1",
                 "--save_rollouts", "--eval_every", "0", "--out", out, "--seed", str(seed),
                 "--problems_per_rollout", "32", "--lr", "2e-4", "--sampler", "transformers"],
                cwd=ROOT, check=True)
            seeds.append(measure_rollout(out / "rollouts" / "rollout_000001.pt", seed))
            if seed:
                drop_what_only_figures_need(seeds[-1])
    result = dict(theory=theory.proposition_1(), tabular_slope=theory.tabular_slope(), seeds=seeds)
    (RESULTS / "anatomy.json").write_text(json.dumps(runs.rounded(result)) + "\n")


def measure_rollout(file, seed):
    """Each analysis opens the rollout anew: the one before it has moved the policy."""
    about = dict(rollout=1, method="grpo", seed=seed)
    return dict(
        steps=dict(about, lr=2e-4, **anatomy.steps(open_rollout(file))),
        slow=anatomy.steps(open_rollout(file), lr=5e-5)["slope"],
        sgd=anatomy.steps(open_rollout(file), lr=0.2, optimizer=torch.optim.SGD)["slope"],
        far=anatomy.steps(open_rollout(file), count=64, lr=1e-3)["dominance"],
        subsets=dict(about, **anatomy.compare_subsets(open_rollout(file))),
        entropy=dict(about, lr=2e-4, **anatomy.entropy_changes(open_rollout(file))))


def drop_what_only_figures_need(measured):
    """Figures show the first seed alone."""
    ratios = {side: dict(std=v["std"]) for side, v in measured["steps"]["ratios"].items()}
    measured["steps"].update(tables=[], ratios=ratios)
    for subset in measured["subsets"]["subsets"].values():
        subset["matrices"] = {}


# ---------------------------------------------------------------------------- the kept numbers

# Student's 97.5% quantiles for n values
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306,
           10: 2.262}


class OverSeeds(tuple):
    """(mean, low, high) of one value per seed, by the bootstrap.

    It is `above` or `below` a value only where Student's t interval, which is wider with few
    seeds, agrees: of five normal values the bootstrap's 95% cover 82%."""

    def __new__(cls, values):
        self = super().__new__(cls, runs.bootstrap(values))
        standard_error = statistics.stdev(values) / len(values) ** 0.5
        self.half_width = standard_error * STUDENT[len(values)]
        return self

    def above(self, x=0.0):
        return min(self[1], self[0] - self.half_width) > x

    def below(self, x=0.0):
        return max(self[2], self[0] + self.half_width) < x


class Numbers:
    """The kept numbers. A run's name is that of a line of results/grid.txt and its steps, as in
    "grpo-16"."""

    def __init__(self):
        self.runs = {}
        for run in runs.read(RESULTS / "runs.jsonl"):
            self.runs.setdefault(run["name"], {})[run["seed"]] = run
        self.anatomy = json.loads((RESULTS / "anatomy.json").read_text())

    def values(self, name, metric):
        """{seed: value}: the last of the run; of clip/ and time/ the mean of the run."""
        of_run = runs.average if metric.startswith(("clip/", "time/")) else runs.last
        return {seed: of_run(run, metric) for seed, run in self.runs[name].items()}

    def mean(self, name, metric):
        return runs.bootstrap(list(self.values(name, metric).values()))

    def gap(self, a, b, metric):
        """a - b, seed by seed."""
        of_a, of_b = self.values(a, metric), self.values(b, metric)
        return OverSeeds([of_a[seed] - of_b[seed] for seed in sorted(of_a.keys() & of_b.keys())])

    def over_seeds(self, quantity):
        """quantity: a seed's part of the anatomy -> a number."""
        return OverSeeds([quantity(seed) for seed in self.anatomy["seeds"]])


def signed(x):
    mean, low, high = x
    return f"{mean:+.3f} ({low:+.3f}, {high:+.3f})"


def plain(x, digits=3):
    mean, low, high = x
    return f"{mean:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


# ---------------------------------------------------------------------------- verdicts

REPRODUCED, CONTRADICTED = "reproduced", "contradicted"
UNDECIDED, WITHDRAWN = "not at this scale", "withdrawn"
MARGIN = 0.05  # of mean@16: a loss that is surely smaller is none


def verdict(x, above=True, than=0.0):
    """Of a quantity that the paper has above (or below) a value: an interval that holds the value
    says nothing."""
    if not (x.above(than) or x.below(than)):
        return UNDECIDED
    return REPRODUCED if x.above(than) == above else CONTRADICTED


def falls(x):
    """Of a difference that the paper has below 0."""
    return verdict(x, above=False)


def holds(x):
    """Of a difference that the paper has at 0 or above: surely no loss of MARGIN, or surely a
    loss."""
    return REPRODUCED if x.above(-MARGIN) else CONTRADICTED if x.below() else UNDECIDED


def not_judged(x):
    """Of a difference that no paper has a claim about."""
    return "-"


def withdrawn(claim, where):
    """Is the figure not the paper's quantity, or a ranking of methods at one learning rate?
    RESULTS.md gives the reasons at its top."""
    return (where.startswith("Remark 1") or where == "main table" or "T = 1.2" in claim
            or claim.startswith(("norm of the gradient", "the entropy changes as",
                                 "solves more than", "without a clip to tune")))


class Claim(NamedTuple):
    paper: str
    claim: str
    where: str
    command: str
    figure: str
    verdict: str


def judged(paper, claim, where, command, figure, verdict):
    """-> the Claim, withdrawn where it has to be."""
    if withdrawn(claim, where):
        verdict = WITHDRAWN
    return Claim(paper, claim, where, command, figure, verdict)


METRICS = {"mean@n": "mean@16", "pass@n": "pass@16", "policy/entropy": "entropy",
           "optim/head_rank1_share": "rank-1 share"}


def compare(n, paper, claim, where, a, b, metric="mean@n", judge=verdict):
    """-> the Claim about two lines of the grid."""
    gap = n.gap(a, b, metric)
    figure = f"{METRICS[metric]}, {a} less {b}: {signed(gap)}"
    return judged(paper, claim, where, GRID, figure, judge(gap))


# ---------------------------------------------------------------------------- the claims


def claims(n):
    """-> the Claims of all papers, with what the numbers n say of them."""
    return [*acpo_steps(n), *acpo_theory(n), *acpo_dominance(n), *acpo_subsets(n), *acpo_runs(n),
            *p3o_runs(n), *p3o_lag(n), *fade_axes(n), *fade_entropy(n), *fade_runs(n)]


def acpo_steps(n):
    command = "analysis steps"
    slope = n.over_seeds(lambda seed: seed["steps"]["slope"]["1"])
    if slope.below(1.5) or slope.above(2.5):
        slope_verdict = CONTRADICTED
    else:
        slope_verdict = REPRODUCED if slope.above(1.5) and slope.below(2.5) else UNDECIDED
    yield judged("ACPO", "the std of the ratio falls as (1 - pi)^2 after one step: "
                         "slope 2 in logarithms", "Lemma 1", command, f"slope {plain(slope, 2)}",
                 slope_verdict)

    def low_over_high(seed):
        ratios = seed["steps"]["ratios"]
        return ratios["low"]["std"] / ratios["high"]["std"]
    spread = n.over_seeds(low_over_high)
    yield judged("ACPO", "ratios spread far more at low probability", "fig. 2a", command,
                 f"std of rho after 16 steps, pi <= 0.2 over pi > 0.8: {plain(spread, 1)} times",
                 verdict(spread, than=1))


def acpo_theory(n):
    for eq, where in ((53, "Prop. 1"), (56, "appendix")):
        gap = max(abs(line["monte_carlo"] - line[f"eq{eq}"]) / line["error"]
                  for line in n.anatomy["theory"])
        yield judged("ACPO", f"the expected gradient by probability is eq. {eq}", where,
                     "analysis theory",
                     f"largest gap to the Monte Carlo of its assumptions: {gap:.1f} standard "
                     "errors", REPRODUCED if gap < 3.5 else CONTRADICTED)


def dominance_ratio(n, part, taken):
    """The mean |G| of low- over that of high-probability tokens after so many steps."""
    def ratio(seed):
        dominance = (seed["steps"]["dominance"] if part == "steps" else seed[part])[taken]
        return dominance["low"]["mean"] / dominance["high"]["mean"]
    return n.over_seeds(ratio)


def acpo_dominance(n):
    for when, taken, low_first in (
            ("near on-policy (1 step), low-probability", "1", True),
            ("far off-policy (16 steps), high-probability", "16", False)):
        ratio = dominance_ratio(n, "steps", taken)
        yield judged("ACPO", f"{when} tokens carry the larger mean gradient", "Remark 1, fig. 2b",
                     "analysis steps", f"mean abs G, pi <= 0.2 over pi > 0.8: {plain(ratio, 1)}",
                     verdict(ratio, above=low_first, than=1))


def acpo_subsets(n):
    """What the paper has above what, and with which numbers."""
    for a, b, key, in_paper in (
            ("pi < 0.2", "pi > 0.8", "norm", "409% against 50%"),
            ("pi > 0.8", "pi < 0.2", "angle", "42.8 against 27.8 degrees"),
            ("A > 0", "A < 0", "angle", "40.5 against 28.0 degrees"),
            ("A > 0", "A < 0", "norm", "122% against 92%"),
            ("no clip", "clip-higher", "angle", "50.7 against 1.3 degrees"),
            ("no clip", "full", "norm", "20177%"),
            ("cispo", "full", "norm", "3268%"),
            ("top 20% entropy", "full", "norm", "340%")):
        of_a, of_b = ([seed["subsets"]["subsets"][name][key] for seed in n.anatomy["seeds"]]
                      for name in (a, b))
        gap = OverSeeds([x - y for x, y in zip(of_a, of_b, strict=True)])
        unit = "" if key == "norm" else " degrees"
        yield judged("ACPO", f"{key} of the gradient: {a} above {b} ({in_paper})", "sec. 3",
                     "analysis subsets",
                     f"{statistics.fmean(of_a):.2f} against {statistics.fmean(of_b):.2f}{unit}: "
                     f"{signed(gap)}", verdict(gap))


def acpo_runs(n):
    for other in ("dapo", "cispo"):
        for steps in (2, 16):
            yield compare(n, "ACPO", f"solves more than {other.upper()}, {steps} steps", "table 1",
                          f"acpo-{steps}", f"{other}-{steps}")
    for claim, where, a, b, judge in (
            ("solves more than DAPO, 16 steps, a quarter of the learning rate", "table 1",
             "acpo_slow-16", "dapo_slow-16", verdict),
            ("solves more than DAPO with Clip-High=Max, 16 steps", "table 3",
             "acpo-16", "dapo_clip_max-16", verdict),
            ("solves more than GRPO with Clip=Avg, 16 steps", "table 3",
             "acpo-16", "grpo_clip_0.6-16", verdict),
            ("CISPO loses off-policy (74.3 at 2 steps, 55.1 at 16)", "table 1",
             "cispo-16", "cispo-2", falls),
            ("the same with its bound of 1.45", "table 1",
             "cispo_1.45-16", "cispo_1.45-2", falls),
            ("ACPO does not (75.7 and 76.3)", "table 1", "acpo-16", "acpo-2", holds)):
        yield compare(n, "ACPO", claim, where, a, b, judge=judge)


def p3o_runs(n):
    for clip, name in (("0.1", "grpo_clip_0.1-16"), ("0.2", "grpo-16"),
                       ("0.4", "grpo_clip_0.4-16"), ("0.6", "grpo_clip_0.6-16")):
        yield compare(n, "P3O", "without a clip to tune, no worse than GRPO with clip "
                                f"{clip}, 16 steps", "clip sweep", "p3o-16", name, judge=holds)
    for name, setting, stays in (("hot", "sampler at T = 1.2", True),
                                 ("cold", "sampler at T = 0.6", False),
                                 ("bf16", "bfloat16 sampler (FP8 in the paper)", True)):
        yield compare(n, "P3O", f"GRPO loses (the paper: collapses), {setting}", "mismatch",
                      f"grpo_{name}-16", "grpo-16", judge=falls)
        yield compare(n, "P3O", f"P3O {'holds' if stays else 'loses, too'}, {setting}", "mismatch",
                      f"p3o_{name}-16", "p3o-16", judge=holds if stays else falls)
    yield compare(n, "P3O", "P3O holds, sampler at T = 1.2, a quarter of the learning rate",
                  "mismatch", "p3o_hot_slow-16", "p3o_slow-16", judge=holds)


def p3o_lag(n):
    def change(method, lag):
        lagging = n.values(f"{method}_lag_{lag}-2", "mean@n")
        fresh = n.values(f"{method}-2", "mean@n")
        return [lagging[seed] - fresh[seed] for seed in fresh]
    for lag in (1, 4, 8):
        p3o, grpo = change("p3o", lag), change("grpo", lag)
        gap = OverSeeds([x - y for x, y in zip(p3o, grpo, strict=True)])
        yield judged("P3O", f"bears rollouts that are {lag} old better than GRPO", "its title",
                     GRID, f"change of mean@16 to lag 0: P3O {statistics.fmean(p3o):+.3f}, "
                           f"GRPO {statistics.fmean(grpo):+.3f}, apart {signed(gap)}",
                     verdict(gap))


def fade_axes(n):
    for steps in (2, 16):
        yield compare(n, "FADE", "success-biased weights (delta 2) cost entropy (the paper: "
                                 f"collapse it), {steps} steps", "sign axis", f"asym-{steps}",
                      f"dr_grpo-{steps}", "policy/entropy", falls)
        yield compare(n, "FADE", "failure-biased weights (delta 0.5) narrow the head's update, "
                                 f"{steps} steps", "sign axis", f"asym_failures-{steps}",
                      f"dr_grpo-{steps}", "optim/head_rank1_share")


def fade_entropy(n):
    def row(paper, formula, where, key, judge):
        x = n.over_seeds(lambda seed: seed["entropy"][f"correlation_{key}"])
        return judged(paper, f"the entropy changes as {formula}", where, "analysis entropy",
                      f"correlation with what is measured: {plain(x, 2)}", judge(x))

    def correlates(x):
        return REPRODUCED if x.above(0.5) else CONTRADICTED if x.below() else UNDECIDED
    yield row("FADE", "(m_S - m_F) H - Cov(A, log pi)", "sec. on entropy", "predicted", correlates)
    yield row("ours", "-(m_S - m_F) H - Cov(A, log pi)", "the other sign", "reversed", not_judged)


def fade_runs(n):
    for steps in (2, 16):
        yield compare(n, "FADE", "focus on hard problems (power) raises pass@k, "
                                 f"{steps} steps", "difficulty axis", f"power-{steps}",
                      f"dr_grpo-{steps}", "pass@n")
    for base in ("grpo", "dr_grpo"):
        for metric, noun in (("mean@n", "accuracy"), ("pass@n", "diversity")):
            yield compare(n, "FADE", f"more {noun} than {base}, 16 steps", "main table", "fade-16",
                          f"{base}-16", metric)
    yield compare(n, "FADE", "without delta there is less entropy (the paper: it collapses)",
                  "ablation", "fade_no_delta-16", "fade-16", "policy/entropy", falls)
    yield compare(n, "FADE", "without alpha pass@k falls", "ablation", "fade_no_alpha-16",
                  "fade-16", "pass@n", falls)
    for part in ("delta", "alpha"):
        yield compare(n, "ours", f"what FADE loses of accuracy without {part}", "ablation",
                      f"fade_no_{part}-16", "fade-16", judge=not_judged)


# ---------------------------------------------------------------------------- tables and figures


def main_table(n):
    """Every run: the methods first, then the other lines of the grid by name."""
    columns = {"mean@16": "mean@n", "pass@16": "pass@n", "entropy": "policy/entropy",
               "clipped": "clip/frac"}
    names = [f"{method}-{steps}" for steps in (2, 16) for method in METHODS]
    names += sorted(name for name in n.runs if name.rsplit("-", 1)[0] not in METHODS)
    rows = []
    for name in names:
        label, steps = name.rsplit("-", 1)
        seconds = statistics.median(n.values(name, "time/rollout").values())
        rows.append((label, steps, str(len(n.runs[name])),
                     *(plain(n.mean(name, metric)) for metric in columns.values()),
                     f"{seconds:.1f}"))
    return markdown_table(("run", "steps", "seeds", *columns, "seconds"), rows)


def draw_ends(n):
    """What groups of runs had at their end."""
    metrics = {"held-out mean@16": "mean@n", "held-out pass@16": "pass@n",
               "entropy (nats)": "policy/entropy"}
    caption = (f"mean of {len(SEEDS)} seeds, 95% bootstrap interval over seeds; "
               "blue 16 steps per rollout, orange 2")

    def draw(file, names):
        panels = {label: {name.replace("-", " "): n.mean(name, metric) for name in names}
                  for label, metric in metrics.items()}
        figures.dots(panels, RESULTS / file, caption)
    draw("methods.png", [f"{method}-{steps}" for method in METHODS for steps in (16, 2)])
    draw("clips.png", ["grpo_clip_0.1-16", "grpo-16", "grpo_clip_0.4-16", "grpo_clip_0.6-16",
                       "dapo-16", "dapo_clip_max-16", "cispo-16", "cispo_1.45-16", "acpo-16",
                       "p3o-16"])
    samplers = [f"{method}{change}-16" for change in ("", "_hot", "_cold", "_bf16")
                for method in ("grpo", "p3o")]
    lags = [f"{method}{lag}-2" for lag in ("", "_lag_1", "_lag_4", "_lag_8")
            for method in ("grpo", "p3o")]
    draw("mismatch.png", samplers + lags)


def draw_runs(n):
    """How groups of runs went."""
    def groups(*names):
        return {name: list(n.runs[name].values()) for name in names}
    figures.curves(groups(*(f"{method}-16" for method in METHODS[:7])), RESULTS / "curves.png")
    figures.fade(groups("dr_grpo-16", "fade-16", "asym-16", "asym_failures-16", "power-16"),
                 theory.masses(), RESULTS / "fade.png")
    figures.p3o(groups("grpo-16", "p3o-16", "p3o_hot-16", "p3o_cold-16", "acpo-16", "cispo-16"),
                RESULTS / "p3o.png")
    curves = runs.pass_at_k(groups("grpo-2", "grpo-16", "cispo-16", "acpo-16", "p3o-16", "fade-16",
                                   "power-16"))
    figures.passk(curves, RESULTS / "passk.png",
                  f"mean of {len(SEEDS)} seeds, 95% bootstrap interval over seeds")


def draw_anatomy(n):
    first = n.anatomy["seeds"][0]
    figures.steps(first["steps"], RESULTS / "steps.png")
    figures.subsets(first["subsets"], RESULTS / "subsets.png")
    figures.entropy(first["entropy"], RESULTS / "entropy.png")
    figures.theory(n.anatomy["theory"], RESULTS / "theory.png")


# ---------------------------------------------------------------------------- the page


def text_numbers(n):
    """The numbers in the text of results/RESULTS.in.md: what was tried where a claim did not come
    out."""
    def mean(quantity, digits=2):
        return plain(n.over_seeds(quantity), digits)

    def end(name, metric="mean@n", digits=3):
        return plain(n.mean(f"{name}-16", metric), digits)
    slopes = {taken: mean(lambda seed, taken=taken: seed["steps"]["slope"][taken])
              for taken in ("1", "2", "4", "8", "16")}
    sizes = [line["size"] for line in n.anatomy["theory"]]
    return dict(
        slopes=", ".join(f"{slope} after {taken}" for taken, slope in slopes.items()),
        slow=mean(lambda seed: seed["slow"]["1"]), sgd=mean(lambda seed: seed["sgd"]["1"]),
        tabular=f"{n.anatomy['tabular_slope']:.2f}",
        far=plain(dominance_ratio(n, "far", "64"), 1),
        far_low=mean(lambda seed: seed["far"]["64"]["low"]["share"]),
        far_high=mean(lambda seed: seed["far"]["64"]["high"]["share"]),
        least=f"{min(sizes):.2f}", own=f"{0.8 * min(sizes) / (0.2 * max(sizes)):.1f}",
        cov=mean(lambda seed: seed["entropy"]["correlation_covariance"]),
        **{name: end(name) for name in (
            "grpo", "p3o", "grpo_hot", "p3o_hot", "p3o_hot_slow", "p3o_slow", "acpo", "dapo",
            "acpo_slow", "dapo_slow")},
        slow_gap=signed(n.gap("acpo_slow-16", "dapo_slow-16", "mean@n")),
        **{f"{name}_clipped": end(name, "clip/frac") for name in ("acpo", "dapo")},
        **{f"{name}_kl": plain(mean_kl(n, f"{name}-16")) for name in ("acpo", "dapo")},
        hot_entropy=end("p3o_hot", "policy/entropy", 2),
        hot_slow_entropy=end("p3o_hot_slow", "policy/entropy", 2),
        acpo_range=plain(mean_clip_range(n), 2))


def mean_kl(n, name):
    """KL within a rollout, over the rollouts of the run."""
    return runs.bootstrap([runs.average(run, "policy/kl_old") for run in n.runs[name].values()])


def mean_clip_range(n):
    """ACPO's clip range, over the tokens of the optimizer steps."""
    def of_step(step):
        return sum(step[f"clip/range/bin{i}"] * step[f"policy/bin_frac/bin{i}"] for i in range(5))
    return runs.bootstrap([statistics.fmean(map(of_step, run["profile"]))
                           for run in n.runs["acpo-16"].values()])


def page(n):
    """RESULTS.md: results/RESULTS.in.md with its numbers filled in."""
    rows = claims(n)
    counts = {v: sum(row.verdict == v for row in rows)
              for v in (REPRODUCED, UNDECIDED, CONTRADICTED, WITHDRAWN)}
    first = [run["records"][0] for by_seed in n.runs.values() for run in by_seed.values()]
    base = [record for record in first if record["rollout"] == 0]
    template = (RESULTS / "RESULTS.in.md").read_text()
    return template.format(
        **text_numbers(n), runs=sum(map(len, n.runs.values())),
        counts=", ".join(f"{count} {v}" for v, count in counts.items()),
        base_mean=f"{statistics.fmean(r['mean@n'] for r in base):.3f}",
        base_pass=f"{statistics.fmean(r['pass@n'] for r in base):.3f}",
        claims=markdown_table(Claim._fields, rows), table=main_table(n))


def write_results(measure_first=False):
    """-> the files that it wrote"""
    if measure_first:
        measure()
    n = Numbers()
    draw_ends(n)
    draw_runs(n)
    draw_anatomy(n)
    (ROOT / "RESULTS.md").write_text(page(n))
    numbers = [RESULTS / "anatomy.json"] if measure_first else []
    return [ROOT / "RESULTS.md", *numbers, *sorted(RESULTS.glob("*.png"))]

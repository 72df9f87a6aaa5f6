"""RESULTS.md and its figures, from results/runs.jsonl and results/anatomy.json: what the papers claim, and what the runs say.

    ./run_all.sh grid           the runs, the anatomy, RESULTS.md: hours
    ./run_all.sh results        this file alone: RESULTS.md from the numbers that are kept in results/
    python bench/claims.py --measure      the anatomy of the first rollout of five seeds again: minutes
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import anatomy  # noqa: E402
import analyze  # noqa: E402
import figures  # noqa: E402

RESULTS, SEEDS = ROOT / "results", range(5)
METHODS = "grpo dr_grpo dapo cispo acpo p3o fade asym power".split()  # asym: delta 2, success-biased
GRID = "./run_all.sh grid"


def measure():
    """The anatomy of each seed's first rollout, in the grid's settings."""
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            out = Path(folder, str(seed))
            subprocess.run([sys.executable, "train.py", "--loss", "grpo", "--rollouts", "1", "--save_rollouts", "--eval_every", "0", "--out", out,
                            "--seed", str(seed), *"--problems_per_rollout 32 --lr 2e-4 --sampler transformers".split()], cwd=ROOT, check=True)
            file = str(out / "rollouts" / "rollout_000001.pt")

            def kept():
                return anatomy.open_rollout(file)
            about = dict(rollout=1, method="grpo", seed=seed)
            seeds.append(dict(steps=dict(about, lr=2e-4, **anatomy.steps(kept())), slow=anatomy.steps(kept(), lr=5e-5)["slope"],
                              sgd=anatomy.steps(kept(), lr=0.2, optimizer=torch.optim.SGD)["slope"],
                              far=anatomy.steps(kept(), count=64, lr=1e-3)["dominance"],
                              subsets=dict(about, **anatomy.gradients(kept())), entropy=dict(about, lr=2e-4, **anatomy.entropy_changes(kept()))))
            if seed:  # figures show the first
                seeds[-1]["steps"].update(tables=[], ratios={k: dict(std=v["std"]) for k, v in seeds[-1]["steps"]["ratios"].items()})
                for found in seeds[-1]["subsets"]["subsets"].values():
                    found["matrices"] = {}
    told = dict(theory=anatomy.theory(), tabular_slope=anatomy.tabular_slope(), seeds=seeds)
    (RESULTS / "anatomy.json").write_text(json.dumps(analyze.rounded(told)) + "\n")


T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # Student's 97.5% quantiles for n values
MARGIN = 0.05  # of mean@16: a loss that is surely smaller is none


class Found(tuple):
    """(mean, low, high) of one value per seed, by the bootstrap. `above` and `below` 0 are said where Student's t interval, which is
    wider with few seeds, agrees: of five normal values the bootstrap's 95% cover 82%."""

    def __new__(cls, values):
        found = super().__new__(cls, analyze.bootstrap(values))
        found.half = statistics.stdev(values) / len(values) ** 0.5 * T[len(values)]
        return found

    def above(self, x=0.0):
        return min(self[1], self[0] - self.half) > x

    def below(self, x=0.0):
        return max(self[2], self[0] + self.half) < x


class Numbers:
    """The kept numbers, asked by the name of a line of results/grid.txt and its steps, as in "grpo-16"."""

    def __init__(self):
        self.runs = {}
        for run in analyze.read(RESULTS / "runs.jsonl"):
            self.runs.setdefault(run["name"], {})[run["seed"]] = run
        self.anatomy = json.loads((RESULTS / "anatomy.json").read_text())

    def values(self, name, metric):
        """{seed: value}: the last of the run; clip/frac is the mean of the run."""
        ask = analyze.average if metric.startswith(("clip/", "time/")) else analyze.last
        return {seed: ask(run, metric) for seed, run in self.runs[name].items()}

    def mean(self, name, metric):
        return analyze.bootstrap(list(self.values(name, metric).values()))

    def gap(self, a, b, metric):
        """a - b, seed by seed."""
        of_a, of_b = self.values(a, metric), self.values(b, metric)
        return Found([of_a[s] - of_b[s] for s in sorted(of_a.keys() & of_b.keys())])

    def over_seeds(self, ask):
        return Found([ask(seed) for seed in self.anatomy["seeds"]])


def shown(x):
    mean, low, high = x
    return f"{mean:+.3f} ({low:+.3f}, {high:+.3f})"


def plain(x, digits=3):
    mean, low, high = x
    return f"{mean:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def verdict(x, above=True):
    """Of a difference that the paper has above 0 (or below): an interval that holds 0 says nothing."""
    if not (x.above() or x.below()):
        return "not at this scale"
    return "reproduced" if x.above() == above else "contradicted"


def holds(x):
    """Of a difference that the paper has at 0 or above: surely no loss of MARGIN, or surely a loss."""
    return "reproduced" if x.above(-MARGIN) else "contradicted" if x.below() else "not at this scale"


def withdrawn(claim, where):
    """Is the figure not the paper's quantity, or a ranking of methods at one learning rate? RESULTS.md says why, at its top."""
    return where.startswith("Remark 1") or claim.startswith(("norm of the gradient", "the entropy changes as", "solves more than", "without a clip to tune")) or (
        "T = 1.2" in claim) or where == "main table"


def claims(n):
    """[(paper, claim, where, command, figure, verdict)]"""
    rows = []

    def add(paper, claim, where, command, figure, verdict):
        rows.append((paper, claim, where, command, figure, "withdrawn" if withdrawn(claim, where) else verdict))

    def compare(paper, claim, where, a, b, metric="mean@n", above=True, judge=verdict):
        x = n.gap(a, b, metric)
        name = {"mean@n": "mean@16", "pass@n": "pass@16", "policy/entropy": "entropy", "optim/head_rank1_share": "rank-1 share"}[metric]
        add(paper, claim, where, GRID, f"{name}, {a} less {b}: {shown(x)}", judge(x, above) if judge is verdict else judge(x))

    steps = "analyze.py steps"
    slope = n.over_seeds(lambda s: s["steps"]["slope"]["1"])
    add("ACPO", "the std of the ratio falls as (1 - pi)^2 after one step: slope 2 in logarithms", "Lemma 1", steps, f"slope {plain(slope, 2)}",
        "contradicted" if slope.below(1.5) or slope.above(2.5) else "reproduced" if slope.above(1.5) and slope.below(2.5) else "not at this scale")
    spread = n.over_seeds(lambda s: s["steps"]["ratios"]["low"]["std"] / s["steps"]["ratios"]["high"]["std"])
    add("ACPO", "ratios spread far more at low probability", "fig. 2a", steps, f"std of rho after 16 steps, pi <= 0.2 over pi > 0.8: {plain(spread, 1)} times",
        "reproduced" if spread.above(1) else "contradicted" if spread.below(1) else "not at this scale")
    theory = n.anatomy["theory"]
    for eq in (53, 56):
        off = max(abs(line["monte_carlo"] - line[f"eq{eq}"]) / line["error"] for line in theory)
        add("ACPO", f"the expected gradient by probability is eq. {eq}", "Prop. 1" if eq == 53 else "appendix", "analyze.py theory",
            f"largest gap to the Monte Carlo of its assumptions: {off:.1f} standard errors", "reproduced" if off < 3.5 else "contradicted")
    for when, taken, low_first in (("near on-policy (1 step), low-probability", "1", True), ("far off-policy (16 steps), high-probability", "16", False)):
        ratio = n.over_seeds(lambda s: s["steps"]["dominance"][taken]["low"]["mean"] / s["steps"]["dominance"][taken]["high"]["mean"])
        add("ACPO", f"{when} tokens carry the larger mean gradient", "Remark 1, fig. 2b", steps, f"mean abs G, pi <= 0.2 over pi > 0.8: {plain(ratio, 1)}",
            "not at this scale" if not (ratio.above(1) or ratio.below(1)) else "reproduced" if ratio.above(1) == low_first else "contradicted")
    for a, b, key, said in (("pi < 0.2", "pi > 0.8", "norm", "409% against 50%"), ("pi > 0.8", "pi < 0.2", "angle", "42.8 against 27.8 degrees"),
                            ("A > 0", "A < 0", "angle", "40.5 against 28.0 degrees"), ("A > 0", "A < 0", "norm", "122% against 92%"),
                            ("no clip", "clip-higher", "angle", "50.7 against 1.3 degrees"), ("no clip", "full", "norm", "20177%"),
                            ("cispo", "full", "norm", "3268%"), ("top 20% entropy", "full", "norm", "340%")):
        x = n.over_seeds(lambda s: s["subsets"]["subsets"][a][key] - s["subsets"]["subsets"][b][key])
        means = [statistics.fmean(s["subsets"]["subsets"][name][key] for s in n.anatomy["seeds"]) for name in (a, b)]
        unit = "" if key == "norm" else " degrees"
        add("ACPO", f"{key} of the gradient: {a} above {b} ({said})", "sec. 3", "analyze.py subsets", f"{means[0]:.2f} against {means[1]:.2f}{unit}: {shown(x)}", verdict(x))
    for other in ("dapo", "cispo"):
        for regime in (2, 16):
            compare("ACPO", f"solves more than {other.upper()}, {regime} steps", "table 1", f"acpo-{regime}", f"{other}-{regime}")
    compare("ACPO", "solves more than DAPO, 16 steps, a quarter of the learning rate", "table 1", "acpo_slow-16", "dapo_slow-16")
    compare("ACPO", "solves more than DAPO with Clip-High=Max, 16 steps", "table 3", "acpo-16", "dapo_clip_max-16")
    compare("ACPO", "solves more than GRPO with Clip=Avg, 16 steps", "table 3", "acpo-16", "grpo_clip_0.6-16")
    compare("ACPO", "CISPO loses off-policy (74.3 at 2 steps, 55.1 at 16)", "table 1", "cispo-16", "cispo-2", above=False)
    compare("ACPO", "the same with its bound of 1.45", "table 1", "cispo_1.45-16", "cispo_1.45-2", above=False)
    compare("ACPO", "ACPO does not (75.7 and 76.3)", "table 1", "acpo-16", "acpo-2", judge=holds)

    for e, name in (("0.1", "grpo_clip_0.1-16"), ("0.2", "grpo-16"), ("0.4", "grpo_clip_0.4-16"), ("0.6", "grpo_clip_0.6-16")):
        compare("P3O", f"without a clip to tune, no worse than GRPO with clip {e}, 16 steps", "clip sweep", "p3o-16", name, judge=holds)
    for what, setting, stays in (("hot", "sampler at T = 1.2", True), ("cold", "sampler at T = 0.6", False), ("bf16", "bfloat16 sampler (FP8 in the paper)", True)):
        compare("P3O", f"GRPO loses (the paper: collapses), {setting}", "mismatch", f"grpo_{what}-16", "grpo-16", above=False)
        compare("P3O", f"P3O {'holds' if stays else 'loses, too'}, {setting}", "mismatch", f"p3o_{what}-16", "p3o-16", above=False, judge=holds if stays else verdict)
    compare("P3O", "P3O holds, sampler at T = 1.2, a quarter of the learning rate", "mismatch", "p3o_hot_slow-16", "p3o_slow-16", judge=holds)
    for lag in (1, 4, 8):
        a, b = ([n.values(f"{m}_lag_{lag}-2", "mean@n")[s] - n.values(f"{m}-2", "mean@n")[s] for s in n.runs[f"{m}-2"]] for m in ("p3o", "grpo"))
        x = Found([u - v for u, v in zip(a, b)])
        add("P3O", f"bears rollouts that are {lag} old better than GRPO", "its title", GRID,
            f"change of mean@16 to lag 0: P3O {statistics.fmean(a):+.3f}, GRPO {statistics.fmean(b):+.3f}, apart {shown(x)}", verdict(x))

    for regime in (2, 16):
        compare("FADE", f"success-biased weights (delta 2) cost entropy (the paper: collapse it), {regime} steps", "sign axis", f"asym-{regime}", f"dr_grpo-{regime}", "policy/entropy", above=False)
        compare("FADE", f"failure-biased weights (delta 0.5) narrow the head's update, {regime} steps", "sign axis", f"asym_failures-{regime}", f"dr_grpo-{regime}", "optim/head_rank1_share")
    for key, label, wanted in (("predicted", "(m_S - m_F) H - Cov(A, log pi)", True), ("reversed", "-(m_S - m_F) H - Cov(A, log pi)", None)):
        x = n.over_seeds(lambda s: s["entropy"][f"correlation_{key}"])
        add("FADE" if wanted else "ours", f"the entropy changes as {label}", "sec. on entropy" if wanted else "the other sign", "analyze.py entropy",
            f"correlation with what is measured: {plain(x, 2)}", "-" if not wanted else "reproduced" if x.above(0.5) else "contradicted" if x.below() else "not at this scale")
    for regime in (2, 16):
        compare("FADE", f"focus on hard problems (power) raises pass@k, {regime} steps", "difficulty axis", f"power-{regime}", f"dr_grpo-{regime}", "pass@n")
    for base in ("grpo", "dr_grpo"):
        for metric in ("mean@n", "pass@n"):
            compare("FADE", f"more {dict(zip(('mean@n', 'pass@n'), ('accuracy', 'diversity')))[metric]} than {base}, 16 steps", "main table", "fade-16", f"{base}-16", metric)
    compare("FADE", "without delta there is less entropy (the paper: it collapses)", "ablation", "fade_no_delta-16", "fade-16", "policy/entropy", above=False)
    compare("FADE", "without alpha pass@k falls", "ablation", "fade_no_alpha-16", "fade-16", "pass@n", above=False)
    for part in ("delta", "alpha"):
        compare("ours", f"what FADE loses of accuracy without {part}", "ablation", f"fade_no_{part}-16", "fade-16", judge=lambda x: "-")
    return rows


def markdown(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|"] + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def main_table(n):
    columns = (("mean@16", "mean@n"), ("pass@16", "pass@n"), ("entropy", "policy/entropy"), ("clipped", "clip/frac"))
    names = [f"{m}-{s}" for s in (2, 16) for m in METHODS] + sorted(name for name in n.runs if name.rsplit("-", 1)[0] not in METHODS)
    rows = [(name.rsplit("-", 1)[0], name.rsplit("-", 1)[1], len(n.runs[name]), *(plain(n.mean(name, metric)) for _, metric in columns),
             f"{statistics.median(n.values(name, 'time/rollout').values()):.1f}") for name in names]
    return markdown(("run", "steps", "seeds", *(c for c, _ in columns), "seconds"), rows)


def draw(n):
    caption = f"mean of {len(SEEDS)} seeds, 95% bootstrap interval over seeds; blue 16 steps per rollout, orange 2"

    def panels(names, metrics):
        return {label: {name.replace("-", " "): n.mean(name, metric) for name in names} for label, metric in metrics}
    three = (("held-out mean@16", "mean@n"), ("held-out pass@16", "pass@n"), ("entropy (nats)", "policy/entropy"))
    figures.dots(panels([f"{m}-{s}" for m in METHODS for s in (16, 2)], three), RESULTS / "methods.png", caption)
    clips = ["grpo_clip_0.1-16", "grpo-16", "grpo_clip_0.4-16", "grpo_clip_0.6-16", "dapo-16", "dapo_clip_max-16", "cispo-16", "cispo_1.45-16", "acpo-16", "p3o-16"]
    figures.dots(panels(clips, three), RESULTS / "clips.png", caption)
    off = [f"{m}{what}-16" for what in ("", "_hot", "_cold", "_bf16") for m in ("grpo", "p3o")] + [f"{m}{lag}-2" for lag in ("", "_lag_1", "_lag_4", "_lag_8") for m in ("grpo", "p3o")]
    figures.dots(panels(off, three), RESULTS / "mismatch.png", caption)

    def groups(*names):
        return {name: list(n.runs[name].values()) for name in names}
    sixteen = [f"{m}-16" for m in METHODS]
    figures.curves(groups(*sixteen[:7]), RESULTS / "curves.png")
    figures.fade(groups("dr_grpo-16", "fade-16", "asym-16", "asym_failures-16", "power-16"), analyze.masses(), RESULTS / "fade.png")
    figures.p3o(groups("grpo-16", "p3o-16", "p3o_hot-16", "p3o_cold-16", "acpo-16", "cispo-16"), RESULTS / "p3o.png")
    figures.passk(analyze.pass_at_k(groups("grpo-2", "grpo-16", "cispo-16", "acpo-16", "p3o-16", "fade-16", "power-16")), RESULTS / "passk.png", caption.split(";")[0])
    for what in ("steps", "subsets", "entropy"):
        getattr(figures, what)(n.anatomy["seeds"][0][what], RESULTS / f"{what}.png")
    figures.theory(n.anatomy["theory"], RESULTS / "theory.png")


def tried(n):
    """What was tried where a claim did not come out, in numbers."""
    def mean(ask, digits=2):
        return plain(n.over_seeds(ask), digits)
    far = n.over_seeds(lambda s: s["far"]["64"]["low"]["mean"] / s["far"]["64"]["high"]["mean"])
    share = [n.over_seeds(lambda s: s["far"]["64"][side]["share"]) for side in ("low", "high")]
    least = min(line["size"] for line in n.anatomy["theory"])
    return dict(
        slopes=", ".join(f"{mean(lambda s: s['steps']['slope'][t])} after {t}" for t in ("1", "2", "4", "8", "16")),
        slow=mean(lambda s: s["slow"]["1"]), sgd=mean(lambda s: s["sgd"]["1"]), tabular=f"{n.anatomy['tabular_slope']:.2f}",
        far=plain(far, 1), far_low=plain(share[0], 2), far_high=plain(share[1], 2), least=f"{least:.2f}",
        own=f"{0.8 * least / (0.2 * max(line['size'] for line in n.anatomy['theory'])):.1f}",
        cov=mean(lambda s: s["entropy"]["correlation_covariance"]),
        **{name: plain(n.mean(f"{name}-16", "mean@n")) for name in (
            "grpo", "p3o", "grpo_hot", "p3o_hot", "p3o_hot_slow", "p3o_slow", "acpo", "dapo", "acpo_slow", "dapo_slow")},
        slow_gap=shown(n.gap("acpo_slow-16", "dapo_slow-16", "mean@n")),
        **{f"{name}_clipped": plain(n.mean(f"{name}-16", "clip/frac")) for name in ("acpo", "dapo")},
        **{f"{name}_kl": plain(analyze.bootstrap([analyze.average(run, "policy/kl_old") for run in n.runs[f"{name}-16"].values()])) for name in ("acpo", "dapo")},
        hot_entropy=plain(n.mean("p3o_hot-16", "policy/entropy"), 2), hot_slow_entropy=plain(n.mean("p3o_hot_slow-16", "policy/entropy"), 2),
        acpo_range=plain(analyze.bootstrap([statistics.fmean(sum(step[f"clip/range/bin{i}"] * step[f"policy/bin_frac/bin{i}"] for i in range(5))
                                                            for step in run["profile"]) for run in n.runs["acpo-16"].values()]), 2))


def page(n):
    """RESULTS.md: results/RESULTS.in.md with its numbers filled in."""
    rows = claims(n)
    counts = {v: sum(row[-1] == v for row in rows) for v in ("reproduced", "not at this scale", "contradicted", "withdrawn")}
    base = [run["records"][0] for runs in n.runs.values() for run in runs.values() if run["records"][0]["rollout"] == 0]
    text = (RESULTS / "RESULTS.in.md").read_text()
    values = dict(tried(n), runs=sum(map(len, n.runs.values())), counts=", ".join(f"{c} {v}" for v, c in counts.items()),
                  base_mean=f"{statistics.fmean(r['mean@n'] for r in base):.3f}", base_pass=f"{statistics.fmean(r['pass@n'] for r in base):.3f}",
                  claims=markdown(("paper", "claim", "where", "command", "figure", "verdict"), rows), table=main_table(n))
    return text.format(**values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="the anatomy first")
    if parser.parse_args().measure:
        measure()
    numbers = Numbers()
    draw(numbers)
    (ROOT / "RESULTS.md").write_text(page(numbers))
    print(ROOT / "RESULTS.md")

"""RESULTS.md and its figures, from grid.jsonl, updates.json and sanity.json in study/results/: what
the papers claim, and what the runs say.

    ./run_all.sh grid                       the runs, the updates, RESULTS.md: hours
    ./run_all.sh results                    RESULTS.md alone, from the numbers in study/results/
    python -m study results --measure       first the updates on the first rollouts again: minutes
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from data.recipe import BASE
from experiment.tables import markdown_table
from study import anatomy, claims, claims_of_updates, figures, theory, worked
from study.grid import (
    BESIDE,
    ROLLOUTS,
    SEEDS,
    TUNING_SEEDS,
    at_edge,
    checksum,
    of_other_bases,
    read_finished,
    tuned,
    validation,
)
from study.verdicts import KINDS, NOT_MEASURED, STUDENT

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
UPDATES = RESULTS / "updates.json"
SANITY = RESULTS / "sanity.json"
ROLLOUT_SEEDS = range(8)  # of the rollouts whose updates are measured
HEAD = ("paper", "place", "known from", "claim", "measured", "verdict")
BASES = {"countdown": BASE, "worked": worked.BASE}
TASKS = tuple(BASES)


# ---------------------------------------------------------------------------- measuring


def rounded(value):
    """To 4 significant digits, in lists and dicts too."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def measure():
    """Writes updates.json: what the optimizer steps on the first rollout of each seed
    do, and what the theory has for it. Raises ValueError where the finished runs are of another
    base."""
    bases = {task: checksum(Path(base, "model.safetensors")) for task, base in BASES.items()}
    if sentence := of_other_bases(read_finished(), bases):
        raise ValueError(f"{sentence}: updates of the present ones do not go with them")
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in ROLLOUT_SEEDS:
            out = Path(folder, str(seed))
            subprocess.run(
                [sys.executable, "train.py", "--loss", "grpo", "--rollouts", "1",
                 "--save_rollouts", "--eval_every", "0", "--out", out, "--seed", str(seed),
                 "--problems_per_rollout", "32", "--lr", "1e-4", "--sampler", "transformers"],
                cwd=ROOT, check=True)
            rollout = anatomy.anatomy_of(out / "rollouts" / "rollout_000001.pt")
            if seeds:
                rollout = claims_of_updates.without_what_only_figures_need(rollout)
            seeds.append(rollout)
            print(f"measured: seed {seed}", flush=True)
    result = dict(theory=theory.everything(), seeds=seeds)
    UPDATES.write_text(json.dumps(rounded(result)) + "\n")


# ---------------------------------------------------------------------------- tables


def claims_table(runs, updates):
    """-> the table of all claims, how many have each kind of verdict, and what is not measured."""
    kept = claims.survivors(runs)
    rows = [claim.row(updates) for claim in claims_of_updates.claims()]
    rows += [claim.row(runs) for claim in claims.claims()]
    rows.sort(key=lambda row: ("ACPO", "others", "P3O", "FADE", "ours").index(row[0]))
    counts = Counter(row[-1].split(":")[0] for row in rows)
    shown = [[*row[:-1], row[-1] + " *" * ((row[3], row[4]) in kept)] for row in rows
             if not row[-1].startswith(NOT_MEASURED)]
    missing = Counter(row[0] for row in rows if row[-1].startswith(NOT_MEASURED))
    return markdown_table(HEAD, shown), counts, missing


def settings_table(runs, task=""):
    """Every setting, of a task or of all: what was tuned, and what the seeds gave."""
    rows = []
    for key in sorted(k for k in runs.final if k.startswith(task)):
        setting = runs.settings[key]
        source = runs.settings[setting.rate_of] if setting.rate_of else setting
        lr, flags = tuned(source, runs.finished)
        scores = figures.scores_by_rate(source, runs.finished)
        width = "-" if setting.rate_of else f"{figures.plateau(scores)} of {len(scores)}"
        edge = " (edge)" * at_edge(source, runs.finished)
        shown = setting.flags if setting.rate_of else flags
        rows.append((key.removeprefix(f"{task}/"), f"`{shown}`", f"{lr:g}{edge}", width,
                     str(len(runs.final[key])),
                     *(runs.mean(key, score).plain() for score in (
                         claims.BEST, claims.END, claims.PASS)),
                     f"{runs.mean(key, 'entropy').mean:.3f}"))
    return markdown_table(("setting", "flags", "rate", "plateau", "seeds", claims.BEST,
                           claims.END, claims.PASS, "entropy"), rows)


def power(runs, score=claims.END):
    """-> what paired differences of the settings can exclude: the median, least and most of the
    half width of their intervals, over pairs of tuned settings of equal steps."""
    names = [key for key in runs.final if not runs.settings[key].rate_of]
    widths = [runs.gap(a, b, score).half_width for i, a in enumerate(names) for b in names[:i]
              if a.rsplit("-")[-1] == b.rsplit("-")[-1] and a.split("/")[0] == b.split("/")[0]]
    return statistics.median(widths), min(widths), max(widths)


def base_score(runs, task):
    """What the base scores on the puzzles that validate reported runs, as a text."""
    found = [run["validation"] for seeds in runs.final.values() for run in seeds.values()
             if run["task"] == task]
    if not found:
        return "not measured yet"
    return ", ".join(f"{kind}@8 {statistics.fmean(v[kind][0][1] for v in found):.3f}"
                     for kind in ("mean", "pass"))


def core_hours(runs):
    """What the finished runs took: by the seconds of their rollouts, and with BESIDE of each."""
    seconds = sum(run["seconds"] * ROLLOUTS[run["task"]] for run in runs.finished.values())
    whole = seconds + BESIDE * len(runs.finished)
    return (f"{seconds / 3600:.1f} core-hours of rollouts, {whole / 3600:.1f} with about {BESIDE} "
            "s for what is beside them in each run")


def at_end(runs, task):
    """How many of the reported runs validate best at their end."""
    courses = [[x for at, x in run["validation"]["mean"] if at] for seeds in runs.final.values()
               for run in seeds.values() if run["task"] == task]
    return f"{sum(course[-1] == max(course) for course in courses)} of {len(courses)}"


def at_bound(runs, steps, bound=3.0):
    """How many of ACPO's runs had a clip range at its bound."""
    found = runs.final.get(f"countdown/acpo-{steps}", {}).values()
    reached = sum(bound in run["series"]["clip/range_max"] for run in found)
    return f"{reached} of {len(found)}"


def tuning_noise(runs):
    """The standard error of a tuning score, by how much the validation of the seeds that are
    reported varies: the median over settings."""
    spread = [statistics.stdev(map(validation, seeds.values())) for seeds in runs.final.values()]
    return statistics.median(spread) / len(TUNING_SEEDS) ** 0.5


def sanity_table(sanity):
    """A line for each method: the try that solved the problems, or the best one."""
    rows = []
    for name, tries in sanity["methods"].items():
        chosen = max(tries, key=lambda found: (bool(found["rollouts"]), found["best"]))
        rows.append((name, f"{chosen['lr']:g}", f"{chosen['best']:.3f}",
                     f"{chosen['rollouts']} rollouts" if chosen["rollouts"]
                     else "not within budget"))
    return markdown_table(("method", "learning rate", "most solved in a rollout", "solved 95% "
                           "after"), rows)


# ---------------------------------------------------------------------------- figures


def draw(runs, updates):
    """Writes the figures. -> their files"""
    tables = {"the three papers' methods, 16 steps": (
        "acpo", "dapo_acpo", "cispo_acpo", "grpo", "p3o", "fade"),
        "the clip": ("grpo", "grpo_clip_0.4", "grpo_clip_0.6", "p3o", "p3o_cap", "p3o_kl"),
        "the advantage": ("dr_grpo", "fade", "asym", "power")}
    figures.rates({title: [f"countdown/{name}-16" for name in names]
                        for title, names in tables.items()}, runs, RESULTS / "rates.png")
    for task in TASKS:
        names = [f"{task}/{name}-{steps}" for name in (
            "acpo", "dapo_acpo", "cispo_acpo", "grpo", "p3o", "dr_grpo", "fade", "asym", "power")
            for steps in (16, 2)]
        if set(names) & set(runs.final):
            figures.dots(names, runs, RESULTS / f"{task}.png")
            figures.passk([n for n in names if n.endswith("-16")], runs,
                               RESULTS / f"{task}_passk.png")
    at_16 = "countdown/{}-16".format
    figures.courses([at_16(n) for n in ("dr_grpo", "fade", "asym", "power")],
                         {"validation": "validation mean@8", "policy/entropy": "entropy (nats)",
                          "optim/head_rank1_share": "rank-1 share of the head's change",
                          "adv/fade_alpha": "FADE's alpha"}, runs, RESULTS / "fade.png")
    figures.courses([at_16(n) for n in ("grpo", "acpo", "p3o", "cispo_acpo")],
                         {"validation": "validation mean@8", "policy/ess": "ess",
                          "policy/kl_old": "KL within a rollout (nats)",
                          "clip/range_max": "ACPO's largest range",
                          "clip/range_mean": "ACPO's mean range"}, runs, RESULTS / "clips.png")
    hot = [at_16(f"{name}_{word}{end}") for word in ("hot", "cold")
           for name, end in (("grpo", ""), ("grpo", "_sampler"), ("p3o", "_trainer"), ("p3o", ""))]
    figures.dots(hot, runs, RESULTS / "mismatch.png")
    claims_of_updates.draw(updates, RESULTS)
    return sorted(RESULTS.glob("*.png"))


# ---------------------------------------------------------------------------- the page


def page(runs, updates, sanity):
    """RESULTS.md: study/results/RESULTS.in.md with its numbers filled in."""
    table, counts, missing = claims_table(runs, updates)
    middle, least, most = power(runs)
    of_best = power(runs, claims.BEST)
    stars = table.count(" * |")
    text = dict(
        runs=len(runs.finished), cost=core_hours(runs), seeds=len(SEEDS),
        student=STUDENT[len(SEEDS)], claims=table,
        counts=", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]),
        missing=", ".join(f"{n} of {paper}" for paper, n in missing.items()) or "none",
        power=f"{middle:.3f}",
        power_range=f"{least:.3f} to {most:.3f}", power_best=f"{of_best[0]:.3f}",
        power_best_range=f"{of_best[1]:.3f} to {of_best[2]:.3f}",
        stars=f"{stars or 'No'} verdict{'s have' if stars > 1 else ' has'} one here.",
        sanity=sanity_table(sanity),
        **{f"table_{task}": settings_table(runs, task) for task in TASKS},
        noise=f"{tuning_noise(runs):.3f}", few=claims_of_updates.few_tokens(updates),
        **{f"bound_{steps}": at_bound(runs, steps) for steps in (2, 16)},
        **{f"at_end_{task}": at_end(runs, task) for task in TASKS},
        **{f"base_{task}": base_score(runs, task) for task in TASKS},
        updates=claims_of_updates.tables(updates))
    return (RESULTS / "RESULTS.in.md").read_text().format(**text)


def read():
    """-> Runs, and what is kept of the updates and of the sanity test."""
    return (claims.Runs(), json.loads(UPDATES.read_text()), json.loads(SANITY.read_text()))


def write_results(measure_first=False):
    """-> the files that it wrote"""
    if measure_first:
        measure()
    runs, updates, sanity = read()
    drawn = draw(runs, updates)
    (ROOT / "RESULTS.md").write_text(page(runs, updates, sanity))
    return [ROOT / "RESULTS.md", *([UPDATES] if measure_first else []), *drawn]

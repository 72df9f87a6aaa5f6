"""The one rule of RESULTS.md: what may be said of a claim of claims.toml, by the runs of plan.toml.

A claim's contrasts give one number for each seed, and so one interval. All intervals of one model
are one family for Holm's procedure. The verdict follows from the corrected interval, and is
about the setting that was measured.
"""

import re
import tomllib
from collections import defaultdict
from statistics import fmean, stdev
from typing import NamedTuple

import mpmath

from study.runs import HERE, read_finished

LEVEL = 0.05   # of one interval; of a family, of which there are two, half of it
MARGIN = 0.04  # of the gain over the base: the size of the effect in ACPO's table 1
FACTOR = 1.5   # a magnitude within this factor of the paper's is reproduced
SCORES = {"test": "mean@", "pass": "pass@"}  # at 16 completions, of Gemma at 4


def student_p(t, freedom):
    """The two-sided p of Student's t."""
    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


def student_quantile(level, freedom):
    """The t whose two-sided p is `level`."""
    root = mpmath.findroot(lambda t: student_p(t, freedom) - level, (0, 1e9), solver="bisect")
    return float(root)


class Interval(NamedTuple):
    """A mean over n seeds, and its standard error."""

    mean: float
    error: float
    n: int

    @classmethod
    def of(cls, values):
        """values: one of each seed, two or more."""
        values = list(values)
        return cls(fmean(values), stdev(values) / len(values) ** 0.5, len(values))

    @property
    def p(self):
        """Of the mean being 0, by Student's t."""
        if not self.error:
            return float(self.mean == 0)
        return student_p(self.mean / self.error, self.n - 1)

    def half(self, level=LEVEL):
        """Half its width: a difference as large is seen half the time, as this then ends at 0."""
        return self.error * student_quantile(level, self.n - 1)

    def ends(self, level=LEVEL):
        half = self.half(level)
        return self.mean - half, self.mean + half


def holm_levels(p_values, level=LEVEL):
    """The level at which Holm's procedure (1979) takes each of a family's intervals: level / m for
    the smallest p, then level / (m - 1), ...; from the first that fails, all have its level."""
    levels, at = [0.0] * len(p_values), None
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        levels[i] = at or level / (len(p_values) - rank)
        if p_values[i] > levels[i]:
            at = levels[i]
    return levels


def of_test(scores, kind):
    """mean@n, or pass@k at its largest k, of {name: score} of the test puzzles."""
    return [x for name, x in scores.items() if name.startswith(SCORES[kind])][-1]


def score(run, kind):
    """One number of a finished run: one of SCORES at its end, early, best or peak of its
    evaluations, or the mean over it of a metric of train.py."""
    if kind in SCORES:
        return of_test(run["test"], kind)
    if kind not in ("early", "best", "peak"):
        return run["mean"][kind]
    after = [(value, -rollout) for rollout, value in run["validation"] if rollout]
    best, at = max(after)
    return dict(early=after[0][0], best=best, peak=-at)[kind]


def read_runs(parts):
    """The finished runs of parts: {(task, name, steps): {rate: {seed: run}}}."""
    runs = defaultdict(lambda: defaultdict(dict))
    for part in parts:
        for run in read_finished(part).values():
            runs[run["task"], run["name"], run["steps"]][run["lr"]][run["seed"]] = run
    return runs


def by_seed(runs, task, contrast, kind="test", over="rates"):
    """{seed: number} of a contrast, 'a/16 - b/2', on a task, of the seeds that have all of it: over
    the learning rates that all of its settings have there, or of each one's own three. None
    without such rates."""
    terms = re.findall(r"([-+]?)([\w.]+)/(\d+)", contrast.replace(" ", ""))
    found = [(-1 if sign == "-" else 1, runs.get((task, name, int(steps)), {}))
             for sign, name, steps in terms]
    common = set.intersection(*(set(setting) for _, setting in found))
    if not common or over == "own" and any(len(setting) != 3 for _, setting in found):
        return None
    if over != "own":
        found = [(sign, {lr: setting[lr] for lr in common}) for sign, setting in found]
    seeds = set.intersection(*(set(of) for _, setting in found for of in setting.values()))
    return {seed: sum(sign * number(setting, seed, kind, over) for sign, setting in found)
            for seed in seeds}


def own_rate(setting):
    """Where a parabola through the validation scores of a setting's three learning rates, in log
    lr, is largest between the least and the largest of them. -> its place from -1 to 1, and the
    rate. A validation score is the mean of a run's last two."""
    rates = sorted(setting)
    left, middle, right = (fmean(value for run in setting[lr].values()
                                 for _, value in run["validation"][-2:]) for lr in rates)
    bend, slope = (left + right) / 2 - middle, (right - left) / 2
    ends = max((left, -1.0), (right, 1.0))[1]
    place = max(-1.0, min(1.0, -slope / (2 * bend))) if bend < 0 else ends
    return place, rates[1] * (rates[2] / rates[1]) ** place


def number(setting, seed, kind, over):
    """One setting's part of a contrast, of one seed: over rates their mean, over spread the best
    less the worst, over own the score at own_rate, by the parabola through the three."""
    scores = [score(setting[lr][seed], kind) for lr in sorted(setting)]
    if over == "own":
        x, _ = own_rate(setting)
        left, middle, right = scores
        return left * x * (x - 1) / 2 + middle * (1 - x * x) + right * x * (x + 1) / 2
    return max(scores) - min(scores) if over == "spread" else fmean(scores)


def values(runs, contrasts, kind="test", over="rates"):
    """{seed: number}: the mean over the tasks and the contrasts, each as of by_seed. Raises
    ValueError where fewer than two seeds have all of the runs."""
    tasks = sorted({task for task, *_ in runs})
    found = [of for contrast in contrasts for task in tasks
             if (of := by_seed(runs, task, contrast, kind, over)) is not None]
    seeds = set.intersection(*map(set, found)) if found else set()
    if len(seeds) < 2:
        raise ValueError(f"{'; '.join(contrasts)}: fewer than two seeds have all of the runs")
    return {seed: fmean(of[seed] for of in found) for seed in sorted(seeds)}


def of_side(right, number, size):
    """The verdict of an interval on one side, the right one or not. size: the paper's, or None."""
    if not right:
        return "opposite"
    if size is None:
        return "holds"
    return "reproduced" if 1 / FACTOR <= number / size <= FACTOR else "direction alone"


class Row(NamedTuple):
    """A claim, or what stands beside one, with its interval. beside: "" for the claim itself, own
    for mean@16 at each setting's own rate, best for the best validation score; level: Holm's."""

    claim: dict
    beside: str
    score: str
    interval: Interval
    level: float = LEVEL

    @property
    def in_units_of_gain(self):
        """Is its score a share of problems solved, as the gain over the base is?"""
        return self.score in ("test", "best", "pass")

    def verdict(self, gain):
        """Of the claim alone; what stands beside it has none. gain: over the base, of mean@16."""
        if self.beside:
            return ""
        low, high = self.interval.ends(self.level)
        says, margin = self.claim["says"], MARGIN * gain
        if says == "no loss":
            return ("holds" if low > -margin else "opposite" if high < -margin else "not certain")
        if low > 0 or high < 0:
            if says == "open":
                return "higher" if low > 0 else "lower"
            return of_side((low > 0) == (says == "more"), self.interval.mean / gain,
                           self.claim.get("size"))
        if self.in_units_of_gain and -margin < low and high < margin:
            return "no difference above m"
        return "not certain"


GEMMA = ["gemma", "gemma_16", "gemma_4", "gemma_fp8"]  # the parts of its runs


def read_claims(gemma):
    """The claims, with the fields that they leave to their defaults; or those of Gemma."""
    claims = tomllib.loads((HERE / "claims.toml").read_text())["claim"]
    claims = [dict(score="test", parts=["map"], over="rates", own=True) | claim for claim in claims]
    return [dict(claim, contrasts=claim["gemma"], parts=GEMMA, own=False)
            for claim in claims if "gemma" in claim] if gemma else claims


def rows(gemma=False):
    """-> the Rows of all claims, and the claims whose runs are not all trained. Beside a claim
    about mean@16 of the map stands the same at each setting's own rate, and beside one about
    ACPO's table 1 the best validation score, which that reports."""
    found, missing = [], []
    for claim in read_claims(gemma):
        runs = read_runs(claim["parts"])
        beside = [("", claim["score"], claim["over"])]
        if claim["own"] and claim["score"] == "test" and claim["over"] == "rates":
            beside.append(("own", "test", "own"))
        if "table 1" in claim["paper"]:
            beside.append(("best", "best", "rates"))
        try:
            found += [Row(claim, name, kind, Interval.of(
                values(runs, claim["contrasts"], kind, over).values()))
                for name, kind, over in beside]
        except ValueError:
            missing.append(claim)
    levels = holm_levels([row.interval.p for row in found], LEVEL / 2)
    return [row._replace(level=level) for row, level in zip(found, levels, strict=True)], missing


def gain(runs, task, base):
    """What GRPO adds to mean@16 of a task's base, whose scores these are: the mean over the seeds
    after 16 steps at its best rate, less the base's."""
    return max(fmean(score(run, "test") for run in seeds.values())
               for seeds in runs[task, "grpo", 16].values()) - of_test(base, "test")

"""What the papers claim about training, a claim an entry: where it stands, how well we know it,
which settings of results/grid.txt are compared in which quantity, and the test of it.

The claims about single updates stand in analysis/claims_of_updates.py.
"""

import statistics
from typing import NamedTuple

from analysis.grid import read_finished, read_grid, tuned
from analysis.verdicts import (
    NOT_MEASURED,
    Interval,
    Verdict,
    all_more,
    holds,
    less,
    more,
    unjudged,
)

# how well a claim is known
PAPER = "paper"
CODE = "paper, settings from its code"
ABSTRACT = "abstract"
SUMMARY = "abstract, the method from a note"
NOTE = "note"


class Claim(NamedTuple):
    """paper, place in it, how well it is known, the claim in words; `measure` takes Runs and gives
    the figure, as text, and the Verdict."""

    paper: str
    place: str
    known: str
    claim: str
    measure: object

    def row(self, runs):
        """The claim's line in RESULTS.md: its fields, figure and verdict as texts."""
        try:
            figure, verdict = self.measure(runs)
        except Missing as e:
            figure, verdict = "-", Verdict(NOT_MEASURED, f"{e} is not trained")
        return [self.paper, self.place, self.known, self.claim, figure, str(verdict)]


# ---------------------------------------------------------------------------- the numbers


class Missing(LookupError):
    """A setting has no finished runs."""


# a finished run -> a number
SCORES = {
    "mean@16": lambda run: run["held_out"]["mean@16"],
    "pass@16": lambda run: run["held_out"]["pass@16"],
    "best validation mean@8": lambda run: max(x for at, x in run["validation"]["mean"] if at),
    "last validation mean@8": lambda run: run["validation"]["mean"][-1][1],
    "rollout of the best validation": lambda run: max(
        ((x, -at) for at, x in run["validation"]["mean"] if at))[1] * -1,
    "mean validation mean@8": lambda run: statistics.fmean(
        x for at, x in run["validation"]["mean"] if at),
    "entropy": lambda run: run["series"]["policy/entropy"][-1],
    "rank-1 share": lambda run: [x for x in run["series"]["optim/head_rank1_share"]
                                 if x is not None][-1],
}
END, PASS, BEST = "mean@16", "pass@16", "best validation mean@8"
KS = (1, 2, 4, 8, 16)
for k in KS:
    SCORES[f"pass@{k}"] = lambda run, k=k: run["held_out"][f"pass@{k}"]


def early(run):
    """The validation score after a third of the rollouts."""
    scores = [x for at, x in run["validation"]["mean"] if at]
    return scores[(len(scores) - 1) // 3]


SCORES["early validation mean@8"] = early


class Runs:
    """The finished runs of the grid. A setting is named as "acpo-16", of the task countdown, or
    with its task, "worked/acpo-16"."""

    def __init__(self, settings=None, finished=None):
        self.settings = read_grid() if settings is None else settings
        self.finished = read_finished() if finished is None else finished
        self.final = {}
        for run in self.finished.values():
            if run["role"] == "final":
                self.final.setdefault(run["setting"], {})[run["seed"]] = run

    def of(self, name):
        """{seed: run}. Raises Missing."""
        key = name if "/" in name else f"countdown/{name}"
        if len(self.final.get(key, {})) < 2:
            raise Missing(key)
        return self.final[key]

    def values(self, name, score):
        """{seed: value}"""
        return {seed: SCORES[score](run) for seed, run in self.of(name).items()}

    def mean(self, name, score):
        return Interval.of(list(self.values(name, score).values()))

    def gaps(self, a, b, score):
        """a less b, one for each seed that both have."""
        of_a, of_b = self.values(a, score), self.values(b, score)
        common = sorted(of_a.keys() & of_b.keys())
        if len(common) < 2:
            raise Missing(f"{a} with the seeds of {b}")
        return [of_a[seed] - of_b[seed] for seed in common]

    def gap(self, a, b, score):
        return Interval.of(self.gaps(a, b, score))

    def best_static(self, steps, task="countdown"):
        """Of FADE's static advantages the one with the best mean validation score while it was
        tuned: chosen on other seeds than it is compared on. -> its name"""
        keys = [f"{task}/{name}-{steps}" for name in ("dr_grpo", "asym", "power")]
        static = [self.settings[key] for key in keys if key in self.settings]
        if missing := [s.key for s in static if tuned(s, self.finished) is None]:
            raise Missing(missing[0])
        return max(static, key=self.tuning_score).key

    def tuning_score(self, setting):
        """The mean validation score of a setting's best learning rate on the tuning seeds."""
        from analysis.grid import tuning_runs, validation
        choice = tuned(setting, self.finished)
        return statistics.fmean(validation(self.finished[run.id]) for run in tuning_runs(setting)
                                if (run.lr, run.flags) == choice)


# ---------------------------------------------------------------------------- kinds of claims


def compare(paper, place, known, claim, a, b, test=more, score=END):
    """A claim about one setting against another."""
    def measure(runs):
        gap = runs.gap(a, b, score)
        figure = (f"{score}: {a} {runs.mean(a, score).mean:.3f}, {b} "
                  f"{runs.mean(b, score).mean:.3f}, apart {gap.signed()}")
        return figure, test(gap)
    return Claim(paper, place, known, claim, measure)


def compare_changes(paper, place, known, claim, a, b, test=more, score=END):
    """A claim about what a change does to one method against what it does to another; a and b:
    (changed, unchanged)."""
    def measure(runs):
        of_a, of_b = runs.gaps(*a, score), runs.gaps(*b, score)
        gap = Interval.of([x - y for x, y in zip(of_a, of_b, strict=True)])
        figure = (f"{score}: {a[0]} less {a[1]} {Interval.of(of_a).signed()}, {b[0]} less {b[1]} "
                  f"{Interval.of(of_b).signed()}, apart {gap.signed()}")
        return figure, test(gap)
    return Claim(paper, place, known, claim, measure)


def at_every_k(paper, place, known, claim, a, b):
    """A claim about pass@k for all k."""
    def measure(runs):
        other = runs.best_static(*b) if isinstance(b, tuple) else b
        gaps = {k: runs.gap(a, other, f"pass@{k}") for k in KS}
        figure = f"{a} less {other}: " + ", ".join(
            f"pass@{k} {gap.signed()}" for k, gap in gaps.items())
        return figure, all_more(list(gaps.values()))
    return Claim(paper, place, known, claim, measure)


def against_best_static(paper, place, known, claim, a, steps, task, test, score):
    def measure(runs):
        other = runs.best_static(steps, task)
        return compare(paper, place, known, claim, a, other, test, score).measure(runs)
    return Claim(paper, place, known, claim, measure)


# ---------------------------------------------------------------------------- ACPO


def acpo(task):
    def setting(name, steps):
        return f"{name}-{steps}" if task == "countdown" else f"{task}/{name}-{steps}"
    for steps in (2, 16) if task == "countdown" else (16,):
        for name, noun in (("dapo_acpo", "DAPO"), ("cispo_acpo", "CISPO")):
            for score in (BEST, END):
                yield compare("ACPO", "table 1", CODE, f"ACPO solves more than {noun}, {task}, "
                              f"{steps} steps", setting("acpo", steps), setting(name, steps),
                              score=score)
    if task == "countdown":
        yield compare("ACPO", "table 1, Countdown", CODE, "CISPO falls off-policy (74.3 at 2 "
                      "steps, 55.1 at 16)", "cispo_acpo-16", "cispo_acpo-2", less)
        yield compare("ACPO", "table 1, Countdown", CODE, "ACPO does not fall off-policy (75.7 "
                      "and 76.3)", "acpo-16", "acpo-2", holds)
        for steps in (2, 16):
            yield compare("ACPO", "table 3", PAPER, "ACPO solves more than DAPO with "
                          f"Clip-High=Max, the largest range observed, {steps} steps",
                          f"acpo-{steps}", f"clip_high_max-{steps}")
            yield compare("ACPO", "table 3", PAPER, "ACPO solves more than GRPO with Clip=Avg, "
                          f"the mean range observed, {steps} steps", f"acpo-{steps}",
                          f"clip_avg-{steps}")
            yield compare("ACPO", "table 3", PAPER, "DAPO with Clip-High=Max solves more than "
                          f"DAPO, {steps} steps", f"clip_high_max-{steps}", f"dapo_acpo-{steps}")
            yield compare("ACPO", "table 3", PAPER, "GRPO with Clip=Avg solves less than DAPO, "
                          f"{steps} steps", f"clip_avg-{steps}", f"dapo_acpo-{steps}", less)


def acpo_contradiction():
    """Sec. 2.2: what one paper has at 2 steps, and another at 16."""
    for claim, a, b in (
            ("weighing low-probability tokens down (AR-Lopti) helps near on-policy, 2 steps",
             "ar_lopti-2", "grpo-2"),
            ("updating high-entropy tokens alone helps off-policy, 16 steps",
             "top_entropy-16", "grpo-16"),
            ("high-entropy tokens alone do better than low-entropy tokens alone, 16 steps",
             "top_entropy-16", "bottom_entropy-16"),
            ("which of the two is better turns around: AR-Lopti at 2 steps",
             "ar_lopti-2", "top_entropy-2"),
            ("which of the two is better turns around: top entropy at 16 steps",
             "top_entropy-16", "ar_lopti-16")):
        yield compare("ACPO", "sec. 2.2", CODE, claim, a, b)


def acpo_sensitivity():
    for name, what in (("alpha_1", "alpha 1"), ("alpha_5", "alpha 5"), ("base_0.1", "base 0.1"),
                       ("base_0.3", "base 0.3"), ("bins_2", "2 bins"), ("bins_10", "10 bins")):
        yield compare("ACPO", "sensitivity, app. J.1 (arXiv)", CODE,
                      f"as good with {what} as with alpha 3, base 0.2, 5 bins, 16 steps",
                      f"acpo_{name}-16", "acpo-16", holds)


# ---------------------------------------------------------------------------- P3O


def p3o():
    for clip, name in (("0.2", "grpo"), ("0.4", "grpo_clip_0.4"), ("0.6", "grpo_clip_0.6")):
        yield compare("P3O", "abstract", ABSTRACT, "matches or exceeds tuned GRPO, here with clip "
                      f"{clip}, 16 steps", "p3o-16", f"{name}-16", holds)
    yield compare("P3O", "abstract", ABSTRACT, "matches or exceeds tuned GRPO, 2 steps", "p3o-2",
                  "grpo-2", holds)
    for part, name in (("the cap", "p3o_cap"), ("the KL", "p3o_kl")):
        yield compare("ours", "asked for by P3O's reviewers", NOTE, f"what P3O gains over {part} "
                      "alone, 16 steps", "p3o-16", f"{name}-16", unjudged)
    for word, where, known, test in (("hot", "T = 1.2", ABSTRACT, holds),
                                     ("cold", "T = 0.6, rates not tuned there", NOTE, unjudged)):
        for reference, a, b in (("trainer", f"p3o_{word}_trainer-16", f"grpo_{word}-16"),
                                ("sampler", f"p3o_{word}-16", f"grpo_{word}_sampler-16")):
            yield compare("P3O", "abstract; mismatch", known, f"matches or exceeds GRPO, sampler "
                          f"at {where}, both ratios against the {reference}, 16 steps", a, b, test)
        yield compare("ours", "the reference alone", NOTE, f"sampler at {where}: GRPO's ratio "
                      "against the sampler over the trainer", f"grpo_{word}_sampler-16",
                      f"grpo_{word}-16", unjudged)
    yield compare("ours", "the reference alone", CODE, "the sampler's probabilities before "
                  "temperature, as P3O's released code has them, against the trainer's, T = 1.2",
                  "p3o_hot_raw-16", "p3o_hot_trainer-16", unjudged)
    for name in ("grpo", "p3o"):
        yield compare("P3O", "mismatch", NOTE, f"what a bfloat16 sampler costs {name}, 16 steps "
                      "(FP8 in the note)", f"{name}_bf16-16", f"{name}-16", unjudged)
    for lag in (4, 8):
        for name, noun in (("grpo", "GRPO"), ("decoupled", "decoupled GRPO")):
            yield compare_changes(
                "P3O", "title, abstract", ABSTRACT, f"bears rollouts that are {lag} old better "
                f"than {noun}, 2 steps", (f"p3o_lag_{lag}-2", "p3o-2"),
                (f"{name}_lag_{lag}-2", "grpo-2"))


# ---------------------------------------------------------------------------- FADE


def fade(task):
    def setting(name, steps):
        return f"{name}-{steps}" if task == "countdown" else f"{task}/{name}-{steps}"
    for steps in (16,):
        yield against_best_static(
            "FADE", "abstract", SUMMARY, f"its best pass@1 comes earlier than the best static "
            f"advantage's, {task}, {steps} steps", setting("fade", steps), steps, task, less,
            "rollout of the best validation")
        yield at_every_k("FADE", "abstract", SUMMARY, "the best trade-off over all pass@k, against "
                         f"the best static advantage, {task}, {steps} steps",
                         setting("fade", steps), (steps, task))


def fade_axes():
    for steps in (16,):
        yield compare("FADE", "abstract, sign axis", ABSTRACT, "more mass on successes (delta 2) "
                      "collapses entropy", f"success_biased-{steps}", f"dr_grpo-{steps}", less,
                      "entropy")
        yield compare("FADE", "abstract, sign axis", ABSTRACT, "more mass on failures (delta 0.5) "
                      "collapses weight geometry: the head's update narrows",
                      f"failure_biased-{steps}", f"dr_grpo-{steps}", more, "rank-1 share")
        for name, noun in (("success_biased", "more mass on successes"),
                           ("failure_biased", "more mass on failures")):
            for score, when in (("early validation mean@8", "early"), (END, "at the end")):
                yield compare("FADE", "abstract, sign axis", ABSTRACT, f"which side helps when: "
                              f"{noun}, {when}", f"{name}-{steps}", f"dr_grpo-{steps}", unjudged,
                              score)
        for score, when in (("early validation mean@8", "early"), (END, "at the end")):
            yield compare("FADE", "abstract, difficulty axis", ABSTRACT, "which side helps when: "
                          f"focus on hard problems, {when}", f"power-{steps}",
                          f"dr_grpo-{steps}", unjudged, score)
    for part in ("alpha", "delta"):
        for score in (END, PASS, "entropy"):
            yield compare("FADE", "ablation", NOTE, f"what is lost without {part}, 16 steps",
                          f"fade_no_{part}-16", "fade-16", unjudged, score)


def claims():
    """All claims about training, in the order of RESULTS.md."""
    return [*acpo("countdown"), *acpo("worked"), *acpo_contradiction(), *acpo_sensitivity(),
            *p3o(), *fade("countdown"), *fade("worked"), *fade_axes()]

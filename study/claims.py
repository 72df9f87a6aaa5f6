"""What the papers claim about training, a claim an entry: where it stands, how well we know it,
which settings of study/results/grid.txt are compared in which quantity, and the test of it.

The claims about single updates are in study/claims_of_updates.py.
"""

import statistics
from typing import NamedTuple

from study.grid import (
    at_edge,
    final_runs,
    read_finished,
    read_grid,
    tuned,
    tuning_runs,
    validation,
)
from study.verdicts import (
    INCONSISTENT,
    NOT_JUDGED,
    NOT_MEASURED,
    Interval,
    Verdict,
    all_more,
    beside,
    holds,
    holm,
    less,
    more,
    of_a_note,
    student_p,
    unjudged,
    with_remark,
)

# how well a claim is known
PAPER = "paper"
CODE = "paper; settings of its code"
CAPTION = "paper; a figure's caption"
ABSTRACT = "abstract"
SUMMARY = "abstract; the method from a note"
NOTE = "note"
OURS = "our question"


class Claim(NamedTuple):
    """paper, place in it, how well it is known, the claim in words; `measure` takes Runs and gives
    the figure, as text, and the Verdict; `difference`, where it is about one, takes Runs and gives
    the values over seeds."""

    paper: str
    place: str
    known: str
    claim: str
    measure: object
    difference: object = None

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


SCORES["early validation mean@8"] = lambda run: run["validation"]["mean"][1][1]


def average(name, part=slice(None)):
    """The mean of a series over the rollouts of a run, or over a part of them."""
    return lambda run: statistics.fmean(x for x in run["series"][name][part] if x is not None)


SCORES["clipped"] = average("clip/frac")
SCORES["mean range"] = average("clip/range_mean")
SCORES["mean range, first five rollouts"] = average("clip/range_mean", slice(5))
SCORES["mean range, last five rollouts"] = average("clip/range_mean", slice(-5, None))


class Runs:
    """The finished runs of the grid. A setting is named as "acpo-16", of the task countdown, or
    with its task, "worked/acpo-16"."""

    def __init__(self, settings=None, finished=None):
        self.settings = read_grid() if settings is None else settings
        self.finished = read_finished() if finished is None else finished
        # of the rates that are best by now: one more may have been tried since a run was trained
        final = {key: {run.seed: self.finished[run.id] for run in final_runs(
            setting, self.settings, self.finished) if run.id in self.finished}
            for key, setting in self.settings.items()}
        # one seed has no interval: its setting is not there yet
        self.final = {key: seeds for key, seeds in final.items() if len(seeds) > 1}

    def of(self, name):
        """{seed: run}. Raises Missing."""
        key = name if "/" in name else f"countdown/{name}"
        if key not in self.final:
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

    def equal(self, a, b):
        """Have the runs of two settings the same scores and the same series, seed by seed?"""
        def numbers(name):
            return {seed: (run["validation"], run["held_out"], run["series"])
                    for seed, run in self.of(name).items()}
        return numbers(a) == numbers(b)

    def at_edge(self, name):
        """Is the learning rate of a setting the least or the largest of those that were tried?"""
        setting = self.settings[name if "/" in name else f"countdown/{name}"]
        return at_edge(self.settings[setting.rate_of] if setting.rate_of else setting,
                       self.finished)

    def other_rates(self, a, b):
        """"" where two settings have one learning rate, else both: a smaller rate alone keeps more
        of pass@k."""
        rates = [next(iter(self.of(name).values()))["lr"] for name in (a, b)]
        return "" if rates[0] == rates[1] else f"; learning rates {rates[0]:g} and {rates[1]:g}"

    def gap(self, a, b, score):
        return Interval.of(self.gaps(a, b, score))

    def best_of(self, names, steps, task="countdown"):
        """The setting of these names with the best mean validation score while it was tuned: chosen
        on other seeds than it is compared on. -> its key"""
        keys = [f"{task}/{name}-{steps}" for name in names]
        there = [self.settings[key] for key in keys if key in self.settings]
        if missing := [s.key for s in there if tuned(s, self.finished) is None]:
            raise Missing(missing[0])
        return max(there, key=self.tuning_score).key

    def tuning_score(self, setting):
        """The mean validation score of a setting's best learning rate on the tuning seeds."""
        choice = tuned(setting, self.finished)
        return statistics.fmean(
            validation(self.finished[run.id]) for run in tuning_runs(setting, self.finished)
            if (run.lr, run.flags) == choice)


# ---------------------------------------------------------------------------- kinds of claims

STATIC = ("dr_grpo", "asym", "power")  # FADE's static advantages
CLIPS = ("grpo", "grpo_clip_0.4", "grpo_clip_0.6")


def compare(paper, place, known, claim, a, b, test=more, score=END, clips=False):
    """A claim about one setting against another; b: its name, or (names, steps, task), of which the
    best in tuning is taken. clips: is it one about clips? Then what the two clip is said: where it
    is little, they are nearly the same method."""
    def other(runs):
        return runs.best_of(*b) if isinstance(b, tuple) else b

    def measure(runs):
        gap = Interval.of(runs.gaps(a, other(runs), score))
        both = [f"{name} {runs.mean(name, score).mean:.3f}{' (edge)' * runs.at_edge(name)}"
                for name in (a, other(runs))]
        figure = f"{score}: {', '.join(both)}, apart {gap.signed()}"
        figure += runs.other_rates(a, other(runs))
        if clips:
            clipped = [runs.mean(name, "clipped").mean for name in (a, other(runs))]
            figure += f"; of the tokens they clip {clipped[0]:.2%} and {clipped[1]:.2%}"
        if runs.equal(a, other(runs)):
            return figure, Verdict(NOT_JUDGED, "the runs are equal: what sets the two apart never "
                                               "acts here")
        return figure, test(gap)
    return Claim(paper, place, known, claim, measure,
                 lambda runs: runs.gaps(a, other(runs), score))


def compare_changes(paper, place, known, claim, a, b, test=more, score=END):
    """A claim about what a change does to one method against what it does to another; a and b:
    (changed, unchanged)."""
    def difference(runs):
        return [x - y for x, y in zip(runs.gaps(*a, score), runs.gaps(*b, score), strict=True)]

    def measure(runs):
        of_a, of_b = (Interval.of(runs.gaps(*pair, score)) for pair in (a, b))
        gap = Interval.of(difference(runs))
        figure = (f"{score}: {a[0]} less {a[1]} {of_a.signed()}, {b[0]} less {b[1]} "
                  f"{of_b.signed()}, apart {gap.signed()}")
        return figure, test(gap)
    return Claim(paper, place, known, claim, measure, difference)


def at_every_k(paper, place, known, claim, a, b, test=all_more):
    """A claim about pass@k for all k; b as in compare."""
    def measure(runs):
        other = runs.best_of(*b) if isinstance(b, tuple) else b
        gaps = {k: runs.gap(a, other, f"pass@{k}") for k in KS}
        figure = f"{a} less {other}: " + ", ".join(
            f"pass@{k} {gap.signed()}" for k, gap in gaps.items())
        return figure + runs.other_rates(a, other), test(list(gaps.values()))
    return Claim(paper, place, known, claim, measure)


# ---------------------------------------------------------------------------- ACPO


def by_table(test, score):
    """ACPO's tables report the best validation score; the end stands beside it."""
    return test if score == BEST else beside("best validation score")


def table_1(task, steps):
    def setting(name):
        return f"{name}-{steps}" if task == "countdown" else f"{task}/{name}-{steps}"
    for name, noun in (("dapo_acpo", "DAPO"), ("cispo_acpo", "CISPO")):
        for score in (BEST, END):
            yield compare("ACPO", "table 1", CODE, f"ACPO solves more than {noun}, {task}, "
                          f"{steps} steps", setting("acpo"), setting(name),
                          by_table(more, score), score, clips=True)


def stability():
    """Table 1's Countdown and sec. 4.2: from 2 to 16 steps."""
    for score in (BEST, END):
        yield compare("ACPO", "table 1, Countdown", CODE, "CISPO falls from 2 to 16 steps (74.3 to "
                      "55.1)", "cispo_acpo-16", "cispo_acpo-2", by_table(less, score), score)
        yield compare("ACPO", "table 1, Countdown", CODE, "ACPO does not (75.7 to 76.3)",
                      "acpo-16", "acpo-2", by_table(holds, score), score)
        for name, noun, test in (
                ("cispo_acpo", "CISPO", by_table(more, score)),
                ("dapo_acpo", "DAPO", lambda x: Verdict(NOT_JUDGED, "on Countdown table 1 has the "
                                                        "opposite, +0.5 against +1.1"))):
            yield compare_changes("ACPO", "sec. 4.2", CODE, "from 2 to 16 steps ACPO changes for "
                                  f"the better against {noun}", ("acpo-16", "acpo-2"),
                                  (f"{name}-16", f"{name}-2"), test, score)


def table_3():
    largest = "Clip-High=Max, the largest range observed (3, ACPO's bound)"
    mean = "Clip=Avg, the mean range observed"
    for steps in (2, 16):
        for score in (BEST, END):
            for claim, a, b, test in (
                    (f"ACPO solves more than DAPO with {largest}", "acpo", "clip_high_max", more),
                    (f"ACPO solves more than GRPO with {mean}", "acpo", "clip_avg", more),
                    (f"DAPO with {largest} solves more than DAPO", "clip_high_max", "dapo_acpo",
                     more),
                    ("GRPO with Clip=Avg solves less than DAPO", "clip_avg", "dapo_acpo", less)):
                yield compare("ACPO", "table 3", PAPER, f"{claim}, {steps} steps", f"{a}-{steps}",
                              f"{b}-{steps}", by_table(test, score), score, clips=True)

    def restrictive(runs):
        x = runs.mean("acpo-16", "mean range")
        return (f"ACPO's mean range {x.plain()}", Verdict(
            INCONSISTENT, "with the base of 0.2 that its released code has, the range is 0.2 "
                          "plus a positive number"))
    yield Claim("ACPO", "sec. 4.3", CODE, "Clip=Avg is more restrictive than GRPO's clip of 0.2",
                restrictive)

    def over_training(runs):
        parts = []
        for steps in (2, 16):
            first, last = (runs.mean(f"acpo-{steps}", f"mean range, {part} five rollouts")
                           for part in ("first", "last"))
            parts.append(f"{steps} steps {first.plain()}, then {last.plain()}")
        return "; ".join(parts), Verdict(NOT_JUDGED, "no run here has converged")
    yield Claim("ACPO", "sec. 4.1", PAPER, "the clip range tightens as the policy converges: its "
                "mean in the first five rollouts and in the last five", over_training)


def contradiction():
    """What the two papers have that ACPO's sec. 2.2 sets against each other, one with 2 steps on a
    rollout, one with 16, and what sec. 2.3 makes of it."""
    wang, yang = "arXiv 2506.01939, cited in sec. 2.2", "arXiv 2505.12929, cited in sec. 2.2"
    for place, claim, a, b, test in (
            (wang, "high-entropy tokens alone do better than all tokens, 16 steps",
             "top_entropy-16", "dapo_acpo-16",
             lambda x: Verdict(NOT_JUDGED, "the abstract has it for 14B and 32B, as good with 8B, "
                                           "and a trend with size")),
            (wang, "high-entropy tokens alone do better than the other 80%, 16 steps",
             "top_entropy-16", "bottom_entropy-16", more),
            (wang, "high-entropy tokens alone do better than the other 80%, 2 steps",
             "top_entropy-2", "bottom_entropy-2", more),
            (yang, "weighing low-probability tokens down does better (AR-Lopti: two passes, twice "
             "the optimizer steps), 2 steps", "ar_lopti-2", "dapo_acpo-2", more)):
        for score in (BEST, END):
            yield compare("others", place, ABSTRACT, claim, a, b, test if score == BEST else
                          lambda x: Verdict(NOT_JUDGED, "judged by the best validation score, as "
                                                        "ACPO's tables have it"), score)
    for claim, a, b in (
            ("AR-Lopti over high-entropy tokens alone, 2 steps", "ar_lopti-2", "top_entropy-2"),
            ("AR-Lopti over high-entropy tokens alone, 16 steps", "ar_lopti-16",
             "top_entropy-16")):
        yield compare("ours", "ACPO, sec. 2.2", OURS, claim, a, b, unjudged)
    yield compare_changes("ACPO", "sec. 2.3.1", PAPER, "the number of steps makes the difference: "
                          "from 2 to 16 steps high-entropy tokens alone gain on AR-Lopti",
                          ("top_entropy-16", "top_entropy-2"), ("ar_lopti-16", "ar_lopti-2"))


def sensitivity():
    for name, what in (("alpha_1", "alpha 1"), ("alpha_5", "alpha 5"), ("base_0.1", "base 0.1"),
                       ("base_0.3", "base 0.3"), ("bins_2", "2 bins"), ("bins_10", "10 bins")):
        yield compare("ACPO", "sensitivity", NOTE, f"ACPO with {what}, against alpha 3, base "
                      "0.2, 5 bins, 16 steps", f"acpo_{name}-16", "acpo-16", unjudged)


# ---------------------------------------------------------------------------- P3O


def p3o():
    yield compare("P3O", "abstract", ABSTRACT, "matches or exceeds tuned GRPO, 16 steps; its clip "
                  "the best of 0.2, 0.4, 0.6", "p3o-16", (CLIPS, 16), holds)
    yield compare("P3O", "abstract", ABSTRACT, "matches or exceeds GRPO, its clip 0.2, 2 steps",
                  "p3o-2", "grpo-2", holds)
    yield compare("P3O", "abstract", ABSTRACT, "matches or exceeds GRPO, its clip 0.2, 16 steps, "
                  "worked", "worked/p3o-16", "worked/grpo-16", holds)
    yield compare("P3O", "abstract: mismatch", ABSTRACT, "matches or exceeds GRPO, sampler "
                  "at T = 1.2, both ratios against the sampler, as the objective has it, 16 steps",
                  "p3o_hot-16", "grpo_hot_sampler-16", holds)
    yield compare("P3O", "abstract: mismatch", "abstract; the ratio of its released code",
                  "the same, P3O's ratio against the sampler's probabilities from before "
                  "temperature, as the code has it, GRPO's against the trainer, 16 steps",
                  "p3o_hot_raw-16", "grpo_hot-16",
                  with_remark(holds, "such a ratio cannot see the mismatch"))
    yield compare("ours", "P3O", OURS, "P3O over GRPO, both against the trainer, T = 1.2, 16 steps",
                  "p3o_hot_trainer-16", "grpo_hot-16", unjudged)
    for lag in (4, 8):
        for name, noun in (("grpo", "GRPO"), ("decoupled", "decoupled GRPO")):
            yield compare("P3O", "abstract: stale data", ABSTRACT, f"matches or exceeds "
                          f"{noun}, data {lag} rollouts old, {2 * lag} optimizer steps"
                          f"{', rates of 4 rollouts' * (lag == 8)}", f"p3o_lag_{lag}-2",
                          f"{name}_lag_{lag}-2", holds)
    yield compare("P3O", "a note on its experiments", NOTE, "a sampler at T = 1.2 breaks GRPO, 16 "
                  "steps", "grpo_hot-16", "grpo-16", of_a_note(less))
    for a, b in (("p3o_hot-16", "grpo_hot_sampler-16"), ("p3o_hot_trainer-16", "grpo_hot-16")):
        yield compare("ours", "P3O", OURS, "P3O over GRPO, T = 1.2, 16 steps", a, b, unjudged, PASS)
    for claim, a, b in (
            ("P3O over its cap alone", "p3o-16", "p3o_cap-16"),
            ("P3O over its KL alone", "p3o-16", "p3o_kl-16"),
            ("GRPO's ratio against the sampler over the trainer, T = 1.2", "grpo_hot_sampler-16",
             "grpo_hot-16"),
            ("P3O's ratio against the sampler over the trainer, T = 1.2", "p3o_hot-16",
             "p3o_hot_trainer-16"),
            ("P3O with the sampler's probabilities before temperature, as its released code has "
             "them, over the trainer's, T = 1.2", "p3o_hot_raw-16", "p3o_hot_trainer-16"),
            ("P3O over GRPO, both against the trainer, T = 0.6 (rates not tuned there)",
             "p3o_cold_trainer-16", "grpo_cold-16"),
            ("P3O over GRPO, both against the sampler, T = 0.6 (rates not tuned there)",
             "p3o_cold-16", "grpo_cold_sampler-16"),
            ("what a bfloat16 sampler costs GRPO", "grpo_bf16-16", "grpo-16"),
            ("what a bfloat16 sampler costs P3O", "p3o_bf16-16", "p3o-16")):
        yield compare("ours", "P3O", OURS, f"{claim}, 16 steps", a, b, unjudged)


# ---------------------------------------------------------------------------- FADE


def says_whether_delta_acts(claim, name):
    """The claim, whose figure says so where FADE's delta is 1 in all rollouts of all runs."""
    def measure(runs):
        figure, verdict = claim.measure(runs)
        acts = any(x < 1 for run in runs.of(name).values() for x in run["series"]["adv/fade_delta"])
        return figure if acts else f"{figure}; delta is 1 throughout", verdict
    return claim._replace(measure=measure)


def fade(task):
    static = (STATIC, 16, task)
    for name, what in {"countdown": (("fade-16", ""), ("fade_0.42-16", ", target 0.42")),
                       "worked": (("worked/fade-16", ""),)}[task]:
        found = [compare(
            "FADE", "abstract", SUMMARY, "its best pass@1 comes earlier than the best static "
            f"advantage's, {task}, 16 steps{what}", name, static,
            with_remark(of_a_note(less), "runs are evaluated every five rollouts, and one that "
                        "still rises at its end peaks there"), "rollout of the best validation")]
        found += [compare("ours", "FADE", OURS, f"FADE over the best static advantage, {task}, 16 "
                          f"steps{what}", name, static, unjudged, score)
                  for score in ("early validation mean@8", "mean validation mean@8", END)]
        found.append(at_every_k(
            "FADE", "abstract", SUMMARY, "the best trade-off over all pass@k: more than the best "
            f"static advantage at every k, {task}, 16 steps{what}", name, static,
            of_a_note(all_more)))
        for claim in found:
            yield says_whether_delta_acts(claim, name)
    for other, what in {"countdown": (("hard_focus-16", "power with alpha 3, not tuned"),),
                        "worked": (("worked/dapo_acpo-16", "ACPO's DAPO"),)}[task]:
        yield at_every_k("ours", "FADE", OURS, f"FADE over {what}, {task}, 16 steps",
                         "fade-16" if task == "countdown" else "worked/fade-16", other,
                         lambda gaps: unjudged())


def fade_axes():
    yield compare("FADE", "sign axis", NOTE, "more mass on successes (delta 2) collapses entropy, "
                  "16 steps", "success_biased-16", "dr_grpo-16", of_a_note(less), "entropy")
    yield compare("FADE", "sign axis", NOTE, "more mass on failures (delta 0.5) collapses weight "
                  "geometry: the head's update narrows, 16 steps", "failure_biased-16",
                  "dr_grpo-16", of_a_note(more), "rank-1 share")
    early = "early validation mean@8"
    for claim, a, b, test, score in (
            ("early, balance beats mass on successes", "dr_grpo-16", "success_biased-16", more,
             early),
            ("early, balance beats mass on failures", "dr_grpo-16", "failure_biased-16", more,
             early),
            ("early, focus on hard problems (alpha 3) beats medium focus (alpha 1)",
             "hard_focus-16", "dr_grpo-16", more, early),
            ("late, suppressed failures (delta 2) beat balance", "success_biased-16",
             "dr_grpo-16", more, END),
            ("late, medium focus (alpha 1) beats focus on hard problems (alpha 3)", "dr_grpo-16",
             "hard_focus-16", more, END)):
        when = "rollout 5 of 20" if score == early else "the end of runs that had it throughout"
        yield compare("FADE", "abstract", SUMMARY, f"{claim}, 16 steps ({when})", a, b,
                      of_a_note(test), score)
    for part in ("alpha", "delta"):
        for score in (END, PASS, "entropy"):
            yield compare("FADE", "ablation", NOTE, f"FADE needs its {part}: less without, 16 "
                          "steps, target 0.21", f"fade_no_{part}-16", "fade-16",
                          unjudged if score == "entropy" else of_a_note(less), score)
    for score in (END, PASS, "entropy"):
        yield compare("ours", "FADE", OURS, "FADE with the target 0.42, where delta acts, over "
                      "0.21, 16 steps", "fade_0.42-16", "fade-16", unjudged, score)


def claims():
    """All claims about training, in the order of RESULTS.md."""
    return [*table_1("countdown", 2), *table_1("countdown", 16), *table_1("worked", 16),
            *stability(), *table_3(), *contradiction(), *sensitivity(), *p3o(),
            *fade("countdown"), *fade("worked"), *fade_axes()]


def survivors(runs):
    """Of the claims that were judged by a difference, those whose difference is still there when
    all of them were looked at (Holm): {the claim's words and figure}."""
    tried = []
    for claim in claims():
        try:
            figure, verdict = claim.measure(runs)
            if claim.difference is None or verdict.kind == NOT_JUDGED:
                continue
            values = claim.difference(runs)
        except Missing:
            continue
        tried.append((claim.claim, figure, student_p(Interval.of(values), len(values))))
    kept = holm([p for *_, p in tried])
    return {(claim, figure) for (claim, figure, _), there in zip(tried, kept, strict=True) if there}

"""The claims about single updates: verdicts on made-up numbers, rows of the stored ones."""

import copy
import json
import math
import statistics

import pytest

from study import mechanism
from study.rule import Interval
from study.updates import UPDATES

STORED = json.loads(UPDATES.read_text())
OF_STEPS = dict(seeds=[  # as Gemma's
    {name: x for name, x in rollout.items() if name not in ("far", "subsets")}
    for rollout in STORED["seeds"]])


@pytest.mark.parametrize("says, mean, than, size, verdict", [  # mean +- 0.1, about 0.25 as 95%
    ("more", 0.5, 0, None, "holds"), ("less", 0.5, 0, None, "opposite"),
    ("more", 0.2, 0, None, "not certain"), ("", 0.5, 0, None, ""),
    ("more", 0.5, 0.2, None, "holds"), ("more", 0.5, 0.4, None, "not certain"),
    ("less", 0.5, 1, 0.74, "reproduced"),       # 0.5 is within 1.5 of 0.74
    ("less", 0.5, 1, 0.76, "direction alone"),  # and not of 0.76
    ("more", 1.3, 1, 201.77, "direction alone"),
    ("more", 0.7, 1, 0.7, "opposite"),          # a size alone does not do
    ("equal", 1.0, 1, 0.98, "reproduced"), ("equal", 1.4, 1, 0.98, "not certain"),
    ("equal", 2.1, 1, 0.98, "opposite")])
def test_a_verdict_follows_from_its_interval(says, mean, than, size, verdict):
    interval = Interval.of([mean - 0.1, mean, mean + 0.1])
    assert mechanism.judge(says, interval, than, size) == verdict


def test_g_is_counted_in_the_direction_that_it_has_over_all_rollouts():
    """Low is noise around -0.02, of either sign: the mean of its sizes would be near 0.05."""
    rollouts = copy.deepcopy(STORED["seeds"])
    noise = [0.05, -0.06, 0.04, -0.05, 0.06, -0.07, 0.03, -0.16]
    for rollout, low in zip(rollouts, noise, strict=True):
        rollout["near"]["16"] = [low, -0.1]
    gap = mechanism.interval_of(mechanism.columns(rollouts), "|G_L| 16 of 16 - |G_H| 16 of 16")
    assert gap.mean == pytest.approx(0.02 - 0.1) and gap.n == 8


@pytest.fixture(scope="module")
def rows():
    return {row.claim: row for row in mechanism.rows(STORED, OF_STEPS)}


def test_a_row_is_what_the_stored_numbers_give(rows):
    """By the t of seven degrees of freedom in the tables, 2.3646."""
    selected, by_all = rows["norm, pi < 0.2"].measured.split("; over all tokens ")
    for said, key in ((selected, "norm_selected"), (by_all, "norm")):
        norms = [100 * r["subsets"]["pi < 0.2"][key] for r in STORED["seeds"]]
        mean, half = statistics.fmean(norms), 2.3646 * statistics.stdev(norms) / math.sqrt(8)
        assert said == f"{mean:.0f}% ({mean - half:.0f} to {mean + half:.0f})"


@pytest.mark.parametrize("change, claim, verdict", [
    (lambda t: t["lemma_1"].update(slope=1.5), "std(rho) in its own tabular model",
     "contradicts eq. 15"),
    (lambda t: t["proposition_1"].update({"53": 9.0}), "the expected gradient by probability",
     "contradicts eq. 53"),
    (lambda t: t["proposition_1"].update({"56": 1.0}), "its asymptotic form", "follows"),
    (lambda t: [scan["reversed"].update({"53": [[0.5, 100.0]], "56": [[1.0, 2.0], [9.0, 100.0]]})
                for scan in t["remark_1"]], "size of G_L over that of G_H", "follows")])
def test_a_formula_follows_or_contradicts_an_equation(change, claim, verdict, rows):
    assert rows[claim].verdict != verdict
    theory = copy.deepcopy(STORED["theory"])
    change(theory)
    assert {row.claim: row.verdict for row in mechanism.formulas(theory)}[claim] == verdict

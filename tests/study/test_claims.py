"""Verdicts, fed made-up numbers; the grid's plan; and that every claim finds its runs."""

import json
import random
import re
import shlex
import subprocess
import sys

import pytest

import train
from conftest import ROOT
from losses import METHODS
from study import claims, grid, results
from study import claims_of_updates as updates_claims
from study import train_grid as trained
from study.verdicts import (
    CONTRADICTED,
    FOLLOWS,
    INCONSISTENT,
    KINDS,
    NOT_JUDGED,
    NOT_MEASURED,
    NOT_SEEN,
    REPRODUCED,
    Interval,
    Verdict,
    all_more,
    beside,
    between,
    derived,
    holds,
    holm,
    less,
    more,
    of_a_note,
    student_p,
    unjudged,
    with_remark,
)

# seeds that agree on a gain, on a loss, and that disagree
GAIN = [0.04, 0.05, 0.06, 0.05, 0.04, 0.05, 0.06, 0.05]
LOSS = [-x for x in GAIN]
NOISE = [0.1, -0.1, 0.05, -0.05, 0.08, -0.08, 0.02, -0.02]


# ---------------------------------------------------------------------------- verdicts


def test_the_interval_is_students():
    x = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    # by hand: mean 3, standard deviation 1.5811, over sqrt 5 0.7071, times 2.776
    assert x == pytest.approx((3.0, 3 - 1.9629, 3 + 1.9629), abs=1e-4)
    assert x.half_width == pytest.approx(1.9629, abs=1e-4)
    assert Interval.of([0.5, 0.5]).half_width == 0
    with pytest.raises(ValueError, match="two or more"):
        Interval.of([0.5])


@pytest.mark.parametrize("test, values, kind", [
    (more, GAIN, REPRODUCED), (more, LOSS, CONTRADICTED), (more, NOISE, NOT_SEEN),
    (less, LOSS, REPRODUCED), (less, GAIN, CONTRADICTED), (less, NOISE, NOT_SEEN),
    (holds, GAIN, REPRODUCED), (holds, [x / 10 for x in NOISE], REPRODUCED),
    (holds, LOSS, CONTRADICTED), (holds, [x / 5 for x in LOSS], CONTRADICTED),
    (holds, NOISE, NOT_SEEN), (unjudged, GAIN, NOT_JUDGED), (of_a_note(more), GAIN, NOT_JUDGED),
])
def test_a_verdict_follows_from_its_interval(test, values, kind):
    assert test(Interval.of(values)).kind == kind


def test_what_is_not_seen_says_what_is_excluded():
    x = Interval(0.001, -0.011, 0.0132)
    assert str(more(x)) == "not seen at this scale: more than 0.013 is excluded"
    assert str(less(x)) == "not seen at this scale: less than -0.011 is excluded"
    assert str(holds(x)) == "reproduced: a loss above 0.011 is excluded"
    assert str(of_a_note(more)(x)).startswith("not judged: as the note has the method, not seen")
    assert more(x, than=0.02).kind == CONTRADICTED and more(x, than=-0.02).kind == REPRODUCED
    assert holds(x, margin=0.005).kind == NOT_SEEN


def test_what_stands_beside_the_papers_score_is_not_judged():
    x = Interval.of([0.2, 0.21, 0.19])
    verdict = beside("best validation")(x)
    assert verdict.kind == NOT_JUDGED and "best validation" in verdict.remark
    assert with_remark(more, "but")(x) == Verdict(REPRODUCED, "but")
    assert with_remark(less, "but")(Interval.of([-1.0, 0.0, 1.0])).remark.endswith("; but")


def test_a_claim_about_several_numbers_needs_all_of_them():
    up, down, wide = (Interval.of(values) for values in (GAIN, LOSS, NOISE))
    assert all_more([up, up]).kind == REPRODUCED
    assert all_more([up, wide]).kind == NOT_SEEN and "1 of 2" in all_more([up, wide]).remark
    assert all_more([up, wide, down]).kind == NOT_SEEN
    assert all_more([down, down]).kind == CONTRADICTED


def test_p_values_and_what_many_comparisons_leave():
    # by tables of Student's t: 7 degrees of freedom, t = 2.365 and 3.499
    assert student_p(Interval(1.0, 0.0, 2.0), 8) == pytest.approx(0.05, abs=1e-4)
    x = Interval(3.499, 3.499 - 2.365, 3.499 + 2.365)
    assert student_p(x, 8) == pytest.approx(0.01, abs=1e-4)
    assert student_p(Interval(-3.499, -3.499 - 2.365, -3.499 + 2.365), 8) == student_p(x, 8)
    assert student_p(Interval(0.5, 0.5, 0.5), 8) == 0
    # by hand: 0.005 <= 0.05 / 4 and 0.01 <= 0.05 / 3, but 0.03 > 0.05 / 2
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([]) == []


def test_a_value_is_found_or_not():
    assert between(Interval(2.0, 1.8, 2.2), 1.5, 2.5).kind == REPRODUCED
    assert between(Interval(1.0, 0.9, 1.1), 1.5, 2.5).kind == CONTRADICTED
    assert between(Interval(1.4, 1.2, 1.6), 1.5, 2.5).kind == NOT_SEEN


def test_a_formula_follows_from_its_assumptions_or_contradicts_them():
    assert derived([0.5, -2.0, 3.1]).kind == FOLLOWS
    assert derived([0.5, -40.0]).kind == INCONSISTENT
    assert "40.0 standard errors" in derived([0.5, -40.0]).remark


# ---------------------------------------------------------------------------- the grid's plan

LINES = """# a comment

countdown  a      16 2  tuned  --loss grpo --eps_low {0.1,0.2}
countdown  b      16    a      --loss grpo --dual_clip 3
"""


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "grid.txt").write_text(LINES)
    return grid.read_grid(tmp_path / "grid.txt")


def finished_run(run, score):
    """What bench/grid.py keeps of a run, with made-up numbers around a score."""
    kept = dict(id=run.id, **run._asdict(), command=run.command(), seconds=1.0, base=7,
                validation=dict(mean=[[0, 0.1], [5, score / 2], [10, score], [15, score],
                                      [20, score]], **{"pass": [[0, 0.5], [20, 0.6]]}))
    if run.role == "final":
        kept["held_out"] = {"mean@16": score, **{f"pass@{k}": score + 0.01 * k
                                                 for k in (1, 2, 4, 8, 16)}}
        kept["series"] = {"policy/entropy": [0.4, score / 2],
                          "optim/head_rank1_share": [None, 0.3, None],
                          "clip/frac": [0.01, 0.02], "clip/range_mean": [0.3, 0.4],
                          "adv/fade_delta": [1.0, 0.9]}
    return kept


def all_finished(settings, score):
    """Plays the grid through: {id: run}; score: of a Planned run."""
    finished = {}
    while planned := grid.missing(settings, finished):
        finished.update({run.id: finished_run(run, score(run)) for run in planned})
    return finished


def test_the_plan_tunes_first_and_reports_the_best(settings):
    assert list(settings) == ["countdown/a-16", "countdown/a-2", "countdown/b-16"]
    first = grid.missing(settings, {})
    assert {run.role for run in first} == {"tune"}
    assert len(first) == 2 * 2 * 4 * 2  # settings, alternatives, rates, seeds
    assert {run.flags for run in first} == {"--loss grpo --eps_low 0.1",
                                            "--loss grpo --eps_low 0.2"}

    def score(run):
        return 0.3 + (run.lr == 2e-4) * 0.1 + run.flags.endswith("0.1") * 0.05 + run.seed * 1e-4
    finished = all_finished(settings, score)
    final = [run for run in finished.values() if run["role"] == "final"]
    assert {run["seed"] for run in final} == set(range(8)) and len(final) == 3 * 8
    assert {run["lr"] for run in final} == {2e-4}
    # 2e-4 is the largest of 16 steps' rates, and one more was tried beyond it; it is none of 2's
    tried = {steps: {run["lr"] for run in finished.values() if run["steps"] == steps}
             for steps in (2, 16)}
    assert tried[16] - set(grid.RATES[16]) == {4e-4} and tried[2] == set(grid.RATES[2])
    assert {run.lr for run in first if run.steps == 2} == set(grid.RATES[2]) != set(grid.RATES[16])
    assert {run["flags"] for run in final} == {"--loss grpo --eps_low 0.1",
                                               "--loss grpo --dual_clip 3"}
    assert not {run.seed for run in first} & {run["seed"] for run in final}
    assert grid.tuned(settings["countdown/a-16"], {}) is None
    # one noisy evaluation alone does not decide: the last two do
    run = dict(validation=dict(mean=[[5, 0.9], [10, 0.2], [15, 0.4]]))
    assert grid.validation(run) == pytest.approx(0.3)


@pytest.mark.parametrize("line, says", [
    ("countdown a 16 tuned loss", "line 1 is not: task name steps"),
    ("countdown a sixteen tuned --loss grpo", "line 1 is not"),
    ("countdown a 16 b --loss grpo", "takes the learning rate of countdown/b-16"),
    ("countdown a 16 tuned --loss grpo\ncountdown a 16 2 tuned --loss p3o", "two settings"),
    ("countdown a 16 tuned --loss grpo\ncountdown b 16 a --loss grpo --eps_low {0.1,0.2}",
     "not tuned and has alternatives"),
    ("countdown a 4 tuned --loss grpo", "learning rates for 16, 2 steps, not for 4")])
def test_a_wrong_line_of_the_grid_is_named(tmp_path, line, says):
    (tmp_path / "grid.txt").write_text(line + "\n")
    with pytest.raises(ValueError, match=says):
        grid.read_grid(tmp_path / "grid.txt")


def test_finished_runs_are_read_but_for_a_line_that_was_cut_off(tmp_path, settings):
    run = grid.missing(settings, {})[0]
    kept = json.dumps(finished_run(run, 0.3))
    (tmp_path / "grid.jsonl").write_text(f"{kept}\n{kept[:40]}")
    assert list(grid.read_finished(tmp_path / "grid.jsonl")) == [run.id]
    assert grid.read_finished(tmp_path / "nothing.jsonl") == {}


@pytest.mark.parametrize("key", list(grid.read_grid()))
def test_the_grid_has_flags_that_exist(key):
    setting = grid.read_grid()[key]
    for flags in setting.alternatives:
        run = grid.Planned(key, "final", 1e-4, flags, 0, setting.task, setting.steps)
        args, _ = train.parse_args(shlex.split(run.command()))
        assert args.loss in METHODS and args.steps_per_rollout == setting.steps


# ---------------------------------------------------------------------------- the claims


def test_every_claim_finds_its_runs():
    """With made-up runs of the whole grid every claim has a figure and a verdict of a kind; without
    runs it says what is missing."""
    settings = grid.read_grid()
    finished = all_finished(settings, lambda run: (
        0.3 + 0.001 * run.seed + run.lr * 100 + 1e-4 * (len(run.setting) + run.seed % 2)))
    runs, nothing = claims.Runs(settings, finished), claims.Runs(settings, {})
    rows = [claim.row(runs) for claim in claims.claims()]
    assert len(rows) > 60
    for row in rows:
        kind = row[-1].split(":")[0]
        assert kind in KINDS and kind != NOT_MEASURED, row
        assert re.search(r"\d\.\d{3} \([+-]?\d\.\d{3}", row[-2]), row
    assert {claim.row(nothing)[-1].split(":")[0] for claim in claims.claims()} == {NOT_MEASURED}


def test_a_claim_compares_seed_by_seed():
    settings = grid.read_grid()
    finished = all_finished(settings, lambda run: 0.1 * run.seed + 0.05 * ("acpo" in run.setting))
    runs = claims.Runs(settings, finished)
    claim = claims.compare("ACPO", "", "", "", "acpo-16", "grpo-16")
    figure, verdict = claim.measure(runs)  # the seeds differ much, the methods always by 0.05
    assert "apart +0.050 (+0.050, +0.050)" in figure and verdict.kind == REPRODUCED
    change = claims.compare_changes("P3O", "", "", "", ("acpo-16", "grpo-16"),
                                    ("p3o-16", "grpo-16"))
    assert "apart +0.050 (+0.050, +0.050)" in change.measure(runs)[0]


def test_equal_runs_are_said_to_be_equal():
    """As those of fade without delta where delta stays at 1: an interval of no width says less."""
    settings = grid.read_grid()
    finished = all_finished(settings, lambda run: 0.3 + 0.01 * run.seed)
    claim = claims.compare("ours", "", "", "", "fade_no_delta-16", "fade-16")
    verdict = claim.measure(claims.Runs(settings, finished))[1]
    assert verdict.kind == NOT_JUDGED and "the runs are equal" in verdict.remark
    one = next(run for run in finished.values() if run["setting"] == "countdown/fade-16"
               and run["role"] == "final")
    one["series"] = dict(one["series"], other=[0.1])  # equal scores alone are not equal runs
    assert claim.measure(claims.Runs(settings, finished))[1].kind != NOT_JUDGED


def test_the_best_static_advantage_is_chosen_by_the_tuning_seeds():
    """And not by the seeds on which it is compared."""
    settings = grid.read_grid()

    def score(run):
        better = dict(tune="power", final="asym")[run.role]
        return 0.3 + 0.1 * (better in run.setting)
    runs = claims.Runs(settings, all_finished(settings, score))
    assert runs.best_of(claims.STATIC, 16) == "countdown/power-16"
    claim = claims.compare("FADE", "", "", "", "fade-16", (claims.STATIC, 16))
    assert "countdown/power-16 0.300, apart +0.000" in claim.measure(runs)[0]


def test_a_setting_of_one_seed_is_not_there_yet():
    """As where the grid was interrupted: the page is written without it."""
    settings = grid.read_grid()
    finished = {key: run for key, run in all_finished(settings, lambda run: 0.3).items()
                if run["setting"] != "countdown/p3o-16" or run["seed"] in (0, 100, 101)}
    runs = claims.Runs(settings, finished)
    assert "countdown/p3o-16" not in runs.final and "countdown/grpo-16" in runs.final
    verdict = claims.compare("P3O", "", "", "", "p3o-16", "grpo-16").row(runs)[-1]
    assert verdict.startswith(NOT_MEASURED)


def test_the_edge_of_the_rates_is_marked():
    """A setting that takes another's rate is at the edge where that one is. One rate more is tried
    beyond the edge, so that 2e-4 is none."""
    settings = grid.read_grid()
    best = {"acpo": 2e-4, "fade": 0.0}
    runs = claims.Runs(settings, all_finished(settings, lambda run: -abs(
        run.lr - best.get(run.setting.split("/")[1].split("-")[0], 1.0))))
    assert [runs.at_edge(name) for name in ("acpo-16", "fade-16", "fade_no_alpha-16", "grpo-16")
            ] == [False, True, True, True]


def test_what_two_methods_clip_stands_beside_a_claim_about_clips():
    settings = grid.read_grid()
    finished = all_finished(settings, lambda run: 0.3 + 0.1 * ("/acpo" in run.setting))
    claim = claims.compare("ACPO", "", "", "", "acpo-16", "dapo_acpo-16", clips=True)
    figure, verdict = claim.measure(claims.Runs(settings, finished))
    assert verdict.kind == REPRODUCED and "they clip 1.50% and 1.50%" in figure


def test_what_sets_two_settings_apart_beside_the_method_is_said():
    """Other learning rates, and a controller of FADE that never acts."""
    settings = grid.read_grid()
    best = {"fade": 5e-5}
    finished = all_finished(settings, lambda run: 0.4 - abs(
        run.lr - best.get(run.setting.split("/")[1].split("-")[0], 1e-4)))
    runs = claims.Runs(settings, finished)
    assert runs.other_rates("fade-16", "acpo-16") == "; learning rates 5e-05 and 0.0001"
    assert runs.other_rates("grpo-16", "acpo-16") == ""
    claim = claims.compare("FADE", "", "", "", "fade-16", "acpo-16")
    assert "learning rates 5e-05 and 0.0001" in claim.measure(runs)[0]
    claim = claims.says_whether_delta_acts(claim, "fade-16")
    assert "delta" not in claim.measure(runs)[0]
    for run in runs.of("fade-16").values():
        run["series"]["adv/fade_delta"] = [1.0, 1.0]
    assert claim.measure(runs)[0].endswith("; delta is 1 throughout")


def test_counts_on_the_page_are_those_of_the_runs():
    settings = grid.read_grid()
    runs = claims.Runs(settings, all_finished(settings, lambda run: 0.3))
    acpo = list(runs.of("acpo-2").values())
    for run in acpo:
        run["series"]["clip/range_max"] = [0.5, 1.0]
    acpo[0]["series"]["clip/range_max"] = [0.5, 3.0]
    assert results.at_bound(runs, 2) == "1 of 8"
    total = int(results.at_end(runs, "worked").split(" of ")[1])
    assert results.at_end(runs, "worked") == f"{total} of {total}"
    next(iter(runs.of("worked/acpo-16").values()))["validation"]["mean"][1][1] = 0.9
    assert results.at_end(runs, "worked") == f"{total - 1} of {total}"


def test_a_rate_that_is_best_later_replaces_the_runs_of_the_one_before():
    """The runs at 2e-4 were trained before 4e-4 was tried, and stay in the file."""
    settings = grid.read_grid()
    finished = all_finished(settings, lambda run: 0.3 + run.lr * 100)
    assert claims.Runs(settings, finished).of("acpo-16")[0]["lr"] == 4e-4
    old = [grid.Planned("countdown/acpo-16", "final", 2e-4, settings["countdown/acpo-16"].flags,
                        seed, "countdown", 16) for seed in range(8)]
    finished.update({run.id: finished_run(run, 0.9) for run in old})
    assert {run["lr"] for run in claims.Runs(settings, finished).of("acpo-16").values()} == {4e-4}


def test_runs_of_two_bases_are_not_mixed(settings):
    run = grid.missing(settings, {})[0]
    finished = {run.id: finished_run(run, 0.3)}
    assert grid.of_other_bases(finished, dict(countdown=7)) is None
    assert grid.of_other_bases(finished, dict(worked=8)) is None  # of another task
    assert grid.of_other_bases(finished, dict(countdown=8)).startswith(
        "1 finished runs are of another base")
    with pytest.raises(ValueError, match="finished runs are of another base"):
        results.measure()  # those of the page, from before the bases were files


def test_the_grids_puzzles_are_distinct_and_its_sets_disjoint(tmp_path):
    """Prompts that differ in the order of the numbers alone are one puzzle."""
    for task in grid.ROLLOUTS:
        sets = []
        for part, size in (("held_out", 200), ("tune", 50), ("final", 50)):
            rows = trained.problem_file(task, part, tmp_path).read_text().splitlines()
            answers = [json.loads(row)["answer"] for row in rows]
            sets.append({(*sorted(a["nums"]), a["target"]) for a in answers})
            assert len(rows) == len(sets[-1]) == size
        assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]


def test_what_many_comparisons_leave_is_marked():
    settings = grid.read_grid()
    sure = claims.Runs(settings, all_finished(
        settings, lambda run: 0.3 + 0.1 * ("/acpo-16" in run.setting) + run.seed * 1e-3))
    marked = claims.survivors(sure)
    assert any("ACPO solves more than DAPO" in claim for claim, _ in marked)
    rng = random.Random(0)
    chance = claims.Runs(settings, all_finished(settings, lambda run: 0.3 + rng.gauss(0, 0.02)))
    assert len(claims.survivors(chance)) <= 1


def test_results_md_is_what_the_numbers_give():
    assert results.page(*results.read()) == (ROOT / "RESULTS.md").read_text(), (
        "./run_all.sh results writes it again")


SMALL = """
import contextlib, io, json, sys
from pathlib import Path
root, folder = map(Path, sys.argv[1:])
sys.path.insert(0, str(root))
from study import grid as plan
plan.RATES, plan.TUNING_SEEDS, plan.SEEDS = {2: (1e-4,)}, (100,), range(2)
plan.VALIDATE_EVERY = 1
plan.ROLLOUTS = dict(countdown=1)
from study import train_grid as grid
grid.PARTS = dict(held_out=slice(0, 4), tune=slice(4, 54), final=slice(54, 104))
said, kept, results = [], [], folder / "grid.jsonl"

def run(*args):
    sys.argv = ["train_grid", "--grid", str(folder / "grid.txt"), "--results", str(results),
                "--folder", str(folder / "runs"), "--jobs", "1", *args]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            grid.main()
            end = ""
        except SystemExit as e:
            end = e.code
    said.append((out.getvalue(), end))
    kept.append(results.read_text().splitlines() if results.exists() else [])

(folder / "grid.txt").write_text("countdown  a  2  tuned  --loss grpo --eps_low {0.1,0.2}\\n")
run("--plan")
run("--only", "nothing*")
run()
(folder / "runs" / "run-1").mkdir()
results.write_text("\\n".join(kept[-1][:-1]) + "\\n")
run("--plan")
run()
(folder / "grid.txt").write_text("countdown  a  2  tuned  --loss grpo --no_such 1\\n")
run()
print(json.dumps([said, kept]))
"""


def test_a_grid_is_trained_and_continues(base, tmp_path):
    """Two alternatives are tuned, the better one gets two seeds; a run that is there is not trained
    again; a failure is named. One process for all of it: it imports torch once."""
    done = subprocess.run([sys.executable, "-c", SMALL, ROOT, tmp_path], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (plan, nothing, first, lost, second, failure), kept = json.loads(done.stdout.splitlines()[-1])
    assert "0 runs are finished, 4 are left" in plan[0]
    assert nothing[1] == "" and kept[1] == []
    runs, again = ([json.loads(line) for line in kept[i]] for i in (2, 4))
    assert [run["role"] for run in runs] == ["tune", "tune", "final", "final"]
    assert [run["seed"] for run in runs] == [100, 100, 0, 1]
    final = runs[-1]
    assert {"mean@16", "pass@1", "pass@16"} <= set(final["held_out"])
    assert len(final["series"]["policy/entropy"]) == 1 and len(final["validation"]["mean"]) == 2
    assert first[1] == "" and "| a-2 |" in first[0].replace("countdown/", "")
    # the last line is lost, as by a crash of the machine: that run alone is trained again, and
    # files of a run that was interrupted do not stay
    assert "3 runs are finished, 1 are left" in lost[0] and second[1] == ""
    assert [run["id"] for run in again] == [run["id"] for run in runs]
    assert again[-1]["held_out"] == final["held_out"]  # to the bit
    assert not (tmp_path / "runs" / "run-1").exists()
    assert "failed: " in failure[0] and "again" in failure[1]


# ---------------------------------------------------------------------------- updates


def rollout_with(low, high, taken="16"):
    sides = dict(low=dict(mean=low, size=abs(low)), high=dict(mean=high, size=abs(high)),
                 low_over_high=abs(low / high))
    return dict(steps=dict(reversal={taken: sides}))


def test_the_side_that_dominates_is_judged_by_means_over_rollouts():
    """Low is noise around 0.02, of either sign, and high is 0.05 each time: the mean of |low| would
    be near 0.09, and dominate."""
    claim = updates_claims.dominates("", "", "16", less)
    noise = [0.06, -0.05, 0.05, -0.04, 0.06, -0.05, 0.05, 0.0]
    updates = dict(seeds=[rollout_with(2 * x, -0.05 - 0.001 * i) for i, x in enumerate(noise)])
    figure, verdict = claim.measure(updates)
    assert "eq. 54: 0.020" in figure and "eq. 55: 0.05" in figure and "apart -0.0" in figure
    assert verdict.kind == NOT_SEEN
    # high is the larger on all rollouts, by far on one: that hides the difference, not the ratio
    updates = dict(seeds=[rollout_with(0.02, -0.05 - 2 * (i == 0)) for i in range(8)])
    verdict = claim.measure(updates)[1]
    assert verdict.kind == NOT_SEEN and "by the logarithm of the ratio reproduced" in str(verdict)
    updates = dict(seeds=[rollout_with(0.2 * x, -0.05) for x in noise])
    assert claim.measure(updates)[1].kind == REPRODUCED
    updates = dict(seeds=[rollout_with(0.2 + x, -0.05) for x in noise])
    assert claim.measure(updates)[1].kind == CONTRADICTED


@pytest.mark.parametrize("ranges, kind", [
    ([], INCONSISTENT), ([[0.5, 0.7]], INCONSISTENT), ([[0.5, 100.0]], FOLLOWS)])
def test_a_remark_by_an_equation_has_to_stay_true(ranges, kind):
    lines = [dict(kappa=k, log10_53=x) for k, x in ((0.01, 2.0), (100.0, -1.0 if ranges else 1.0))]
    updates = dict(theory=dict(remark_1=[dict(lines=lines, reversed_53=ranges, low=0.2,
                                              high=high) for high in (0.2, 0.3)]))
    assert updates_claims.scanned(53)(updates)[1].kind == kind


def test_the_lemma_is_judged_where_what_it_drops_is_smallest():
    def updates(slope):
        return dict(theory=dict(lemma_1=[dict(vocabulary=2, slope=1.0, diffuse=dict(slope=1.0)),
                                         dict(vocabulary=9, slope=1.5,
                                              diffuse=dict(slope=slope))]))
    assert updates_claims.tabular(updates(1.99))[1].kind == FOLLOWS
    assert updates_claims.tabular(updates(1.5))[1].kind == INCONSISTENT


def test_what_equals_the_gradient_without_the_clip_is_not_judged():
    """On these rollouts CISPO does, as published; ACPO's does not."""
    updates = json.loads(results.UPDATES.read_text())
    of = {claim.claim: claim for claim in updates_claims.claims()}
    as_published, = (c for name, c in of.items() if "CISPO, which gates nothing" in name)
    released, = (c for name, c in of.items() if "CISPO as its released code" in name)
    assert as_published.measure(updates)[1].kind == NOT_JUDGED
    assert released.measure(updates)[1].kind != NOT_JUDGED
    updates["seeds"][3]["subsets"]["subsets"]["cispo"]["norm"] *= 1.1  # where its bound acts
    assert as_published.measure(updates)[1].kind != NOT_JUDGED


def test_the_effective_number_of_problems_is_kishs():
    """Equal masses count whole; of one mass alone one problem counts, whatever its solve rate."""
    for alpha in (1, 3):
        number = updates_claims.effective_problems(alpha)
        assert number(dict(solve_rates=[0.25] * 6)) == pytest.approx(6)
        assert number(dict(solve_rates=[0.5, 0, 1, 0])) == pytest.approx(1)
    # masses 0.25 and 0.1875 with alpha 1, 0.0625 and 0.1055 with alpha 3
    two = dict(solve_rates=[0.5, 0.25])
    assert updates_claims.effective_problems(1)(two) == pytest.approx(1.96)
    assert updates_claims.effective_problems(3)(two) == pytest.approx(1.8771, abs=1e-4)


def test_every_claim_about_updates_has_a_verdict():
    updates = json.loads(results.UPDATES.read_text())
    rows = [claim.row(updates) for claim in updates_claims.claims()]
    assert len(rows) > 25 and len(updates["seeds"]) == 8
    assert {row[-1].split(":")[0] for row in rows} <= set(KINDS)

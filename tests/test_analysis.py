"""Figures and tables from runs that are whole, cut off, or without an evaluation; the anatomy of an
update against runs, enumeration and closed forms."""

import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import data
import train
from analysis import anatomy, figures, masses, quantities, rollout, runs
from analysis.__main__ import main
from analysis.flags import COMMANDS
from conftest import ROOT
from engine.loading import load
from engine.sampler import Completion
from experiment import log
from losses import METHODS, Tokens


def write_run(folder, seed=0, lr=1e-3, evaluated=True, rollouts=3, torn=False, errors=None,
              run_id=None):
    folder.mkdir()
    flags = dict(loss="grpo", steps_per_rollout=2, seed=seed, lr=lr, out=str(folder))
    config = dict(flags=flags, id=run_id) if run_id else dict(flags=flags)
    (folder / "config.json").write_text(json.dumps(config))
    records = []
    for r in range(1, rollouts + 1):
        steps = [{"policy/ess": 1.0 - 0.1 * i * r, "clip/frac": 0.25} for i in range(2)]
        records.append({"rollout": r, "time/rollout": 1.0 + r, "policy/entropy": 0.5,
                        "clip/frac": 0.25, "reward/mean": 0.1 * r, "steps": steps})
    if evaluated:
        for record in records:
            record.update({"eval/countdown/mean@4": 0.1 * record["rollout"] + 0.1 * seed,
                           "eval/countdown/pass@2": 0.2, "eval/countdown/pass@4": 0.5})
        records.insert(0, {"rollout": 0, "eval/countdown/mean@4": 0.05,
                           "eval/countdown/pass@1": 0.05, "eval/countdown/pass@4": 0.1})
    if errors is not None:  # (of mean@4 and pass@4), None where there is one problem
        for record in records:
            record.update({"eval/countdown/mean@4_stderr": errors[0],
                           "eval/countdown/pass@1_stderr": 0.5,
                           "eval/countdown/pass@4_stderr": errors[1]})
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "metrics.jsonl").write_text(lines + ('{"rollout": 9, "poli' if torn else ""))
    return folder


def analysis_prints(*args):
    process = subprocess.run([sys.executable, "-m", "analysis", *map(str, args)], cwd=ROOT,
                             capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / "a-0"), write_run(tmp_path / "a-1", seed=1, torn=True),
            write_run(tmp_path / "c-0", lr=0.5),
            write_run(tmp_path / "c-1", seed=1, lr=0.7, evaluated=False, rollouts=1)]


def test_table(folders, tmp_path):
    read = [run for folder in folders for run in runs.read(folder)]
    lines = runs.table(read).splitlines()[2:]
    assert lines[0] == (
        "| a | grpo | 2 | 3 | 2 | - | 0.350 (0.300-0.400) | 0.500 (0.500-0.500) "
        "| 0.500 (0.500-0.500) | 0.250 (0.250-0.250) | 3.000 (3.000-3.000) |")
    assert lines[1].startswith("| c | grpo | 2 | 3 | 1 | - | 0.300 |")
    assert lines[2] == "| c (3) | grpo | 2 | 1 | 1 | - | - | - | 0.500 | 0.250 | 2.000 |"
    flags = dict(data="x/own.jsonl", eval_problems=32, eval_samples=4)
    assert runs.held_out(flags) == "own.jsonl, 32 x 4"
    kept = tmp_path / "kept.jsonl"
    runs.keep(read, kept)
    assert runs.table(runs.read(kept)) == runs.table(read)
    assert str(tmp_path) not in kept.read_text()
    profile = runs.read(kept)[0]["profile"]
    assert [step["policy/ess"] for step in profile] == pytest.approx([1.0, 0.8])


@pytest.mark.parametrize("command, lines", [("curves", [4, 4, 3, 3, 3, 0]), ("p3o", [2, 2, 0]),
                                            ("passk", [2, 2])])
def test_figures_of_runs(folders, tmp_path, monkeypatch, command, lines):
    """Points of the longest line of each panel."""
    drawn, save = [], figures.save

    def note(figure, *args):
        drawn.extend([len(line.get_xdata()) for line in axis.lines] for axis in figure.axes)
        save(figure, *args)
    monkeypatch.setattr(figures, "save", note)
    out = tmp_path / f"{command}.png"
    main([command, *map(str, folders), "--only", "a", "--out", str(out)])
    assert out.stat().st_size > 10_000
    if command == "passk":
        assert drawn == [lines]
    else:
        assert [max(panel, default=0) for panel in drawn] == lines


def test_figure_of_fade(folders, tmp_path):
    main(["fade", *map(str, folders), "--out", str(tmp_path / "fade.png")])
    assert (tmp_path / "fade.png").stat().st_size > 10_000


def test_what_the_base_scores_is_no_result(tmp_path):
    """A run that was interrupted before an evaluation has none."""
    run = runs.read(write_run(tmp_path / "a-0", rollouts=0))
    assert runs.last(run[0], "mean@n") is None and "| - | - |" in runs.table(run)
    assert runs.pass_at_k(runs.grouped(run))["a"] == {}


def test_pass_at_k_of_runs(folders):
    read = [run for folder in folders[:2] for run in runs.read(folder)]
    for run in read:
        run["flags"]["model"] = "m"
    curves = runs.pass_at_k(runs.grouped(read))
    assert curves == {"base": {1: (0.05,) * 3, 4: (0.1,) * 3}, "a": {2: (0.2,) * 3, 4: (0.5,) * 3}}


# ---------------------------------------------------------------------------- standard errors


def test_a_standard_error_is_no_score(tmp_path):
    """"mean@n" is the score of the largest n, whatever the order of the names; its error goes with
    it, and survives `keep`."""
    run, = runs.read(write_run(tmp_path / "a-0", errors=(0.01, 0.02)))
    last = run["records"][-1]
    assert (last["mean@n"], last["mean@n_stderr"]) == (pytest.approx(0.3), 0.01)
    assert (last["pass@n"], last["pass@n_stderr"]) == (0.5, 0.02)
    assert runs.of_largest_n({"eval/x/pass@16": 0.9, "eval/x/pass@16_stderr": None,
                              "eval/x/pass@8": 0.7, "eval/x/pass@8_stderr": 0.1}) == {
        "pass@n": 0.9, "pass@n_stderr": None}
    # of an old record, only the scores
    assert runs.of_largest_n({"eval/x/mean@8": 0.7, "eval/x/mean_length": 3.0}) == {"mean@n": 0.7}
    kept = tmp_path / "kept.jsonl"
    runs.keep([run], kept)
    again, = runs.read(kept)
    assert again["records"][-1]["pass@n_stderr"] == 0.02
    assert '"pass@n' not in kept.read_text()
    assert runs.table([again]) == runs.table([run])


def test_pass_at_k_of_one_seed_has_an_interval_over_problems(tmp_path):
    run, = runs.read(write_run(tmp_path / "a-0", errors=(0.01, 0.02)))
    curves = runs.pass_at_k(dict(a=[run]))
    assert curves["a"][4] == pytest.approx((0.5, 0.5 - 1.96 * 0.02, 0.5 + 1.96 * 0.02))
    assert curves["base"][1] == pytest.approx((0.05, 0.05 - 1.96 * 0.5, 0.05 + 1.96 * 0.5))
    assert list(curves["a"]) == [2, 4]
    value, low, high = curves["a"][2]  # no error was logged
    assert value == 0.2 and math.isnan(low) and math.isnan(high)


def drawn_by(command, groups, out, monkeypatch):
    """-> the caption, and for each panel the heights of its bands."""
    found, save = {}, figures.save

    def note(figure, out, caption=None):
        found["caption"] = caption
        found["bands"] = [[part.get_paths()[0].get_extents() for part in axis.collections]
                          for axis in figure.axes]
        save(figure, out, caption)
    monkeypatch.setattr(figures, "save", note)
    command(groups, out)
    return found["caption"], [[box.ymax - box.ymin for box in panel] for panel in found["bands"]]


def test_the_band_of_one_seed_is_over_problems(tmp_path, monkeypatch):
    run, = runs.read(write_run(tmp_path / "a-0", errors=(0.01, 0.02)))
    caption, bands = drawn_by(figures.curves, dict(a=[run]), tmp_path / "a.png", monkeypatch)
    # mean@4 goes from 0.05 to 0.3, pass@4 from 0.1 to 0.5
    assert bands[0] == [pytest.approx(0.25 + 2 * 1.96 * 0.01)]
    assert bands[1] == [pytest.approx(0.4 + 2 * 1.96 * 0.02)]
    assert bands[2:] == [[], [], [], []]
    assert caption.startswith("1 seed") and "1.96 standard errors over problems" in caption
    assert "held-out" in caption and "least" not in caption


@pytest.mark.parametrize("errors", [None, (None, None)])
def test_without_standard_errors_there_is_no_band(tmp_path, monkeypatch, errors):
    run, = runs.read(write_run(tmp_path / "a-0", errors=errors))
    caption, bands = drawn_by(figures.curves, dict(a=[run]), tmp_path / "a.png", monkeypatch)
    assert caption == "1 seed" and bands == [[]] * 6


def test_the_band_of_several_seeds_is_from_least_to_most(tmp_path, monkeypatch):
    several = [runs.read(write_run(tmp_path / f"a-{seed}", seed=seed, errors=(0.01, 0.02)))[0]
               for seed in (0, 1)]
    alone, = runs.read(write_run(tmp_path / "b-0", lr=0.5, errors=(0.01, 0.02)))
    caption, bands = drawn_by(figures.curves, dict(a=several), tmp_path / "a.png", monkeypatch)
    # seed 1 has 0.1 more after rollout 0
    assert bands[0] == [pytest.approx(0.4 - 0.05)]
    assert caption == "mean over 2 seeds, band: least and most"
    groups = dict(a=several, b=[alone])
    caption, _ = drawn_by(figures.curves, groups, tmp_path / "a.png", monkeypatch)
    assert "1 to 2 seeds" in caption and "least and most" in caption
    assert "of 1 seed, band: 1.96 standard errors" in caption
    assert figures.passk_caption(dict(b=[alone])) == f"1 seed, {figures.ERRORS}"
    assert "bootstrap" in figures.passk_caption(groups)
    assert figures.passk_caption(groups).endswith(figures.ERRORS)
    assert "standard errors" not in figures.passk_caption(dict(a=several))


# ---------------------------------------------------------------------------- runs given twice


def test_a_seed_counts_once(tmp_path, capsys):
    """Of equally long runs the last given, of others the longest is used, and that is said."""
    first, short, last = tmp_path / "a-0", tmp_path / "b-0", tmp_path / "c-0"
    for folder, rollouts in ((first, 3), (short, 2), (last, 3)):
        write_run(folder, rollouts=rollouts)
    other = write_run(tmp_path / "d-1", seed=1)
    main(["table", str(first), str(last), str(short), str(other), "--out",
          str(tmp_path / "t.md")])
    said = capsys.readouterr()
    assert "| c | grpo | 2 | 3 | 2 |" in said.out and said.out.count("| grpo |") == 1
    for folder in (first, short):
        assert f"{last} is used, {folder} is not" in said.err
    read = [runs.read(folder)[0] for folder in (first, short, last, other)]
    used, left_out = runs.distinct(read)
    assert [run["path"] for run in used] == [last, other]
    assert [(a["path"], b["path"]) for a, b in left_out] == [(last, first), (last, short)]
    main(["table", str(last), str(other), "--out", str(tmp_path / "t.md")])
    assert capsys.readouterr().err == ""


def test_a_run_and_its_kept_line_are_one(tmp_path, capsys):
    """Their flags differ in what `keep` leaves out; a folder goes before a file of `keep`, unless
    the file has more of the run."""
    folder = write_run(tmp_path / "a-0", run_id="x")
    kept = tmp_path / "runs.jsonl"
    main(["keep", str(folder), "--out", str(kept)])
    main(["table", str(folder), str(kept), "--out", str(tmp_path / "t.md")])
    said = capsys.readouterr()
    assert said.out.count("| grpo |") == 1 and f"{folder} is used, {kept} is not" in said.err
    shutil.rmtree(folder)
    write_run(folder, rollouts=1, run_id="x")
    used, _ = runs.distinct(runs.read(folder) + runs.read(kept))
    assert [run["path"] for run in used] == [kept]


def test_the_base_of_one_seed_counts_once(tmp_path):
    """Two methods begin with the same model: that is one evaluation and not two seeds."""
    read = [runs.read(write_run(tmp_path / name, lr=lr, errors=(0.01, 0.02)))[0]
            for name, lr in (("a-0", 0.1), ("b-0", 0.2))]
    base = runs.pass_at_k(runs.grouped(read))["base"]
    assert base[4] == pytest.approx((0.1, 0.1 - 1.96 * 0.02, 0.1 + 1.96 * 0.02))


# ---------------------------------------------------------------------------- passk's refusals


def test_passk_names_the_runs_without_evaluations(folders, tmp_path, capsys):
    out = tmp_path / "p.png"
    begun = write_run(tmp_path / "d-0", lr=0.9, rollouts=0)  # evaluated before training alone
    main(["passk", *map(str, folders), str(begun), "--out", str(out)])
    said = capsys.readouterr().err
    assert f"leaves out {folders[3]}, {begun}" in said and "--eval_every" in said
    assert str(folders[0]) not in said and out.stat().st_size > 10_000


def test_passk_says_that_there_is_no_base(folders, tmp_path, capsys):
    metrics = folders[0] / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[1:]))
    main(["passk", str(folders[0]), "--out", str(tmp_path / "p.png")])
    assert "no base" in capsys.readouterr().err


# ---------------------------------------------------------------------------- what is refused


def refused(capsys, *args):
    """-> the one sentence with which the command ends, exit code 2"""
    with pytest.raises(SystemExit) as e:
        main([*map(str, args)])
    assert e.value.code == 2
    *usage, said = capsys.readouterr().err.splitlines()
    assert not usage or usage[0].startswith("usage: ")  # argparse's own
    return said


def test_what_is_wrong_is_said(folders, tmp_path, capsys):
    file = tmp_path / "rollout.pt"
    torch.save({}, file)
    empty = tmp_path / "empty"
    empty.mkdir()
    for args, message in (
            (["replay", __file__], "no rollout that"), (["steps", file], "no rollout that"),
            (["replay", file, "--methods", "nope"], "nope"),
            (["table", folders[0], "--model", "x"], "--model"), (["table"], "required: run"),
            (["table", tmp_path / "nope"], "nope: there is no such folder"),
            (["table", empty], f"{empty} holds no run"),
            (["steps"], "required: rollout"), (["steps", file, file], f"does not take {file}"),
            (["steps", tmp_path / "nope.pt"], "no such file; train.py --save_rollouts"),
            (["steps", empty], "is a folder"),
            (["steps", file, "--lr", "0"], "above 0"),
            (["steps", file, "--lr", "nan"], "above 0"),
            (["steps", file, "--lr", "fast"], "number"),
            (["curves", folders[0], "--only", "x"], "named like x"),
            (["passk", folders[3]], "--eval_every"), (["table", __file__], "line 1 is no JSON"),
            (["nope"], "nope"), ([], "command"),
            (["curves", folders[0], "--out", empty], "is a folder"),
            (["curves", folders[0], "--out", tmp_path / "no" / "f.png"], "there is no folder"),
            (["curves", folders[0], "--out", tmp_path / "f"], ".png"),
            (["curves", folders[0], "--out", tmp_path / "f.jsonl"], ".png")):
        assert message in refused(capsys, *args), args


def test_what_lies_beside_runs_is_left_out_and_said(folders, tmp_path, capsys):
    """A shell makes of runs/* whatever lies there: a folder, a file of problems."""
    empty, problems = tmp_path / "empty", tmp_path / "problems.jsonl"
    empty.mkdir()
    problems.write_text('{"prompt": "1 + 1 =", "answer": "2", "reward": "math"}\n')
    main(["table", str(empty), *map(str, folders), str(problems)])
    shown = capsys.readouterr()
    assert f"left out, for they hold no run: {empty}, {problems}" in shown.out + shown.err
    alone = tmp_path / "alone"
    main(["keep", str(folders[0]), str(empty), "--out", str(alone)])
    main(["table", str(alone), str(empty)])  # a file of keep is a run
    assert f"hold no run: {empty}\n" in capsys.readouterr().err + "\n"


def test_files_that_are_not_a_runs_are_said(folders, tmp_path, capsys):
    notes = tmp_path / "notes.jsonl"
    notes.write_text('{"name": "x"}\n')
    assert f"{notes}, line 1 is no run" in refused(capsys, "table", notes)
    notes.write_bytes(b"\xff\xfe")
    assert f"{notes} is no text" in refused(capsys, "table", notes)
    lines = (folders[0] / "metrics.jsonl").read_text().splitlines()
    (folders[0] / "metrics.jsonl").write_text("\n".join([lines[0], "torn", lines[2], ""]))
    assert "metrics.jsonl, line 2 is no JSON" in refused(capsys, "table", folders[0])
    (folders[0] / "config.json").write_text('{"flags": 3}')
    assert "config.json lacks flags" in refused(capsys, "table", folders[0])


# ---------------------------------------------------------------------------- where files go


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_figures_lie_beside_what_they_are_of(folders, tmp_path, monkeypatch, capsys):
    """Nothing is written into a run's folder: its own curves.png says that it is done. The last
    line names what was written."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before = files_in(tmp_path)
    for args, name in (
            (["curves", folders[0]], "a-0-curves.png"), (["curves", *folders], "curves.png"),
            (["table", *folders[:2]], "table.md"), (["passk", f"{folders[0]}/"], "a-0-passk.png"),
            (["keep", *folders], "runs.jsonl"),
            (["p3o", tmp_path / "runs.jsonl"], "runs-p3o.png")):
        capsys.readouterr()
        main([*map(str, args)])
        assert capsys.readouterr().out.splitlines()[-1] == f"written: {tmp_path / name}"
        before = sorted([*before, name])
        assert files_in(tmp_path) == before
    monkeypatch.chdir(folders[0])
    main(["table", "."])
    assert files_in(tmp_path) == sorted([*before, "a-0-table.md"])


def test_a_folder_that_cannot_be_written_is_said(folders, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, os.strerror(28))
    monkeypatch.setattr(figures.plt.Figure, "savefig", full)
    assert "curves.png cannot be written" in refused(capsys, "curves", *folders)


def test_commands_of_the_pages_are_taken(tmp_path, monkeypatch):
    """Every `python -m analysis` of the documentation is parsed, in a folder as its readers'."""
    from analysis.flags import parse
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    found = 0
    for page in (ROOT / "README.md", ROOT / "docs" / "analysis.md"):
        for line in re.findall(r"^python -m analysis (.*)$", page.read_text(), re.M):
            args = parse(shlex.split(line), "")
            found += 1
            assert args.command in COMMANDS
    assert found > 9


# ---------------------------------------------------------------------------- what is explained


def test_the_table_is_explained(folders, tmp_path, capsys):
    main(["table", *map(str, folders), "--out", str(tmp_path / "t.md")])
    said = capsys.readouterr().out
    assert all(word in said.split("\n\n")[1] for word in (*runs.COLUMNS, "Look at", "bootstrap"))
    assert (tmp_path / "t.md").read_text() == said.split("\n\n")[0] + "\n"  # the table alone
    main(["table", str(folders[0]), "--out", str(tmp_path / "t.md")])
    said = capsys.readouterr().out
    assert "bootstrap" not in said and "more than one seed" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command, capsys):
    """Each sentence has a subject, each flag its default."""
    with pytest.raises(SystemExit) as e:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert e.value.code == 0
    _, *flags = re.split(r" (?=--[a-z]+ )", text.split("show this help message and exit")[1])
    for flag in flags:
        assert re.search(r"\bIt \w+ ", flag) and "(default: " in flag, flag
    assert all(len(flag) > 30 for flag in flags) and flags


def test_bootstrap():
    assert runs.bootstrap([0.3]) == (0.3, 0.3, 0.3)
    assert runs.bootstrap([0.0, 1.0]) == (0.5, 0.0, 1.0)
    # all 3,125 resamples: the 79th from either end
    assert runs.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 1.8, 4.2))
    mean, low, high = runs.bootstrap([float(i) for i in range(100)])
    assert mean == 49.5
    assert low == pytest.approx(49.5 - 1.96 * 2.9, abs=0.4)
    assert high == pytest.approx(49.5 + 1.96 * 2.9, abs=0.4)


@functools.cache
def masses_of_128():
    return masses.masses(128)


@pytest.mark.parametrize("name", masses.MASSES)
def test_gradient_masses_are_those_of_the_formulas(name):
    """Groups of 128 come close to groups without end."""
    for p, pos, neg in masses_of_128()[name]["measured"]:
        assert (pos, neg) == pytest.approx(masses.MASSES[name](p), rel=1e-2, abs=8e-3)


# ---------------------------------------------------------------------------- the anatomy


@pytest.fixture(scope="module")
def kept_run(base, tmp_path_factory):
    """One rollout of fade in 4 steps, with the checkpoint after it."""
    out = tmp_path_factory.mktemp("kept") / "run"
    train.main(["--model", base, "--loss", "fade", "--out", str(out), "--save_rollouts", *(
        "--sampler transformers --rollouts 1 --problems_per_rollout 16 --group_size 8 "
        "--steps_per_rollout 4 --max_tokens 16 --max_prompt_tokens 16 --lr 1e-3 --eval_every 0 "
        "--tokens_per_micro_batch 4096 --warmup 2 --schedule cosine --entropy_coef 0.01").split()])
    return out


@pytest.fixture
def kept(kept_run):
    return rollout.open_rollout(kept_run / "rollouts" / "rollout_000001.pt")


def test_a_walk_takes_the_runs_own_steps(kept, kept_run):
    """The weights after it are those of the run's checkpoint, bit for bit."""
    assert [taken for taken, *_ in rollout.walk(kept)] == [0, 1, 2, 3, 4]
    after = load(kept_run / "checkpoints" / "rollout_000001", None, kept.batch.rows([0, 1, 2, 3]),
                 budget=4096).state_dict()
    for name, value in kept.policy.state_dict().items():
        assert torch.equal(value, after[name]), name


def test_steps(kept):
    result = anatomy.steps(kept)
    assert list(result["slope"]) == [1, 2, 4] and len(result["tables"]) == 4
    # tokens without advantage are in no line
    counted = sum(line["tokens"] for table in result["tables"] for line in table)
    assert counted <= int(kept.batch.mask.sum())
    for table in result["tables"]:
        assert sum(line["gradient"] for line in table) == pytest.approx(1, abs=1e-5)
    assert all(line["clipped"] in (0, None) for line in result["tables"][0])  # ratios are 1
    assert result["ratios"]["low"]["std"] > result["ratios"]["high"]["std"] > 0
    assert list(result["own_slope"]) == [1, 2, 4] and list(result["reversal"]) == [0, 1, 2, 4]
    with_advantage = int((kept.batch.mask & (kept.batch.advantages != 0)).sum())
    clipped = result["clipped"]
    for kind in ("clipped", "passed"):  # every token is in one step
        met = sum(step[kind]["tokens"] for step in clipped["steps"])
        assert met == clipped["rollout"][kind]["tokens"]
    for when in ("rollout", "after"):
        counts = [clipped[when][kind]["tokens"] for kind in ("clipped", "passed")]
        assert sum(counts) == with_advantage and min(counts) > 0
        share = counts[0] / with_advantage
        assert share == pytest.approx(sum(
            line["tokens"] * (line["clipped"] or 0) for line in clipped[when]["by_entropy"]
        ) / with_advantage)
    # before the first step all ratios are 1: G is (1 - pi) A
    start = result["reversal"][0]
    assert start["low"]["size"] > start["high"]["size"] and sum(start["low"]["tokens"]) > 20


def some_tokens(pi, ratio, advantage):
    pi, ratio, advantage = (torch.tensor([x], dtype=torch.float64) for x in (pi, ratio, advantage))
    return Tokens(pi.log(), (pi / ratio).log(), advantage, torch.ones_like(pi, dtype=torch.bool),
                  torch.zeros_like(pi))


def test_gradient_sizes_are_those_of_the_formula():
    """(1 - pi) rho |A| where PPO does not clip, 0 where it does."""
    tokens = some_tokens([0.1, 0.1, 0.9, 0.9], [1.1, 1.5, 1.5, 0.5], [2.0, 2.0, -1.0, -1.0])
    method = METHODS["grpo"]
    gradient = anatomy.logprob_gradient(tokens, method)
    assert gradient[0].tolist() == pytest.approx([2.2, 0, 1.5, 0])
    dominance = anatomy.dominance(tokens, method)
    assert dominance["low"]["mean"] == pytest.approx(0.9 * 2.2 / 2)
    assert dominance["high"]["mean"] == pytest.approx(0.1 * 1.5 / 2)
    table = {(line["sign"], line["bin"]): line for line in anatomy.token_statistics(tokens, method)}
    assert table[1, 0]["clipped"] == 0.5 and table[1, 0]["weight"] == pytest.approx(0.55)
    assert table[-1, 4]["tokens"] == 2


def test_slope_of_a_spread_that_is_known():
    g = torch.Generator().manual_seed(0)
    pi = torch.rand(1, 100_000, generator=g, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    for power in (1, 2):
        noise = torch.randn(pi.shape, generator=g, dtype=torch.float64)
        ratio = 1 + 0.01 * (1 - pi) ** power * noise
        tokens = Tokens(pi.log() + ratio.log(), pi.log(), torch.ones_like(pi),
                        torch.ones_like(pi, dtype=torch.bool), pi)
        # 20 wide bins: a little low
        assert quantities.slope(anatomy.ratio_spread(tokens)) == pytest.approx(power, abs=0.15)


def test_a_selection_has_no_gradient_outside_of_it(kept):
    """top_entropy's other tokens carry nothing, and are not called clipped."""
    tokens, method = kept.tokens(), METHODS["top_entropy"]
    size = anatomy.gradient_size(tokens, method)[tokens.mask]
    assert 0.05 < (size > 0).float().mean() <= 0.25
    assert anatomy.logprob_gradient(tokens, method)[tokens.mask].min() >= 0
    table = anatomy.token_statistics(tokens, method)
    assert all(line["clipped"] in (0, None) for line in table)
    assert sum(line["gradient"] for line in table) == pytest.approx(1, abs=1e-5)


def test_rollouts_that_cannot_be_taken_apart(kept_run, kept, tmp_path):
    saved = torch.load(kept_run / "rollouts" / "rollout_000001.pt", weights_only=False)
    changed = tmp_path / "changed.pt"
    for change, message in ((dict(rewards=torch.zeros(16, 8)), "no completion"),
                            (dict(flags={**kept.flags, "lora_rank": 4}), "adapters")):
        torch.save({**saved, **change}, changed)
        with pytest.raises(ValueError, match=message):
            rollout.open_rollout(changed)
    with pytest.raises(ValueError, match="nope cannot be used"):
        rollout.open_rollout(kept_run / "rollouts" / "rollout_000001.pt", tmp_path / "nope")
    with pytest.raises(ValueError, match="do not divide"):
        anatomy.steps(kept, 7)


def test_replay_gives_what_the_run_had(base, kept_run, tmp_path):
    """Loss, gradient norm and clip fraction of the very step that the run took, and the cosines of
    other methods' gradients."""
    run = tmp_path / "run"
    train.main(["--model", base, "--loss", "fade", "--out", str(run), "--save_rollouts", *(
        "--sampler transformers --rollouts 1 --problems_per_rollout 8 --group_size 8 "
        "--steps_per_rollout 1 --max_tokens 16 --max_prompt_tokens 16 --lr 1e-3 "
        "--eval_every 0").split()])
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    file = run / "rollouts" / "rollout_000001.pt"
    result = anatomy.replay(rollout.open_rollout(file), METHODS)
    before = result["methods"]
    assert list(before) == list(METHODS)
    assert before["fade"]["grad_norm"] == pytest.approx(record["optim/grad_norm"], rel=1e-4)
    assert before["fade"]["loss"] == pytest.approx(record["loss/total"], rel=1e-4, abs=1e-7)
    cosine = {(a, b): v for a, line in zip(before, result["cosine"], strict=True)
              for b, v in zip(before, line, strict=True)}
    assert all(cosine[m, m] == pytest.approx(1, abs=1e-4) for m in METHODS)
    # one step: ratios of 1
    assert cosine["grpo", "acpo"] == pytest.approx(1, abs=1e-4)
    assert cosine["grpo", "reinforce"] < 0.99
    # at the checkpoint after it, ratios are spread
    assert "| acpo |" in analysis_prints(
        "replay", file, "--model", run / "checkpoints" / "rollout_000001",
        "--methods", "grpo,acpo,p3o", "--out", tmp_path / "after.png")
    after = json.loads((tmp_path / "after.json").read_text())["methods"]
    assert list(after) == ["grpo", "acpo", "p3o"]
    assert after["grpo"]["approx_kl"] > 1e-4 > abs(before["grpo"]["approx_kl"])
    assert after["acpo"]["clip_frac"] <= after["grpo"]["clip_frac"]


def test_figures_of_a_rollout(kept_run, tmp_path, capsys):
    """Beside the rollout; every column is explained."""
    main(["steps", str(shutil.copy(kept_run / "rollouts" / "rollout_000001.pt", tmp_path))])
    said = capsys.readouterr().out
    figure, numbers = said.splitlines()[-1].removeprefix("written: ").split(", ")
    assert Path(figure) == tmp_path / "rollout_000001-steps.png"
    assert Path(numbers).suffix == ".json"
    assert Path(figure).stat().st_size > 10_000
    assert json.loads(Path(numbers).read_text())
    assert Path(numbers).with_suffix("") == Path(figure).with_suffix("")
    table, explained = said.split("\n\n")[:2]
    columns = [cell.strip() for cell in table.split("|---")[0].split("|")[1:-1]]
    for column in columns[1:]:
        words = re.findall(r"[A-Za-z]+|[0-9]{2}", column.split(",")[0])
        assert all(word in explained for word in words), column
    assert "Look " in explained


def test_the_folder_of_a_run_is_no_rollout(kept_run, capsys):
    said = refused(capsys, "steps", kept_run)
    assert str(kept_run / "rollouts" / "rollout_000001.pt") in said


def test_help_is_quick():
    """It imports neither of the large packages."""
    script = ("import sys; from analysis.__main__ import parse; from analysis.flags import "
              "make_parser; make_parser().format_help(); parse(['curves', 'runs'], ''); "
              "print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))")
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True,
                             text=True)
    assert process.stdout.strip() == "set()", process.stderr


# ---------------------------------------------------------------------------- what is logged


@pytest.mark.parametrize("x, wanted", [
    (float("nan"), None), (float("inf"), None), (1.5, 1.5), (3, 3), ("nan", "nan"),
    ({"a": [float("nan"), {"b": 1.0}]}, {"a": [None, {"b": 1.0}]})])
def test_what_is_logged_is_json(x, wanted):
    assert log.numbers(x) == wanted


def test_only_the_last_token_is_left_out_of_a_text(tokenizer):
    ids = tokenizer.encode("<answer>7+1<pad>+9</answer><eos>")
    text = data.decode(tokenizer, Completion(ids, [], False))
    assert text == "<answer>7+1<pad>+9</answer>"
    assert data.decode(tokenizer, Completion(ids[:3], [], True)) == "<answer>7+"

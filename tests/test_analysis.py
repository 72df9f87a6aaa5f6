"""Figures and tables of runs that are whole, cut off, or without an evaluation."""

import json
import math
import os
import shutil

import pytest

from analysis import runs
from analysis.__main__ import main
from anatomy import __main__ as anatomy
from anatomy.passk import pass_at_k
from data.prompts import decode
from engine.sampler import Completion
from harness import curves, files
from helpers import python, refused


def write_run(folder, seed=0, lr=1e-3, evaluated=True, rollouts=3, torn=False, errors=None):
    folder.mkdir()
    flags = dict(loss="grpo", steps_per_rollout=2, seed=seed, lr=lr, out=str(folder), model="m",
                 data="x/own.jsonl", eval_data=None, eval_every=1, eval_problems=32, eval_samples=4,
                 temperature=1.0)
    (folder / "config.json").write_text(json.dumps(dict(flags=flags)))
    records = [{"rollout": r, "time/rollout": 1.0 + r, "policy/entropy": 0.5, "clip/frac": 0.25,
                "reward/mean": 0.1 * r, "steps": [
                    {"policy/ess": 1.0 - 0.1 * i * r, "clip/frac": 0.25} for i in range(2)]}
               for r in range(1, rollouts + 1)]
    if evaluated:
        for record in records:
            record.update({"eval/countdown/mean@4": 0.1 * record["rollout"] + 0.1 * seed,
                           "eval/countdown/pass@2": 0.2, "eval/countdown/pass@4": 0.5})
        records.insert(0, {"rollout": 0, "eval/countdown/mean@4": 0.05,
                           "eval/countdown/pass@1": 0.05, "eval/countdown/pass@4": 0.1})
    if errors is not None:  # (of mean@4 and pass@4), None where there is one problem
        for record in records:
            record.update({f"eval/countdown/{name}_stderr": error for name, error in (
                ("mean@4", errors[0]), ("pass@1", 0.5), ("pass@4", errors[1]))})
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "metrics.jsonl").write_text(lines + ('{"rollout": 9, "poli' if torn else ""))
    return folder


def grouped(*folders):
    return runs.grouped([curves.read(folder) for folder in folders])


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / "a-0"), write_run(tmp_path / "a-1", seed=1, torn=True),
            write_run(tmp_path / "c-0", lr=0.5),
            write_run(tmp_path / "c-1", seed=1, lr=0.7, evaluated=False, rollouts=1)]


@pytest.fixture
def drawn(monkeypatch):
    """[(panels, caption)] of the line plots that are made."""
    found, draw = [], curves.draw
    monkeypatch.setattr(curves, "draw", lambda panels, out, caption, *xlabel, **axes: (
        found.append((panels, caption)), draw(panels, out, caption, *xlabel, **axes)))
    return found


def test_table(folders, tmp_path, capsys):
    main(["table", *map(str, folders), "--out", str(tmp_path / "t.md")])
    text, said = (tmp_path / "t.md").read_text(), capsys.readouterr().out
    lines = text.splitlines()[2:]
    assert lines[0] == (
        "| a | grpo | 2 | 3 | 2 | own.jsonl, 32 x 4 | 0.350 (-0.285 to 0.985) "
        "| 0.500 (0.500 to 0.500) | 0.500 (0.500 to 0.500) | 0.250 (0.250 to 0.250) "
        "| 3.000 (3.000 to 3.000) |")
    assert lines[1].startswith("| c | grpo | 2 | 3 | 1 | own.jsonl, 32 x 4 | 0.300 |")
    assert lines[2] == (
        "| c (3) | grpo | 2 | 1 | 1 | own.jsonl, 32 x 4 | - | - | 0.500 | 0.250 | 2.000 |")
    assert said.startswith(text) and said.endswith(f"written: {tmp_path / 't.md'}\n")
    assert all(word in said[len(text):] for word in (*runs.COLUMNS, "Look at", "Student's 95%"))


@pytest.mark.parametrize("command, points", [
    ("curves", [4, 4, 3, 3, 3, 0]), ("p3o", [2, 0, 2, 0, 0, 0]), ("fade", [0, 0, 3, 0, 0, 3]),
    ("passk", [2])])
def test_figures_of_runs(folders, tmp_path, drawn, command, points):
    """Points of the longest line of each panel."""
    out = tmp_path / f"{command}.png"
    program = anatomy.main if command == "passk" else main
    program([command, *map(str, folders[:2]), "--out", str(out)])
    assert out.stat().st_size > 10_000
    (panels, _), = drawn
    assert [max(map(len, lines.values())) for lines in panels.values()] == points
    if command == "p3o":  # over the steps of a rollout
        assert panels["effective sample size"] == {
            "a, 2 seeds": [(1, 1.0, 1.0, 1.0), (2, pytest.approx(0.8), 0.7, 0.9)]}


def test_pass_at_k_of_runs(folders, tmp_path):
    assert pass_at_k(grouped(*folders[:2])) == {
        "base m x/own.jsonl": {1: (0.05,) * 3, 4: (0.1,) * 3}, "a": {2: (0.2,) * 3, 4: (0.5,) * 3}}
    one, other = (curves.read(folder) for folder in (folders[0], folders[2]))
    other["flags"].update(model="other", temperature=0.6)
    assert list(pass_at_k(runs.grouped([one, other]))) == [
        "base m x/own.jsonl", "base other x/own.jsonl, T = 0.6", "a", "c"]
    # what the base scores is no result of a run that was interrupted before an evaluation
    groups = grouped(write_run(tmp_path / "b-0", rollouts=0))
    assert "| 0 | 1 | own.jsonl, 32 x 4 | - | - |" in runs.table(groups)
    assert list(pass_at_k(groups)) == ["base m x/own.jsonl"]


def test_students_interval():
    """1, ..., 5 have the standard error sqrt(2.5 / 5); quantiles from a table of Student's t."""
    assert runs.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(
        (3 - 2.776 * 0.5**0.5, 3 + 2.776 * 0.5**0.5))
    assert runs.interval([0.3, 0.3]) == (0.3, 0.3)
    for n, quantile in ((10, 2.262), (12, 2.201), (20, 2.093), (30, 2.045), (200, 1.972)):
        low, high = runs.interval([0.0, 1.0] * (n // 2))
        assert high - low == pytest.approx(quantile / (n - 1) ** 0.5, rel=1e-3)


def test_a_standard_error_is_no_score(tmp_path):
    """"mean@n" is the score of the largest n, in any order of the names, with its error."""
    last = curves.read(write_run(tmp_path / "a-0", errors=(0.01, None)))["records"][-1]
    assert (last["mean@n"], last["mean@n_stderr"]) == (pytest.approx(0.3), 0.01)
    assert (last["pass@n"], last["pass@n_stderr"]) == (0.5, None)
    record = {"eval/x/pass@16": 0.9, "eval/x/pass@8": 0.7, "eval/x/pass@8_stderr": 0.1,
              "eval/x/mean@8": 0.7, "eval/x/mean_length": 3.0}
    assert curves.scores(record, "pass") == {16: "eval/x/pass@16", 8: "eval/x/pass@8"}
    assert curves.scores(record, "mean") == {8: "eval/x/mean@8"}


def test_pass_at_k_of_one_seed_has_an_interval_over_problems(tmp_path):
    """Two methods begin with the same model: that is one evaluation and not two seeds."""
    curves = pass_at_k(grouped(*(write_run(tmp_path / name, lr=lr, errors=(0.01, 0.02))
                                 for name, lr in (("a-0", 0.1), ("b-0", 0.2)))))
    for found, value, half in ((curves["a"][4], 0.5, 1.96 * 0.02), (curves["a"][2], 0.2, math.nan),
                               (curves["base m x/own.jsonl"][1], 0.05, 1.96 * 0.5)):
        assert found == pytest.approx((value, value - half, value + half), nan_ok=True)


@pytest.mark.parametrize("errors", [(0.01, 0.02), (None, None), None])
def test_the_band_of_one_seed_is_over_problems(tmp_path, drawn, errors):
    curves.draw_curves(grouped(write_run(tmp_path / "a-0", errors=errors)), tmp_path / "a.png")
    (panels, caption), = drawn
    half = 1.96 * errors[0] if errors and errors[0] else math.nan
    assert panels["held-out mean@n"]["a"][-1] == pytest.approx(
        (3, 0.3, 0.3 - half, 0.3 + half), nan_ok=True)
    assert math.isnan(panels["entropy (nats)"]["a"][0][2])
    assert "of one seed, band: 1.96 standard errors over problems" in caption


def test_any_logged_number_is_drawn_and_the_band_of_several_seeds(folders, drawn, capsys):
    for flags in ["--metric", "time/rollout"], []:
        main(["curves", *map(str, folders[:2]), *flags])
    (timed, _), (panels, caption) = drawn
    assert timed == {"time/rollout": {"a, 2 seeds": [(r, *[1.0 + r] * 3) for r in (1, 2, 3)]}}
    said, _ = capsys.readouterr().out.splitlines()
    assert said == f"written: {folders[0].parent / 'time-rollout.png'}"
    assert panels["held-out mean@n"] == {"a, 2 seeds": [  # seed 1 has 0.1 more after rollout 0
        (0, 0.05, 0.05, 0.05), *((r, *map(pytest.approx, (x + 0.05, x, x + 0.1)))
                                 for r, x in ((1, 0.1), (2, 0.2), (3, 0.3)))]}
    assert caption.startswith("mean over seeds") and "band: least and most" in caption


def test_a_second_run_of_a_seed_is_a_line_of_its_own(tmp_path, capsys):
    """As after a change of the code."""
    first, again = (write_run(tmp_path / name, rollouts=rollouts)
                    for name, rollouts in (("a-0", 3), ("a-0.2", 2)))
    other = write_run(tmp_path / "d-1", seed=1)
    main(["table", *map(str, (first, again, other))])
    said = capsys.readouterr().out
    assert "| a | grpo | 2 | 3 | 2 |" in said and "| a-0.2 | grpo | 2 | 2 | 1 |" in said


def test_what_is_wrong_is_said(folders, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = shutil.copytree(folders[0], tmp_path / "damaged")
    (damaged / "metrics.jsonl").write_bytes(b"\xff\n")
    for args, message in (
            (["table", damaged], "damaged: a file of the run is damaged: "),
            (["curves", folders[0], "--metric", "policy/entropie"], "did you mean policy/entropy?"),
            (["curves", folders[0], "--metric", "steps"], "steps: no such number was"),
            (["table", folders[0], "--metric", "policy/entropy"], "--metric is no flag of table"),
            (["curves", folders[0], "--out", empty / "c.txt"], "of a figure .png, .pdf or .svg"),
            (["table", folders[0], "--model", "x"], "--model"), (["table"], "required"),
            (["table", empty, __file__], f"{empty}, {__file__}: no run's folder"),
            (["passk", folders[0]], "passk is none of"), (["nope", empty], "nope is none of"),
            (["curves", folders[0], "--out", tmp_path / "no" / "f.png"], "no file in a folder")):
        assert message in refused(capsys, main, *args), args
    for args, message in (
            ([folders[3]], "anatomy: passk: no run was evaluated after training, as by train.py "),
            ([damaged], f"anatomy: {damaged}: a file of the run is damaged: "),
            ([empty], f"anatomy: {empty}: no run's folder is among these; train.py --out names"),
            ([folders[0], "--lr", "1"], "--lr is no flag of passk"),
            ([folders[0], "--out", empty], "no file in a folder")):
        assert message in refused(capsys, anatomy.main, "passk", *args), args


def test_figures_lie_beside_what_they_are_of(folders, tmp_path, monkeypatch, capsys):
    """Nothing is written into a run's folder, whose curves.png says that it is done."""
    monkeypatch.chdir(folders[0])
    there = {*tmp_path.rglob("*.*")}
    for args, name in ((["table", *folders], "table.md"), (["table", "."], "a-0-table.md"),
                       (["passk", f"{folders[0]}/"], "a-0-passk.png"),
                       (["table", *tmp_path.glob("*")], "table.md")):  # as a shell's runs/*
        (anatomy.main if args[0] == "passk" else main)([*map(str, args)])
        assert capsys.readouterr().out.splitlines()[-1] == f"written: {tmp_path / name}"
        there.add(tmp_path / name)
        assert {*tmp_path.rglob("*.*")} == there


def test_what_is_logged_is_json():
    nan = float("nan")
    assert files.numbers([nan, {"a": [math.inf, {"b": 1.0}]}]) == [None, {"a": [None, {"b": 1.0}]}]


def test_only_the_last_token_is_left_out_of_a_text(tokenizer):
    ids = tokenizer.encode("<answer>7+1<pad>+9</answer><eos>")
    text = decode(tokenizer, Completion(ids, [], False))
    assert text == "<answer>7+1<pad>+9</answer>"
    assert decode(tokenizer, Completion(ids[:3], [], True)) == "<answer>7+"


def test_a_run_is_sent_to_weights_and_biases(folders, tmp_path):
    """wandb is a stand-in here, which prints what it is given."""
    (tmp_path / "wandb.py").write_text("""
class init:
    def __init__(self, **settings): print(settings["project"], settings["config"]["lr"])
    def __enter__(self): return self
    def __exit__(self, *_): print("finished")
    def log(self, numbers, step): print(step, numbers["rollout"], "steps" in numbers)
""")
    config = json.loads((folders[1] / "config.json").read_text())
    config["flags"]["rollouts"] = 3
    (folders[1] / "config.json").write_text(json.dumps(config))
    done = python("examples/to_wandb.py", folders[1], "--project", "mine",
                  env=dict(os.environ, PYTHONPATH=str(tmp_path)))
    assert done.stdout.split("\n")[:3] == ["mine 0.001", "0 0 False", "1 1 False"], done.stderr

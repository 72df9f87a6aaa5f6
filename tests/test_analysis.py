"""Figures and tables of runs that are whole, cut off, or without an evaluation; a walk's steps."""

import json
import math
import shutil

import pytest
import torch

import data
from analysis import figures, rollout, runs
from analysis.__main__ import main
from engine.loading import load
from engine.sampler import Completion
from harness import files
from harness.stats import interval
from helpers import refused


def write_run(folder, seed=0, lr=1e-3, evaluated=True, rollouts=3, torn=False, errors=None):
    folder.mkdir()
    flags = dict(loss="grpo", steps_per_rollout=2, seed=seed, lr=lr, out=str(folder), model="m",
                 data="x/own.jsonl", eval_data=None, eval_every=1, eval_problems=32, eval_samples=4)
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
    return runs.grouped([run for folder in folders for run in runs.read(folder)])


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / "a-0"), write_run(tmp_path / "a-1", seed=1, torn=True),
            write_run(tmp_path / "c-0", lr=0.5),
            write_run(tmp_path / "c-1", seed=1, lr=0.7, evaluated=False, rollouts=1)]


@pytest.fixture
def drawn(monkeypatch):
    """[(panels, caption)] of the line plots that are made."""
    found, draw = [], figures.draw
    monkeypatch.setattr(figures, "draw", lambda panels, out, caption, *xlabel, **axes: (
        found.append((panels, caption)), draw(panels, out, caption, *xlabel, **axes)))
    return found


def test_table(folders, tmp_path, capsys):
    main(["table", *map(str, folders), "--out", str(tmp_path / "t.md")])
    text, said = (tmp_path / "t.md").read_text(), capsys.readouterr().out
    lines = text.splitlines()[2:]
    assert lines[0] == (
        "| a | grpo | 2 | 3 | 2 | own.jsonl, 32 x 4 | 0.350 (0.300-0.400) | 0.500 (0.500-0.500) "
        "| 0.500 (0.500-0.500) | 0.250 (0.250-0.250) | 3.000 (3.000-3.000) |")
    assert lines[1].startswith("| c | grpo | 2 | 3 | 1 | own.jsonl, 32 x 4 | 0.300 |")
    assert lines[2] == (
        "| c (3) | grpo | 2 | 1 | 1 | own.jsonl, 32 x 4 | - | - | 0.500 | 0.250 | 2.000 |")
    assert said.startswith(text) and said.endswith(f"written: {tmp_path / 't.md'}\n")
    assert all(word in said[len(text):] for word in (*runs.COLUMNS, "Look at", "bootstrap"))


@pytest.mark.parametrize("command, points", [
    ("curves", [4, 4, 3, 3, 3, 0]), ("p3o", [2, 0, 2, 0, 0, 0]), ("fade", [0, 0, 3, 0, 0, 3]),
    ("passk", [2])])
def test_figures_of_runs(folders, tmp_path, drawn, command, points):
    """Points of the longest line of each panel."""
    out = tmp_path / f"{command}.png"
    main([command, *map(str, folders[:2]), "--out", str(out)])
    assert out.stat().st_size > 10_000
    (panels, _), = drawn
    assert [max(map(len, lines.values())) for lines in panels.values()] == points
    if command == "p3o":  # over the steps of a rollout
        assert panels["effective sample size"] == {
            "a, 2 seeds": [(1, 1.0, 1.0, 1.0), (2, pytest.approx(0.8), 0.7, 0.9)]}


def test_any_logged_number_is_drawn(folders, drawn, capsys):
    main(["curves", *map(str, folders[:2]), "--metric", "time/rollout"])
    assert drawn[0][0] == {"time/rollout": {"a, 2 seeds": [(r, *[1.0 + r] * 3) for r in (1, 2, 3)]}}
    assert capsys.readouterr().out == f"written: {folders[0].parent / 'time-rollout.png'}\n"


def test_what_the_base_scores_is_no_result(tmp_path):
    """A run that was interrupted before an evaluation has none."""
    groups = grouped(write_run(tmp_path / "a-0", rollouts=0))
    assert "| 0 | 1 | own.jsonl, 32 x 4 | - | - |" in runs.table(groups)
    assert list(runs.pass_at_k(groups)) == ["base m x/own.jsonl"]


def test_pass_at_k_of_runs(folders):
    assert runs.pass_at_k(grouped(*folders[:2])) == {
        "base m x/own.jsonl": {1: (0.05,) * 3, 4: (0.1,) * 3}, "a": {2: (0.2,) * 3, 4: (0.5,) * 3}}
    one, other = (runs.read(folder)[0] for folder in (folders[0], folders[2]))
    other["flags"]["model"] = "other"
    assert list(runs.pass_at_k(runs.grouped([one, other]))) == [
        "base m x/own.jsonl", "base other x/own.jsonl", "a", "c"]


def test_bootstrap():
    assert interval([0.3]) == (0.3, 0.3)
    assert interval([0.0, 1.0]) == (0.0, 1.0)
    # all 3,125 resamples: the 79th from either end
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((1.8, 4.2))
    ends = interval([float(i) for i in range(100)])
    assert ends == pytest.approx((49.5 - 1.96 * 2.9, 49.5 + 1.96 * 2.9), abs=0.4)


def test_a_standard_error_is_no_score(tmp_path):
    """"mean@n" is the score of the largest n, in any order of the names, with its error."""
    last = runs.read(write_run(tmp_path / "a-0", errors=(0.01, None)))[0]["records"][-1]
    assert (last["mean@n"], last["mean@n_stderr"]) == (pytest.approx(0.3), 0.01)
    assert (last["pass@n"], last["pass@n_stderr"]) == (0.5, None)
    record = {"eval/x/pass@16": 0.9, "eval/x/pass@8": 0.7, "eval/x/pass@8_stderr": 0.1,
              "eval/x/mean@8": 0.7, "eval/x/mean_length": 3.0}
    assert runs.scores(record, "pass") == {16: "eval/x/pass@16", 8: "eval/x/pass@8"}
    assert runs.scores(record, "mean") == {8: "eval/x/mean@8"}


def test_pass_at_k_of_one_seed_has_an_interval_over_problems(tmp_path):
    """Two methods begin with the same model: that is one evaluation and not two seeds."""
    curves = runs.pass_at_k(grouped(*(write_run(tmp_path / name, lr=lr, errors=(0.01, 0.02))
                                      for name, lr in (("a-0", 0.1), ("b-0", 0.2)))))
    for found, value, half in ((curves["a"][4], 0.5, 1.96 * 0.02), (curves["a"][2], 0.2, math.nan),
                               (curves["base m x/own.jsonl"][1], 0.05, 1.96 * 0.5)):
        assert found == pytest.approx((value, value - half, value + half), nan_ok=True)


@pytest.mark.parametrize("errors", [(0.01, 0.02), (None, None), None])
def test_the_band_of_one_seed_is_over_problems(tmp_path, drawn, errors):
    figures.curves(grouped(write_run(tmp_path / "a-0", errors=errors)), tmp_path / "a.png")
    (panels, caption), = drawn
    half = 1.96 * errors[0] if errors and errors[0] else math.nan
    assert panels["held-out mean@n"]["a"][-1] == pytest.approx(
        (3, 0.3, 0.3 - half, 0.3 + half), nan_ok=True)
    assert math.isnan(panels["entropy (nats)"]["a"][0][2])
    assert "of one seed, band: 1.96 standard errors over problems" in caption


def test_the_band_of_several_seeds_is_from_least_to_most(folders, drawn):
    main(["curves", *map(str, folders[:2])])
    (panels, caption), = drawn
    assert panels["held-out mean@n"] == {"a, 2 seeds": [  # seed 1 has 0.1 more after rollout 0
        (0, 0.05, 0.05, 0.05), *((r, *map(pytest.approx, (x + 0.05, x, x + 0.1)))
                                 for r, x in ((1, 0.1), (2, 0.2), (3, 0.3)))]}
    assert caption.startswith("mean over seeds") and "band: least and most" in caption


def test_a_seed_counts_once(tmp_path, capsys):
    """Of equally long runs the last given, of others the longest is used, and that is said."""
    first, short, last = (write_run(tmp_path / name, rollouts=rollouts)
                          for name, rollouts in (("a-0", 3), ("b-0", 2), ("c-0", 3)))
    other = write_run(tmp_path / "d-1", seed=1)
    main(["table", *map(str, (first, last, short, other))])
    said = capsys.readouterr()
    assert "| c | grpo | 2 | 3 | 2 |" in said.out and said.out.count("| grpo |") == 1
    assert "analysis: c (seed 0) is given twice; a seed of a setting" in said.err
    main(["table", str(last), str(other)])
    assert capsys.readouterr().err == ""


def test_what_is_wrong_is_said(folders, tmp_path, capsys):
    file, empty = tmp_path / "rollout.pt", tmp_path / "empty"
    torch.save({}, file)
    empty.mkdir()
    damaged = shutil.copytree(folders[0], tmp_path / "damaged")
    (damaged / "metrics.jsonl").write_bytes(b"\xff\n")
    for args, message in (
            (["table", damaged], "damaged: a file of the run is damaged: "),
            (["tokens", __file__], "no rollout that"), (["tokens", file], "no rollout that"),
            (["tokens", file, "--methods", "grpo,nope"], "no such method: nope; there are"),
            (["tokens", file, "--methods", "grpo,"], "no such method: ; there are"),
            (["tokens", file, "--methods", "grpo, grpo --eps_lwo 0.1"],
             "did you mean --eps_low?; --help lists them; grpo has --eps_low, --eps_high, --dual"),
            (["tokens", file, "--methods", "dr_grpo --eps_low x"], "--eps_low: invalid float"),
            (["curves", folders[0], "--metric", "policy/entropie"], "did you mean policy/entropy?"),
            (["curves", folders[0], "--metric", "steps"], "steps: no such number was"),
            (["table", folders[0], "--metric", "policy/entropy"], "--metric is no flag of table"),
            (["curves", folders[0], "--out", empty / "c.txt"], "of a figure .png, .pdf or .svg"),
            (["table", folders[0], "--model", "x"], "--model is no flag"), (["table"], "required"),
            (["table", empty, __file__], f"{empty}, {__file__}: no run's folder"),
            (["tokens", file, file], "tokens takes one file that train.py --save_rollouts kept"),
            (["tokens", empty], "tokens takes one file"),
            (["tokens", file, "--lr", "nan"], "--lr must be 1e-12 or more"),
            (["tokens", file, "--steps", "-1"], "1 or more"),
            (["passk", folders[3]], "--eval_every"), (["nope", file], "nope is none of"),
            (["curves", folders[0], "--out", empty], "no file in a folder"),
            (["curves", folders[0], "--out", tmp_path / "no" / "f.png"], "no file in a folder")):
        assert message in refused(capsys, main, *args), args


def test_figures_lie_beside_what_they_are_of(folders, tmp_path, monkeypatch, capsys):
    """Nothing is written into a run's folder, whose curves.png says that it is done."""
    monkeypatch.chdir(folders[0])
    there = {*tmp_path.rglob("*.*")}
    for args, name in ((["table", *folders], "table.md"), (["table", "."], "a-0-table.md"),
                       (["passk", f"{folders[0]}/"], "a-0-passk.png"),
                       (["table", *tmp_path.glob("*")], "table.md")):  # as a shell's runs/*
        main([*map(str, args)])
        assert capsys.readouterr().out.splitlines()[-1] == f"written: {tmp_path / name}"
        there.add(tmp_path / name)
        assert {*tmp_path.rglob("*.*")} == there


def test_a_walk_takes_the_runs_own_steps(kept, kept_run):
    assert [taken for taken, _ in rollout.walk(kept)] == [0, 1, 2, 3, 4]
    after = load(kept_run / "checkpoints" / "rollout_000001", None, kept.batch.rows([0, 1, 2, 3]),
                 budget=4096).state_dict()
    for name, value in kept.policy.state_dict().items():
        assert torch.equal(value, after[name]), name


def test_rollouts_that_cannot_be_taken_apart(kept_run, kept, tmp_path, capsys):
    file, changed = kept_run / "rollouts" / "rollout_000001.pt", tmp_path / "changed.pt"
    saved = torch.load(file)
    for change, message in ((dict(shaped_rewards=torch.zeros(8, 8)), "none of its completions"),
                            (dict(flags={**kept.flags, "lora_rank": 4}), "adapters"),
                            (dict(flags={**kept.flags, "loss": "mine"}), "KeyError: 'mine'")):
        torch.save({**saved, **change}, changed)
        with pytest.raises(ValueError, match=message):
            rollout.open_rollout(changed)
    said = refused(capsys, main, "tokens", file, "--model", tmp_path / "nope")
    assert "nope cannot be used" in said
    with pytest.raises(ValueError, match="do not divide"):
        next(rollout.walk(kept, 7))


def test_what_is_logged_is_json():
    nan = float("nan")
    assert files.numbers([nan, {"a": [math.inf, {"b": 1.0}]}]) == [None, {"a": [None, {"b": 1.0}]}]


def test_only_the_last_token_is_left_out_of_a_text(tokenizer):
    ids = tokenizer.encode("<answer>7+1<pad>+9</answer><eos>")
    text = data.decode(tokenizer, Completion(ids, [], False))
    assert text == "<answer>7+1<pad>+9</answer>"
    assert data.decode(tokenizer, Completion(ids[:3], [], True)) == "<answer>7+"

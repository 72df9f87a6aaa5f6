"""Updates taken apart: a walk's steps, subsets of tokens, and the commands of python -m anatomy."""

import json
import re

import pytest
import torch

from anatomy import rollout, subsets
from anatomy.__main__ import main
from engine.loading import Compute, load
from helpers import refused


def test_subsets_of_tokens_add_up_to_the_gradient(kept):
    """The entropy bonus is taken apart, too."""
    kept.policy.double()  # but for transformers' RMSNorm, which is in float32
    result = subsets.compare_subsets(kept, layers=1, k=4)
    assert result["after"] == 2 and result["sum_error"] < 2e-7
    found = result["subsets"]
    assert found["full"]["norm"] == pytest.approx(1) and found["full"]["angle"] < 1e-3
    assert sum(found[name]["tokens"] for name in subsets.PARTS) == pytest.approx(1)
    assert found["no clip"]["norm"] != found["full"]["norm"]  # at 1e-3, something is clipped
    one_step = found[subsets.ONE_STEP]
    assert one_step["norm"] > 0.1 and one_step["angle"] > 1
    assert all(p.grad is None for p in kept.policy.parameters())  # else a walk's next step has them


@pytest.fixture
def command_of(kept_run, tmp_path, capsys):
    """command_of(name, flag ...) -> what a command prints, and the numbers beside its figure."""
    def run(name, *flags):
        figure = tmp_path / f"{name}.png"
        main([name, str(kept_run / "rollouts" / "rollout_000001.pt"), "--out", str(figure), *flags])
        said = capsys.readouterr().out
        assert said.splitlines()[-1] == f"written: {figure}, {figure.with_suffix('.json')}"
        assert figure.stat().st_size > 10_000
        return said, json.loads(figure.with_suffix(".json").read_text())
    return run


def test_the_subsets_of_a_rollout(command_of):
    said, result = command_of("subsets")
    assert "| norm_selected |" in said.splitlines()[0].replace("  ", "")
    assert result["subsets"]["full"]["norm_selected"] == pytest.approx(1)


def test_the_steps_of_a_rollout(command_of):
    said, result = command_of("steps")
    assert (result["rollout"], result["method"], result["lr"]) == (1, "fade", 1e-3)
    start, *after = result["steps"]
    assert len(after) == 4 and start["clip_frac"] == 0 and start["ess"] == pytest.approx(1)
    for line in result["steps"]:
        assert len(line["bins"]) == 10
        assert sum(b["gradient"] for b in line["bins"]) == pytest.approx(1, abs=1e-5)
    # before the first step all ratios are 1: G is (1 - pi) A
    assert all(b["clipped"] in (0, None) for b in start["bins"])
    assert start["bins"][5]["size"] > start["bins"][9]["size"] > 0
    assert after[-1]["bins"][5]["ratio_std"] > 0 and after[-1]["clip_frac"] > 0
    table, explained = said.split("\n\n")[:2]
    for column in [cell.strip() for cell in table.split("|---")[0].split("|")[1:-1]]:
        assert re.sub("A [<>] 0: ", "", column).split(",")[0] in explained


def test_other_steps_than_the_runs(command_of, kept_run):
    """With the weights after the run's own steps the ratios are spread before the first step."""
    _, result = command_of("steps", "--steps", "2", "--lr", "1e-9", "--model",
                           str(kept_run / "checkpoints" / "rollout_000001"))
    assert result["lr"] == 1e-9 and len(result["steps"]) == 3
    assert all(line["approx_kl"] > 1e-3 for line in result["steps"])


def test_a_walk_takes_the_runs_own_steps(kept, kept_run):
    assert [taken for taken, _ in rollout.walk(kept)] == [0, 1, 2, 3, 4]
    after = load(kept_run / "checkpoints" / "rollout_000001", None, kept.batch.rows([0, 1, 2, 3]),
                 Compute(budget=4096)).state_dict()
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
    for command in ("page", "steps", "subsets"):
        said = refused(capsys, main, command, file, "--model", tmp_path / "nope")
        assert "nope cannot be used" in said
    assert "do not divide" in refused(capsys, main, "steps", file, "--steps", 7)


def test_what_is_wrong_is_said(tmp_path, capsys):
    file, empty = tmp_path / "rollout.pt", tmp_path / "empty"
    torch.save({}, file)
    empty.mkdir()
    for args, message in (
            (["page", __file__], "no rollout that"), (["steps", file], "no rollout that"),
            (["subsets", file], f"anatomy: {file}: it is no rollout that train.py"),
            (["page", file, "--methods", "grpo,nope"], "no such method: nope; there are"),
            (["page", file, "--methods", "grpo, grpo --eps_lwo 0.1"],
             "did you mean --eps_low?; --help lists them; grpo has --eps_low, --eps_high, --dual"),
            (["page", file, "--methods", "dr_grpo --eps_low x"], "--eps_low: invalid float"),
            (["steps", file, "--methods", "grpo"], "--methods is no flag of steps"),
            (["page"], "required"), (["tokens", file], "tokens is none of steps, subsets"),
            (["page", file, file], "page takes one file that train.py --save_rollouts kept"),
            (["steps", empty], "steps takes one file"), (["subsets", "x.pt"], "not x.pt"),
            (["page", file, "--lr", "nan"], "--lr must be 1e-12 or more"),
            (["page", file, "--steps", "-1"], "1 or more"),
            (["steps", file, "--out", empty / "s.txt"], "of a figure .png, .pdf or .svg"),
            (["page", file, "--out", tmp_path / "no" / "p.html"], "no file in a folder")):
        assert message in refused(capsys, main, *args), args

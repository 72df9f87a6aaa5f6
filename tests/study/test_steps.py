"""Ratios, clipping and gradients after each optimizer step, against closed forms."""

import json
import math
import shutil

import pytest
import torch

from losses import METHODS, Tokens, weight_on_logprob
from study import __main__ as command
from study.quantities import signed_gradient
from study.steps import token_statistics


def test_steps(kept_run, tmp_path, capsys):
    file = shutil.copy(kept_run / "rollouts" / "rollout_000001.pt", tmp_path)
    command.main(["steps", str(file)])
    said = capsys.readouterr().out
    figure, numbers = (tmp_path / f"rollout_000001-steps.{end}" for end in ("png", "json"))
    assert said.splitlines()[-1] == f"written: {figure}, {numbers}"
    assert figure.stat().st_size > 10_000
    result = json.loads(numbers.read_text())
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
        assert column.removeprefix("A < 0: ").removeprefix("A > 0: ").split(",")[0] in explained


def test_gradient_sizes_are_those_of_the_formula():
    """(1 - pi) rho |A| where PPO does not clip, 0 where it does."""
    pi, ratio, advantage = torch.tensor([[[0.1, 0.1, 0.9, 0.9]], [[1.1, 1.5, 1.5, 0.5]],
                                         [[2.0, 2.0, -1.0, -1.0]]], dtype=torch.float64)
    tokens = Tokens(pi.log(), (pi / ratio).log(), advantage, torch.ones(1, 4, dtype=torch.bool),
                    torch.zeros_like(pi))
    method = METHODS["grpo"]
    weight = weight_on_logprob(method, tokens)
    assert weight[0].tolist() == pytest.approx([2.2, 0, -1.5, 0])
    table = {(b["sign"], b["bin"]): b for b in token_statistics(tokens, method)}
    low, high = table[1, 0], table[-1, 4]
    assert (low["tokens"], low["clipped"], low["weight"]) == (2, 0.5, pytest.approx(0.55))
    assert (low["size"], high["size"]) == (pytest.approx(0.9 * 1.1), pytest.approx(0.1 * 1.5 / 2))
    assert low["gradient"] == pytest.approx(1.98 / (1.98 + 0.15))
    assert low["ratio_std"] == pytest.approx(0.2) and high["ratio_std"] == pytest.approx(0.5)
    assert table[1, 4]["tokens"] == 0 and math.isnan(table[1, 4]["clipped"])


def test_a_selection_has_no_gradient_outside_of_it(kept):
    """top_entropy's other tokens carry nothing, and are not called clipped."""
    tokens, method = kept.tokens(), METHODS["top_entropy"]
    size = signed_gradient(tokens, method).abs()[tokens.mask]
    assert 0.05 < (size > 0).float().mean() <= 0.25
    table = token_statistics(tokens, method)
    assert all(line["clipped"] == 0 or not line["tokens"] for line in table)
    assert sum(line["gradient"] for line in table) == pytest.approx(1, abs=1e-5)

"""Updates taken apart: subsets of the tokens, and all of one kept rollout; the commands of python
-m study."""

import json
import math
import re

import pytest
import torch

from harness import files
from study import __main__ as command
from study import anatomy


def test_subsets_of_tokens_add_up_to_the_gradient(kept):
    """The entropy bonus is taken apart, too."""
    kept.policy.double()  # but for transformers' RMSNorm, which is in float32
    result = anatomy.compare_subsets(kept, layers=1, k=4)
    assert result["after"] == 2 and result["sum_error"] < 2e-7
    subsets = result["subsets"]
    assert subsets["full"]["norm"] == pytest.approx(1) and subsets["full"]["angle"] < 1e-3
    assert sum(subsets[name]["tokens"] for name in anatomy.PARTS) == pytest.approx(1)
    # at 1e-3, something is clipped
    assert subsets["no clip"]["norm"] != subsets["full"]["norm"]
    one_step = subsets[anatomy.ONE_STEP]
    assert one_step["norm"] > 0.1 and one_step["angle"] > 1


def test_a_gradient_leaves_nothing_for_the_next_step_of_a_walk(kept):
    anatomy.gradient_of(kept, anatomy.sampled_matrices(kept.policy.model, 2))
    assert all(p.grad is None for p in kept.policy.parameters())


def test_anatomy_of_a_rollout(kept, kept_run):
    result = anatomy.anatomy_of(kept_run / "rollouts" / "rollout_000001.pt")
    json.dumps(files.numbers(result), allow_nan=False)
    assert list(result["near"]) == [0, 1, 2, 4]
    assert list(result["far"]) == [0, 1, 2, 4, 8, 16, 32, 64]
    low, high = result["near"][0]  # before the first step all ratios are 1: G is (1 - pi) A
    assert abs(low) > abs(high) and result["far"][0] == result["near"][0]
    assert 0 < result["own_slope"] < 3 and len(result["spread"]) > 10
    assert result["ratio_std"]["low"] > result["ratio_std"]["high"] > 0
    clipped, (every, low) = result["clipped"], zip(*result["met"], strict=True)
    counts = [clipped[kind]["tokens"] for kind in ("clipped", "passed")]
    # every token is in one step
    assert sum(counts) == sum(every) == (kept.batch.mask & (kept.batch.advantages != 0)).sum()
    assert len(low) == 4 and all(0 < x < y / 2 for x, y in zip(low, every, strict=True))
    assert min(counts) > 0 and counts[0] == pytest.approx(sum(
        line["tokens"] * (line["clipped"] or 0) for line in clipped["by_entropy"]))
    part = result["subsets"]["A < 0"]  # fade divides by the limit of tokens: a length alone differs
    assert part["angle_selected"] == pytest.approx(part["angle"], abs=0.1)
    assert part["norm_selected"] > part["norm"] and len(result["solve_rates"]) == 8


def test_principal_angles():
    e = torch.eye(6, dtype=torch.float64)
    assert anatomy.angle(e[:2], e[:2]) == pytest.approx(0, abs=1e-5)
    assert anatomy.angle(e[:2], e[2:4]) == pytest.approx(90)
    turned = torch.stack([math.cos(0.5) * e[0] + math.sin(0.5) * e[3], e[1]])
    assert anatomy.angle(e[:2], turned) == pytest.approx(math.degrees(0.5) / 2, abs=1e-5)
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5]))
    largest = anatomy.right_subspace(matrix, 2)
    assert anatomy.angle(largest, e[:2, :4]) == pytest.approx(0, abs=1e-5)


def test_the_command_writes_its_table_and_figure(kept_run, tmp_path, capsys):
    out = tmp_path / "subsets.png"
    command.main(["subsets", str(kept_run / "rollouts" / "rollout_000001.pt"), "--out", str(out)])
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"written: {out}, {tmp_path / 'subsets.json'}"
    assert out.stat().st_size > 10_000 and "| norm_selected |" in said[0].replace("  ", "")
    subsets = json.loads((tmp_path / "subsets.json").read_text())["subsets"]
    assert subsets["full"]["norm_selected"] == pytest.approx(1)


def test_the_rank_of_a_change(kept_run, capsys):
    command.main(["rank", str(kept_run)])
    (rollout, share), = re.findall(r"^rollout (\d+): ([\d.]+)$", capsys.readouterr().out, re.M)
    assert rollout == "1" and 0 < float(share) < 1


@pytest.mark.parametrize("args, says", [
    (["subsets"], "takes one path"), (["measure", "x.pt"], "takes no path"),
    (["nope"], "invalid choice"), (["subsets", "x.pt"], "x.pt: it is no rollout")])
def test_a_mistake_ends_with_a_sentence(args, says, capsys):
    with pytest.raises(SystemExit) as e:
        command.main(args)
    said = capsys.readouterr().err
    assert e.value.code == 2 and "usage: python -m study" in said and says in said

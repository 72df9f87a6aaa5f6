"""Updates taken apart: subsets of tokens, one kept rollout; the commands of python -m study."""

import json
import re

import pytest

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
    assert subsets["no clip"]["norm"] != subsets["full"]["norm"]  # at 1e-3, something is clipped
    one_step = subsets[anatomy.ONE_STEP]
    assert one_step["norm"] > 0.1 and one_step["angle"] > 1
    assert all(p.grad is None for p in kept.policy.parameters())  # else a walk's next step has them


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
    assert min(counts) > 0
    part = result["subsets"]["A < 0"]  # fade divides by the limit of tokens: a length alone differs
    assert part["angle_selected"] == pytest.approx(part["angle"], abs=0.1)
    assert part["norm_selected"] > part["norm"] and len(result["solve_rates"]) == 8


@pytest.fixture
def command_of(kept_run, tmp_path, capsys):
    """command_of(name) -> what a command of a rollout prints, and the numbers beside its figure."""
    def run(name):
        figure = tmp_path / f"{name}.png"
        command.main([name, str(kept_run / "rollouts" / "rollout_000001.pt"), "--out", str(figure)])
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


def test_the_rank_of_a_change(kept_run, capsys):
    command.main(["rank", str(kept_run)])
    (rollout, share), = re.findall(r"^rollout (\d+): ([\d.]+)$", capsys.readouterr().out, re.M)
    assert rollout == "1" and 0 < float(share) < 1


@pytest.mark.parametrize("args, says", [
    (["subsets"], "takes one path"), (["measure", "x.pt"], "takes no path"),
    (["subsets", "x.pt"], "x.pt: it is no rollout")])
def test_a_mistake_ends_with_a_sentence(args, says, capsys):
    with pytest.raises(SystemExit) as e:
        command.main(args)
    said = capsys.readouterr().err
    assert e.value.code == 2 and "usage: python -m study" in said and says in said

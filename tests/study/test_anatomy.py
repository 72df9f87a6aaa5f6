"""Updates taken apart for RESULTS.md: subsets of the tokens, the change of entropy, and all of one
kept rollout; the commands of python -m study."""

import json
import math
import statistics

import pytest
import torch

import train
from analysis import rollout
from experiment import log
from study import __main__ as command
from study import anatomy, figures, quantities


@pytest.fixture(scope="module")
def kept_run(base, tmp_path_factory):
    """One rollout of fade in 4 steps."""
    out = tmp_path_factory.mktemp("kept") / "run"
    train.main(["--model", base, "--loss", "fade", "--out", str(out), "--save_rollouts", *(
        "--sampler transformers --rollouts 1 --problems_per_rollout 8 --group_size 8 "
        "--steps_per_rollout 4 --max_tokens 16 --max_prompt_tokens 16 --lr 1e-3 --eval_every 0 "
        "--tokens_per_micro_batch 4096 --warmup 2 --schedule cosine --entropy_coef 0.01").split()])
    return out


@pytest.fixture
def kept(kept_run):
    return rollout.open_rollout(kept_run / "rollouts" / "rollout_000001.pt")


def test_subsets_of_tokens_add_up_to_the_gradient(kept, tmp_path):
    """The entropy bonus is taken apart, too."""
    kept.policy.double()  # but for transformers' RMSNorm, which is in float32
    with pytest.raises(ValueError, match="took 4"):
        anatomy.compare_subsets(kept, layers=1, after=5)
    result = anatomy.compare_subsets(kept, layers=1, k=4)
    assert result["after"] == 2 and result["sum_error"] < 2e-7
    subsets = result["subsets"]
    assert subsets["full"]["norm"] == pytest.approx(1) and subsets["full"]["angle"] < 1e-3
    assert len(subsets["full"]["matrices"]) == 7
    # at 1e-3, something is clipped
    assert subsets["no clip"]["norm"] != subsets["full"]["norm"]
    figures.subsets(dict(result, rollout=1, method="fade"), tmp_path / "subsets.png")
    assert (tmp_path / "subsets.png").stat().st_size > 10_000


def test_steps(kept, tmp_path):
    result = quantities.steps(kept)
    assert list(result["slope"]) == list(result["own_slope"]) == [1, 2, 4]
    assert list(result["reversal"]) == [0, 1, 2, 4] and len(result["tables"]) == 4
    assert result["ratios"]["low"]["std"] > result["ratios"]["high"]["std"] > 0
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
    figures.steps(log.numbers(dict(result, rollout=1, method="fade", lr=1e-3)), tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_anatomy_of_a_rollout(kept_run):
    result = anatomy.anatomy_of(kept_run / "rollouts" / "rollout_000001.pt")
    json.dumps(result, allow_nan=False)
    assert (result["method"], result["lr"], result["rollout"]) == ("fade", 1e-3, 1)
    assert list(result["near"]["reversal"]) == [0, 1, 2]
    assert list(result["far"]["reversal"]) == list(result["fast"]["reversal"]) == [0, 32, 64]
    assert 0 < result["sgd"]["own_slope"][1] < 3 and list(result["slow"]["slope"]) == [1, 4]
    # fade divides by completions and max_tokens: the selected ones' norm is larger by their share
    part = result["subsets"]["subsets"]["A < 0"]
    assert part["norm_selected"] * part["completions"] == pytest.approx(part["norm"], rel=1e-3)
    assert part["angle_selected"] == pytest.approx(part["angle"], abs=0.1)
    one_step = result["subsets"]["subsets"][anatomy.ONE_STEP]
    assert one_step["norm"] > 0.1 and one_step["angle"] > 1


def test_principal_angles():
    e = torch.eye(6, dtype=torch.float64)
    assert anatomy.angle(e[:2], e[:2]) == pytest.approx(0, abs=1e-5)
    assert anatomy.angle(e[:2], e[2:4]) == pytest.approx(90)
    turned = torch.stack([math.cos(0.5) * e[0] + math.sin(0.5) * e[3], e[1]])
    assert anatomy.angle(e[:2], turned) == pytest.approx(math.degrees(0.5) / 2, abs=1e-5)
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5]))
    largest = anatomy.right_subspace(matrix, 2)
    assert anatomy.angle(largest, e[:2, :4]) == pytest.approx(0, abs=1e-5)


def check_entropy_changes(result):
    changes = result["advantages"]
    assert changes["raw"]["mass_neg"] == 0
    # lengths differ a little
    asym = changes["asym"]
    assert asym["mass_pos"] == pytest.approx(2 * asym["mass_neg"], rel=0.02)
    assert all(v["measured"] != 0 for v in changes.values())
    for v in changes.values():  # over mean |A| = m_S + m_F
        sign_axis = (v["mass_pos"] - v["mass_neg"]) / (v["mass_pos"] + v["mass_neg"])
        first_term = sign_axis * (changes["raw"]["predicted"] - changes["raw"]["covariance"])
        assert v["predicted"] - v["covariance"] == pytest.approx(first_term, rel=0.02, abs=1e-3)
        assert v["covariance"] - v["reversed"] == pytest.approx(v["predicted"] - v["covariance"])
    columns = ([v[key] for v in changes.values()] for key in ("predicted", "measured"))
    correlation = statistics.correlation(*columns)
    assert result["correlation_predicted"] == pytest.approx(correlation, abs=1e-6)


def test_the_figure_of_a_rollout(kept_run, tmp_path, capsys):
    out = tmp_path / "entropy.png"
    command.main(["entropy", str(kept_run / "rollouts" / "rollout_000001.pt"), "--out", str(out)])
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"written: {out}, {tmp_path / 'entropy.json'}" and out.stat().st_size > 10_000
    check_entropy_changes(json.loads((tmp_path / "entropy.json").read_text()))


@pytest.mark.parametrize("args", [["subsets"], ["theory", "x.pt"], ["nope"], []])
def test_a_command_that_is_mistyped_ends_with_its_usage(args, capsys):
    with pytest.raises(SystemExit) as e:
        command.main(args)
    assert e.value.code == 2 and "usage: python -m study" in capsys.readouterr().err

"""Updates taken apart: a walk's steps, subsets of tokens, the commands of python -m anatomy; the
quantities of an update and the gradients of its parts, by hand."""

import json
import math
import re
from statistics import linear_regression

import pytest
import torch

from anatomy import rollout, steps, subsets
from anatomy.__main__ import main
from anatomy.rollout import signed_gradient
from engine.loading import Compute, load
from helpers import refused
from losses import METHODS, Tokens
from study import quantities

GRPO = METHODS["grpo"]


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


def test_the_steps_and_the_subsets_of_a_rollout(command_of, kept_run):
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
    said, result = command_of("subsets")
    assert "| norm_selected |" in said.splitlines()[0].replace("  ", "")
    assert result["subsets"]["full"]["norm_selected"] == pytest.approx(1)
    # with the weights after the run's own steps the ratios are spread before the first step
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


def test_rollouts_that_cannot_be_taken_apart_and_wrong_arguments_are_said(
        kept_run, kept, tmp_path, capsys):
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


def some_tokens(pi, ratio, advantage, entropy=None):
    """Tokens of [B][T] numbers; None is padding."""
    mask = torch.tensor([[x is not None for x in line] for line in pi])

    def tensor(lines):
        return torch.tensor([[1.0 if x is None else x for x in line] for line in lines],
                            dtype=torch.float64)
    pi, ratio, advantage, entropy = map(tensor, (pi, ratio, advantage, entropy or pi))
    return Tokens(pi.log(), (pi / ratio).log(), advantage, mask, entropy)


def test_the_gradient_of_a_token_by_hand():
    """G = (1 - pi) rho A where PPO does not clip; a line for each sign of A and fifth of pi."""
    tokens = some_tokens([[0.1, 0.1, 0.9, 0.9, 0.5]], [[1.1, 1.5, 1.5, 0.5, 1.0]],
                         [[2.0, 2.0, -1.0, -1.0, 0.0]])
    g = signed_gradient(tokens, GRPO)[0].tolist()
    assert g == pytest.approx([0.9 * 1.1 * 2, 0, -0.1 * 1.5, 0, 0])
    lines = {(x["sign"], x["bin"]): x for x in steps.token_statistics(tokens, GRPO)}
    low, high, none = lines[1, 0], lines[-1, 4], lines[1, 4]
    assert (low["tokens"], low["clipped"], low["weight"]) == (2, 0.5, pytest.approx(0.55))
    assert (low["size"], high["size"]) == (pytest.approx(0.9 * 1.1), pytest.approx(0.1 * 1.5 / 2))
    assert low["gradient"] == pytest.approx(1.98 / (1.98 + 0.15))
    assert low["ratio_std"] == pytest.approx(0.2) and high["ratio_std"] == pytest.approx(0.5)
    assert none["tokens"] == 0 and math.isnan(none["clipped"])
    # a token that top_entropy leaves out has no gradient, and is not called clipped
    tokens.entropy[0, 0], selects = 9, METHODS["top_entropy"]
    g = signed_gradient(tokens, selects)[0].tolist()
    assert g == pytest.approx([0.9 * 1.1 * 2, 0, 0, 0, 0])
    high = steps.token_statistics(tokens, selects)[4]
    assert (high["clipped"], high["size"]) == (0.5, 0)


def test_the_mean_is_uniform_in_pi_and_not_over_tokens_also_on_the_sides_of_remark_1():
    """3 tokens of 1 and 1 token of -5 in two sub-bins are (1 - 5) / 2 and not (3 - 5) / 4; of four,
    those without a token are left out. pi = 1 is in the last one."""
    probs = torch.tensor([0.02, 0.03, 0.04, 0.17, 0.5, 0.25])
    values = torch.tensor([1.0, 1.0, 1.0, -5.0, 100.0, 100.0])
    for parts in (2, 4):
        assert quantities.uniform_mean(values, probs, (0.0, 0.2), parts) == pytest.approx(-2.0)
    assert quantities.uniform_mean(values, probs, (0.8, 1.0), 2) is None
    probs = torch.tensor([1.0, 0.9999999, 0.81])
    mean = quantities.uniform_mean(torch.tensor([2.0, 4.0, 7.0]), probs, (0.8, 1.0), 2)
    assert mean == pytest.approx((7 + 3) / 2)
    # low: 0.89 * 1 and 0.89 * -1; 0.81 * 3, clipped, and 0.81 * 1. High: one token, 0.1 * -2
    tokens = some_tokens([[0.11, 0.11, 0.19], [0.19, 0.9, None]],
                         [[1.0, 1.0, 1.5], [1.0, 1.0, None]], [[1.0, -1.0, 3.0], [1.0, -2.0, None]])
    assert quantities.reversal(tokens, GRPO) == pytest.approx([(0 + 0.405) / 2, -0.2])


def test_slope_of_a_spread_that_is_known():
    g = torch.Generator().manual_seed(0)
    pi = torch.rand(1, 100_000, generator=g, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    for power in (1, 2):
        noise = torch.randn(pi.shape, generator=g, dtype=torch.float64)
        ratio = 1 + 0.01 * (1 - pi) ** power * noise
        tokens = Tokens(pi.log() + ratio.log(), pi.log(), torch.ones_like(pi),
                        torch.ones_like(pi, dtype=torch.bool), pi)
        # 20 wide bins: a little low
        points = quantities.ratio_spread(tokens)
        assert linear_regression(*zip(*points)).slope == pytest.approx(power, abs=0.15)
    # too few tokens for a line
    assert quantities.own_slope(some_tokens([[0.5, 1.0]], [[1.1, 1.0]], [[1.0, 1.0]])) is None


def test_clipped_tokens_by_hand():
    """A < 0 below 0.8 and A > 0 above 1.2 are clipped; a token without advantage is not counted."""
    tokens = some_tokens([[0.1, 0.1, 0.9, 0.95], [0.5, 0.5, None, None]],
                         [[0.7, 1.0, 1.3, 1.3], [1.3, 1.3, None, None]],
                         [[-1.0, -1.0, 1.0, -1.0], [0.0, 1.0, None, None]])
    probs = torch.tensor([[0.15, 0.1, 0.7, 0.73], [0.4, 0.4, 0.0, 0.0]])
    entropy = torch.tensor([[0.1, 2.0, 0.3, 0.2], [9.0, 1.0, 0.0, 0.0]])
    status = quantities.clip_status(tokens, GRPO, probs, entropy)
    assert status[0].tolist() == [True, False, True, False, True]
    edges = torch.tensor([0.15, 0.25, 0.5, 1.5])
    result = quantities.clipped_tokens(*status, edges)
    clipped, passed = result["clipped"], result["passed"]
    assert (clipped["tokens"], passed["tokens"]) == (3, 2)
    assert clipped["probability"] == pytest.approx((0.15 + 0.7 + 0.4) / 3)
    assert clipped["entropy_if_low"] == pytest.approx(0.1)
    assert passed["entropy_if_low"] == pytest.approx(2.0)
    assert [line["clipped"] for line in result["by_entropy"]] == [1.0, 0.0, 1.0, 1.0, 0.0]
    edges = quantities.quantiles(torch.arange(100.0))
    assert torch.bucketize(torch.arange(100.0), edges, right=True).bincount().tolist() == [20] * 5


@pytest.mark.parametrize("name", ["grpo", "cispo"])  # a mean over completions, one over tokens
def test_a_mean_over_all_tokens_and_over_the_selected(name, kept):
    kept.coefficients, batch, method = {}, kept.batch, METHODS[name]
    kept.policy.double()
    matrices = subsets.sampled_matrices(kept.policy.model, 1)
    chosen = batch.mask & (batch.old_logprobs.exp() < 0.2)
    assert 0 < chosen.any(1).sum() < len(chosen)  # a completion without a chosen token is left out

    def by_hand(counted):
        """Before the first step, where all ratios are 1."""
        gain = batch.advantages * (kept.policy(batch)[0] - batch.old_logprobs).exp() * chosen
        lengths = counted.sum(1)
        mean = (gain.sum() / lengths.sum() if name == "cispo" else
                (gain.sum(1) / lengths.clamp(min=1)).sum() / lengths.count_nonzero())
        return dict(zip(matrices, torch.autograd.grad(-mean, [*matrices.values()]), strict=True))
    for found, counted in (
            (subsets.gradient_of(kept, matrices, method, chosen.double()), batch.mask),
            (subsets.gradient_of_selected(kept, matrices, method, chosen), chosen)):
        expected = by_hand(counted)
        off = {n: found[n] - expected[n] for n in matrices}
        assert 0 < subsets.norm(expected) and subsets.norm(off) < 1e-5 * subsets.norm(expected)


def test_norms_and_principal_angles():
    e = torch.eye(6, dtype=torch.float64)
    turned = torch.stack([math.cos(0.5) * e[0] + math.sin(0.5) * e[3], e[1]])
    for other, degrees in ((e[:2], 0), (e[2:4], 90), (turned, math.degrees(0.5) / 2)):
        assert subsets.angle(e[:2], other) == pytest.approx(degrees, abs=1e-5)
    largest = subsets.right_subspace(torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5])), 2)
    assert subsets.angle(largest, e[:2, :4]) == pytest.approx(0, abs=1e-5)
    full = subsets.Reference(dict(a=torch.tensor([[3.0, 0.0]]), b=torch.tensor([[0.0, 4.0]])), 1)
    part = full.compare(dict(a=torch.tensor([[1.0, 1.0]]), b=torch.tensor([[0.0, 1.0]])))
    assert part == pytest.approx(dict(norm=math.sqrt(3) / 5, angle=45 / 2), abs=1e-4)
    nothing = full.compare(dict(a=torch.zeros(1, 2), b=torch.ones(1, 2)))
    assert math.isnan(nothing["angle"]) and nothing["norm"] == pytest.approx(math.sqrt(2) / 5)


def test_the_effective_number_of_problems_is_kishs():
    """Equal masses count whole; of one mass alone one problem counts, whatever its solve rate."""
    for alpha, of_two in ((1, 1.96), (3, 1.8771)):  # masses 0.25, 0.1875; 0.0625, 0.1055
        for rates, number in (([0.25] * 6, 6), ([0.5, 0, 1, 0], 1), ([0.5, 0.25], of_two)):
            assert quantities.effective_problems(rates, alpha) == pytest.approx(number, abs=1e-4)


def test_the_released_codes_selection_by_entropy():
    """A fifth of each completion, at least one token, whatever the other completions have."""
    entropy = [[0.1, 0.2, 0.3, 0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1], [0.3, 0.5] + [None] * 8]
    pi = [[0.5] * 10, [0.5] * 2 + [None] * 8]
    tokens = some_tokens(pi, pi, pi, entropy)
    chosen = subsets.top_entropy_of_each(tokens)
    assert chosen.nonzero().tolist() == [[0, 3], [0, 4], [1, 1]]

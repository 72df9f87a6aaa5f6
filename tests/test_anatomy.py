"""Updates taken apart, by the commands of python -m anatomy and by hand; figures and tables of runs
that are whole, cut off, or without an evaluation."""

import json
import math
import os
import re
import shutil
from statistics import linear_regression

import pytest
import torch

from analysis import __main__ as runs
from analysis.__main__ import main
from anatomy import __main__ as anatomy
from anatomy import rollout, steps, subsets
from anatomy.passk import pass_at_k
from anatomy.rollout import signed_gradient
from data.prompts import decode
from engine.loading import Compute, load
from engine.sampler import Completion
from harness import curves, files
from helpers import python, refused
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
        rollout_file = kept_run / "rollouts" / "rollout_000001.pt"
        anatomy.main([name, str(rollout_file), "--out", str(figure), *flags])
        said = capsys.readouterr().out
        assert said.splitlines()[-1] == f"written: {figure}, {figure.with_suffix('.json')}"
        assert figure.stat().st_size > 10_000
        return said, json.loads(figure.with_suffix(".json").read_text())
    return run


def test_the_steps_and_the_subsets_of_a_rollout(command_of, kept_run, capsys):
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
    assert "WARNING" not in capsys.readouterr().err
    first, second, third = (kept_run / "rollouts" / f"rollout_00000{i}.pt" for i in (1, 2, 3))
    checkpoint = kept_run / "checkpoints" / "rollout_000001"
    before = [*map(anatomy.checkpoint_before, (first, second, third))]
    assert before == [None, str(checkpoint), None]
    assert f"{checkpoint.with_name('rollout_000002')}, which sampled rollout_000003.pt" in (
        capsys.readouterr().err)
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
        said = refused(capsys, anatomy.main, command, file, "--model", tmp_path / "nope")
        assert "nope cannot be used" in said
    assert "do not divide" in refused(capsys, anatomy.main, "steps", file, "--steps", 7)
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
            (["page"], "required"), (["tokens", file], "'tokens' is none of steps, subsets"),
            (["page", file, file], "page takes one file that train.py --save_rollouts kept"),
            (["steps", empty], "steps takes one file"), (["subsets", "x.pt"], "not x.pt"),
            (["page", file, "--lr", "nan"], "--lr must be 1e-12 or more"),
            (["page", file, "--steps", "-1"], "1 or more"),
            (["steps", file, "--out", empty / "s.txt"], "of a figure .png, .pdf or .svg"),
            (["page", file, "--out", tmp_path / "no" / "p.html"], "no file in a folder")):
        assert message in refused(capsys, anatomy.main, *args), args


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


def test_the_effective_number_of_problems_is_kishs_and_the_released_codes_selection():
    """Equal masses count whole; of one mass alone one problem counts, whatever its solve rate."""
    for alpha, of_two in ((1, 1.96), (3, 1.8771)):  # masses 0.25, 0.1875; 0.0625, 0.1055
        for rates, number in (([0.25] * 6, 6), ([0.5, 0, 1, 0], 1), ([0.5, 0.25], of_two)):
            assert quantities.effective_problems(rates, alpha) == pytest.approx(number, abs=1e-4)
    # a fifth of each completion, at least one token, whatever the other completions have
    entropy = [[0.1, 0.2, 0.3, 0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1], [0.3, 0.5] + [None] * 8]
    pi = [[0.5] * 10, [0.5] * 2 + [None] * 8]
    tokens = some_tokens(pi, pi, pi, entropy)
    chosen = subsets.top_entropy_of_each(tokens)
    assert chosen.nonzero().tolist() == [[0, 3], [0, 4], [1, 1]]


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


def test_the_seed_is_not_in_a_runs_name(tmp_path):
    names = [curves.read(write_run(tmp_path / name, seed=1))["name"]
             for name in ("a-16-1", "a-1-1-lr-1e-1", "a")]
    assert names == ["a-16", "a-1-lr-1e-1", "a"]


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


def test_pass_at_k_of_runs_and_of_one_seed_with_an_interval_over_problems(folders, tmp_path):
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
    # two methods begin with the same model: that is one evaluation and not two seeds
    found = pass_at_k(grouped(*(write_run(tmp_path / name, lr=lr, errors=(0.01, 0.02))
                                for name, lr in (("d-0", 0.1), ("e-0", 0.2)))))
    for ends, value, half in ((found["d"][4], 0.5, 1.96 * 0.02), (found["d"][2], 0.2, math.nan),
                              (found["base m x/own.jsonl"][1], 0.05, 1.96 * 0.5)):
        assert ends == pytest.approx((value, value - half, value + half), nan_ok=True)


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


def test_any_logged_number_is_drawn_and_the_band_of_several_seeds(folders, drawn, capsys):
    main(["curves", *map(str, folders[:2]), "--metric", "eval/countdown/mean@4"])
    (panels, caption), = drawn
    assert panels == {"eval/countdown/mean@4": {"a, 2 seeds": [  # seed 1 has 0.1 more after 0
        (0, 0.05, 0.05, 0.05), *((r, *map(pytest.approx, (x + 0.05, x, x + 0.1)))
                                 for r, x in ((1, 0.1), (2, 0.2), (3, 0.3)))]}}
    assert capsys.readouterr().out == (
        f"written: {folders[0].parent / 'eval-countdown-mean@4.png'}\n")
    assert caption.startswith("mean over seeds") and "band: least and most" in caption
    assert "of one seed, band: 1.96 standard errors over problems" in caption


def test_a_second_run_of_a_seed_is_a_line_of_its_own(tmp_path, capsys):
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
            (["curves", folders[0], tmp_path / "none"], f"there is no {tmp_path / 'none'}"),
            (["passk", folders[0]], "'passk' is none of"), (["nope", empty], "'nope' is none of"),
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
    for prompt, thinks in (("", 0), ("a<think>\n", 1), ("<think> it", 0), ("<think></think>", 0)):
        text = decode(tokenizer, Completion(ids[:3], [], True), tokenizer.encode(prompt))
        assert text == "<think>" * thinks + "<answer>7+"


def test_a_run_is_sent_to_weights_and_biases(folders, tmp_path):
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

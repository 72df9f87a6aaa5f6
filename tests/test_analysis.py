"""Figures and tables from runs that are whole, cut off, or without an evaluation; the anatomy of an
update against runs, enumeration and closed forms."""

import functools
import json
import math
import statistics
import subprocess
import sys

import pytest
import torch

import data
import train
from analysis import anatomy, figures, rollout, runs, theory
from analysis.__main__ import main
from conftest import ROOT
from engine.loading import load
from engine.sampler import Completion
from experiment import log
from losses import METHODS, Tokens


def write_run(folder, seed=0, lr=1e-3, evaluated=True, rollouts=3, torn=False):
    folder.mkdir()
    flags = dict(loss="grpo", steps_per_rollout=2, seed=seed, lr=lr, out=str(folder))
    (folder / "config.json").write_text(json.dumps(dict(flags=flags)))
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
        "| a | grpo | 2 | 3 | 2 | 0.350 (0.300-0.400) | 0.500 (0.500-0.500) | 0.500 (0.500-0.500) "
        "| 0.250 (0.250-0.250) | 3.000 (3.000-3.000) |")
    assert lines[1].startswith("| c | grpo | 2 | 3 | 1 | 0.300 |")  # another learning rate: a line
    assert lines[2] == "| c (3) | grpo | 2 | 1 | 1 | - | - | 0.500 | 0.250 | 2.000 |"
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


def test_what_is_wrong_is_said(folders, tmp_path, capsys):
    file = tmp_path / "rollout.pt"
    torch.save({}, file)
    for args, message in (
            (["replay", __file__], "cannot be used"), (["steps", file], "cannot be used"),
            (["replay", file, "--methods", "nope"], "nope"),
            (["table", folders[0], "--model", "x"], "--model"), (["table"], "takes runs"),
            (["table", tmp_path / "nope"], "nope"), (["steps"], "one rollout"),
            (["theory", file], "no path"), (["steps", file, "--lr", "0"], "above 0"),
            (["curves", folders[0], "--only", "x"], "named like x"),
            (["passk", folders[3]], "--eval_every"), (["table", __file__], "cannot be read"),
            (["results", file], "no path"), (["results", "--out", file], "--out"),
            (["table", folders[0], "--measure"], "--measure")):
        with pytest.raises(SystemExit) as e:
            main([*map(str, args)])
        assert e.value.code and message in f"{e.value.code} {capsys.readouterr().err}"


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
    return theory.masses(128)


@pytest.mark.parametrize("name", theory.MASSES)
def test_gradient_masses_are_those_of_the_formulas(name):
    """Groups of 128 come close to groups without end."""
    for p, pos, neg in masses_of_128()[name]["measured"]:
        assert (pos, neg) == pytest.approx(theory.MASSES[name](p), rel=1e-2, abs=8e-3)


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


def test_subsets_of_tokens_add_up_to_the_gradient(kept):
    result = anatomy.compare_subsets(kept)
    # the entropy bonus is taken apart, too
    assert result["after"] == 2 and result["sum_error"] < 2e-6
    subsets = result["subsets"]
    assert subsets["full"]["norm"] == pytest.approx(1) and subsets["full"]["angle"] < 1e-3
    assert len(subsets["full"]["matrices"]) == 3 * 7  # blocks x weight matrices
    # at 1e-3, something is clipped
    assert subsets["no clip"]["norm"] != subsets["full"]["norm"]


def test_subsets_add_up_closer_in_float64(kept):
    kept.policy.double()  # but for transformers' RMSNorm, which is in float32
    result = anatomy.compare_subsets(kept, layers=1, k=4)
    assert result["sum_error"] < 2e-7 and len(result["subsets"]["full"]["matrices"]) == 7


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
        assert theory.slope(anatomy.ratio_spread(tokens)) == pytest.approx(power, abs=0.15)


def test_principal_angles():
    e = torch.eye(6, dtype=torch.float64)
    assert anatomy.angle(e[:2], e[:2]) == pytest.approx(0, abs=1e-5)
    assert anatomy.angle(e[:2], e[2:4]) == pytest.approx(90)
    turned = torch.stack([math.cos(0.5) * e[0] + math.sin(0.5) * e[3], e[1]])
    assert anatomy.angle(e[:2], turned) == pytest.approx(math.degrees(0.5) / 2, abs=1e-5)
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5]))
    largest = anatomy.right_subspace(matrix, 2)
    assert anatomy.angle(largest, e[:2, :4]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("s, low, high", [(0.2, 0.2, 0.2), (0.4, 0.2, 0.3), (0.8, 0.2, 0.28)])
def test_equation_53_is_the_expectation_and_56_is_not(s, low, high):
    mean, error, _ = theory.monte_carlo(s, low, high)
    assert abs(mean - theory.expected_gradient(s, low, high)) < 4 * error
    assert abs(mean - theory.expected_gradient(s, low, high, 56)) > 20 * error


def test_entropy_changes(kept):
    result = anatomy.entropy_changes(kept)
    changes = result["advantages"]
    assert changes["raw"]["mass_neg"] == 0
    # lengths differ a little
    asym = changes["asym"]
    assert asym["mass_pos"] == pytest.approx(2 * asym["mass_neg"], rel=0.02)
    assert all(v["measured"] != 0 for v in changes.values())
    h = kept.batch.entropy[kept.batch.mask].mean().item()
    for v in changes.values():  # over mean |A| = m_S + m_F
        first_term = (v["mass_pos"] - v["mass_neg"]) * h / (v["mass_pos"] + v["mass_neg"])
        assert v["predicted"] - v["covariance"] == pytest.approx(first_term, rel=0.02, abs=1e-3)
        assert v["covariance"] - v["reversed"] == pytest.approx(v["predicted"] - v["covariance"])
    columns = ([v[key] for v in changes.values()] for key in ("predicted", "measured"))
    correlation = statistics.correlation(*columns)
    assert result["correlation_predicted"] == pytest.approx(correlation, abs=1e-6)


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
    with pytest.raises(ValueError, match="do not divide"):
        anatomy.steps(kept, 7)
    with pytest.raises(ValueError, match="took 4"):
        anatomy.compare_subsets(kept, after=5)


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


@pytest.mark.parametrize("command", ["steps", "subsets", "entropy", "theory"])
def test_figures_of_a_rollout(kept_run, tmp_path, command, capsys):
    file = [str(kept_run / "rollouts" / "rollout_000001.pt")] if command != "theory" else []
    main([command, *file, "--out", str(tmp_path / "f.png")])
    assert (tmp_path / "f.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "f.json").read_text())
    assert "|---|" in capsys.readouterr().out


def test_help_is_quick():
    """It imports neither of the large packages."""
    script = ("import sys; from analysis.__main__ import make_parser; make_parser().format_help(); "
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

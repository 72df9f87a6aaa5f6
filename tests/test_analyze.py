"""analyze.py, anatomy.py, log.py: figures and tables from runs that are whole, cut off, or without an evaluation; the anatomy
of an update against runs, enumeration and closed forms."""

import functools
import json
import math
import statistics
import subprocess
import sys

import pytest
import torch

import analyze
import anatomy
import data
import figures
import log
import policy
import train
from conftest import ROOT
from losses import METHODS, Tokens
from sampler import Completion


def write_run(folder, seed=0, lr=1e-3, evaluated=True, rollouts=3, torn=False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(flags=dict(loss="grpo", steps_per_rollout=2, seed=seed, lr=lr, out=str(folder)))))
    records = [{"rollout": r, "time/rollout": 1.0 + r, "policy/entropy": 0.5, "clip/frac": 0.25, "reward/mean": 0.1 * r,
                "steps": [{"policy/ess": 1.0 - 0.1 * i * r, "clip/frac": 0.25} for i in range(2)]} for r in range(1, rollouts + 1)]
    if evaluated:
        records.insert(0, {"rollout": 0, "eval/countdown/mean@4": 0.05, "eval/countdown/pass@1": 0.05, "eval/countdown/pass@4": 0.1})
        for record in records[1:]:
            record.update({"eval/countdown/mean@4": 0.1 * record["rollout"] + 0.1 * seed, "eval/countdown/pass@2": 0.2, "eval/countdown/pass@4": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + ('{"rollout": 9, "poli' if torn else ""))
    return folder


def analyzed(*args, ok=True):
    done = subprocess.run([sys.executable, "analyze.py", *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == ok and "Traceback" not in done.stderr, done.stderr
    return done.stdout if ok else done.stderr


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / "a-0"), write_run(tmp_path / "a-1", seed=1, torn=True), write_run(tmp_path / "c-0", lr=0.5),
            write_run(tmp_path / "c-1", seed=1, lr=0.7, evaluated=False, rollouts=1)]


def test_table(runs, tmp_path):
    read = [run for path in runs for run in analyze.read(path)]
    lines = analyze.table(read).splitlines()[2:]
    assert lines[0] == "| a | grpo | 2 | 3 | 2 | 0.350 (0.300-0.400) | 0.500 (0.500-0.500) | 0.500 (0.500-0.500) | 0.250 (0.250-0.250) | 3.000 (3.000-3.000) |"
    assert lines[1].startswith("| c | grpo | 2 | 3 | 1 | 0.300 |")  # another learning rate is another line
    assert lines[2] == "| c (3) | grpo | 2 | 1 | 1 | - | - | 0.500 | 0.250 | 2.000 |"
    kept = tmp_path / "kept.jsonl"
    analyze.keep(read, kept)
    assert analyze.table(analyze.read(kept)) == analyze.table(read) and str(tmp_path) not in kept.read_text()
    assert [step["policy/ess"] for step in analyze.read(kept)[0]["profile"]] == pytest.approx([1.0, 0.8])


@pytest.mark.parametrize("what, lines", [("curves", [4, 4, 3, 3, 3, 0]), ("p3o", [2, 2, 0]), ("passk", [2, 2])])
def test_figures_of_runs(runs, tmp_path, monkeypatch, what, lines):
    """Points of the longest line of each panel."""
    drawn = []
    own = figures.save
    monkeypatch.setattr(figures, "save", lambda figure, *args: (drawn.extend(
        [[len(line.get_xdata()) for line in axis.lines] for axis in figure.axes]), own(figure, *args)))
    out = tmp_path / f"{what}.png"
    analyze.main([what, *map(str, runs), "--only", "a", "--out", str(out)])
    assert out.stat().st_size > 10_000
    assert [max(panel, default=0) for panel in drawn] == lines if what != "passk" else drawn == [lines]


def test_figure_of_fade(runs, tmp_path):
    analyze.main(["fade", *map(str, runs), "--out", str(tmp_path / "fade.png")])
    assert (tmp_path / "fade.png").stat().st_size > 10_000


def test_what_the_base_scores_is_no_result(tmp_path):
    """A run that was interrupted before an evaluation has none."""
    run = analyze.read(write_run(tmp_path / "a-0", rollouts=0))
    assert analyze.last(run[0], "mean@n") is None and "| - | - |" in analyze.table(run)
    assert analyze.pass_at_k(analyze.grouped(run))["a"] == {}


def test_pass_at_k_of_runs(runs):
    read = [run for path in runs[:2] for run in analyze.read(path)]
    for run in read:
        run["flags"]["model"] = "m"
    curves = analyze.pass_at_k(analyze.grouped(read))
    assert curves == {"base": {1: (0.05,) * 3, 4: (0.1,) * 3}, "a": {2: (0.2,) * 3, 4: (0.5,) * 3}}


def test_what_is_wrong_is_said(runs, tmp_path, capsys):
    rollout = tmp_path / "rollout.pt"
    torch.save({}, rollout)
    for flags, named in ((["replay", __file__], "cannot be used"), (["steps", rollout], "cannot be used"), (["replay", rollout, "--methods", "nope"], "nope"),
                         (["table", runs[0], "--model", "x"], "--model"), (["table"], "takes runs"), (["table", tmp_path / "nope"], "nope"),
                         (["steps"], "one rollout"), (["theory", rollout], "no path"), (["steps", rollout, "--lr", "0"], "above 0"),
                         (["curves", runs[0], "--only", "x"], "named like x"), (["passk", runs[3]], "--eval_every"), (["table", __file__], "cannot be read")):
        with pytest.raises(SystemExit) as e:
            analyze.main([*map(str, flags)])
        assert e.value.code and named in f"{e.value.code} {capsys.readouterr().err}"


def test_bootstrap():
    assert analyze.bootstrap([0.3]) == (0.3, 0.3, 0.3)
    assert analyze.bootstrap([0.0, 1.0]) == (0.5, 0.0, 1.0)
    mean, low, high = analyze.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0])  # all 3,125 resamples: the 79th from either end
    assert (mean, low, high) == pytest.approx((3.0, 1.8, 4.2))
    mean, low, high = analyze.bootstrap([float(i) for i in range(100)])
    assert mean == 49.5 and low == pytest.approx(49.5 - 1.96 * 2.9, abs=0.4) and high == pytest.approx(49.5 + 1.96 * 2.9, abs=0.4)


@functools.cache
def masses_of_128():
    return analyze.masses(128)


@pytest.mark.parametrize("name", analyze.MASSES)
def test_gradient_masses_are_those_of_the_formulas(name):
    """Groups of 128 come close to groups without end."""
    for p, pos, neg in masses_of_128()[name]["measured"]:
        assert (pos, neg) == pytest.approx(analyze.MASSES[name](p), rel=1e-2, abs=8e-3)


# ---------------------------------------------------------------------------- the anatomy of an update


@pytest.fixture(scope="module")
def kept_run(base, tmp_path_factory):
    """One rollout of fade in 4 steps, with the checkpoint after it."""
    out = tmp_path_factory.mktemp("kept") / "run"
    train.main(["--model", base, "--loss", "fade", "--out", str(out), "--save_rollouts", *(
        "--sampler transformers --rollouts 1 --problems_per_rollout 16 --group_size 8 --steps_per_rollout 4 --max_tokens 16 --max_prompt_tokens 16 "
        "--lr 1e-3 --eval_every 0 --tokens_per_micro_batch 4096 --warmup 2 --schedule cosine --entropy_coef 0.01").split()])
    return out


@pytest.fixture
def kept(kept_run):
    return anatomy.open_rollout(kept_run / "rollouts" / "rollout_000001.pt")


def test_a_walk_takes_the_runs_own_steps(kept, kept_run):
    """The weights after it are those of the run's checkpoint, bit for bit."""
    assert [taken for taken, *_ in anatomy.walk(kept)] == [0, 1, 2, 3, 4]
    after = policy.load(kept_run / "checkpoints" / "rollout_000001", None, kept.batch.rows([0, 1, 2, 3]), budget=4096).state_dict()
    for name, value in kept.policy.state_dict().items():
        assert torch.equal(value, after[name]), name


def test_subsets_of_tokens_add_up_to_the_gradient(kept):
    told = anatomy.gradients(kept)
    assert told["after"] == 2 and told["sum_error"] < 2e-6  # the entropy bonus is taken apart, too
    assert told["subsets"]["full"]["norm"] == pytest.approx(1) and told["subsets"]["full"]["angle"] < 1e-3
    assert len(told["subsets"]["full"]["matrices"]) == 3 * 7  # blocks x weight matrices
    assert told["subsets"]["no clip"]["norm"] != told["subsets"]["full"]["norm"]  # at 1e-3, something is clipped


def test_subsets_add_up_closer_in_float64(kept):
    kept.policy.double()  # but for transformers' RMSNorm, which is in float32
    told = anatomy.gradients(kept, layers=1, k=4)
    assert told["sum_error"] < 2e-7 and len(told["subsets"]["full"]["matrices"]) == 7


def test_steps(kept):
    told = anatomy.steps(kept)
    assert list(told["slope"]) == [1, 2, 4] and len(told["tables"]) == 4
    assert sum(line["tokens"] for table in told["tables"] for line in table) <= int(kept.batch.mask.sum())  # those without advantage are in no line
    for table in told["tables"]:
        assert sum(line["gradient"] for line in table) == pytest.approx(1, abs=1e-5)
    assert all(line["clipped"] in (0, None) for line in told["tables"][0])  # ratios are 1
    assert told["ratios"]["low"]["std"] > told["ratios"]["high"]["std"] > 0


def some_tokens(pi, ratio, advantage):
    pi, ratio, advantage = (torch.tensor([x], dtype=torch.float64) for x in (pi, ratio, advantage))
    return Tokens(pi.log(), (pi / ratio).log(), advantage, torch.ones_like(pi, dtype=torch.bool), torch.zeros_like(pi))


def test_gradient_sizes_are_those_of_the_formula():
    """(1 - pi) rho |A| where PPO does not clip, 0 where it does."""
    tokens = some_tokens([0.1, 0.1, 0.9, 0.9], [1.1, 1.5, 1.5, 0.5], [2.0, 2.0, -1.0, -1.0])
    method, hp = METHODS["grpo"], METHODS["grpo"].flags
    assert anatomy.pull(tokens, method, hp)[0].tolist() == pytest.approx([2.2, 0, 1.5, 0])
    told = anatomy.dominance(tokens, method, hp)
    assert told["low"]["mean"] == pytest.approx(0.9 * 2.2 / 2) and told["high"]["mean"] == pytest.approx(0.1 * 1.5 / 2)
    table = {(line["sign"], line["bin"]): line for line in anatomy.token_table(tokens, method, hp)}
    assert table[1, 0]["clipped"] == 0.5 and table[1, 0]["weight"] == pytest.approx(0.55) and table[-1, 4]["tokens"] == 2


def test_slope_of_a_spread_that_is_known():
    g = torch.Generator().manual_seed(0)
    pi = torch.rand(1, 100_000, generator=g, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    for power in (1, 2):
        ratio = 1 + 0.01 * (1 - pi) ** power * torch.randn(pi.shape, generator=g, dtype=torch.float64)
        tokens = Tokens(pi.log() + ratio.log(), pi.log(), torch.ones_like(pi), torch.ones_like(pi, dtype=torch.bool), pi)
        assert anatomy.slope(anatomy.spread(tokens)) == pytest.approx(power, abs=0.15)  # 20 wide bins: a little low


def test_principal_angles():
    e = torch.eye(6, dtype=torch.float64)
    assert anatomy.angle(e[:2], e[:2]) == pytest.approx(0, abs=1e-5) and anatomy.angle(e[:2], e[2:4]) == pytest.approx(90)
    turned = torch.stack([math.cos(0.5) * e[0] + math.sin(0.5) * e[3], e[1]])
    assert anatomy.angle(e[:2], turned) == pytest.approx(math.degrees(0.5) / 2, abs=1e-5)
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5]))
    assert anatomy.angle(anatomy.right_subspace(matrix, 2), e[:2, :4]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("s, low, high", [(0.2, 0.2, 0.2), (0.4, 0.2, 0.3), (0.8, 0.2, 0.28)])
def test_equation_53_is_the_expectation_and_56_is_not(s, low, high):
    mean, error, _ = anatomy.monte_carlo(s, low, high)
    assert abs(mean - anatomy.expected_gradient(s, low, high)) < 4 * error
    assert abs(mean - anatomy.expected_gradient(s, low, high, 56)) > 20 * error


def test_entropy_changes(kept):
    told = anatomy.entropy_changes(kept)
    found = told["advantages"]
    assert found["raw"]["mass_neg"] == 0 and found["asym"]["mass_pos"] == pytest.approx(2 * found["asym"]["mass_neg"], rel=0.02)  # lengths differ a little
    assert all(v["measured"] != 0 for v in found.values())
    h = kept.batch.entropy[kept.batch.mask].mean().item()
    for v in found.values():  # over mean |A| = m_S + m_F
        assert v["predicted"] - v["covariance"] == pytest.approx((v["mass_pos"] - v["mass_neg"]) * h / (v["mass_pos"] + v["mass_neg"]), rel=0.02, abs=1e-3)
        assert v["covariance"] - v["reversed"] == pytest.approx(v["predicted"] - v["covariance"])
    points = [(v["predicted"], v["measured"]) for v in found.values()]
    assert told["correlation_predicted"] == pytest.approx(statistics.correlation(*zip(*points)), abs=1e-6)


def test_a_selection_has_no_gradient_outside_of_it(kept):
    """top_entropy's other tokens carry nothing, and are not called clipped."""
    tokens, method = kept.tokens(), METHODS["top_entropy"]
    size = anatomy.gradient_size(tokens, method, method.flags)[tokens.mask]
    assert 0.05 < (size > 0).float().mean() <= 0.25 and anatomy.pull(tokens, method, method.flags)[tokens.mask].min() >= 0
    table = anatomy.token_table(tokens, method, method.flags)
    assert all(line["clipped"] in (0, None) for line in table) and sum(line["gradient"] for line in table) == pytest.approx(1, abs=1e-5)


def test_rollouts_that_cannot_be_taken_apart(kept_run, kept, tmp_path):
    file = kept_run / "rollouts" / "rollout_000001.pt"
    for change, named in ((dict(rewards=torch.zeros(16, 8)), "no completion"), (dict(flags={**kept.flags, "lora_rank": 4}), "adapters")):
        torch.save({**torch.load(file, weights_only=False), **change}, tmp_path / "changed.pt")
        with pytest.raises(ValueError, match=named):
            anatomy.open_rollout(tmp_path / "changed.pt")
    for f in (lambda: anatomy.steps(kept, 7), lambda: anatomy.gradients(kept, after=5)):
        with pytest.raises(ValueError, match="do not divide|took 4"):
            f()


def test_replay_gives_what_the_run_had(base, kept_run, tmp_path):
    """Loss, gradient norm and clip fraction of the very step that the run took, and the cosines of other methods' gradients."""
    run = tmp_path / "run"
    train.main(["--model", base, "--loss", "fade", "--out", str(run), "--save_rollouts", *(
        "--sampler transformers --rollouts 1 --problems_per_rollout 8 --group_size 8 --steps_per_rollout 1 --max_tokens 16 --max_prompt_tokens 16 "
        "--lr 1e-3 --eval_every 0").split()])
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    file = run / "rollouts" / "rollout_000001.pt"
    told = anatomy.replay(anatomy.open_rollout(file), METHODS)
    assert list(told["methods"]) == list(METHODS)
    assert told["methods"]["fade"]["grad_norm"] == pytest.approx(record["optim/grad_norm"], rel=1e-4)
    assert told["methods"]["fade"]["loss"] == pytest.approx(record["loss/total"], rel=1e-4, abs=1e-7)
    cosine = {(a, b): v for a, line in zip(told["methods"], told["cosine"]) for b, v in zip(told["methods"], line)}
    assert all(cosine[m, m] == pytest.approx(1, abs=1e-4) for m in METHODS)
    assert cosine["grpo", "acpo"] == pytest.approx(1, abs=1e-4) and cosine["grpo", "reinforce"] < 0.99  # one step: ratios of 1
    # at the checkpoint after it, ratios are spread
    assert "| acpo |" in analyzed("replay", file, "--model", run / "checkpoints" / "rollout_000001", "--methods", "grpo,acpo,p3o", "--out", tmp_path / "after.png")
    after = json.loads((tmp_path / "after.json").read_text())["methods"]
    assert list(after) == ["grpo", "acpo", "p3o"] and after["grpo"]["approx_kl"] > 1e-4 > abs(told["methods"]["grpo"]["approx_kl"])
    assert after["acpo"]["clip_frac"] <= after["grpo"]["clip_frac"]


@pytest.mark.parametrize("what", ["steps", "subsets", "entropy", "theory"])
def test_figures_of_a_rollout(kept_run, tmp_path, what, capsys):
    file = [str(kept_run / "rollouts" / "rollout_000001.pt")]
    analyze.main([what, *(file if what != "theory" else []), "--out", str(tmp_path / "f.png")])
    assert (tmp_path / "f.png").stat().st_size > 10_000 and json.loads((tmp_path / "f.json").read_text())
    assert "|---|" in capsys.readouterr().out


@pytest.mark.parametrize("x, wanted", [(float("nan"), None), (float("inf"), None), (1.5, 1.5), (3, 3), ("nan", "nan"),
                                       ({"a": [float("nan"), {"b": 1.0}]}, {"a": [None, {"b": 1.0}]})])
def test_what_is_logged_is_json(x, wanted):
    assert log.numbers(x) == wanted


def test_only_the_last_token_is_left_out_of_a_text(tokenizer):
    ids = tokenizer.encode("<answer>7+1<pad>+9</answer><eos>")
    assert data.decode(tokenizer, Completion(ids, [], False)) == "<answer>7+1<pad>+9</answer>"
    assert data.decode(tokenizer, Completion(ids[:3], [], True)) == "<answer>7+"

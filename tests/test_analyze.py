"""analyze.py, log.py: figures and tables from runs that are whole, cut off, or without an evaluation."""

import json
import subprocess
import sys

import pytest

import analyze
import data
import log
import train
from conftest import ROOT
from losses import METHODS
from sampler import Completion


def write_run(folder, seed=0, lr=1e-3, evaluated=True, rollouts=3, torn=False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(flags=dict(loss="grpo", steps_per_rollout=2, seed=seed, lr=lr, out=str(folder)))))
    records = [{"rollout": r, "time/rollout": 1.0 + r, "policy/entropy": 0.5, "clip/frac": 0.25, "reward/mean": 0.1 * r} for r in range(1, rollouts + 1)]
    if evaluated:
        for record in records:
            record.update({"eval/countdown/mean@4": 0.1 * record["rollout"] + 0.1 * seed, "eval/countdown/pass@2": 0.2, "eval/countdown/pass@4": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + ('{"rollout": 9, "poli' if torn else ""))
    return folder


def test_table(tmp_path, capsys):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1, torn=True), write_run(tmp_path / "c", lr=0.5),
            write_run(tmp_path / "d", lr=0.7, evaluated=False, rollouts=1)]
    analyze.table(runs, tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert lines[0] == "| grpo | 2 | 2 | 0.350 (0.300-0.400) | 0.500 (0.500-0.500) | 0.500 (0.500-0.500) | 0.250 (0.250-0.250) | 3.000 (3.000-3.000) |"
    assert lines[1].startswith("| grpo | 2 | 1 | 0.300 |")  # another learning rate is another line
    assert lines[2] == "| grpo | 2 | 1 | - | - | 0.500 | 0.250 | 2.000 |"
    analyze.curves(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_replay_gives_what_the_run_had(base, tmp_path, capsys):
    """Loss, gradient norm and clip fraction of the very step that the run took, and the cosines of other methods' gradients."""
    train.main(["--model", base, "--loss", "fade", "--out", str(tmp_path / "run"), "--save_rollouts", "--save_every", "1", *(
        "--sampler transformers --rollouts 2 --problems_per_rollout 8 --group_size 8 --steps_per_rollout 1 --max_tokens 16 --max_prompt_tokens 16 "
        "--lr 1e-3 --eval_every 0").split()])
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    file = str(tmp_path / "run" / "rollouts" / "rollout_000001.pt")
    analyze.replay(file, tmp_path / "replay.png")
    told = json.loads((tmp_path / "replay.json").read_text())
    assert list(told["methods"]) == list(METHODS) and (tmp_path / "replay.png").stat().st_size > 10_000
    assert told["methods"]["fade"]["grad_norm"] == pytest.approx(record["optim/grad_norm"], rel=1e-4)
    assert told["methods"]["fade"]["loss"] == pytest.approx(record["loss/total"], rel=1e-4, abs=1e-7)
    cosine = {(a, b): v for a, line in zip(told["methods"], told["cosine"]) for b, v in zip(told["methods"], line)}
    assert all(cosine[m, m] == pytest.approx(1, abs=1e-4) for m in METHODS)
    assert cosine["grpo", "acpo"] == pytest.approx(1, abs=1e-4) and cosine["grpo", "reinforce"] < 0.99  # one step: ratios of 1
    # at the checkpoint after it, ratios are spread
    done = subprocess.run([sys.executable, "analyze.py", "replay", file, "--model", tmp_path / "run" / "checkpoints" / "rollout_000001",
                           "--methods", "grpo,acpo,p3o", "--out", tmp_path / "after.png"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "| acpo |" in done.stdout, done.stderr
    after = json.loads((tmp_path / "after.json").read_text())["methods"]
    assert list(after) == ["grpo", "acpo", "p3o"] and after["grpo"]["approx_kl"] > 1e-4 > abs(told["methods"]["grpo"]["approx_kl"])
    assert after["acpo"]["clip_frac"] <= after["grpo"]["clip_frac"]
    for flags, named in ((["replay", __file__], "cannot be used"), (["replay", file, "--methods", "nope"], "nope"), (["table", str(tmp_path), "--model", "x"], "--model")):
        done = subprocess.run([sys.executable, "analyze.py", *flags], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode and named in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("x, wanted", [(float("nan"), None), (float("inf"), None), (1.5, 1.5), (3, 3), ("nan", "nan"),
                                       ({"a": [float("nan"), {"b": 1.0}]}, {"a": [None, {"b": 1.0}]})])
def test_what_is_logged_is_json(x, wanted):
    assert log.numbers(x) == wanted


def test_only_the_last_token_is_left_out_of_a_text(tokenizer):
    ids = tokenizer.encode("<answer>7+1<pad>+9</answer><eos>")
    assert data.decode(tokenizer, Completion(ids, [], False)) == "<answer>7+1<pad>+9</answer>"
    assert data.decode(tokenizer, Completion(ids[:3], [], True)) == "<answer>7+"

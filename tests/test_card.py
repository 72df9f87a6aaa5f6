"""Model cards of checkpoints."""

import contextlib
import json
import re
import shlex
import shutil
from types import SimpleNamespace

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.cli.hf import app

import train
from conftest import ROOT
from experiment import card

FLAGS = ("--sampler transformers --rollouts 3 --problems_per_rollout 2 --group_size 2 --loss fade "
         "--steps_per_rollout 1 --max_tokens 8 --max_prompt_tokens 16 --eval_every 2 --keep 9 "
         "--eval_problems 4 --eval_samples 2 --save_every 1 --delta_min 0.5").split()
PATH = re.compile(r"(?<![\w.:/<])/\w")  # the start of an absolute path


def test_the_card_has_the_runs_evaluation_and_is_the_same_in_a_resumed_run(base, tmp_path):
    out = tmp_path / "run"
    train.main(["--model", base, *FLAGS, "--out", str(out)])
    cards = [out / "checkpoints" / f"rollout_{rollout:06d}" / "README.md" for rollout in (2, 3)]
    before = [path.read_text() for path in cards]
    read = ModelCard(before[0])
    result, = read.data.eval_results
    assert (result.metric_type, result.metric_name) == ("pass@1", "mean@2")
    assert f'"eval/countdown/mean@2": {result.metric_value}' in (out / "metrics.jsonl").read_text()
    assert read.data.base_model is None and "fade" in read.data.tags
    for words in ("delta_min=0.5", "train.py --loss fade", "--delta_min 0.5", "transformers"):
        assert words in read.text and not PATH.search(read.content)
    for path in cards:
        shutil.rmtree(path.parent)
    train.main(["--out", str(out), "--resume"])
    for path, text in zip(cards, before, strict=True):  # the checkout may have changed
        assert path.read_text().split("Commit")[0] == text.split("Commit")[0]


def test_a_model_and_a_data_set_of_the_hub(tmp_path):
    flags = dict(model="Qwen/Qwen2.5-7B", data="gsm8k", eval_data="/data/own.jsonl", lr=1e-6)
    (tmp_path / "config.json").write_text(json.dumps(dict(flags=flags, versions={}, git=None)))
    (tmp_path / "metrics.jsonl").write_text('{"rollout": 3, "eval//data/own.jsonl/mean@4": 0.5}\n')
    args, method = train.parse_args(["--model", flags["model"], "--data", "gsm8k", "--out", "new"])
    args.eval_data, args.eval_samples = flags["eval_data"], 4
    read = ModelCard(card.text(args, method, tmp_path, 3))
    assert read.data.base_model == flags["model"] and read.data.datasets == "openai/gsm8k"
    assert "--model Qwen/Qwen2.5-7B --data gsm8k --eval_data own.jsonl --lr 1e-06" in read.text
    assert read.data.eval_results[0].dataset_type == "own.jsonl" and not PATH.search(read.content)
    other = ModelCard(card.text(args, method, tmp_path, 4))  # weights without an evaluation
    assert other.data.eval_results is None and "after rollout 3: {'mean@4': 0.5}" in other.text


def test_the_command_uploads_no_state_of_the_trainer(tmp_path, monkeypatch):
    """hf takes one value for each --exclude; a second one would be the path in the repository."""
    page = (ROOT / "docs" / "running.md").read_text()
    words, asked = shlex.split(re.search(r"^hf (upload .*)$", page, re.M)[1]), {}
    words[2] = str(tmp_path)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, **kw: SimpleNamespace(**kw))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **kw: asked.update(kw))
    with contextlib.suppress(AttributeError):  # of the answer, which is None here
        app(words, standalone_mode=False)
    assert "trainer.pt" in asked["ignore_patterns"] and asked["path_in_repo"] == "."

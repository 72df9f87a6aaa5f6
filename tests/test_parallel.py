"""parallel.py: two ranks, each with an engine, compute what one does; whole runs under torchrun."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import eval as evaluation
import ranks
import train
from engine import policy
from harness import log
from helpers import SMALL, needs_vllm, read_rows, torchrun, without
from losses import METHODS


def same(a, b, limit):
    for one, two in zip(a["told"], b["told"]):
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=limit, abs=limit), name
    assert apart(a, b) <= limit


def apart(a, b):
    return max((weight - b["weights"][name]).abs().max() for name, weight in a["weights"].items())


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "two"
    torchrun(2, "tests/ranks.py", model, out, forks=True)
    return torch.load(out)


@pytest.fixture(scope="module")
def one(model):
    return {name: ranks.run(model, name) for name in METHODS}


def test_two_ranks_make_the_same_updates_with_every_method(model, one, two):
    for name in METHODS:
        assert len(one[name]["told"]) == 4 * len(METHODS[name].passes)
        same(one[name], two["plain"][name], 1e-9)
    assert apart(one["grpo"], one["acpo"]) > 1e-4  # methods differ: this test can fail
    assert two["bytes"] == ranks.bytes_of_a_token(model) > 0
    # where steps have no row with an advantage, some methods of each kind
    for name, result in two["uniform"].items():
        alone = ranks.run(model, name, "uniform")
        same(alone, result, 1e-9)
        if name == "grpo":
            assert [step["grad_norm"] > 0 for step in alone["told"]] == [True, False, False, True]


@pytest.mark.parametrize("option", ["shared", "checkpointing", "lora", "float32"])
def test_and_with_the_model_computed_otherwise(model, one, two, option):
    for name in ("grpo", "acpo"):
        alone = one[name]
        if option in ("lora", "float32"):
            alone = ranks.run(model, name, option)
            # merged: a checkpoint like any other
            assert alone["weights"].keys() == one[name]["weights"].keys()
        same(alone, two[option][name], 1e-5 if option == "float32" else 1e-9)


def test_two_ranks_skip_a_step_together(model, two):
    """In float16: the number that is not finite stands in one rank's shard alone."""
    results = ranks.run(model, "grpo", "overflow"), two["overflow"]["grpo"]
    for told in (result["told"] for result in results):
        assert [step["overflow"] for step in told] == [0, 1, 0, 0]
        assert [step["steps"] for step in told] == [1, 1, 2, 3]
        assert [step["scale"] for step in told] == [2.0**10, 2.0**9, 2.0**9, 2.0**9]
    assert apart(*results) < 5e-3


@needs_vllm
def test_a_whole_run_with_one_vllm_engine_of_two_ranks(base, tmp_path):
    """An engine for each rank: test_check.py"""
    done = torchrun(2, "train.py", "--model", base, "--out", tmp_path / "run", *SMALL, *(
        "--sampler vllm --lr 1e-3 --tp 2 --activation_checkpointing --lora_rank 4 "
        "--entropy_coef 0.01").split(), forks=True)
    records = read_rows(tmp_path / "run")
    assert [r["rollout"] for r in records] == [0, 1, 2] and done.stdout.count("done:") == 1
    assert all(r["sampler/logp_absdiff_max"] < 1e-4 for r in records[1:])
    assert records[1]["len/sum"] > 16 * 3 and records[1]["groups/sampled"] >= 4
    assert (tmp_path / "run" / "curves.png").exists() and "ranks: 2" in done.stdout
    assert records[2]["optim/grad_norm"] > 0


def test_one_rank_by_hand_with_offload(small, tmp_path):
    """As Slurm's srun starts it: by the variables alone."""
    torchrun(1, "train.py", "--model", small(), "--out", tmp_path / "run", *SMALL, "--rollouts",
             "1", "--eval_every", "0", "--no-share_prompts", "--offload", "--entropy_coef", "0.01",
             RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29511",
             forks=True)
    record = read_rows(tmp_path / "run")[-1]
    assert record["optim/grad_norm"] > 0 and record["sampler/logp_absdiff_max"] < 1e-4


def test_bad_flags_under_torchrun_are_said_once(tmp_path):
    done = torchrun(2, "train.py", "--problems_per_rollout", "1", check=False)
    assert done.returncode and done.stderr.count("number of engines, 2") == 1


def test_saved_on_two_ranks_resumed_on_one(base, tmp_path, monkeypatch):
    """The resumed run makes the same weights to 1e-6 of the same rollouts, by --save_rollouts."""
    two, saved = tmp_path / "two", {}
    torchrun(2, "train.py", "--out", two, "--model", base, *SMALL, *(
        "--loss fade --entropy_coef 0.01 --kl_coef 0.1 --drop_uniform_groups --save_rollouts "
        "--save_every 1").split(), forks=True)
    one = without(two, tmp_path / "one", 2)

    def sampled(*given, own=train.sample_and_grade):
        rollout = given[4]
        saved.update(torch.load(two / "rollouts" / f"rollout_{rollout:06d}.pt"))
        return own(*given)

    monkeypatch.setattr(train, "sample_and_grade", sampled)
    monkeypatch.setattr(train, "score", lambda *_: (
        policy.Batch(**saved["batch"]),
        {"policy/entropy": saved["state"]["entropy"], log.GAP: 0}))
    monkeypatch.setattr(train, "shaped", lambda *_: saved["shaped_rewards"])
    train.main(["--out", str(one), "--resume"])
    a, b = (load_file(folder / "checkpoints" / "rollout_000002" / "model.safetensors")
            for folder in (two, one))
    assert all((a[k] - b[k]).abs().max() <= 1e-6 for k in a)
    before = load_file(Path(base) / "model.safetensors")
    assert any((a[k] - before[k]).abs().max() > 1e-5 for k in a)
    assert read_rows(two)[1]["groups/sampled"] >= 4
    assert all(r["sampler/logp_absdiff_max"] < 1e-4 for r in read_rows(two)[1:])
    assert read_rows(two)[-1]["adv/fade_entropy"] == pytest.approx(
        read_rows(one)[-1]["adv/fade_entropy"], abs=1e-6)


def test_eval_uses_all_ranks_and_continues(base, tmp_path, monkeypatch):
    """Two ranks stop after two chunks, one continues: each problem has its completions once."""
    flags = ["--model", base, "--limit", "12", "--samples", "2", "--sampler", "transformers"]
    code, out = tmp_path / "small_chunks.py", tmp_path / "out"
    code.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import eval\neval.AT_ONCE = 4\nown, chunks = eval.append, []\n"
        "def append(path, rows):\n"
        "    own(path, rows); chunks.append(len(rows))\n"
        "    if len(chunks) == 2: raise OSError('end')\n"
        "eval.append = append\neval.main(sys.argv[1:])\n")
    done = torchrun(2, code, *flags, "--out", out, check=False, forks=True)
    assert done.returncode and "eval.py: end" in done.stderr
    path = out / "completions.jsonl"
    before = path.read_text()
    assert before.count("completion\"") == 16  # two chunks of 4 problems x 2
    monkeypatch.setattr(evaluation, "AT_ONCE", 4)
    evaluation.main([*flags, "--out", str(out)])
    rows = read_rows(path)
    assert path.read_text().startswith(before)
    assert len(rows) == 24 and len({row["id"] for row in rows}) == 12
    result = json.loads((out / "eval.json").read_text())["results"]["countdown"]
    assert result["problems"] == 12 and result["samples"] == 2


@needs_vllm
def test_an_engine_without_problems_is_in_nobodys_way(base, tmp_path):
    """And an engine that ends leaves the process group to the other ranks, and says nothing."""
    done = torchrun(2, "eval.py", "--model", base, "--limit", "1", "--samples", "2", "--sampler",
                    "vllm", "--out", tmp_path / "out", forks=True)
    assert len(read_rows(tmp_path / "out" / "completions.jsonl")) == 2
    assert "Traceback" not in done.stderr

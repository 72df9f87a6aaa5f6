"""parallel.py: two ranks compute what one does, each with an engine of its own; whole runs under
torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks
from conftest import ROOT
from engine import policy
from engine.sampler import has_vllm
from losses import METHODS


def torchrun(ranks, *command, timeout=1800, check=True):
    """Runs a script of this repository on so many ranks, one thread each; torchrun is left out for
    one."""
    start = (
        [sys.executable]
        if ranks == 1
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
        ]
    )
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*start, *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=dict(env, OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0 or not check, (
        done.stdout[-2000:]
        + "".join(line for line in done.stderr.splitlines(True) if "Triton" not in line)[-9000:]
    )
    return done


def same(a, b, limit):
    for one, two in zip(a["told"], b["told"]):
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=limit, abs=limit), name
    for name, weight in a["weights"].items():
        assert (weight - b["weights"][name]).abs().max() <= limit, name
    return True


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory):
    """Every method on one rank."""
    out = tmp_path_factory.mktemp("ranks")
    model = small()
    torchrun(1, "tests/ranks.py", model, out / "one", "all")
    return model, out, torch.load(out / "one")


def test_two_ranks_make_the_same_updates_with_every_method(alone):
    model, out, one = alone
    sampler = "vllm" if has_vllm() else "transformers"
    torchrun(2, "tests/ranks.py", model, out / "two", "all", sampler)
    two = torch.load(out / "two")
    before = torch.load(out / "one")["grpo"]["weights"]
    for name in METHODS:
        assert len(one[name]["told"]) == 4 * len(METHODS[name].passes)
        same(one[name], two[name], 1e-9)
    assert any(
        (before[k] - one["acpo"]["weights"][k]).abs().max() > 1e-4 for k in before
    )  # methods differ: this test can fail
    assert two["gap"] < 1e-4


def test_and_where_steps_have_no_row_with_an_advantage(small, tmp_path, monkeypatch):
    """Left out of the model or not, on one rank and on two: the same updates, with every method."""
    model = small()
    torchrun(2, "tests/ranks.py", model, tmp_path / "two", "all", "-", "uniform")
    two = torch.load(tmp_path / "two")
    for name in METHODS:
        left_out = ranks.run(model, name, ["uniform"])
        with monkeypatch.context() as patch:
            patch.setattr(policy, "rows_to_learn", lambda batch, *_, **__: [*range(len(batch.ids))])
            whole = ranks.run(model, name, ["uniform"])
        same(whole, left_out, 1e-9)
        same(whole, two[name], 1e-9)
        tokens, all_tokens = ([step["learnt_tokens"] for step in result["told"]]
                              for result in (left_out, whole))
        assert (tokens == all_tokens) == METHODS[name].whole_step
        if name == "grpo":
            assert [step["grad_norm"] > 0 for step in whole["told"]] == [True, False, False, True]
            assert tokens[1] < all_tokens[1] / 3  # a row stands in for none


@pytest.mark.parametrize("options", ["shared", "checkpointing", "lora", "float32"])
def test_and_with_the_model_computed_otherwise(alone, options):
    model, out, one = alone
    torchrun(2, "tests/ranks.py", model, out / "two", "grpo,acpo", "-", options)
    two = torch.load(out / "two")
    if options in ("lora", "float32"):
        torchrun(1, "tests/ranks.py", model, out / "three", "grpo,acpo", "-", options)
        one = torch.load(out / "three")
        assert (
            one["grpo"]["weights"].keys() == alone[2]["grpo"]["weights"].keys()
        )  # merged: a checkpoint like any other
    for name in ("grpo", "acpo"):
        same(one[name], two[name], 1e-5 if options == "float32" else 1e-9)


SMALL = (
    "--rollouts 2 --problems_per_rollout 4 --group_size 4 --steps_per_rollout 2 --lr 1e-4 "
    "--eval_every 1 --eval_problems 4 "
    "--eval_samples 2 --max_tokens 12 --max_prompt_tokens 16 --save_every 1"
).split()


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed")
def test_a_whole_run_on_two_ranks_with_vllm(base, tmp_path):
    done = torchrun(
        2,
        "train.py",
        "--model",
        base,
        "--out",
        tmp_path / "run",
        *SMALL,
        "--sampler",
        "vllm",
        "--drop_uniform_groups",
        "--kl_coef",
        "0.1",
    )
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [r["rollout"] for r in records] == [0, 1, 2] and done.stdout.count("done:") == 1
    assert (
        all(r["sampler/logp_absdiff_max"] < 1e-4 for r in records[1:])
        and records[1]["len/sum"] > 16 * 3
    )
    assert (tmp_path / "run" / "curves.png").exists() and "2 ranks" in done.stdout


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed")
def test_one_engine_over_two_ranks(base, tmp_path):
    torchrun(
        2,
        "train.py",
        "--model",
        base,
        "--out",
        tmp_path / "run",
        *SMALL,
        "--sampler",
        "vllm",
        "--tp",
        "2",
        "--activation_checkpointing",
        "--lora_rank",
        "4",
        "--entropy_coef",
        "0.01",
    )
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        all(r["sampler/logp_absdiff_max"] < 1e-4 for r in records[1:])
        and records[1]["groups/sampled"] == 4
    )
    assert records[2]["optim/grad_norm"] > 0


def test_one_rank_by_hand_with_offload_and_compile(small, tmp_path):
    """As Slurm's srun starts it: by the variables alone."""
    env = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost",
               MASTER_PORT="29511", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "train.py", "--model", small(), "--out", str(tmp_path / "run"), *SMALL,
         "--sampler", "transformers", "--rollouts", "1", "--eval_every", "0", "--no-share_prompts",
         "--offload", "--compile", "--entropy_coef", "0.01"],
        cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, record = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert record["optim/grad_norm"] > 0 and record["sampler/logp_absdiff_max"] < 1e-4


def test_bad_flags_under_torchrun_are_said_once(tmp_path):
    done = torchrun(2, "train.py", "--lr", "0", check=False)
    assert done.returncode and done.stderr.count("--lr must be above 0") == 1
    done = torchrun(2, "train.py", "--problems_per_rollout", "1", check=False)
    assert done.returncode and "number of engines, 2" in done.stderr


def test_saved_on_two_ranks_resumed_on_one(base, tmp_path):
    """The same rollouts to learn from come out of --save_rollouts; weights after the resumed one
    equal to 1e-6."""
    flags = [
        "--model",
        base,
        "--sampler",
        "transformers",
        *SMALL,
        "--loss",
        "fade",
        "--entropy_coef",
        "0.01",
        "--save_rollouts",
    ]
    torchrun(2, "train.py", "--out", tmp_path / "two", *flags)
    Path(tmp_path / "one").mkdir()
    for name in ("config.json", "metrics.jsonl", "samples.jsonl"):
        (tmp_path / "one" / name).write_text((tmp_path / "two" / name).read_text())
    subprocess.run(["cp", "-r", tmp_path / "two" / "checkpoints", tmp_path / "one"], check=True)
    subprocess.run(["rm", "-r", tmp_path / "one" / "checkpoints" / "rollout_000002"], check=True)
    torchrun(
        1, "tests/replayed.py", tmp_path / "two" / "rollouts", "--out", tmp_path / "one", "--resume"
    )
    from safetensors.torch import load_file

    a, b = (
        load_file(tmp_path / name / "checkpoints" / "rollout_000002" / "model.safetensors")
        for name in ("two", "one")
    )
    assert all((a[k] - b[k]).abs().max() <= 1e-6 for k in a)
    assert any(
        (a[k] - v).abs().max() > 1e-5
        for k, v in load_file(Path(base) / "model.safetensors").items()
    )
    last = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("two", "one")
    ]
    assert last[0]["adv/fade_entropy"] == pytest.approx(last[1]["adv/fade_entropy"], abs=1e-6)

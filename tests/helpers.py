"""What several tests make, run or compare."""

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

import rewards
import train
from conftest import ROOT
from engine.sampler import has_vllm
from forked import script

CORE = ["losses.py", "train.py", "rewards.py", "eval.py", "engine/policy.py", "engine/sampler.py",
        "data/__init__.py", "data/countdown.py", "rollout.py"]
# a run of two rollouts
SMALL = (
    "--sampler transformers --rollouts 2 --problems_per_rollout 4 --group_size 4 "
    "--steps_per_rollout 2 --max_tokens 12 --max_prompt_tokens 16 --lr 1e-4 --eval_every 1 "
    "--eval_problems 4 --eval_samples 2").split()
needs_venv = pytest.mark.skipif(not list(ROOT.glob(".venv/ready-*")),
                                reason="no .venv here: ./run_all.sh test makes it")
needs_vllm = pytest.mark.skipif(not has_vllm(), reason="vllm is not installed")


def counted(problems, texts, *options, **more):
    """-> P lists of rewards, and how often rewards.grade found each kind of fault."""
    results = rewards.grade(problems, texts, *options, **more)
    faults = Counter(x.fault.kind for of in results for x in of if x.fault)
    return [[x.reward for x in of] for of in results], faults


def read_rows(path):
    """The rows of a file of JSON lines, or those of the log of the run in a folder."""
    path = Path(path)
    return [json.loads(line) for line in (path / "metrics.jsonl" if path.is_dir() else path).open()]


def write_rows(path, rows):
    """-> the path, as flags take it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(model, out, *flags):
    """A whole run, by default SMALL -> its records, the first of the evaluation before training."""
    train.main(["--model", model, "--out", str(out), *SMALL, *flags])
    return read_rows(out)


def paste(file, code, table=None):
    """Adds lines to a file of a copy of the project: below its table of this name, or at its end"""
    text = file.read_text()
    end = text.index("\n\n", text.index(f"\n{table} = ")) if table else len(text)
    file.write_text(f"{text[:end]}\n\n{code}\n{text[end:]}")


def run_all(*args, **env):
    """BENCHMARKS is a list of names to study/full.sh, and a folder to the tests."""
    return subprocess.run(["./run_all.sh", *args], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "BENCHMARKS": "", **env})


def python(*command, cwd=ROOT, env=None):
    """A script, or a command of this Python."""
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, text=True,
                          capture_output=True)


def until(condition, seconds):
    """Does a condition hold within so many seconds?"""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def torchrun(ranks, *command, timeout=1800, check=True, forks=False, **variables):
    """Runs a script of this repository on so many ranks, one thread each; torchrun is left out for
    one, and with forks. variables: of the environment."""
    start = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone",
                                   "--nproc_per_node", str(ranks)]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env.update(variables, OMP_NUM_THREADS="1")
    for last in False, True:
        done = script(*command, ranks=ranks, **variables) if forks else subprocess.run(
            [sys.executable, *start, *map(str, command)], cwd=ROOT, text=True, capture_output=True,
            timeout=timeout, env=env)
        if last or "(SIGSEGV)" not in done.stderr:
            break  # torch 2.13's gloo thread crashed in malloc, in one of some hundred launches
        if "--out" in command:
            shutil.rmtree(command[command.index("--out") + 1], ignore_errors=True)
        warnings.warn(f"a rank crashed, it starts again: {done.stderr[-999:]}", stacklevel=2)
    said = [line for line in done.stderr.splitlines(True) if "Triton" not in line]
    assert done.returncode == 0 or not check, done.stdout[-2000:] + "".join(said)[-9000:]
    return done


def refused(capsys, command, *args, code=2):
    """-> the one sentence with which command(args) ends, with this exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command([*map(str, args)])
    *bars, said = capsys.readouterr().err.splitlines(True)
    assert stop.value.code == code, said
    assert not [bar for bar in bars if bar.strip() and "%|" not in bar], bars  # of progress
    return said


def records(out):
    """metrics.jsonl without what a clock measured."""
    return [{name: x for name, x in row.items()
             if not name.startswith(("time/", "perf/", "seconds"))} for row in read_rows(out)]


def weights(out, rollout=4):
    return Path(out, "checkpoints", f"rollout_{rollout:06d}", "model.safetensors").read_bytes()


def without(whole, out, *rollouts):
    """A copy of the run without some checkpoints."""
    shutil.copytree(whole, out)
    for rollout in rollouts:
        shutil.rmtree(out / "checkpoints" / f"rollout_{rollout:06d}")
    return out


def same(out, whole):
    """Are two runs' last weights, logs and samples identical?"""
    assert weights(out) == weights(whole)
    assert records(out) == records(whole)
    assert (out / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    return True

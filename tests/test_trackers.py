"""--trackio: the real package gets what metrics.jsonl gets, without a network."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

needs_package = pytest.mark.skipif(not importlib.util.find_spec("trackio"),
                                   reason="no trackio here: pip install trackio")
TINY = ("--sampler", "transformers", "--problems_per_rollout", "4", "--group_size", "4",
        "--steps_per_rollout", "2", "--eval_every", "0")


def train(*arguments, **env):
    return subprocess.run(
        [sys.executable, "train.py", *map(str, arguments)], cwd=ROOT, text=True,
        capture_output=True,
        env=dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **env))


@pytest.mark.skipif(bool(importlib.util.find_spec("trackio")), reason="trackio is here")
def test_a_missing_package_is_a_sentence():
    done = train("--trackio", "mine")
    assert done.returncode == 2 and done.stderr == (
        "train.py: --trackio: the package trackio is not installed (pip install trackio)\n")


@needs_package
def test_a_name_that_trackio_keeps_for_itself_is_a_sentence():
    done = train("--trackio", "registry-mine")
    assert done.returncode == 2 and "--trackio registry-mine: " in done.stderr
    assert "Traceback" not in done.stderr


@needs_package
def test_it_gets_the_numbers_of_the_log(small, tmp_path):
    """Also of a run that is resumed, which stays one run there."""
    out, kept = tmp_path / "a-run", dict(TRACKIO_DIR=str(tmp_path / "trackio"))
    done = train("--model", small(), *TINY, "--rollouts", 1, "--save_every", 1, "--trackio", "mine",
                 "--out", out, **kept)
    assert done.returncode == 0, done.stderr[-2000:]
    done = train("--out", out, "--resume", "--rollouts", 2, **kept)
    assert done.returncode == 0, done.stderr[-2000:]
    code = ("import json; from trackio.sqlite_storage import SQLiteStorage as S; "
            "runs = S.get_runs('mine'); print(json.dumps([runs, S.get_logs('mine', runs[0])]))")
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True, env=dict(os.environ, **kept))
    runs, logs = json.loads(told.stdout.splitlines()[-1])
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(runs) == 1 and runs[0].startswith("a-run-") and len(logs) == len(records) == 2
    for log, record in zip(logs, records, strict=True):
        assert log["step"] == record["rollout"] and log["optimizer_step"] == record["step"]
        for name in ("reward/mean", "policy/entropy", "optim/grad_norm", "len/mean"):
            assert log[name] == pytest.approx(record[name])

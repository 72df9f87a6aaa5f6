"""docs/own_task.md: its blocks are run as they are printed, in a copy of the project."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from helpers import paste

PAGE = (ROOT / "docs" / "own_task.md").read_text()
FIRST, *SECTIONS = re.split(r"^## ", PAGE, flags=re.M)


def blocks(kind, text):
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


def test_there_are_three_ways_and_an_example():
    assert [section[0] for section in SECTIONS] == list("123A")
    assert blocks("sh", FIRST)[0].startswith("source .venv/bin/activate\n")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.split("\n")[0])
def test_the_blocks_run_as_printed(section, copy, base):
    if "reasoning-gym" in section.split("\n")[0] and not importlib.util.find_spec("reasoning_gym"):
        pytest.skip("no reasoning-gym here: pip install reasoning-gym==0.1.25")
    for code in blocks("python", section):
        verifier = "the table `REWARDS`" in section  # else a set, at the end of its file
        paste(copy / ("rewards.py" if verifier else "data/sets.py"), code, verifier and "REWARDS")
    small = blocks("sh", FIRST)[0].split("\n", 1)[1]
    env = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
               PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-e", "-c", small + "\n".join(blocks("sh", section))], cwd=copy,
                          env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    if "own_file.py runs/" in section:
        assert "right: 48" in done.stdout
    out, = re.findall(r"train.py .* --out (\S+)", section)
    records = (copy / out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout"] for line in records] == [1, 2]
    assert all(json.loads(line)["grader/error"] == 0 for line in records)

"""docs/changes.md: each of its diffs, applied to a copy, trains two rollouts."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT
from helpers import read_rows

DIFFS = re.findall(r"```diff\n--- (\S+)\n(.*?)```", (ROOT / "docs/changes.md").read_text(), re.S)
SMALL = ("--rollouts 2 --problems_per_rollout 16 --group_size 8 --steps_per_rollout 2 "
         "--eval_every 0 --save_every 1 --sampler transformers --out").split()


@pytest.mark.parametrize("name, lines", DIFFS, ids=range(len(DIFFS)))
def test_a_change_trains(name, lines, copy):
    old, new = ("".join(line[1:] for line in lines.splitlines(True) if line[0] == sign)
                for sign in "-+")
    path = copy / name
    text = path.read_text()
    assert text.count(old) == 1, f"{name} has no such lines any more"
    path.write_text(text.replace(old, new))
    done = subprocess.run([sys.executable, "train.py", *SMALL, "run"], cwd=copy,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1000:]
    first, last = read_rows(copy / "run")
    assert first["optim/grad_norm"] > 0 and last["rollout"] == 2


def test_there_are_five():
    assert len(DIFFS) == 5

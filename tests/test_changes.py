"""examples/changes: each diff is applied to a copy, which trains two rollouts."""

import os
import shutil
import subprocess

import pytest

from conftest import ROOT
from helpers import python, read_rows

DIFFS = sorted((ROOT / "examples/changes").glob("*.diff"))
SMALL = ("--rollouts 2 --problems_per_rollout 16 --group_size 8 --steps_per_rollout 2 "
         "--eval_every 0 --save_every 1 --sampler transformers --out").split()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_a_change_trains(diff, copy):
    env = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}
    alone = dict(cwd=copy, env={**env, "GIT_CEILING_DIRECTORIES": str(copy.parent)})
    apply = ["git", "apply", diff]
    subprocess.run(apply, **alone, check=True)
    assert subprocess.run([*apply, "--check"], **alone).returncode, "nothing was changed"
    done = python("train.py", *SMALL, "run", cwd=copy)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1000:]
    first, last = read_rows(copy / "run")
    assert first["optim/grad_norm"] > 0 and last["rollout"] == 2


def test_each_is_on_the_page():
    page = (ROOT / "docs/changes.md").read_text()
    assert len(DIFFS) == 6 and all(f"examples/changes/{diff.name})" in page for diff in DIFFS)

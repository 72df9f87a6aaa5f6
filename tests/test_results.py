"""docs/lessons.md and bench/full.txt: their commands are parsed, their examples executed."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import losses
import rewards
import train
from analysis.__main__ import make_parser
from conftest import ROOT
from losses import METHODS

LESSONS = (ROOT / "docs" / "lessons.md").read_text()
SHORT, = re.findall(r'^SHORT="(.*)"$', LESSONS, re.M)
VERIFIER, LOSS = re.findall(r"```python\n(.*?)```", LESSONS, re.S)


def lesson_commands():
    """Every train.py of the lessons, loops at their first value."""
    for line in re.findall(r"^.*python train\.py.*$", LESSONS, re.M):
        loop = re.match(r"for (\w+) in (\S+) .*?; do (.*); done$", line)
        if loop:
            line = loop[3].replace(f"${loop[1]}", loop[2])
        yield line.replace("$SHORT", SHORT)


def test_the_list_of_full_has_flags_that_exist():
    names = []
    for line in (ROOT / "bench" / "full.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, rest = line.split(maxsplit=1)
            steps, flags = rest.split("--", 1)
            for s in steps.split():
                args, _ = train.parse_args(shlex.split("--" + flags) + ["--steps_per_rollout", s])
                assert args.loss in METHODS
                names.append((name, s))
    assert len(names) == len(set(names)) >= 10


@pytest.mark.parametrize("command", lesson_commands())
def test_commands_of_the_lessons_have_flags_that_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there are no runs yet
    before = set(vars(losses))
    exec(LOSS, vars(losses))  # METHODS itself: experiment/flags.py has it, too
    near = tmp_path / "near.jsonl"
    row = dict(prompt="1", answer=dict(nums=[1], target=1), reward="countdown")
    near.write_text(json.dumps(row) + "\n")
    flags = command.split("train.py")[1].replace("runs/lesson8/near.jsonl", str(near))
    try:
        train.parse_args(shlex.split(flags))
    finally:
        del METHODS["smooth"]
        for name in set(vars(losses)) - before:
            delattr(losses, name)


def test_commands_of_the_lessons_on_runs_and_rollouts_are_taken():
    for command in re.findall(r"^python -m analysis (.*)$", LESSONS, re.M):
        make_parser().parse_args(shlex.split(command))


def test_the_lessons_have_their_figures():
    assert "{lesson" not in LESSONS
    for folder, text in ((ROOT / "docs", LESSONS), (ROOT, (ROOT / "RESULTS.md").read_text())):
        for figure in re.findall(r"!\[.*?\]\((.*?)\)", text):
            assert (folder / figure).stat().st_size > 5_000


def test_the_verifier_of_the_lesson_can_be_fooled(tmp_path):
    """In a copy with the lesson's lines directly below `REWARDS = ...`: the workers grade by it,
    and take any gold answer."""
    shutil.copytree(ROOT / "graders", tmp_path / "graders")
    text = (ROOT / "rewards.py").read_text()
    pasted = re.sub(r"^REWARDS = .*\n", lambda line: f"{line[0]}\n{VERIFIER}\n", text, flags=re.M)
    (tmp_path / "rewards.py").write_text(pasted)
    script = ("import rewards; a = dict(nums=[1, 2], target=7); "
              "problems = [dict(answer=a, reward=r) for r in ('near', 'gold_near')]; "
              "texts = [['<answer>9</answer>', '<answer>99</answer>']] * 2; "
              "print(rewards.grade(problems, texts)[0])")
    process = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True,
                             text=True)
    assert process.stdout.strip() == "[[1.0, 0.0], [1.0, 1.0]]", process.stderr
    assert rewards.REWARDS["countdown"]("<answer>9</answer>", dict(nums=[1, 2], target=7)) == 0

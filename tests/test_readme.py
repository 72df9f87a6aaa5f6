"""README.md: its commands run, its tables say what the files say."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import data
import eval
import losses
import train
from conftest import ROOT
from losses import METHODS, every_token

README = (ROOT / "README.md").read_text()
PAGES = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = [
    line.split("  #")[0].strip()
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page, re.S)
    for line in block.splitlines()
    if "$" not in line
]
CORE = [
    "losses.py",
    "train.py",
    "rewards.py",
    "engine/policy.py",
    "engine/sampler.py",
    "eval.py",
    "data/__init__.py",
    "data/countdown.py",
]


def methods_table():
    lines = []
    notes = json.loads((ROOT / "docs" / "methods.json").read_text())
    for name, m in METHODS.items():
        select = [f.__name__ for f in (m.select, *m.passes) if f is not every_token]
        source = notes.get(name, {}).get("source", m.source)
        source = (re.match(r".*?arXiv [\d.]+\d", source) or re.match(".*", source))[0]
        source = re.sub(r"arXiv ([\d.]+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
        cells = [
            m.advantage.__name__,
            ", ".join(select),
            m.objective.__name__,
            m.aggregate.__name__,
            source,
        ]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def test_the_table_of_methods_is_that_of_the_code():
    """What it says of a method is so; a method of one's own need not be in it."""
    rows = [
        line
        for line in README.splitlines()
        if line.startswith("| `") and line.split("`")[1] in METHODS
    ]
    table = methods_table()
    assert len(rows) >= 20 and set(rows) <= set(table), "\n".join(table)


def test_every_source_of_a_row_is_in_its_long_form():
    notes = json.loads((ROOT / "docs" / "methods.json").read_text())
    assert set(notes) <= set(METHODS)
    for name, note in notes.items():
        assert METHODS[name].source in note["source"], name


def test_the_reading_list_is_the_core_with_its_lengths():
    listed = dict(re.findall(r"^\| `([\w./]+)` \| (\d+) \|", README, re.M))
    assert list(listed) == CORE
    for name, lines in listed.items():
        have = len((ROOT / name).read_text().splitlines())
        assert abs(have - int(lines)) <= max(10, have // 10), f"{name} has {have} lines"


def test_pages_link_to_what_is_there():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    assert len(README.splitlines()) < 200


@pytest.mark.parametrize("command", [c for c in COMMANDS if " train.py" in c])
def test_commands_have_flags_that_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there are no runs yet
    args, method = train.parse_args(shlex.split(command.split(" train.py")[1]))
    assert args.loss in METHODS and method.flags is not None


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python eval.py")])
def test_commands_of_eval_have_flags_that_exist(command):
    args = eval.parse_args(shlex.split(command)[2:])
    assert set(args.benchmarks.split(",")) <= set(data.names())


def test_every_other_command_is_one_that_is_tested_here():
    known = (" train.py", "python eval.py", "python -m analysis", "python bench/")
    others = {c.split()[0] for c in COMMANDS if c and not any(name in c for name in known)}
    others = {first for first in others if "=" not in first}  # MODEL=... ./run_all.sh full
    known = {"./run_all.sh", "source", "python", "mkdir", "import", "for", "pip", "hf",
             "jupyter"}
    assert others <= known, others
    assert {
        "./run_all.sh",
        "./run_all.sh test",
        "python train.py --loss fade --steps_per_rollout 16",
    } <= set(COMMANDS)
    assert "run_all.sh test" in (ROOT / ".ci" / "run").read_text()


def test_the_examples_of_new_methods(monkeypatch, tmp_path):
    """They are added to losses.py, chosen, and tried on the toy batch on which flags are tried."""
    monkeypatch.chdir(tmp_path)
    names, rows = set(vars(losses)), set(METHODS)
    try:
        for code in re.findall(r"```python\n(.*?)```", README, re.S):
            exec(code, vars(losses))
        flags = {name: train.parse_args(["--loss", name])[1].flags for name in set(METHODS) - rows}
    finally:
        for name in set(vars(losses)) - names:
            delattr(losses, name)
        for name in set(METHODS) - rows:
            del METHODS[name]
    assert set(flags) == {"smooth", "unlikely"} and flags["smooth"] == dict(tau=2.0)
    assert dict(memory=0.9, unlikely_share=0.5).items() <= flags["unlikely"].items()


def test_losses_py_prints_every_card():
    done = subprocess.run([sys.executable, "losses.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and all(f"\n{name} = " in "\n" + done.stdout for name in METHODS)
    done = subprocess.run(
        [sys.executable, "losses.py", "nope"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode and "nope" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(
    not list(ROOT.glob(".venv/ready-*")), reason="no .venv here: ./run_all.sh test makes it"
)
def test_run_all(base, tmp_path):
    """Nothing is set up again, each method runs, what is done is not done again."""
    env = dict(
        os.environ,
        METHODS="grpo p3o",
        STEPS="2",
        RUNS=str(tmp_path),
        EXTRA=(
            "--sampler transformers --rollouts 1 --problems_per_rollout 4 --group_size 4 "
            "--eval_problems 4 --eval_samples 2"  # vLLM's start would be most of the time
        ),
    )

    def run_all(*args):
        return subprocess.run(
            ["./run_all.sh", *args], cwd=ROOT, env=env, capture_output=True, text=True
        )

    done = run_all()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "setting up" not in done.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    table = (tmp_path / "table.md").read_text()
    assert "| grpo | 2 | 1 |" in table and "| p3o | 2 | 1 |" in table
    grpo, p3o = (
        next(tmp_path.glob(f"{name}-2-0-*")) for name in ("grpo", "p3o")
    )  # other flags than none are in the name
    assert json.loads((grpo / "metrics.jsonl").read_text().splitlines()[-1])["rollout"] == 1
    stamp = (grpo / "metrics.jsonl").stat().st_mtime
    (p3o / "curves.png").unlink()  # as if it had been interrupted
    done = run_all()
    assert (
        done.returncode == 0
        and f"{grpo} is done" in done.stdout
        and f"{p3o} is done" not in done.stdout
    )
    assert stamp == (grpo / "metrics.jsonl").stat().st_mtime
    assert (p3o / "curves.png").exists() and "from rollout 1" in done.stdout  # went on where it was
    done = run_all("tests")
    assert done.returncode == 2 and "tests" in done.stderr


@pytest.mark.skipif(
    not list(ROOT.glob(".venv/ready-*")), reason="no .venv here: ./run_all.sh test makes it"
)
def test_run_all_full(base, tmp_path):
    """A file of runs: how long is said first, two at a time, a failure is named and the rest goes
    on, what is done is skipped."""
    grid, out = tmp_path / "grid.txt", tmp_path / "runs"
    grid.write_text("# a comment\na  2 4  --loss grpo --eps_high 0.3\n")
    env = dict(
        os.environ,
        GRID=str(grid),
        RUNS=str(out),
        MODEL=base,
        DATA="countdown",
        SEEDS="0",
        JOBS="2",
        ROLLOUTS="1",
        EXTRA=(
            "--sampler transformers --problems_per_rollout 4 --group_size 4 --eval_problems 4 "
            "--eval_samples 2 --eval_every 1 --max_tokens 16 --max_prompt_tokens 32"
        ),
    )

    def run_all(*args, **more):
        return subprocess.run(
            ["./run_all.sh", *args], cwd=ROOT, env={**env, **more}, capture_output=True, text=True
        )

    done = run_all("full")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (
        "2 runs of 1 rollouts, 2 at a time: about 0." in done.stdout
        and done.stdout.count(" is done") == 2
    )
    table = (out / "table.md").read_text()
    assert all(
        f"| {name} | {loss} | {steps} | 1 | 1 |" in table
        for name, loss, steps in (("a-2", "grpo", 2), ("a-4", "grpo", 4))
    )
    assert all((out / name).stat().st_size > 5_000 for name in ("curves.png", "passk.png"))
    kept = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert [[record["rollout"] for record in run["records"]] for run in kept] == [[0, 1]] * 2
    flags = json.loads((out / "a-4-0" / "config.json").read_text())["flags"]
    assert (flags["eps_high"], flags["lr"], flags["model"]) == (0.3, 1e-6, base)
    done = run_all("full", EXTRA=env["EXTRA"] + " --lr 1")
    assert (
        done.returncode == 1
        and done.stdout.count("failed") == 2
        and "--lr was" in done.stdout
        and "continues" in done.stderr
    )  # other flags than the runs'
    done = run_all("full")
    assert done.returncode == 0 and "done" not in done.stdout and "failed" not in done.stdout
    assert "no run" in run_all("full", GRID="/dev/null").stderr
    done = run_all("full", METHODS="acpo")
    assert done.returncode == 2 and "METHODS" in done.stderr
    done = run_all("full", MODEL="")
    assert done.returncode and "MODEL=" in done.stderr

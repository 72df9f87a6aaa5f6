"""python -m analysis watch: curves.png follows runs that grow and appear, and Ctrl-C ends it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import ROOT

ENV = dict(os.environ, OMP_NUM_THREADS="1")


def add_rollouts(folder, numbers, seed=0, cut_off=""):
    folder.mkdir(exist_ok=True, parents=True)
    flags = dict(seed=seed, loss="grpo", steps_per_rollout=2, out=str(folder))
    (folder / "config.json").write_text(json.dumps(dict(flags=flags, id=str(folder))))
    with open(folder / "metrics.jsonl", "a") as file:
        for number in numbers:
            record = {"rollout": number, "reward/mean": number / 10, "steps": []}
            file.write(json.dumps(record) + "\n")
        file.write(cut_off)


@pytest.fixture
def watch(tmp_path):
    """watch(*arguments) starts the command in tmp_path; what is started is ended."""
    started = []

    def start(*arguments):
        started.append(subprocess.Popen(
            [sys.executable, "-m", "analysis", "watch", *arguments], text=True, cwd=tmp_path,
            env=dict(ENV, PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]
    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines_until(process, text):
    """The lines that a process prints, up to the one with the text. It has a minute for them."""
    lines = []
    killer = threading.Timer(60, process.kill)
    killer.start()
    for line in process.stdout:
        lines.append(line)
        if text in line:
            killer.cancel()
            return "".join(lines)
    raise AssertionError("".join(lines) + process.stderr.read())


def redrawn(file, before):
    """Waits until the file is another than `before` (its st_mtime_ns)."""
    end = time.monotonic() + 60
    while file.stat().st_mtime_ns == before:
        assert time.monotonic() < end, "not drawn anew"
        time.sleep(0.1)
    return file.stat().st_mtime_ns


def ends_well(process):
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in errors, errors


def test_a_run_that_grows_and_one_that_appears_later(tmp_path, watch):
    figure = tmp_path / "runs" / "curves.png"
    add_rollouts(tmp_path / "runs" / "a-0", [1, 2], cut_off='{"rollout": 3, ')
    process = watch("runs/a-0", "--every", "0.3")  # what the shell makes of runs/*
    lines = lines_until(process, "written:")
    assert "every 0.3 seconds runs/curves.png is drawn" in lines
    assert "written: runs/curves.png, 1 run\n" in lines
    drawn = figure.stat().st_mtime_ns
    assert figure.read_bytes().startswith(b"\x89PNG")
    time.sleep(1)
    assert figure.stat().st_mtime_ns == drawn  # there is nothing new
    with open(tmp_path / "runs" / "a-0" / "metrics.jsonl", "a") as file:
        file.write('"reward/mean": 0.9, "steps": []}\n')
    redrawn(figure, drawn)
    (tmp_path / "runs" / "b-0").mkdir()  # nothing can be read there yet
    add_rollouts(tmp_path / "runs" / "b-0", [1], seed=1)
    assert lines_until(process, "2 runs") == "written: runs/curves.png, 2 runs\n"
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == [
        "a-0", "b-0", "curves.png"]
    ends_well(process)


def test_runs_are_waited_for(tmp_path, watch):
    (tmp_path / "runs").mkdir()
    process = watch("runs/*", "--every", "0.2")  # a shell leaves it so where nothing is there
    assert "no run there has finished a rollout yet" in lines_until(process, "no run")
    add_rollouts(tmp_path / "runs" / "a-0", [1])
    lines_until(process, "written: runs/curves.png, 1 run")
    ends_well(process)


def test_one_run_of_several_is_watched_alone(tmp_path, watch):
    for name in ("a-0", "b-0"):
        add_rollouts(tmp_path / "runs" / name, [1])
    process = watch("runs/a-0", "--every", "0.2", "--out", "one.svg")
    assert "written: one.svg, 1 run\n" in lines_until(process, "written:")
    ends_well(process)
    process = watch("runs/a-0", "--every", "0.2")
    lines_until(process, "written: runs/a-0-curves.png, 1 run")
    ends_well(process)


@pytest.mark.parametrize("arguments, said", [
    (["nothing"], "nothing: there is no such folder or file"),
    (["runs/*", "--every", "0"], "--every"),
    (["runs/*", "--every", "nan"], "--every"),
    (["runs/*", "--out", "nowhere/x.png"], "there is no folder nowhere"),
])
def test_bad_input_is_said_before_anything_is_drawn(tmp_path, watch, arguments, said):
    process = watch(*arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and said in errors and "Traceback" not in errors

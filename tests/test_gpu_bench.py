"""bench/gpu.py, gpu_vllm.py: each part runs in small on a CPU; a fault fails its case alone."""

import sys

import pytest

import forked
from conftest import ROOT
from helpers import needs_vllm, read_rows

sys.path.insert(0, str(ROOT / "bench"))
import gpu  # noqa: E402
import gpu_vllm  # noqa: E402


@pytest.mark.parametrize("script", [gpu, pytest.param(gpu_vllm, marks=needs_vllm)],
                         ids=["gpu", "gpu_vllm"])
def test_every_part_is_rehearsed(script, tmp_path):
    out = tmp_path / "out.jsonl"
    done = forked.script(script.__file__, "--rehearse", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    cases = read_rows(out)
    assert {case["part"] for case in cases} == set(script.PARTS)
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(cases) and all(row.count("|") == 5 for row in rows)
    assert sum(seconds for seconds, _ in script.PARTS.values()) < 540  # nine minutes on a GPU


def test_without_a_gpu_it_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as stop:
        gpu.main("gpu.py", "", gpu.PARTS, "gpu.jsonl")
    assert stop.value.code == 2 and "there is no GPU here" in capsys.readouterr().err


# stand-ins for the packages that gpu.py imports: its own parts need none
SCRIPT = """
import sys, time
from unittest.mock import MagicMock
sys.path.insert(0, "bench")
sys.modules.update(dict.fromkeys("torch transformers train data engine engine.policy harness "
                                 "harness.start".split(), MagicMock()))
import gpu
gpu.on_gpu = lambda: True
def cases():
    yield "raises", lambda: 1 / 0
    yield "is beyond", lambda: dict(gap=0.9, norm=2.0, limits=dict(gap=0.02))
    yield "is nan", lambda: dict(gap=float("nan"), limits=dict(gap=0.02))
    yield "is right", lambda: dict(gap=0.01, limits=dict(gap=0.02))
def dies():
    yield "before it", lambda: {}
    sys.exit(3)
def waits():
    time.sleep(600)
sys.exit(gpu.main(__file__, "", {"a": (1, waits), "b": (99, dies), "c": (99, cases)}, "out.jsonl"))
"""


def test_what_fails_is_reported_and_stops_no_other(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "out.jsonl"
    script.write_text(SCRIPT)
    done = forked.script(script, "--out", out)
    found = {(case["part"], case["case"]): case for case in read_rows(out)}
    assert {name: case["failed"] for name, case in found.items()} == {
        ("a", "whole part"): "RuntimeError: stopped after 1 s", ("b", "before it"): "",
        ("b", "whole part"): "RuntimeError: its process ended with code 3",
        ("c", "raises"): "ZeroDivisionError: division by zero", ("c", "is right"): "",
        ("c", "is beyond"): "not below the limit: gap", ("c", "whole part"): "",
        ("c", "is nan"): "not below the limit: gap"}
    assert "1 / 0" in found["c", "raises"]["error"]
    assert found["c", "is beyond"]["figures"] == dict(gap=0.9, norm=2.0)
    assert found["c", "is beyond"]["limits"] == dict(gap=0.02)
    assert done.returncode == 1 and "\n5 cases failed" in done.stdout

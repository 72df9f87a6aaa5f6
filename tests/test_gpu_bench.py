"""bench/gpu.py and bench/gpu_vllm.py: every part runs with tiny shapes on a CPU; a figure beyond
its limit, an error, a time limit each fail one case or part, and no other."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import gpu  # noqa: E402
import gpu_vllm  # noqa: E402

SCRIPTS = {"gpu": gpu, "gpu_vllm": gpu_vllm}


def test_every_part_is_rehearsed(tmp_path):
    """Both scripts at once; the part "train" once, with transformers."""
    names = ["gpu", *["gpu_vllm"] * bool(importlib.util.find_spec("vllm"))]
    of = {"gpu": set(gpu.PARTS), "gpu_vllm": {*gpu_vllm.PARTS} - {"train"}}
    processes = {name: subprocess.Popen(
        [sys.executable, f"bench/{name}.py", "--rehearse", "--out", tmp_path / f"{name}.json",
         "--parts", *sorted(of[name])],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for name in names}
    for name, process in processes.items():
        printed = process.communicate()[0]
        cases = json.loads((tmp_path / f"{name}.json").read_text())
        wrong = [case for case in cases if case["status"] != "ok"]
        assert process.returncode == 0 and not wrong, f"{wrong}\n{printed[-3000:]}"
        parts = SCRIPTS[name].PARTS
        assert {case["part"] for case in cases} == of[name]
        assert sum(seconds for seconds, _ in parts.values()) < 540  # nine minutes on a GPU
        table = (tmp_path / f"{name}.md").read_text().splitlines()
        assert len(table) == 2 + len(cases) and set(table) <= set(printed.splitlines())
        assert all(line.count("|") == 6 for line in table)


def test_without_a_gpu_it_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as stop:
        gpu.main("gpu.py", "", gpu.PARTS, "gpu.json")
    assert stop.value.code == 2 and "there is no GPU here" in capsys.readouterr().err


SCRIPT = """
import sys, time
sys.path.insert(0, "bench")
import gpu
def cases():
    yield "raises", lambda: 1 / 0
    yield "is beyond", lambda: gpu.held(dict(gap=0.9, norm=2.0), gap=0.02)
    yield "is nan", lambda: gpu.held(dict(gap=float("nan")), gap=0.02)
    yield "is right", lambda: gpu.held(dict(gap=0.01), gap=0.02)
def dies():
    yield "before it", lambda: {}
    sys.exit(3)
def waits():
    time.sleep(600)
sys.exit(gpu.main(__file__, "", {"a": (4, waits), "b": (99, dies), "c": (99, cases)}, "out.json"))
"""


def test_what_fails_is_reported_and_stops_no_other(tmp_path, monkeypatch, capsys):
    script, path = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    monkeypatch.chdir(ROOT)
    parts = {"a": (4, None), "b": (99, None), "c": (99, None)}
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)  # of this process: a process for each part
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(path)])
    assert gpu.main(script, "", parts, "out.json") == 1
    found = {(case["part"], case["case"]): case for case in json.loads(path.read_text())}
    assert "ZeroDivisionError" in found["c", "raises"]["error"][-1]
    beyond = found["c", "is beyond"]
    assert beyond["status"] == "failed" and beyond["limits"] == {"gap": 0.02}
    assert beyond["figures"] == {"gap": 0.9, "norm": 2.0}
    assert found["c", "is nan"]["status"] == "failed"
    assert found["c", "is right"]["status"] == "ok"
    assert found["b", "before it"]["status"] == "ok"
    for part, why in (("a", "stopped after 4 s"), ("b", "its process ended with code 3")):
        assert found[part, "the part itself"]["reason"].startswith(why)
    assert "failed: not below the limit: gap" in capsys.readouterr().out


def count(name):
    layers, hidden, heads, groups, mlp, vocabulary, tied = gpu.SHAPES[name]
    attention = 2 * hidden * hidden * (1 + groups / heads)
    return layers * (attention + 3 * hidden * mlp) + vocabulary * hidden * (2 - tied)


@pytest.mark.parametrize("gigabytes, model, lora", [
    (15.6, "0.5B", "1.5B"), (42.3, "1.5B", "3B"), (85, "1.5B", "7B")])
def test_sizes_follow_the_cards_memory(gigabytes, model, lora, monkeypatch):
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu.parallel, "memory", lambda: gigabytes * 1e9)
    assert (gpu.sizes().model, gpu.sizes().lora) == (model, lora)
    # weights and moments of the one, frozen weights of the other when they are made in float32
    assert 12 * count(model) < 0.5 * gigabytes * 1e9 and 4 * count(lora) < 0.5 * gigabytes * 1e9


def test_keys_and_values_are_repeated_for_a_torch_without_groups(monkeypatch):
    from torch.nn.attention import varlen
    seen = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, cu, *, scale: seen.append((k, v)))
    gpu.allow_groups()
    q, k = torch.zeros(5, 4, 8), torch.arange(2.0)[None, :, None].expand(5, 2, 8)
    varlen.varlen_attn(q, k, k, None, scale=1.0, enable_gqa=True)
    assert all(x.shape == q.shape and x[0, :, 0].tolist() == [0, 0, 1, 1] for x in seen[0])

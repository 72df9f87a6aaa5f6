"""bench/gpu.py and bench/gpu_vllm.py: every part runs with tiny shapes, on a CPU, too; one that
fails costs no other."""

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

from engine.sampler import Completion  # noqa: E402

NOT_HERE = ("needs a GPU", "needs 2 GPUs", "not on a GPU", "left out with --small")
NEEDS_VLLM = pytest.mark.skipif(not importlib.util.find_spec("vllm"),
                                reason="vllm is not installed")


def all_right(cases):
    for case in cases:
        right = case["status"] == "ok" or (
            case["status"] == "skipped" and case["reason"].startswith(NOT_HERE))
        assert right, f"{case['part']}, {case['case']}: {case.get('error') or case['reason']}"


def test_parts_run_small(tmp_path):
    """Several in one process, apart from this one: they change torch's settings."""
    code = ("import sys; sys.path[:0] = ['bench', '.']; import gpu\n"
            "for name in ('machine', 'varlen', 'packing', 'budget', 'speed', 'lora'):\n"
            "    gpu.run_cases(gpu.SUITE, name, True, sys.argv[1])")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "cases"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    all_right(map(json.loads, (tmp_path / "cases").read_text().splitlines()))


@NEEDS_VLLM
def test_a_part_runs_small_in_its_process(tmp_path):
    out = tmp_path / "out.json"
    flags = ["--small", "--minutes", "60", "--out", out, "--parts", "cycle_1.5B"]
    done = subprocess.run([sys.executable, gpu_vllm.SUITE.script, *flags], cwd=ROOT,
                          capture_output=True, text=True, timeout=3600)
    cases = json.loads(out.read_text())["cases"]
    assert {case["part"] for case in cases} == {"cycle_1.5B"}
    all_right(cases)
    for case in cases:
        assert f"| {case['part']} | {case['case']} |" in done.stdout
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_case_or_a_part_that_fails_is_reported(tmp_path, monkeypatch):
    def broken(small):
        def off():
            raise gpu.Wrong("too much", dict(gap=2.0))
        yield "fails", lambda: 1 / 0
        yield "works", lambda: dict(x=1)
        yield "is off", off
    monkeypatch.setitem(gpu.PARTS, "machine", gpu.Part(broken, 60))
    gpu.run_cases(gpu.SUITE, "machine", True, tmp_path / "cases")
    first, second, third = map(json.loads, (tmp_path / "cases").read_text().splitlines())
    assert first["status"] == "failed" and "ZeroDivisionError" in first["error"][-1]
    assert second["status"] == "ok" and second["figures"] == {"x": 1}
    assert third["status"] == "failed" and third["figures"] == {"gap": 2.0}
    late = gpu.run_part(gpu.SUITE, "machine", True, 0.1)[-1]
    assert late["status"] == "failed" and late["reason"].startswith("stopped after")


def test_the_first_rank_that_fails_is_the_end_of_all():
    codes = ["import sys; sys.exit(3)", "import time; time.sleep(600)"]
    processes = [subprocess.Popen([sys.executable, "-c", code], process_group=0) for code in codes]
    try:
        assert gpu.wait_for_all(processes, 60) == "its process ended with code 3"
    finally:
        for process in processes:
            gpu.stop(process)
    assert all(process.returncode is not None for process in processes)


def test_what_is_not_the_same_twice_is_seen():
    one, other = Completion([1, 2, 3], [-1.0, -2.0, -3.0], False), None
    assert gpu_vllm.compared([one], [one])["identical"]
    other = Completion([1, 2, 4], [-1.0, -2.5, -9.0], False)
    figures = gpu_vllm.compared([one, one], [one, other])
    assert figures == dict(identical=False, same_tokens="1 of 2", logprobs_max=0.5)
    with pytest.raises(gpu.Wrong):
        gpu_vllm.repeated(True, lambda: [one], lambda: [other])
    assert not gpu_vllm.repeated(False, lambda: [one], lambda: [other])["identical"]


class PretendedEngine:
    """What a Pair asks of an engine, answered by transformers, with the memory of a GPU."""

    def __init__(self, model, gpu_memory, **settings):
        from engine.hf_sampler import TransformersSampler
        self.inner, self.memory, self.calls = TransformersSampler(model, **settings), gpu_memory, []
        self.engine = self

    def reset_prefix_cache(self):
        pass

    def sample(self, *args, **settings):
        return self.inner.sample(*args, **settings)

    def load_weights(self, weights):
        self.calls.append("load")
        self.memory["used"] = 40e9
        self.inner.load_weights(weights)

    def sleep(self):
        self.calls.append("sleep")
        self.memory["used"] = 12e9

    def wake(self):
        self.calls.append("wake")
        self.memory["used"] = 15e9

    def close(self):
        pass


def test_memory_is_followed_through_sleep_and_wake(tmp_path, monkeypatch):
    """What a CPU never runs, on a GPU that is pretended: 10 GB used, 40 with an engine awake."""
    memory = dict(used=10e9)
    fakes = dict(mem_get_info=lambda *device: (80e9 - memory["used"], 80e9),
                 memory_allocated=lambda: 1e9, memory_reserved=lambda: 2e9,
                 max_memory_allocated=lambda: 3e9, current_device=lambda: 0)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(gpu_vllm, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu_vllm, "need_cuda", lambda: None)
    monkeypatch.setattr(gpu.tempfile, "tempdir", str(tmp_path))

    def start_engine(pair):
        pair.sampler = PretendedEngine(pair.folder, memory, dtype="float32", eos=[1],
                                       max_length=64)
        memory["used"] = 40e9
        return {}
    monkeypatch.setattr(gpu_vllm.Pair, "start_engine", start_engine)
    part = gpu_vllm.PARTS["cycle_1.5B"]
    results = {}
    for case, measure in part.cases(True):
        results[case] = gpu.attempt(measure)
    wrong = {case: r for case, r in results.items() if r["status"] != "ok"}
    assert not wrong
    own = {case: r["figures"]["own"] for case, r in results.items() if "own" in r["figures"]}
    assert own["memory asleep, second time"] == own["memory asleep, first time"] == 2
    assert own["memory awake for weights, first time"] == 5
    assert own["memory awake, second time"] == own["memory with an engine"] == 30
    beside = results["memory of an update beside it, first time"]["figures"]
    assert beside["peak_used"] == 12 and beside["grad_norm"] > 0
    assert results["gap after all that"]["figures"]["max"] < 1e-3

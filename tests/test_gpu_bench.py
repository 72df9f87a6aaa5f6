"""bench/gpu.py: every part runs with tiny shapes, on a CPU, too; one that fails costs no other."""

import json
import subprocess
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import gpu  # noqa: E402


def test_every_part_runs_small(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run([sys.executable, "bench/gpu.py", "--small", "--out", out], cwd=ROOT,
                          capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(out.read_text())["cases"]
    assert {c["part"] for c in cases} == set(gpu.PARTS)
    for case in cases:
        right = case["status"] == "ok" or "CUDA" in case["reason"]
        assert right, f"{case['part']}, {case['case']}: {case.get('error') or case['reason']}"
        assert f"| {case['part']} | {case['case']} |" in done.stdout


def test_a_case_or_a_part_that_fails_is_reported(tmp_path, monkeypatch):
    def broken(small):
        yield "fails", lambda: 1 / 0
        yield "works", lambda: dict(x=1)
    monkeypatch.setitem(gpu.PARTS, "machine", gpu.Part(broken, 60))
    gpu.run_cases("machine", True, tmp_path / "cases")
    first, second = map(json.loads, (tmp_path / "cases").read_text().splitlines())
    assert first["status"] == "failed" and "ZeroDivisionError" in first["error"][-1]
    assert second["status"] == "ok" and second["figures"] == {"x": 1}
    late = gpu.run_part("machine", True, 0.1)[-1]
    assert late["status"] == "failed" and late["reason"].startswith("stopped after")

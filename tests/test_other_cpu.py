"""tests/other_cpu: what it replaces is off by rounding, and nothing else changes."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT

CODE = """
import torch
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64):
    x, y, z = (torch.randn(shape, dtype=dtype) for shape in ((3, 50, 60), (3, 60, 7), (3, 50, 7)))
    for f, *args in ((torch.mm, x[0], y[0]), (torch.addmm, z[0], x[0], y[0]), (torch.bmm, x, y),
                     (torch.baddbmm, z, x, y), (torch.sum, x, -1), (torch.mean, x, -1),
                     (torch.softmax, x, -1), (torch.log_softmax, x, -1), (torch.exp, x)):
        found, stock = f(*args), f(*args, out=torch.empty(0, dtype=dtype))  # out=: not replaced
        gap = (found - stock).abs().max() / stock.abs().max() / torch.finfo(dtype).eps
        assert 0 < gap < 10 and found.equal(f(*args)), (f, dtype, gap)
    layer = torch.nn.Linear(60, 7, dtype=dtype)
    assert not layer(x).equal(torch.stack([layer(rows) for rows in x])), "the same for all shapes"
    ones = torch.ones(9, 9, dtype=dtype)
    assert (ones @ ones == 9).all() and ones.sum() == 81 and ones.sub(1).exp().equal(ones)
"""


@pytest.mark.quick
def test_another_cpu_rounds_otherwise():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=dict(
        os.environ, PYTHONPATH=str(ROOT / "tests" / "other_cpu")))
    assert done.returncode == 0 and not done.stderr, done.stderr

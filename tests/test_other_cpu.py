"""tests/other_cpu: all that it replaces is off by rounding, the same for the same shapes, and sums
without rounding stay what they are."""

import os

import pytest

from conftest import ROOT
from helpers import python

CODE = """
import torch
from other_cpu import KEPT

def results(dtype):
    torch.manual_seed(0)
    x, y, z = (torch.randn(shape, dtype=dtype) for shape in ((3, 50, 60), (3, 60, 7), (3, 50, 7)))
    q = x[None].requires_grad_()
    attention = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return [x[0] @ y[0], torch.addmm(z[0], x[0], y[0]), x @ y, torch.baddbmm(z, x, y), x.sum(-1),
            x.mean(-1), x.softmax(-1), x.log_softmax(-1), x.exp(), attention,
            *torch.autograd.grad(attention.sum(), q)]

def all_results():
    ones = torch.ones(9, 9)
    assert (ones @ ones == 9).all() and ones.sum() == 81 and ones.sub(1).exp().equal(ones)
    return results(torch.float32) + results(torch.float64)

found, again = all_results(), all_results()
KEPT.pop()._destroy()
for i, (a, b, stock) in enumerate(zip(found, again, all_results(), strict=True)):
    gap = (a - stock).abs().max() / stock.abs().max() / torch.finfo(a.dtype).eps
    most = 100 if i % 11 == 10 else 10  # attention's gradient: up to 27 were seen
    assert 0 < gap < most and a.equal(b), (i, gap)
"""


@pytest.mark.quick
def test_another_cpu_rounds_otherwise():
    done = python("-c", CODE, env=dict(os.environ, PYTHONPATH=str(ROOT / "tests" / "other_cpu")))
    assert done.returncode == 0 and not done.stderr, done.stderr

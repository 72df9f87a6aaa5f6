"""examples/exercises: a right solution of each passes, and the usual mistakes are found."""

import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "examples/exercises"))
import check  # noqa: E402

CHECKS = {c.function: c for checks in check.EXERCISES.values() for c in checks}


def variance(p, b):
    return p * (1 - p), p * (1 - b)**2 * (1 - p)**2 + (1 - p) * b**2 * p**2 - (p * (1 - p))**2


def clip(x, old, a, low, high, choose=torch.min):
    rho = (x - old).exp()
    return -choose(rho * a, rho.clamp(1 - low, 1 + high) * a)


def by_length(x, m, how, most, length=None):
    x, n = x * m, length or m.sum(1)
    return {"sequence": (x.sum(1) / n).mean(), "token": x.sum() / m.sum(),
            "constant": x.sum() / (len(x) * most)}[how]


def ranges(x, old, m, bins, base, alpha, most, by=0, correction=0):
    p, rho = ((x, old)[by].exp()[m] * bins).long().clamp(max=bins - 1), (x - old).exp()[m]
    stds = [rho[p == i].std(correction=correction) if (p == i).sum() > correction
            else torch.zeros(()) for i in range(bins)]
    return (base + alpha * torch.stack(stds).double()).clamp(max=most)


def ess(x, old, m, per_token=True):
    rho = (x - old).exp()[m]
    return rho.sum()**2 / (rho**2).sum() / (len(rho) if per_token else 1)


def scheduled(p, h, target, most, least, sign=1):
    alpha = min(most, max(1, 1.5 * (1 - p) / p)) if p else most
    return alpha, min(1, max(least, 1 + sign * (h - target)))


def advantage(x, q):
    return q.log_softmax(0) - x.log_softmax(0)


def ascent(x, q):
    """sum over a of pi(a) A(a) ([a = j] - pi(j))"""
    pi = x.softmax(0)
    return (pi * advantage(x, q)) @ (torch.eye(len(pi), dtype=pi.dtype) - pi)


def paid(pattern):
    def reward(completion, answer):
        found = re.fullmatch(pattern, completion)
        return float(bool(found) and found[1].strip() == str(answer))
    return reward


ONE = r"(?s)(?!.*<answer>.*<answer>)(?!.*</answer>.*</answer>).*?<answer>(.*?)</answer>.*"

# function: a right solution, and two mistakes
SOLUTIONS = {
    "mean_and_variance": (variance, lambda p, b: (p * (1 - p) * (1 - b), variance(p, b)[1]),
        lambda p, b: (p * (1 - p), variance(p, b)[1] + (p * (1 - p))**2)),
    "centred": (
        lambda r: r - r.mean(1, keepdim=True), lambda r: r - r.mean(), lambda r: r - r.mean(0)),
    "leave_one_out": (lambda r: r - (r.sum(1, keepdim=True) - r) / (r.shape[1] - 1),
        lambda r: r - r.mean(1, keepdim=True),
        lambda r: r - (r.sum(1, keepdim=True) - r) / r.shape[1]),
    "zscore": (lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-6),
        lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True),
        lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True, correction=0) + 1e-6)),
    "difficulty_weight": (lambda p: 1 / math.sqrt(p * (1 - p)), lambda p: 1 / (p * (1 - p)),
        lambda p: math.sqrt(p * (1 - p))),
    "clip_loss": (clip, lambda *x: clip(*x, choose=torch.max),
        lambda x, old, a, low, high: -(x - old).exp().clamp(1 - low, 1 + high) * a),
    "kl_estimates": (lambda x, ref: (x - ref, (x - ref)**2 / 2, (ref - x).exp() - 1 - (ref - x)),
        lambda x, ref: (ref - x, (x - ref)**2 / 2, (ref - x).exp() - 1 - (ref - x)),
        lambda x, ref: (x - ref, (x - ref)**2 / 2, (x - ref).exp() - 1 - (x - ref))),
    "aggregate": (by_length, lambda x, m, *rest: by_length(x, torch.ones_like(m), *rest),
        lambda x, m, *rest: by_length(x, m, *rest, length=x.shape[1])),
    "pass_at_k": (lambda n, c, k: 1 - math.prod((n - c - i) / (n - i) for i in range(k)),
        lambda n, c, k: 1 - (1 - c / n)**k, lambda n, c, k: math.comb(c, k) / math.comb(n, k)),
    "sequence_ratio": (lambda x, old, m: (((x - old) * m).sum(1) / m.sum(1)).exp(),
        lambda x, old, m: ((x - old) * m).sum(1).exp(), lambda x, old, m: (x - old).mean(1).exp()),
    "clip_ranges": (ranges, lambda *x: ranges(*x, by=1), lambda *x: ranges(*x, correction=1)),
    "effective_sample_size": (ess, lambda *x: ess(*x, per_token=False),
        lambda x, old, m: ess(x, old, torch.ones_like(m))),
    "schedules": (scheduled, lambda *x: scheduled(*x, sign=-1),
        lambda p, *rest: (max(1, 1.5 * (1 - p) / (p or 1e-9)), scheduled(p, *rest)[1])),
    "reward": (paid(ONE), paid(r"(?s).*<answer>(.*?)</answer>.*"), paid(r"\D*(\d+)\D*")),
    "reverse_kl": (lambda x, q: (x.softmax(0) * (x.log_softmax(0) - q.log_softmax(0))).sum(),
        lambda x, q: (q.softmax(0) * (q.log_softmax(0) - x.log_softmax(0))).sum(),
        lambda x, q: (x.log_softmax(0) - q.log_softmax(0)).mean()),
    "policy_gradient": (
        ascent, lambda x, q: -ascent(x, q), lambda x, q: x.softmax(0) * advantage(x, q))}


def found(name, solution):
    return check.verdict(CHECKS[name], SimpleNamespace(**{name: solution}))


def test_every_function_has_a_solution_and_stubs_and_exceptions_are_said(capsys):
    assert list(SOLUTIONS) == list(CHECKS) and len(check.EXERCISES) == 13
    for name, checks in check.EXERCISES.items():
        module = check.solution(name)
        assert module.__doc__ and all(getattr(module, c.function).__doc__ for c in checks)
    assert check.main(["2"]) == 1
    assert capsys.readouterr().out == "ex02_leave_one_out.leave_one_out: not done yet\n"
    assert "got      'ZeroDivisionError: " in found("pass_at_k", lambda n, c, k: 1 / 0)
    assert found("centred", lambda r: None).startswith("wrong")
    with pytest.raises(SystemExit, match="exercises are 1 to 13, not 14"):
        check.main(["14"])


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_right_solution_passes_and_each_mistake_is_found(name):
    right, *mistakes = SOLUTIONS[name]
    assert found(name, right) is None and len(mistakes) == 2
    for mistake in mistakes:
        assert re.match(r"wrong\n  \w+\(.*\)\n  expected .*\n  got .*\n  hint: ",
                        found(name, mistake), re.DOTALL)


def test_what_one_exercise_does_is_its_own(tmp_path, monkeypatch, capsys):
    """A file that is no Python, one that writes into its inputs, ones that end Python or never."""
    for name, text in dict(
            ex01_baseline="def (", ex08_gspo="def sequence_ratio(x, old, m):\n"
            "    x -= old\n    return ((x * m).sum(1) / m.sum(1)).exp()",
            ex10_ess="raise SystemExit", ex02_leave_one_out="while True: pass",
            ex03_zscore="def zscore(r): return r / 3\n"
            "def difficulty_weight(p): return (p - p * p)**-0.5").items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(check, "SECONDS", 3)
    assert check.main(["1", "8", "10", "3", "2"]) == 1
    said = capsys.readouterr().out
    assert "ex01_baseline: SyntaxError" in said and "ex10_ess: SystemExit" in said
    assert "ex02_leave_one_out: no end after 3 seconds" in said
    assert "difficulty_weight: right" in said and "0.333333333" in said
    assert "a leaf Variable that requires grad" in said

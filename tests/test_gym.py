"""examples/own_task.py and examples/reasoning_gym.py."""

import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from examples import own_task
from graders import Unparsed
from helpers import paste

needs_package = pytest.mark.skipif(
    not importlib.util.find_spec("reasoning_gym"),
    reason="no reasoning-gym here: pip install reasoning-gym==0.1.25")


@pytest.fixture
def gym(monkeypatch):
    """examples/reasoning_gym.py, also where the package is not installed: a stand-in for it scores
    an answer by its number."""
    package = SimpleNamespace(create_dataset=lambda task, seed, size: SimpleNamespace(
        score_answer=lambda text, entry: float(text)))
    for name, module in (("reasoning_gym", package), ("reasoning_gym.factory", SimpleNamespace(
            DATASETS={}))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.25")
    monkeypatch.delitem(sys.modules, "examples.reasoning_gym", raising=False)
    module = importlib.import_module("examples.reasoning_gym")
    monkeypatch.setattr(module, "entry", lambda task, index: dict(question="?", answer="1"))
    yield module
    del sys.modules["examples.reasoning_gym"]


ANSWER = dict(task="gcd", index=0, gold="1")


@pytest.mark.quick
@pytest.mark.parametrize("completion, answer", [
    ("<answer> 0.7 </answer>", 0.7),
    ("<think>or <answer>.3</answer></think> <answer>.4</answer> no: <answer>.5</answer>", 0.5),
    ("<answer>.5</answer> and <answer>.6", 0.5),
])
def test_the_last_answer_after_thinking_is_graded(completion, answer, gym):
    assert gym.rg(completion, ANSWER) == answer


@pytest.mark.quick
@pytest.mark.parametrize("completion", [
    "7", "<answer> </answer>", "<answer>7", "<think><answer>7</answer>", "</answer><answer>7",
    *(f"<answer>{score}</answer>" for score in (1.0000001, -0.1, "nan", "no number"))])
def test_without_an_answer_nothing_is_graded(completion, gym):
    """And no score but those from 0 to 1 is taken."""
    with pytest.raises(Unparsed):
        gym.rg(completion, ANSWER)


@pytest.mark.quick
@pytest.mark.parametrize("task, text, taken", [
    ("countdown", "49*(85 - 1)/14 - 42", True),
    ("countdown", "9**9**9", False),
    ("countdown", "int(24)", False),
    ("n_queens", "[['Q', '_'], ['_', 'Q']]", True),
    ("n_queens", "open('x', 'w')", False),
    ("spiral_matrix", "[1] * 10", False),
    ("simple_integration", "-3*x**2/4 + exp(x)*sin(2.5*x) + C", True),
    ("simple_integration", "__import__('os').system('true')", False),
    ("simple_integration", "Integral(x)", False),
    ("simple_integration", "x.diff(x)", False),
    ("simple_integration", "eval(C)", False),
    ("complex_arithmetic", "-2.5 + 3i", True),
    ("complex_arithmetic", "(1-2j)", True),
    ("complex_arithmetic", "nan", False),
    ("complex_arithmetic", "infj", False),
])
def test_an_answer_that_is_evaluated_calls_nothing(task, text, taken, gym):
    assert bool(re.fullmatch(gym.EVALUATED[task], text, re.S)) is taken
    if not taken:
        with pytest.raises(Unparsed):
            gym.rg(f"<answer>{text}</answer>", dict(ANSWER, task=task))


@pytest.mark.parametrize("change", [dict(gold="2"), dict(task="puzzle24")])
def test_another_problem_than_the_files_is_an_error(change, gym):
    with pytest.raises(ValueError, match="is another one here"):
        gym.rg("<answer>1</answer>", {**ANSWER, **change})


def test_a_task_from_two_functions():
    """tests/test_own_task.py has its run."""
    learnt, held_out = ({own_task.problem(i, split)["prompt"] for i in range(300)}
                        for split in (False, True))
    assert not learnt & held_out
    answer = dict(start="abc", length=6)
    for text, reward in (("abccba", 1), ("abcba", 0), ("abccbaa", 0), ("xbccbx", 0)):
        assert own_task.palindrome(f"It is <answer> {text} </answer>", answer) == reward
    with pytest.raises(Unparsed):
        own_task.palindrome("abccba", answer)


@needs_package
@pytest.mark.parametrize("task", ["chain_sum", "countdown", "intermediate_integration"])
def test_problems_of_reasoning_gym(task, copy):
    """They are functions of the task and the index, whose answers are right in a worker."""
    def run(*command):
        return subprocess.run([sys.executable, *map(str, command)], cwd=copy, text=True, check=True,
                              stdout=subprocess.PIPE).stdout
    paste(copy / "rewards.py", "from examples.reasoning_gym import rg\nREWARDS['rg'] = rg",
          "REWARDS")
    learnt, again, test = (run("examples/reasoning_gym.py", task, *flags) for flags in (
        [20], [20], [5, "--held_out"]))
    assert learnt == again and len(learnt.splitlines()) == 20 and "Integral(" not in learnt
    rows = list(map(json.loads, learnt.splitlines()))
    assert not {r["prompt"] for r in rows} & {json.loads(t)["prompt"] for t in test.splitlines()}
    marker = copy / "was_run"
    texts = [rows[0]["answer"]["gold"] or "0", f"open({str(marker)!r}, 'w')", "7"]
    code = ("import json, sys; from rewards import grade\n"
            "print(json.dumps(grade([json.loads(sys.argv[1])], [json.loads(sys.argv[2])], 60)))")
    scores, counts = json.loads(run("-c", code, json.dumps(rows[0]), json.dumps(
        [f"<answer>{text}</answer>" for text in texts])))
    assert counts["error"] == counts["timeout"] == 0 and max(scores[0][1:]) < 1
    assert (scores[0][0] == 1 or task == "countdown") and not marker.exists()

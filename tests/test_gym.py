"""--data rg:NAME: the tasks of reasoning-gym, their problems, their verifiers in the workers."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import data
import rewards
from conftest import ROOT
from data import gym
from rewards import grade

needs_package = pytest.mark.skipif(
    not importlib.util.find_spec("reasoning_gym"),
    reason=f"no reasoning-gym here: pip install reasoning-gym=={rewards.gym.VERSION}")
FIVE = ("chain_sum", "basic_arithmetic", "leg_counting", "simple_equations", "gcd")
ENV = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=ENV, text=True,
                          capture_output=True)


# ------------------------------------------------------------------ without the package

@pytest.mark.parametrize("completion, answer", [
    ("<answer> 7 </answer>", "7"),
    ("<think>or <answer>3</answer></think> <answer>4</answer> no: <answer>5</answer>", "5"),
    ("<answer>5</answer> and <answer>6", "5"),
])
def test_the_last_answer_after_thinking_is_graded(completion, answer):
    assert rewards.gym.last_answer(completion) == answer


@pytest.mark.parametrize("completion", ["7", "<answer> </answer>", "<answer>7",
                                        "<think><answer>7</answer>", "</answer><answer>7"])
def test_without_an_answer_nothing_is_graded(completion):
    assert rewards.REWARDS["rg"](completion, None) == 0


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
def test_an_answer_that_is_evaluated_calls_nothing(task, text, taken):
    form = rewards.gym.EVALUATED[task]
    assert bool(rewards.re.fullmatch(form, text, rewards.re.S)) is taken


def test_a_missing_package_is_a_sentence(monkeypatch):
    monkeypatch.setattr(gym.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DataError, match="is not installed .pip install reasoning-gym=="):
        data.load("rg:gcd", "train")


def test_data_dir_is_refused_beside_it():
    done = run("train.py", "--data", "rg:gcd", "--data_dir", ".")
    assert done.returncode == 2 and "is made, not read" in done.stderr


def test_passk_is_refused_beside_it():
    done = run("train.py", "--data", "rg:gcd", "--loss", "passk")
    assert done.returncode == 2 and "rewards of 0 and 1" in done.stderr


# ------------------------------------------------------------------ with it

@needs_package
@pytest.mark.parametrize("name, said", [
    ("rg:chainsum", "no task 'chainsum'; near it are chain_sum"),
    ("rg:xyz", "lists them"),
    ("rg:acre", "other problems of it in every process"),
    ("rg:puzzle24", "any other puzzle"),
    ("rg:coin_flip", "takes 0 for right"),
])
def test_an_unknown_task_is_a_sentence(name, said):
    with pytest.raises(data.DataError, match=said):
        data.load(name, "train")
    if name == "rg:chainsum":
        done = run("train.py", "--data", name)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@needs_package
def test_another_version_is_a_sentence(monkeypatch):
    monkeypatch.setattr(gym, "version", lambda name: "9.9")
    with pytest.raises(data.DataError, match="reasoning-gym 9.9 is installed"):
        data.load("rg:gcd", "train")


@needs_package
@pytest.mark.parametrize("task", FIVE)
def test_problems_are_functions_of_split_and_index(task):
    train, test = data.load(f"rg:{task}", "train"), data.load(f"rg:{task}", "test")
    learnt, held_out = [train[i] for i in range(300)], test[:60]
    assert not {p["prompt"] for p in learnt} & {p["prompt"] for p in held_out}
    assert all("<answer>" in p["prompt"] and p["reward"] == "rg" for p in learnt)
    assert len({p["id"] for p in learnt + held_out}) == 360
    code = (f"import data, json; print(json.dumps([data.load('rg:{task}', 'train')[299],"
            f" data.load('rg:{task}', 'test')[59]]))")
    assert json.loads(run("-c", code).stdout) == [learnt[299], held_out[59]]


@needs_package
@pytest.mark.parametrize("task", FIVE)
def test_the_verifier_tells_right_from_wrong(task):
    problems = [data.load(f"rg:{task}", "train")[i] for i in range(8)]
    texts = [[f"<think>...</think> <answer>{p['answer']['answer']}</answer>",
              f"<answer>{p['answer']['answer']}7</answer>", p["answer"]["answer"]]
             for p in problems]
    scores, counts = grade(problems, texts)
    assert all(right == 1 and wrong < 1 and none == 0 for right, wrong, none in scores)
    assert counts["unparsed_answer"] == 8 and counts["error"] == counts["timeout"] == 0
    golds, _ = grade([dict(p, reward="gold_rg") for p in problems], [[""]] * 8)
    assert golds == [[1.0]] * 8


@needs_package
def test_partial_scores_and_hostile_answers():
    """A score between 0 and 1 is a reward; what would run Python is not run; another problem than
    the one that was sampled is an error and no score."""
    task = data.load("rg:countdown", "train")[0]
    marker = ROOT / "tests" / "was_run"
    texts = ["<answer>1 + 2</answer>", f"<answer>open({str(marker)!r}, 'w')</answer>"]
    (some, none), = grade([task], [texts])[0]
    assert 0 < some < 1 and none == 0 and not marker.exists()
    other = dict(task, answer=dict(task["answer"], answer="1"))
    scores, counts = grade([other], [["<answer>1</answer>"]])
    assert scores == [[0.0]] and counts["error"] == 1


@pytest.mark.parametrize("score, reward", [(0.25, 0.25), (1, 1), (1 + 2e-16, 0), (-0.1, 0),
                                           (float("nan"), 0)])
def test_a_score_is_from_0_to_1(score, reward, monkeypatch):
    entry = dict(question="?", answer="7")
    made = SimpleNamespace(score_answer=lambda text, entry: score)
    monkeypatch.setattr(rewards.gym, "entry", lambda task, index: entry)
    monkeypatch.setattr(rewards.gym, "dataset", lambda task: made)
    answer = dict(task="gcd", index=0, answer="7")
    assert rewards.REWARDS["rg"]("<answer>7</answer>", answer) == reward


@needs_package
def test_constants_are_not_right():
    """Of two tasks an answer was always right that has nothing to do with the problem."""
    problems = [data.load("rg:complex_arithmetic", "train")[i] for i in range(4)]
    scores, _ = grade(problems, [[f"<answer>{x}</answer>" for x in ("nan", "NaN", "nanj", "0")]
                                 for _ in problems])
    assert all(max(row) < 1 for row in scores)


@needs_package
def test_integrals_have_a_solution():
    problems = [data.load("rg:intermediate_integration", "train")[i] for i in range(30)]
    assert not any("Integral" in p["answer"]["answer"] for p in problems)
    golds, _ = grade([dict(p, reward="gold_rg") for p in problems], [[""]] * 30)
    assert sum(gold for gold, in golds) == 30


@needs_package
@pytest.mark.parametrize("task", FIVE)
def test_a_rollout_of_each(task, small, tmp_path):
    done = run("train.py", "--model", small(), "--data", f"rg:{task}", "--sampler", "transformers",
               "--rollouts", 1, "--problems_per_rollout", 4, "--group_size", 4,
               "--steps_per_rollout", 2, "--eval_problems", 4, "--eval_samples", 2,
               "--max_prompt_tokens", 500, "--max_tokens", 16, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["rollout"] == 1 and record["grader/error"] == 0
    assert f"eval/rg:{task}/mean@2" in record or record["optim/grad_norm"] is not None


@needs_package
def test_eval_takes_it(small, tmp_path):
    done = run("eval.py", "--model", small(), "--benchmarks", "rg:gcd,rg:chain_sum",
               "--sampler", "transformers", "--limit", 3, "--samples", 2, "--max_tokens", 8,
               "--out", tmp_path / "eval")
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "eval" / "eval.json").read_text()
    assert "rg:gcd" in text and "rg:chain_sum" in text

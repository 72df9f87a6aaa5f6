"""rewards.py: the verifiers' tables, programs, the audit, workers that hang, crash and talk."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rewards
from conftest import ROOT
from graders import sandbox, worker
from rewards import REWARDS, arithmetic, grade

PUZZLE = dict(nums=[3, 5, 7, 7], target=24)


def answer(text):
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize("completion, reward", [
    (answer("(7-3)*5+7-3"), 0),                      # 3 twice
    (answer("7+7+5*(5-3)"), 0),                      # 5 twice
    (answer("7*5-7-3"), 0),                          # 25
    (answer("7+7+3*5-5"), 0),
    (answer("3*7+5-7"), 0),                          # 19
    (answer("(5+3)*(7/7)"), 0),
    (answer("7+5+3*7"), 0),                          # 33
    (answer("7*3+7-5"), 0),                          # 23
    (answer("(7-3)*7-5"), 0),                        # 23
    (answer("(5-7/7)*3"), 0),                        # 12
    (answer("7*7-5*(3+2)"), 0),                      # 2 is not given
    (answer("24"), 0),                               # uses nothing that was given
    ("", 0), ("24", 0), (answer(""), 0), (answer(" "), 0),
])
def test_wrong_answers(completion, reward):
    assert REWARDS["countdown"](completion, PUZZLE) == reward


RIGHT = dict(nums=[2, 3, 4], target=14)


@pytest.mark.parametrize("completion, reward", [
    (answer("2+3*4"), 1), (answer(" ( 2 + 3 * 4 ) "), 1), (answer("4*3+2"), 1),
    (answer("2--3*4"), 1), (answer("2\n+3*4"), 1),
    ("<think>2*3*4 is 24, so</think>" + answer("2+(3*4)") + " and that is it", 1),
    (answer("((((2))))+3*4"), 1),
    (answer("02+3*4"), 1),
    ("2+3*4", 0),                                    # no answer
    ("<answer>2+3*4", 0),                            # cut off
    ("2+3*4</answer>", 0),
    (answer("2+3*4") + answer("2+3*4"), 0),          # several, even if the same
    (answer("1") + " no, " + answer("2+3*4"), 0),
    ("<answer>" + answer("2+3*4"), 0),
    (answer("2+3*4") + "</answer>", 0),
    ("<ANSWER>2+3*4</ANSWER>", 0),
    (answer("2+3*4=14"), 0), (answer("14=2+3*4"), 0), (answer("x=2+3*4"), 0),
    (answer("2+3x4"), 0), (answer("2+3\u00d74"), 0), (answer("2+3(4)"), 0), (answer("2 3 4"), 0),
    (answer("2+3*4;"), 0),
    # digits, but not ASCII's
    (answer("\u0662+3*4"), 0), (answer("\uff12+3*4"), 0), (answer("\u00b2+3*4"), 0),
    (answer("2+3*4+0"), 0), (answer("2.0+3*4"), 0), (answer("2e0+3*4"), 0), (answer("0x2+3*4"), 0),
    (answer("2_+3*4"), 0),
    (answer("+2+3*4"), 0),
    (answer("2+3*4+3-3"), 0), (answer("2+12"), 0), (answer("23+4"), 0),
    (answer("2+3*4/(2-2)"), 0), (answer("(2-2)/(3*4)"), 0), (answer("1/0"), 0),
    (answer("2+3*"), 0), (answer("(2+3*4"), 0), (answer("2+3*4)"), 0), (answer("()"), 0),
    (answer("*"), 0),
    (answer("9**9**99"), 0), (answer("2**3**4"), 0), (answer("7//2"), 0), (answer("2<<3"), 0),
    (answer("4!"), 0),
    (answer("__import__('os').system('true')"), 0), (answer("exit()"), 0), (answer("2+3*4 #"), 0),
    (answer("(" * 100_000 + "2"), 0), (answer("(" * 99 + "2" + ")" * 99), 0),
    (answer("-" * 100_000 + "2"), 0),
    (answer("9" * 1_000_000), 0), (answer("9" * 199), 0), (answer("*".join(["9" * 40] * 4)), 0),
    ("<answer>" * 100_000, 0), (answer("2+3*4") * 50_000, 0), ("\x00" + answer("2\x00+3*4"), 0),
])
def test_countdown_table(completion, reward):
    began = time.perf_counter()
    assert REWARDS["countdown"](completion, RIGHT) == reward
    assert time.perf_counter() - began < 0.2  # at once, whatever is asked


def test_values_are_exact():
    # floats say 23.999...
    assert REWARDS["countdown"](answer("8/(3-8/3)"), dict(nums=[3, 8, 3, 8], target=24)) == 1
    assert REWARDS["countdown"](answer("99999999999999999-1"),
        dict(nums=[99999999999999999, 1], target=10**17 - 1)) == 0
    value, used = arithmetic("1/3+1/3+1/3")
    assert value == 1 and used == [1, 3] * 3
    assert arithmetic("2-3-4")[0] == -5 and arithmetic("8/4/2")[0] == 1
    assert arithmetic("2-3*4+1")[0] == -9


def test_grade_keeps_the_order_and_counts():
    problems = [dict(reward="countdown", answer=RIGHT),
        dict(reward="countdown", answer=dict(RIGHT, target=20))]
    texts = [[answer("2+3*4"), "none", answer("4")] * 40,
        [answer("(2+3)*4"), answer("2+3*4"), answer("1/0")] * 40]
    got, counters = grade(problems, texts)
    assert got == [[1, 0, 0] * 40, [1, 0, 0] * 40]
    assert counters["unparsed_answer"] == 80 and counters["timeout"] == counters["error"] == 0
    assert grade([], [])[0] == []


BAD = """
import os, signal, time
from rewards import VERIFIERS
print("what a module prints goes nowhere")
def bad(completion, answer):
    print("what a verifier prints goes nowhere", flush=True)
    os.write(1, b"[1.0, null]\\n")
    if completion == "hang": time.sleep(1000)
    if completion == "loop": 9**9**9
    if completion == "die": os._exit(0)
    if completion == "exit": raise SystemExit
    if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise": raise MemoryError("as if")
    if completion == "deep": return bad(completion, answer)
    return completion == "good"
VERIFIERS["bad"] = bad
"""


@pytest.fixture
def bad_verifier(monkeypatch, tmp_path):
    """A problem whose verifier does what the completion says."""
    (tmp_path / "bad_rewards.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(rewards, "MODULE", "bad_rewards")
    yield dict(reward="bad", answer=None)
    for process in worker.pool("bad_rewards", 2):
        process.stop()
    worker.pool.cache_clear()


def test_a_hang_costs_its_own_limit_and_nobody_else(bad_verifier, capfd):
    texts = ["good", "wrong"] * 200
    for place, text in ((3, "hang"), (90, "loop"), (170, "die"), (171, "kill"), (172, "exit"),
        (250, "raise"), (251, "deep")):
        texts[place] = text
    grade([bad_verifier], [["good"]], workers=2)  # started
    began = time.perf_counter()
    (got,), counters = grade([bad_verifier], [texts], timeout=1.0, workers=2)
    assert time.perf_counter() - began < 8
    assert got == [float(text == "good") for text in texts]
    assert counters["timeout"] == 2 and counters["error"] == 5
    assert 1 <= counters["seconds_max"] < 2
    assert "MemoryError" in capfd.readouterr().err  # an error is shown, not only counted


def test_an_unknown_verifier_is_an_error_that_is_shown(capfd):
    (got,), counters = grade([dict(reward="nobody's", answer=None)], [["x"]], workers=1)
    assert got == [0] and counters["error"] == 1 and "KeyError" in capfd.readouterr().err


def test_the_verifiers_load_without_sympy():
    script = ("import sys, rewards; "
              "sys.exit(bool({'sympy', 'math_verify', 'torch', 'numpy'} & set(sys.modules)))")
    assert not subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode


def test_a_worker_that_cannot_start_is_an_error_and_not_a_loop(monkeypatch):
    monkeypatch.setattr(rewards, "MODULE", "there_is_no_such_module")
    (got,), counters = grade([dict(reward="countdown", answer=RIGHT)], [[answer("2+3*4")] * 3],
        workers=1)
    assert got == [0, 0, 0] and counters["error"] == 3


def test_workers_that_died_between_two_rollouts_are_replaced():
    problems = [dict(reward="countdown", answer=RIGHT)]
    texts = [[answer("2+3*4")] * 40]
    assert grade(problems, texts)[0] == [[1.0] * 40]
    for one in worker.pool("rewards", worker.WORKERS):
        if one.process:
            one.process.kill()
            one.process.wait()
    rewards_after, counters = grade(problems, texts)
    assert rewards_after == [[1.0] * 40] and not counters["error"]


def test_deep_nesting_is_no_answer():
    assert REWARDS["countdown"](answer("(" * 199), RIGHT) == 0
    assert grade([dict(reward="countdown", answer=RIGHT)],
        [[answer("(" * 99 + "2+3*4" + ")" * 99)]])[1]["unparsed_answer"] == 1


def test_the_audit_of_a_file(tmp_path):
    rows = [dict(completion="\\boxed{5}", answer="5", reward="math", score=1.0),
            dict(completion="\\boxed{6}", answer="5", reward="math"),
            dict(completion="no box", answer="5", reward="math"),
            dict(completion=answer("2+3*4"), answer=RIGHT, reward="countdown")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def audit(*files):
        return subprocess.run([sys.executable, "rewards.py", *map(str, files)], cwd=ROOT,
            capture_output=True, text=True)
    report = audit(path).stdout
    for line in ("4 completions", "right: 2", "wrong: 1", "unparsed_answer: 1", "unparsed_gold: 0",
                 "timeout: 0", "error: 0"):
        assert line in report
    assert "gold '5'" in report and "no box" in report
    path.write_text(json.dumps(dict(completion="x", answer="5", reward=1.0)) + "\n")
    for files, message in (((path,), "line 1"), ((tmp_path / "none.jsonl",), "one file"),
        ((), "one file")):
        done = audit(*files)
        assert done.returncode and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not sandbox.unshared()[0], reason="programs cannot be isolated here")
@pytest.mark.parametrize("completion, reward", [
    ("```python\nprint(int(input())*2)\n```", 1),
    ("so\n```\nprint(int(input())*2)\n```\nas said", 1),
    ("```python\nprint(1)\n```\nno,\n```py\nprint(int(input())*2)\n```", 1),
    ("```python\nprint(int(input())*2)\n```\nor\n```\nprint(1)\n```", 0),
    ("print(int(input())*2)", 0), ("```python\nprint(int(input())*2)", 0), ("", 0), ("``````", 0),
    ("```\n```", 0),
])
def test_programs(completion, reward):
    problem = dict(reward="code", answer=dict(tests=[dict(input="3\n", output="6\n")],
        fn_name=None))
    assert grade([problem], [[completion]])[0] == [[reward]]
    assert REWARDS["code"](completion, problem["answer"]) == reward


@pytest.mark.skipif(not sandbox.unshared()[0], reason="programs cannot be isolated here")
def test_a_worker_killed_over_a_program_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    problem = dict(reward="code", answer=dict(tests=[dict(input="", output="")], fn_name=None))
    one = worker.Worker("rewards")
    try:
        _, fault, seconds = one.run([worker.Job(
        "code", "```\nimport time\ntime.sleep(60)\n```", problem["answer"], 1.0)])[0]
        assert fault == "timeout" and seconds < 3 and not list(tmp_path.iterdir())
    finally:
        one.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process by a pipe's end")
def test_a_worker_that_hangs_dies_with_its_parent(tmp_path):
    """Also where the verifier hangs in C code, which holds Python's lock."""
    (tmp_path / "hanging.py").write_text(
        "import re\n"
        "VERIFIERS = {'hang': lambda completion, _: completion and re.match('(a+)+$', "
        "completion)}\n")
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "from graders import worker; w = worker.Worker('hanging'); w.start(); "
         "print(w.process.pid, flush=True); "
         "w.run([worker.Job('hang', 'a' * 60 + 'b', None, 600.0)])"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=f"{ROOT}:{tmp_path}"))
    child = int(parent.stdout.readline())
    time.sleep(1.0)  # it is in the regular expression by then

    def lives():
        try:
            return Path(f"/proc/{child}/stat").read_text().split()[2] not in "ZX"
        except FileNotFoundError:
            return False
    assert lives()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while lives() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives()

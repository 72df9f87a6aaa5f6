"""rewards.py: the verifiers' tables, programs, a graded file, workers that hang, crash and talk."""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rewards
from conftest import ROOT
from graders import Unparsed, UnparsedGold, sandbox, worker
from helpers import counted, python, until
from rewards import REWARDS, arithmetic, grade

PUZZLE, RIGHT = dict(nums=[3, 5, 7, 7], target=24), dict(nums=[2, 3, 4], target=14)


def answer(text):
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize("problem, completion, reward", [
    # values are exact: floats say 23.999...
    (dict(nums=[3, 8, 3, 8], target=24), answer("8/(3-8/3)"), 1),
    (dict(nums=[10**17 - 1, 1], target=10**17 - 1), answer("99999999999999999-1"), 0),
    *((RIGHT, answer(text), 1) for text in (
        "2+3*4", " ( 2 + 3 * 4 ) ", "4*3+2", "2--3*4", "2\n+3*4", "((((2))))+3*4", "02+3*4",
        "+2++3*4")),
    *((RIGHT, completion, 0) for completion in (  # its thinking has no end, or is all there is
        "<think>" + answer("2+3*4"), "<think>1</think><think>" + answer("2+3*4"),
        "<think>" + answer("2+3*4") + "</think> so I stop", answer("2+3*4") + "</think>")),
    *((RIGHT, f"<think>{text}</think>{answer('2+(3*4)')} and that is it", 1) for text in (
        "2*3*4 is 24, so", "not " + answer("2*3*4"))),
    *((RIGHT, completion, 0) for completion in (  # none, one that is cut off, several
        "", "2+3*4", "<answer>2+3*4", "2+3*4</answer>", answer("2+3*4") * 2,
        answer("1") + " no, " + answer("2+3*4"), "<answer>" + answer("2+3*4"),
        answer("2+3*4") + "</answer>", "</answer>" + answer("2+3*4"), "<ANSWER>2+3*4</ANSWER>",
        "<answer>" * 100_000, answer("2+3*4") * 50_000, "\x00" + answer("2\x00+3*4"))),
    *((RIGHT, answer(text), 0) for text in (
        "2+3*4=14", "14=2+3*4", "x=2+3*4", "2+3x4", "2+3\u00d74", "2+3(4)", "2 3 4", "2+3*4;", "+",
        "\u0662+3*4", "\uff12+3*4", "\u00b2+3*4",  # digits, but not ASCII's
        "2+3*4+0", "2.0+3*4", "2e0+3*4", "0x2+3*4", "2_+3*4", "2+3*4+3-3", "2+12", "23+4",
        "2+3*4/(2-2)", "(2-2)/(3*4)", "1/0", "2+3*", "(2+3*4", "2+3*4)", "()", "*", "9**9**99",
        "2**3**4", "7//2", "2<<3", "4!", "__import__('os').system('true')", "exit()", "2+3*4 #",
        "(" * 100_000 + "2", "(" * 99 + "2" + ")" * 99, "-" * 100_000 + "2", "9" * 1_000_000,
        "9" * 199, "*".join(["9" * 40] * 4), "(" * 199)),
    *((PUZZLE, answer(text), 0) for text in (  # other values, and other numbers than are given
        "", " ", "24", "(7-3)*5+7-3", "7+7+5*(5-3)", "7*5-7-3", "7+7+3*5-5", "3*7+5-7",
        "(5+3)*(7/7)", "7+5+3*7", "7*3+7-5", "(7-3)*7-5", "(5-7/7)*3", "7*7-5*(3+2)"))])
def test_countdown(problem, completion, reward):
    began = time.process_time()
    assert REWARDS["countdown"](completion, problem) == reward
    assert time.process_time() - began < 0.5  # at once, whatever is asked


@pytest.mark.parametrize("text, value", [
    ("(" * 40 + "2" + ")" * 40, 2), ("(" * 41 + "2" + ")" * 41, None),
    ("(2)+" * 20 + "(2)", 42), ("(2)+" * 40 + "(2)", None),  # 41 in a row, too
    ("1" + "+1" * 99 + " ", 100), ("1" + "+1" * 99 + "  ", None),  # 200 characters, and 201
    ("2*-3", -6), ("-(2+3)*2", -10), ("--2", 2), ("2-(3-4)", 3), ("8/(4/2)", 4), ("2+3*4/6-1", 3),
    ("12", 12), ("1 2", None), ("(2", None), ("(2 3", None), ("2)", None), ("1/(2-2)", None),
    ("0/2", 0), ("2*0", 0), ("2-0", 2), ("0+0", 0), ("2-3-4", -5), ("8/4/2", 1), ("2-3*4+1", -9),
    ("1/3+1/3+1/3", 1)])
def test_expressions(text, value):
    if value is None:
        with pytest.raises(Unparsed):
            arithmetic(text)
    else:
        assert arithmetic(text) == (value, [*map(int, re.findall(r"\d+", text))])


@pytest.mark.parametrize("kind, gold, good", [
    ("countdown", RIGHT, 1), ("countdown", dict(nums=[0, 3], target=-3), 1),
    ("countdown", dict(nums=[], target=3), 0), ("countdown", dict(nums=[3], target=3.0), 0),
    ("countdown", dict(nums=[], target=3.0), 0), ("countdown", dict(nums=["3"], target=8), 0),
    ("countdown", dict(nums=[3, -1], target=2), 0),
    ("table", ["a", 2], 1), ("table", [], 0), ("table", "a", 0), ("table", ["<think>"], 0),
    ("table", ["\\boxed{5}"], 0), ("table", {"a": 1}, 0), ("table", None, 0),
    ("code", dict(tests=[dict(input="", output="")]), 1), ("code", dict(tests=[]), 0),
    ("code", dict(tests=[dict(input="", output=3)]), 0),
    ("code", dict(tests=[dict(input=3, output="")]), 0),
    ("code", dict(tests=[dict(input="", output=""), dict(input=3, output=3)]), 0),
    ("code", dict(tests=[dict(input="[1]\n\n2", output="[null]")], fn_name="f"), 1),
    ("code", dict(tests=[dict(input="1", output="2")], fn_name=1), 0),
    ("code", dict(tests=[dict(input="", output="x" * 2**22)]), 1),
    ("code", dict(tests=[dict(input="", output="x" * 2**22 + "y")]), 0),
    ("math", "5", 1), ("math", 4, 1), ("math", 0.5, 1), ("math", "\\frac{1}{2", 0),
    ("math", ["4"], 0), ("math", True, 0), ("math", None, 0), ("math", "\frac{1}{2}", 0),
    *(("math", float(x), 0) for x in ("nan", "inf", "-inf"))])
def test_which_golds_can_be_graded(kind, gold, good):
    assert REWARDS[kind].gold_ok(gold) is bool(good)


@pytest.mark.parametrize("kind, gold, why", [
    ("table", [float("nan")], "not JSON compliant"), ("countdown", "8", "must be integers"),
    ("countdown", dict(nums=[3, 5]), "target"), ("code", "print(1)", "no attribute"),
    ("code", dict(tests=[dict(input="[1", output="2")], fn_name="f"), "Expecting ',' delimiter"),
    ("code", dict(tests=[dict(input="1", output="x = 2")], fn_name="f"), "Expecting value"),
    *(("code", dict(tests=[dict(input="1", output=text)], fn_name="f"), "not JSON compliant")
      for text in ("NaN", "[1, -Infinity]", "1e999"))])
def test_a_gold_of_another_form_can_be_an_error(kind, gold, why):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError), match=why):
        REWARDS[kind].gold_ok(gold)


@pytest.mark.parametrize("completion, program", [
    ("```python\nx = 1\n```", "x = 1\n"), ("a\n```\nx\ny\n```\nb", "x\ny\n"),
    ("```\nx\n```\nno,\n```py\ny\n``` b", "y\n"), ("```\nx\n```\nno\n```py\ny", "x\n"),
    ("  ```python\n  x\n    y\nz\n  ```\n", "x\n  y\nz\n"), ("```\nx", None), ("x", None),
    ("", None), ("``````", None), ("```x```\ny\n```z```", None), ("So: ```py\nx\n```", "x\n"),
    ("````py\nx\n````", "x\n"), ("~~~py\nx = '```'\n~~~", "x = '```'\n"),
    ("> ```py\n> if x:\n>     y\n>\n> ```", "if x:\n    y\n\n"), ("```py\nx\n~~~\ny", None),
    ("1. So:\n   ```py\n   x\n     y\n   ```", "x\n  y\n"),
    ("- ```py\n  x\n    y\n  ```", "x\n  y\n"), ("  So: ```py\n  x\n```", "  x\n"),
    ("```py\ns = '```'\nx\n```", "s = '```'\nx\n"), ("it's ~5: ```py\nx\n```", "x\n"),
    ("````py\nx\n```\ny\n````", "x\n```\ny\n"), ("```py\nx```", None),
    ("```py\nx\n```py\ny\n```", "y\n"), ("```{.py}\nx\n```", "x\n"),
    *((f"```{mark}\nx\n```\nIt prints\n```{other}\n6\n```", "x\n") for mark, other in (
        ("python", ""), ("Python3 solve.py", "text"), ("", "cpp"), ("py", "bash"))),
    ("```cpp\nx\n```\n```sh\ny\n```", "y\n"), ("```\nx\n```\n```\ny\n```", "y\n"),
    ("<think>\n```\nx\n```\n</think>\n```\ny\n```", "y\n"), ("<think>\n```\nx\n```", None),
    ("```\nx\n```\n</think>\nnone", None), ("```\nx\n```\n</think>\n```\ny", None)])
@pytest.mark.parametrize("names", [{}, dict(fn_name="f")])
def test_the_program_of_a_completion(completion, program, names, monkeypatch):
    seen = []
    monkeypatch.setattr(rewards, "run_tests", lambda *args: seen.append(args) or True)
    assert REWARDS["code"](completion, dict(tests=["a test"], **names)) == bool(program)
    assert seen == ([(program, ["a test"], names.get("fn_name"))] if program else [])
    problem = dict(tests=[], **names)
    with pytest.raises(UnparsedGold if program else Unparsed):
        REWARDS["code"].grade(completion, problem)
    assert REWARDS["code"](completion, problem) == 0


@pytest.mark.parametrize("completion", [
    "```py\nRIGHT\n```\n```py\nprint(f(3))\n```", "```\nRIGHT\n```\n```\n6\n```",
    "```py\ndef f(a): 0\n```\n```py\nRIGHT\n```\n```py\ndef f2(a): f\n```",
    "```\nRIGHT\n```\n```py\nf(3)\n```", "```py\nRIGHT\n```\n```ruby\ndef f a\nend\n```"])
def test_the_program_is_the_last_that_defines_the_function(completion):
    right = "def f(a): 1"
    blocks = sandbox.fenced_blocks(completion.replace("RIGHT", right))
    assert sandbox.final_program(blocks, "f") == right + "\n"


PIECES = ["```", "~~~", "1", "\\right ", "\\boxed{", "}", "{", "<answer>", "</answer>", "<think>",
          "(", "[", ",", " ", "\n", "x", "^", "_", "-", "=", "\\", "$", "and", "1 1/2", "\\pm",
          "> ", "a" * 20]


@pytest.mark.parametrize("text", [
    *(piece * (100_000 // len(piece)) for piece in PIECES),
    *("".join(random.Random(i).choices(PIECES, k=9000)) for i in range(20)),
    "```" + "a" * 80_000, "1 " + "1" * 2400 + "/" + "2" * 2400, "1" + "\\right " * 10_000,
    "({" * 40_000, "\t(" * 40_000])
def test_what_reads_a_completion_is_linear_in_it(text, monkeypatch):
    """Below a second, of 100,000 characters, or of a box of as many as are read."""
    monkeypatch.setattr(rewards, "run_tests", lambda *args: True)
    golds = dict(countdown=RIGHT, math="5", table=["5"], code=dict(tests=["a test"]))
    for name, gold in golds.items():
        for form in (text, f"<answer>{text[:4900]}</answer>", f"\\boxed{{{text[:4900]}}}",
                     f"```py\n{text}\n```"):
            began = time.process_time()
            REWARDS[name](form, gold)
            assert time.process_time() - began < 2, (name, form[:40])  # on a slow machine


def test_what_grade_asks_of_the_workers(monkeypatch, capsys):
    """The time of each job, where it runs, what of the answers is counted, and in which order.
    Errors that differ by their data are one line."""
    asked, errors = [], [worker.Fault("error", f"no number: '{x}'") for x in "adf"]
    results = [worker.Result(*result) for result in (
        (1.0, None), (0.0, errors[0]), (0.0, worker.Fault("timeout", "")), (0.0, errors[1]),
        (0.5, worker.Fault("unparsed_answer", "")), (0.0, errors[2]))]
    monkeypatch.setattr(worker, "run_jobs", lambda *args: asked.append(args) or results)
    problems = [dict(verifier="math", answer="5"), dict(verifier="code", answer=dict(tests=[])),
                dict(verifier="table", answer=3)]
    texts = [["a", "b"], ["c"], ["d", "e", "f"]]
    assert grade(problems, texts, workers=3) == [results[:2], results[2:3], results[3:]]
    assert capsys.readouterr().err == (
        "rewards: math, 1 of 6 completions: error: no number: 'a'\n"
        "rewards: code, 1 of 6 completions: timeout after 600 s\n"
        "rewards: table, 2 of 6 completions: error: no number: 'd'\n")
    assert asked == [("rewards", [
        ("math", ["a", "5"], 4.0, 0), ("math", ["b", "5"], 4.0, 0),
        ("code", ["c", dict(tests=[])], 600.0, 0), ("table", ["d", 3], 4.0, 0),
        ("table", ["e", 3], 4.0, 0), ("table", ["f", 3], 4.0, 0)], 3)]
    grade(problems, texts, timeout=1.5)
    assert {job.seconds for job in asked[1][1]} == {1.5} and asked[1][2] == worker.WORKERS
    with pytest.raises(ValueError):
        grade(problems, [["a"]])


def test_after_an_interrupt_no_worker_takes_another_job(monkeypatch):
    class Slow:
        def run(self, job):
            time.sleep(0.05)
            if job == 3:
                os.kill(os.getpid(), signal.SIGINT)
            done.append(job)

    done = []
    monkeypatch.setattr(worker, "pool", lambda module, size: [Slow() for _ in range(size)])
    with pytest.raises(KeyboardInterrupt):
        worker.run_jobs("rewards", range(200), 2)
    assert len(done) < 50


def test_a_row_counts_what_cannot_be_read_and_gives_0(monkeypatch):
    for name in ("math", "countdown", "table", "code"):
        with pytest.raises(Unparsed):
            rewards.call(name, "nothing", ["a"])
        assert REWARDS[name]("nothing", ["a"]) == 0
    # a function alone is a row
    monkeypatch.setitem(REWARDS, "mine", lambda text, answer: 0.5)
    assert rewards.call("mine", "", 3) == 0.5 and rewards.verifier("mine").seconds == 4
    assert rewards.call("gold mine", 3) is True  # any gold answer is taken


def test_an_exception_in_a_package_is_placed_where_it_was_called():
    def broken(completion, answer):
        return json.loads(completion)
    reward, (kind, detail) = worker.graded(broken, "no JSON", [None])
    line = broken.__code__.co_firstlineno + 1
    assert (reward, kind) == (0, "error")
    assert detail.endswith(f"({broken.__code__.co_filename}, line {line})")
    assert "is a return missing?" in worker.graded(lambda *_: None, "no return", [])[1][1]


OWN = """
import os, signal, threading, time
from rewards import REWARDS, Unparsed, Verifier, call
print("what a module prints goes nowhere")
def own(completion, answer):
    print("what a verifier prints goes nowhere", flush=True)
    os.write(1, b"[1.0, null]\\n")
    if completion == "hang": time.sleep(1000)
    if completion == "loop": 9**9**9
    if completion == "die": os._exit(0)
    if completion == "exit": raise SystemExit
    if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise": raise MemoryError("as if")
    if completion == "deep": return own(completion, answer)
    if completion == "forks": return float(os.fork() > 0)
    if completion == "leaves": os.fork() or time.sleep(600)
    if completion in ("[1.0, null]\\n", "half a line", "[" * 5000 + "\\n", "\\xff\\n", "null\\n"):
        for descriptor in range(3, 4096):
            try: os.write(descriptor, completion.encode("latin-1") * 3)
            except OSError: pass
    if completion == "reads": return float(os.read(0, 1 << 20) == b"")
    if completion == "closes": os.closerange(3, 4096)
    if completion == "later": threading.Timer(0.5, own, ["null\\n", None]).start()
    if completion == "unread": raise Unparsed
    return dict(nan=float("nan"), inf=float("inf"), good=1.0, later=1.0, wrong=-1.0, less=-1.5,
                large=1e300).get(completion, 0.0)
REWARDS["own"] = Verifier(own, least=-1.0)
"""


@pytest.fixture
def verifiers(monkeypatch, tmp_path):
    """The workers have the verifier of OWN, and are two at most."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(rewards, "MODULE", "own_rewards")
    monkeypatch.setitem(REWARDS, "own", rewards.Verifier(lambda *_: 0.0, least=-1.0))
    yield
    for process in [*worker.pool("own_rewards", 1), *worker.pool("own_rewards", 2)]:
        process.stop()
    worker.pool.cache_clear()


def test_a_hang_costs_its_own_limit_and_nobody_else(verifiers, capfd, tmp_path):
    problem = dict(verifier="own", answer=None)
    texts = ["good", "bad"] * 200
    for place, text in ((3, "hang"), (90, "loop"), (170, "die"), (171, "kill"), (172, "exit"),
        (250, "raise"), (251, "deep")):
        texts[place] = text
    grade([problem], [["good"]], workers=2)  # started
    began = time.perf_counter()
    (got,), counters = counted([problem], [texts], timeout=3.0, workers=2)
    assert time.perf_counter() - began < 60
    values = dict(good=1.0, bad=0.0)
    assert got == [values.get(text, -1.0) for text in texts]
    assert counters["timeout"] == 2 and counters["error"] == 5
    said = capfd.readouterr().err  # what fails is shown, with its place, not only counted
    line = OWN[:OWN.index("as if")].count("\n") + 1
    assert f"error: MemoryError: as if ({tmp_path}/own_rewards.py, line {line})\n" in said
    assert "rewards: own, 2 of 400 completions: timeout after 3 s\n" in said


def test_what_is_not_graded_has_the_least_reward(verifiers, capfd):
    """Errors and unread answers gain nothing; so do rewards below the least or beyond float32."""
    texts = ["good", "bad", "wrong", "unread", "raise", "die", "less", "large", "nan"]
    (got,), counters = counted([dict(verifier="own", answer=None)], [texts], workers=1)
    assert got == [1, 0] + [-1] * 7
    assert counters["unparsed_answer"] == 1 and counters["error"] == 5
    said = capfd.readouterr().err
    assert "the reward is -1.5, and the verifier's least is -1, its most 3.4e+38: see" in said
    row = rewards.Verifier(lambda text, gold: rewards.the_answer(text), least=-2.0)
    assert row("none", None) == -2


def test_a_process_that_does_not_start_is_no_timeout_of_the_verifier(monkeypatch):
    monkeypatch.setattr(worker, "START_SECONDS", 0.001)
    result = worker.Worker("rewards").run(worker.Job("math", [r"\boxed{1}", "1"], 4.0))
    assert result.reward == 0 and "does python -c 'import rewards' work?" in str(result.fault)


@pytest.mark.slow  # this project's, as a fork's verifiers import what they like
def test_the_verifiers_load_without_torch():
    script = "import sys, rewards; sys.exit(bool({'sympy', 'torch', 'numpy'} & set(sys.modules)))"
    assert not python("-c", script).returncode


def test_a_nested_gold_an_unknown_verifier_and_a_worker_that_cannot_start_are_errors(monkeypatch):
    nested = functools.reduce(lambda inside, _: [inside], range(5000), 1)
    problems = [dict(verifier="table", answer=gold) for gold in ([1], nested, [2])]
    got, counters = counted(problems, [[answer(1)], [answer(1)], [answer(2)]], workers=1)
    assert got == [[1], [0], [1]] and counters["error"] == 1
    with pytest.raises(KeyError, match="nobody's"):
        grade([dict(verifier="nobody's", answer=None)], [["x"]], workers=1)
    monkeypatch.setattr(rewards, "MODULE", "there_is_no_such_module")
    (got,), counters = counted([dict(verifier="countdown", answer=RIGHT)], [[answer("2+3*4")] * 3],
        workers=1)
    assert got == [0, 0, 0] and counters["error"] == 3


def test_workers_that_died_between_two_rollouts_are_replaced():
    problems = [dict(verifier="countdown", answer=dict(RIGHT, target=n)) for n in (14, 20)]
    texts = [[answer("2+3*4"), "none", answer("4")] * 40,
             [answer("(2+3)*4"), answer("2+3*4"), answer("1/0")] * 40]
    for _ in range(2):
        got, counters = counted(problems, texts)
        assert got == [[1, 0, 0] * 40] * 2 and counters["unparsed_answer"] == 80
        assert counters["timeout"] == counters["error"] == 0
        for one in worker.pool("rewards", worker.WORKERS):
            if one.process:
                one.process.kill()
                one.process.wait()
    assert grade([], []) == []


def test_a_file_is_graded(tmp_path):
    rows = [dict(completion="\\boxed{5}", answer="5", verifier="math", reward=1.0),
            dict(completion="\\boxed{6}", answer="5", verifier="math"),
            dict(completion="no box", answer="5", verifier="math"),
            dict(answer=float("nan"), verifier="math"), dict(answer=RIGHT, verifier="countdown"),
            dict(completion=answer("2+3*4"), answer=RIGHT, verifier="countdown")]
    path = tmp_path / "rows.jsonl"

    def graded(rows, *files):
        path.write_text("".join(
            (row if isinstance(row, str) else json.dumps(dict(row, prompt="?"))) + "\n"
            for row in rows))
        return python("examples/own_file.py", *files)
    done = graded(rows, path)
    assert done.stdout.splitlines() == ["problems: 5", "right: 2", "wrong: 1", "unparsed_answer: 1"]
    assert ", line 4 (id 3) is left out" in done.stderr and done.stderr.count("\n") == 1
    for row, files, message in (
            (dict(completion="x", answer="5"), (path,), "line 1 has no field verifier"),
            (dict(completion="x", answer="5", verifier="maths"), (path,), "none of math, "),
            ("[]", (path,), "line 1 is not"), ("[" * 200_000, (path,), "recursion"),
            ({}, (tmp_path / "none.jsonl",), "No such file")):
        done = graded([row], *files)
        assert done.returncode and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, see test_portable.py")
def test_a_worker_that_hangs_dies_with_its_parent(tmp_path):
    """Also where the verifier hangs in C code, which holds Python's lock."""
    (tmp_path / "hanging.py").write_text(
        "import re\n"
        "def call(name, completion):\n    return completion and re.match('(a+)+$', completion)\n")
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "from graders import worker; w = worker.Worker('hanging'); w.start(); "
         "print(w.process.pid, flush=True); "
         "w.run(worker.Job('hang', ['a' * 60 + 'b'], 600.0))"], cwd=ROOT, text=True,
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
    assert until(lambda: not lives(), 60)


def test_what_a_verifier_does_to_its_worker_costs_no_other_completion(verifiers, capfd):
    """It forks, writes to descriptors that it did not open, reads the worker's jobs, is NaN."""
    problem = dict(verifier="own", answer=None)
    faulty = ["[1.0, null]\n", "half a line", "[" * 5000 + "\n", "\xff\n", "null\n", "closes",
              "nan", "inf"]
    texts = [text for bad in ["forks", "leaves", "reads", *faulty] for text in (bad, "good")]
    (got,), counters = counted([problem], [texts], timeout=20.0, workers=1)
    values = dict(good=1.0, forks=1.0, reads=1.0, leaves=0.0)
    assert got == [values.get(text, -1.0) for text in texts]
    assert counters == dict(error=len(faulty))
    said = capfd.readouterr().err
    assert "own, 1 of 22 completions: error: the reward is nan" in said
    assert "6 of 22 completions: error: the verifier's process died, or wrote to a desc" in said
    assert counted([problem], [["later"]], workers=1)[0] == [[1]]
    time.sleep(1.0)  # It has written by then, and the next block is not charged for it.
    assert counted([problem], [["good"]], workers=1) == ([[1]], {})

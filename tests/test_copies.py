"""What runs in a copy of the project: docs/own_task.md, the notebook, diffs of examples/changes."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

import rewards
from conftest import ROOT
from docs.notebook import cells_of, notebook
from examples import own_task
from forked import script
from graders import Unparsed
from helpers import paste, read_rows

PAGE = (ROOT / "docs" / "own_task.md").read_text()
NO_PACKAGE = "no reasoning-gym here: pip install reasoning-gym==0.1.25"
FIRST, *SECTIONS = re.split(r"^## ", PAGE, flags=re.M)


def blocks(kind, text):
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.split("\n")[0])
def test_the_blocks_run_as_printed(section, copy, base):
    if "reasoning-gym" in section.split("\n")[0] and not importlib.util.find_spec("reasoning_gym"):
        pytest.skip(NO_PACKAGE)
    for code in blocks("python", section):
        verifier = "the table `REWARDS`" in section  # else a set, at the end of its file
        paste(copy / ("rewards.py" if verifier else "data/sets.py"), code, verifier and "REWARDS")
    activate, small = blocks("sh", FIRST)[0].split("\n", 1)
    assert activate == "source .venv/bin/activate" and len(SECTIONS) == 4
    env = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
               PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-e", "-c", small + "\n".join(blocks("sh", section))], cwd=copy,
                          env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    if "own_file.py runs/" in section:
        assert "right: 48" in done.stdout
    out, = re.findall(r"small .* --out (\S+)", section)
    records = read_rows(copy / out)  # the first may be an evaluation, before rollout 1
    assert [(x["rollout"], x["grader/error"]) for x in records if x["rollout"]] == [(1, 0), (2, 0)]
    assert "--eval_every" not in section or any("mean@" in name for name in records[-1])


@pytest.fixture
def gym(monkeypatch):
    """examples/reasoning_gym.py with a stand-in for the package: a number is its own score."""
    dataset = SimpleNamespace(score_answer=lambda text, entry: float(text))
    for name, module in (
            ("reasoning_gym", SimpleNamespace(create_dataset=lambda task, seed, size: dataset)),
            ("reasoning_gym.factory", SimpleNamespace(DATASETS={}))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.25")
    monkeypatch.delitem(sys.modules, "examples.reasoning_gym", raising=False)
    module = importlib.import_module("examples.reasoning_gym")
    monkeypatch.setattr(module, "entry", lambda task, index: dict(question="?", answer="1"))
    yield module
    del sys.modules["examples.reasoning_gym"]


ANSWER = dict(task="gcd", index=0, gold="1")


@pytest.mark.quick
@pytest.mark.parametrize("completion, score", [
    ("<answer> 0.7 </answer>", 0.7),
    ("<think>or <answer>.3</answer></think> <answer>.4</answer> no: <answer>.5</answer>", 0.5),
    ("<answer>.5</answer> and <answer>.6", 0.5),
    *((text, None) for text in (
        "7", "<answer> </answer>", "<answer>7", "<think><answer>7</answer>", "</answer><answer>7",
        *(f"<answer>{score}</answer>" for score in (1.0000001, -0.1, "nan", "no number"))))])
def test_the_last_answer_after_thinking_is_graded(completion, score, gym):
    """No score but those from 0 to 1 is taken."""
    if score is not None:
        assert gym.rg(completion, ANSWER) == score
    else:
        with pytest.raises(Unparsed):
            gym.rg(completion, ANSWER)


@pytest.mark.quick
@pytest.mark.parametrize("task, taken, refused", [
    ("countdown", ["49*(85 - 1)/14 - 42"], ["9**9**9", "int(24)"]),
    ("n_queens", ["[['Q', '_'], ['_', 'Q']]"], ["open('x', 'w')"]),
    ("spiral_matrix", [], ["[1] * 10"]),
    ("simple_integration", ["-3*x**2/4 + exp(x)*sin(2.5*x) + C"], [
        "__import__('os').system('true')", "Integral(x)", "x.diff(x)", "eval(C)"]),
    ("complex_arithmetic", ["-2.5 + 3i", "(1-2j)"], ["nan", "infj"])])
def test_an_answer_that_is_evaluated_calls_nothing(task, taken, refused, gym):
    assert all(re.fullmatch(gym.EVALUATED[task], text, re.S) for text in taken)
    for text in refused:
        with pytest.raises(Unparsed):
            gym.rg(f"<answer>{text}</answer>", dict(ANSWER, task=task))


@pytest.mark.parametrize("change", [dict(gold="2"), dict(task="puzzle24")])
def test_another_problem_than_the_files_is_an_error(change, gym):
    with pytest.raises(ValueError, match="is another one here"):
        gym.rg("<answer>1</answer>", {**ANSWER, **change})


def test_a_task_from_two_functions():
    learnt, held_out = ({own_task.problem(i, split)["prompt"] for i in range(300)}
                        for split in (False, True))
    assert not learnt & held_out
    answer = dict(start="abc", length=6)
    for text, reward in (("abccba", 1), ("abcba", 0), ("abccbaa", 0), ("xbccbx", 0)):
        assert own_task.palindrome(f"It is <answer> {text} </answer>", answer) == reward
    with pytest.raises(Unparsed):
        own_task.palindrome("abccba", answer)


@pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason=NO_PACKAGE)
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
    graded, = json.loads(run("-c", code, json.dumps(rows[0]), json.dumps(
        [f"<answer>{text}</answer>" for text in texts])))
    scores, faults = zip(*graded)
    assert not {"error", "timeout"} & {fault[0] for fault in faults if fault}
    assert max(scores[1:]) < 1 and (scores[0] == 1 or task == "countdown") and not marker.exists()


NOTEBOOK = ROOT / "docs" / "lessons.ipynb"
LESSONS = (ROOT / "docs" / "lessons.md").read_text()
# the sampler that starts fastest, and as few completions as every command takes
SHORTER = ("--rollouts 2 --problems_per_rollout 16 --group_size 4 --eval_every 1 --eval_problems 8 "
           "--eval_samples 4 --sampler transformers")


def test_the_notebook_is_that_of_the_lessons_whose_verifier_can_be_fooled():
    names = dict(vars(rewards), REWARDS={})
    exec(re.search(r"```python\n(.*?)```", LESSONS, re.S)[1], names)
    texts, answer = ("<answer>9</answer>", "<answer>99</answer>"), dict(nums=[1, 2], target=7)
    assert [names["REWARDS"]["near"](text, answer) for text in texts] == [1, 0]
    assert rewards.REWARDS["countdown"](texts[0], answer) == 0
    text = NOTEBOOK.read_text()
    assert text == notebook(LESSONS), "python docs/notebook.py writes it anew"
    cells = json.loads(text)["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert {'Image("runs/lesson1.png")', 'page("runs/lesson3.html")'} <= {
        cell["source"] for cell in cells}
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))


@pytest.fixture
def shown(monkeypatch):
    """-> the sizes of what cells show, by a stand-in for IPython's Image and HTML"""
    sizes = []
    display = types.ModuleType("IPython.display")
    display.Image = lambda file: sizes.append(Path(file).stat().st_size)
    display.HTML = lambda text: sizes.append(len(text))
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return sizes


def run_cell(source, names):
    """Does what Jupyter does with a cell; of a loop over runs the first turn alone."""
    if not source.startswith("%%bash\n"):
        return exec(source, names)
    source = re.sub(r"for (\w+) in (\S+) [^;]*;", r"for \1 in \2;", source.split("\n", 1)[1])
    done = subprocess.run(["bash", "-c", source], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, source + done.stdout[-2000:] + done.stderr[-3000:]


def test_lessons_run(copy, shown, monkeypatch):
    """Those that paste a verifier and a loss into the code, in place of what they pasted before."""
    cells, names, lesson = [], {}, 0
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        heading = re.match(r"## (\d+)", "".join(cell["source"]))
        lesson = int(heading[1]) if heading else lesson
        if cell["cell_type"] == "code" and lesson in (0, 8, 9):  # 0: before the first
            cells.append(cell["source"])
    monkeypatch.chdir(copy / "docs")  # where Jupyter starts a kernel
    monkeypatch.setenv("SHORT", SHORTER)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for source in cells:
        run_cell(source, names)
    assert Path.cwd() == copy and shown and min(shown) > 5_000
    first = {file: Path(file).read_text() for file in ("losses.py", "rewards.py")}
    for source in cells:
        if source.startswith("paste("):
            run_cell(source, names)
    assert first == {file: Path(file).read_text() for file in first}
    for (file, text), start in zip(first.items(), ("\n}\n\n", "\n\n"), strict=True):
        mark = "# pasted by the notebook\n"
        original = re.sub(f"\n\n{mark}.*# the end of it\n", "", text, flags=re.S)
        assert f"{start}\n{mark}" in text and original == (ROOT / file).read_text()


def test_elsewhere_the_first_cell_says_what_to_do(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="clone nanoRLVR first"):
        run_cell(cells_of("```sh\nSHORT=\"\"\n```")[0]["source"], {})


DIFFS = sorted((ROOT / "examples/changes").glob("*.diff"))


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_a_change_trains(diff, copy):
    env = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}
    alone = dict(cwd=copy, env={**env, "GIT_CEILING_DIRECTORIES": str(copy.parent)})
    apply = ["git", "apply", diff]
    subprocess.run(apply, **alone, check=True)
    assert subprocess.run([*apply, "--check"], **alone).returncode, "nothing was changed"
    done = script("train.py", *(
        "--rollouts 2 --problems_per_rollout 16 --group_size 8 --steps_per_rollout 2 "
        "--eval_every 0 --save_every 1 --sampler transformers --out run").split(), cwd=copy)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1000:]
    first, last = read_rows(copy / "run")
    assert first["optim/grad_norm"] > 0 and last["rollout"] == 2
    assert f"examples/changes/{diff.name})" in (ROOT / "docs/changes.md").read_text()

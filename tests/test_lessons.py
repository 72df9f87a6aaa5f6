"""docs/lessons.md: its form and its verifier (test_readme.py has its commands); docs/lessons.ipynb:
the same text, and its cells run."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import rewards
from conftest import ROOT
from docs.notebook import cells_of, notebook

NOTEBOOK = ROOT / "docs" / "lessons.ipynb"
LESSONS = (ROOT / "docs" / "lessons.md").read_text()
# the sampler that starts fastest, and as few completions as every command takes
SHORTER = ("--rollouts 2 --problems_per_rollout 16 --group_size 4 --eval_every 1 --eval_problems 8 "
           "--eval_samples 4 --sampler transformers")


# ---------------------------------------------------------------------------- the page

def test_every_lesson_has_a_question_before_and_the_answer_after():
    lessons = LESSONS.split("\n## ")[1:]
    for number, lesson in enumerate(lessons, 1):
        assert lesson.startswith(f"{number}. ")
        question, answer = lesson.index("\n*Question: "), lesson.index("\n**Answer.** ")
        assert question < lesson.index("```sh\n") < answer, number
    assert len(lessons) == 13


def test_the_verifier_of_the_lesson_can_be_fooled():
    names = dict(vars(rewards), REWARDS={})
    exec(re.search(r"```python\n(.*?)```", LESSONS, re.S)[1], names)
    texts, answer = ("<answer>9</answer>", "<answer>99</answer>"), dict(nums=[1, 2], target=7)
    assert [names["REWARDS"]["near"](text, answer) for text in texts] == [1, 0]
    assert rewards.REWARDS["countdown"](texts[0], answer) == 0


# ---------------------------------------------------------------------------- the notebook

def test_the_notebook_is_that_of_the_lessons():
    assert NOTEBOOK.read_text() == notebook(LESSONS), "python docs/notebook.py writes it anew"
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))


def test_a_block_becomes_a_cell():
    text = ("# Title\n\n```sh\nSHORT=\"--lr 1\"\n```\nabove\n\n## 1. One\n\nPaste it below the "
            "table `METHODS` in `losses.py`.\n\n```python\nx = '\\n'\n```\n\n```sh\n"
            "python train.py --out runs/l1/a\npython -m analysis curves --out runs/l1.png\n"
            "python -m analysis tokens --out runs/l1.html\n```\n\n```\nan output\n```\n")
    cells = cells_of(text)
    assert [cell["cell_type"][0] for cell in cells] == list("mcmmccccm")
    assert '"SHORT", "--lr 1"' in cells[1]["source"]
    assert cells[4]["source"] == "paste('losses.py', 'METHODS', r'''\nx = '\\n'\n''')"
    assert cells[5]["source"].startswith("%%bash\nset -e\nrm -rf runs/l1\npython train.py")
    assert [cell["source"] for cell in cells[6:8]] == ['Image("runs/l1.png")',
                                                       'page("runs/l1.html")']
    assert cells[8]["source"] == "```\nan output\n```"
    assert len({cell["id"] for cell in cells}) == len(cells)


@pytest.fixture
def shown(monkeypatch):
    """Stands for IPython's Image and HTML, which the tests do not need. -> the sizes of what cells
    show"""
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
        exec(source, names)
        return
    source = re.sub(r"for (\w+) in (\S+) [^;]*;", r"for \1 in \2;", source)
    done = subprocess.run(["bash", "-c", source.split("\n", 1)[1]], capture_output=True, text=True,
                          timeout=1800)
    assert done.returncode == 0, source + done.stdout[-2000:] + done.stderr[-3000:]


def cells_of_lessons(*numbers):
    """The code cells before the first lesson, and those of some lessons."""
    lesson = 0
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        heading = re.match(r"## (\d+)", "".join(cell["source"]))
        lesson = int(heading[1]) if heading else lesson
        if cell["cell_type"] == "code" and lesson in (0, *numbers):
            yield cell["source"]


def test_lessons_run(copy, shown, monkeypatch):
    """Those that paste a verifier and a loss into the code. Pasted again, they take the place of
    what was pasted before."""
    monkeypatch.chdir(copy / "docs")  # where Jupyter starts a kernel
    monkeypatch.setenv("SHORT", SHORTER)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    names = {}
    for source in cells_of_lessons(8, 9):
        run_cell(source, names)
    assert Path.cwd() == copy and shown and min(shown) > 5_000
    first = {file: Path(file).read_text() for file in ("losses.py", "rewards.py")}
    for source in cells_of_lessons(8, 9):
        if source.startswith("paste("):
            run_cell(source, names)
    assert first == {file: Path(file).read_text() for file in first}
    for file, name, end in (("losses.py", "smooth", "\n}"), ("rewards.py", "near", "")):
        assert first[file].count(f"{end}\n\n\n# pasted by the notebook\n") == 1
        assert first[file].count(f"def {name}(") == 1
    names["paste"]("losses.py", "METHODS", "\nx = 5\n")
    assert Path("losses.py").read_text() == (ROOT / "losses.py").read_text().replace(
        "\n}\n\n", "\n}\n\n\n# pasted by the notebook\nx = 5\n# the end of it\n\n", 1)


def test_elsewhere_the_first_cell_says_what_to_do(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="clone nanoRLVR first"):
        run_cell(cells_of("```sh\nSHORT=\"\"\n```")[0]["source"], {})

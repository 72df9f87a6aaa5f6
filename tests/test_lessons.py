"""docs/lessons.md: its verifier (commands: test_readme.py); the notebook's cells run."""

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


def test_the_verifier_of_the_lesson_can_be_fooled():
    names = dict(vars(rewards), REWARDS={})
    exec(re.search(r"```python\n(.*?)```", LESSONS, re.S)[1], names)
    texts, answer = ("<answer>9</answer>", "<answer>99</answer>"), dict(nums=[1, 2], target=7)
    assert [names["REWARDS"]["near"](text, answer) for text in texts] == [1, 0]
    assert rewards.REWARDS["countdown"](texts[0], answer) == 0


def test_the_notebook_is_that_of_the_lessons():
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

"""docs/lessons.ipynb: the text of lessons.md, and its cells run."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from bench.notebook import cells_of, notebook
from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "lessons.ipynb"
LESSONS = (ROOT / "docs" / "lessons.md").read_text()
# the sampler that starts fastest, and as few completions as every command takes
SHORT = ("--rollouts 2 --problems_per_rollout 16 --group_size 4 --eval_every 1 --eval_problems 8 "
         "--eval_samples 4 --sampler transformers")


def test_the_notebook_is_that_of_the_lessons():
    assert NOTEBOOK.read_text() == notebook(LESSONS), "python bench/notebook.py writes it anew"


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
    """The first one, and those that paste a verifier and a loss into the code; the flags of
    all commands are parsed in test_results.py."""
    monkeypatch.chdir(copy / "docs")  # where Jupyter starts a kernel
    monkeypatch.setenv("SHORT", SHORT)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = {}
    for source in cells_of_lessons(1, 8, 9):
        run_cell(source, names)
    assert Path.cwd() == copy and shown and min(shown) > 5_000
    # what was pasted stands where the text says, and once
    for file, name in (("losses.py", "smooth"), ("rewards.py", "near")):
        assert Path(file).read_text().count(f"def {name}(") == 1
    assert 'METHODS["smooth"]' in Path("losses.py").read_text()


def test_what_is_pasted_again_takes_the_place_of_what_was(tmp_path):
    before, after = "\nTABLE = {\n    1: 2}\n", "\n\ndef f():\n    pass\n"
    file = tmp_path / "some.py"
    file.write_text(before + after)
    set_up = cells_of("```sh\nSHORT=\"\"\n```")[0]["source"]
    names = {}
    exec("import re\nfrom pathlib import Path\n"
         + set_up[set_up.index("def paste"):set_up.index("def page")], names)
    for value in (4, 5):
        names["paste"](file, "TABLE", f"\nTABLE[3] = {value}\n")
    assert file.read_text() == (f"{before}\n\n# pasted by the notebook\nTABLE[3] = 5\n"
                                f"# the end of it\n{after}")


def test_elsewhere_the_first_cell_says_what_to_do(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="clone nanoRLVR first"):
        run_cell(cells_of("```sh\nSHORT=\"\"\n```")[0]["source"], {})


def test_jupyter_takes_the_notebook():
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))

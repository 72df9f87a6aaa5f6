"""Writes docs/lessons.ipynb, the notebook of docs/lessons.md: the same text, with its commands as
cells. The text is changed in lessons.md, then:

    python docs/notebook.py
"""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent

# stands for the first commands of lessons.md, which a notebook has no shell to keep
SET_UP = '''\
import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from IPython.display import HTML, Image

here = Path.cwd()
clone = [folder for folder in (here, *here.parents) if (folder / "train.py").exists()]
if not clone:
    raise SystemExit("train.py is not here: clone nanoRLVR first, and change into its folder")
os.chdir(clone[0])
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
os.environ.setdefault("SHORT", "{short}")

# Where nobody has called ./run_all.sh, as on Colab: what is missing beside torch. Without vLLM,
# train.py samples with transformers
if importlib.util.find_spec("xdist") is None:
    wanted = [line for line in Path("requirements.txt").read_text().splitlines()
              if not line.startswith(("#", "torch", "vllm"))]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)


def paste(file, table, code):
    """Puts code directly below a table of a file, in place of what was pasted there before."""
    begin, end = "# pasted by the notebook", "# the end of it"
    text = re.sub(f"\\n\\n\\n{begin}\\n.*?{end}", "", Path(file).read_text(), flags=re.S)
    at = text.index("\\n\\n", text.index(f"\\n{table} = "))
    Path(file).write_text(f"{text[:at]}\\n\\n\\n{begin}\\n{code.strip()}\\n{end}{text[at:]}")


def page(file):
    """Shows a page for the browser within the notebook."""
    text = html.escape(Path(file).read_text())
    return HTML(f'<div><iframe srcdoc="{text}" width="100%" height="700"></iframe></div>')
'''
SHOWN = {".png": 'Image("{}")', ".html": 'page("{}")'}


def markdown(text):
    return dict(cell_type="markdown", metadata={}, source=text.strip())


def code(text):
    return dict(cell_type="code", metadata={}, source=text.strip(), execution_count=None,
                outputs=[])


def cells_of(lessons):
    """The cells of a text in Markdown: a block of sh becomes a cell of bash, one of python is
    pasted where the text above it says, and other blocks stay text. A figure or a page that a
    command makes is shown below it. A cell can be run again: it begins by deleting its runs."""
    cells, text = [], ""
    for part in re.split(r"(^```(?:sh|python)\n.*?^```$)", lessons, flags=re.M | re.S):
        block = re.fullmatch(r"```(sh|python)\n(.*?)```", part, re.S)
        if not block:
            text = part
            # every lesson begins a cell of its own, so that it can be folded
            cells += [markdown(t) for t in re.split(r"^(?=## )", part, flags=re.M) if t.strip()]
            continue
        language, lines = block.groups()
        if short := re.search(r'^SHORT="(.*)"$', lines, re.M):
            cells.append(code(SET_UP.replace("{short}", short[1])))
        elif language == "python":
            where = re.search(r"below the (?:line|table) `(\w+).*?` in `(.*?)`", text)
            table, file = where.groups()
            cells.append(code(f"paste({file!r}, {table!r}, r'''\n{lines}''')"))
        else:
            runs = sorted(set(re.findall(r"--out (runs/\w+)(?![\w.])", lines)))
            anew = f"rm -rf {' '.join(runs)}\n" if runs else ""
            cells.append(code(f"%%bash\nset -e\n{anew}{lines}"))
            cells += [code(SHOWN[kind].format(file))
                      for file, kind in re.findall(r"--out (runs/\w+(\.\w+))", lines)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return cells


def notebook(lessons):
    """-> the notebook's text"""
    kernel = dict(display_name="Python 3", language="python", name="python3")
    content = dict(cells=cells_of(lessons), nbformat=4, nbformat_minor=5,
                   metadata=dict(kernelspec=kernel, language_info=dict(name="python")))
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (DOCS / "lessons.ipynb").write_text(notebook((DOCS / "lessons.md").read_text()))

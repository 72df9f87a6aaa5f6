"""The shape of the code: what the core may weigh, which way imports point, what ruff finds."""

import ast
import io
import os
import shutil
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter

import pytest

from conftest import QUICK, ROOT
from helpers import CORE, python

# lines, tokens: what is here may only fall
CORE_SIZE, TOOL_SIZE = (2125, 15_600), (7445, 57_377)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENDMARKER}
OURS = {"losses", "rewards", "rollout", "eval", "train", "data", "engine", "harness", "graders",
        "analysis"}
BELOW = {"losses", "graders", "rewards", "data", "engine", "rollout"}
MAY_IMPORT = {  # also within functions; the top level is these five files
    "losses.py": set(), "graders": set(), "rewards.py": {"graders"}, "data": {"rewards", "graders"},
    "engine": {"losses"}, "rollout.py": {"data", "rewards", "engine"}, "harness": BELOW,
    "eval.py": BELOW | {"harness"}, "train.py": BELOW | {"harness", "eval"},
    # beside the tool, which imports none of these
    "analysis": {"harness"},
    "anatomy": {"losses", "data", "engine", "harness", "analysis"},
    "study": OURS | {"examples", "anatomy"},
    "examples": {"losses", "data", "rewards", "graders", "engine"}}
FOLDERS = [ROOT, *(ROOT / name for name in MAY_IMPORT if not name.endswith(".py"))]


def own_files(root):
    """The project's Python files: those in git, without a user's own; all, where there is no git"""
    if shutil.which("git"):
        done = subprocess.run(["git", "ls-files", "-z", "*.py", "*.ipynb"], cwd=root,
                              capture_output=True, text=True)
        if done.returncode == 0:
            return [root / name for name in done.stdout.split("\0") if (root / name).is_file()]
    return [*root.glob("*.py"), *root.glob("[!.]*/**/*.py")]  # not those of .venv


FILES = own_files(ROOT)
SOURCES = [path for path in FILES if path.parent in FOLDERS and path.suffix == ".py"]
TOOL = [path for path in SOURCES if path.parent.name not in ("anatomy", "study", "examples")]


def name_of(path):
    return str(path.relative_to(ROOT))


# slow: budgets, directions and style are this project's, and a fork's quick tests pass
@pytest.mark.slow
@pytest.mark.parametrize("paths, most", [
    ([ROOT / name for name in CORE], CORE_SIZE), (TOOL, TOOL_SIZE)], ids=["core", "tool"])
def test_sizes_keep_to_their_budgets(paths, most):
    texts = [path.read_text() for path in paths]
    lines = sum(len(text.splitlines()) for text in texts)
    tokens = sum(token.type not in LAYOUT for text in texts
                 for token in tokenize.generate_tokens(io.StringIO(text).readline))
    assert lines <= most[0] and tokens <= most[1], f"{lines} lines, {tokens} tokens"


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for path in SOURCES}


def imports_of(path):
    """The modules that a file imports, anywhere in it, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # a module of a package, or a name in a module
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_fit_on_a_screen_and_imports_point_one_way(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name != "add_flags":  # a table
            most = 60 if node.name == "main" and path.name == "train.py" else 50
            assert node.end_lineno - node.lineno < most, f"{path.name}: {node.name}"
    folder = path.name if path.parent == ROOT else path.parent.name
    imported = {name.split(".")[0] for name in imports_of(path)}
    allowed = MAY_IMPORT[folder] | {folder}
    ours = imported & (OURS | {"anatomy", "study", "examples", "bench"})
    assert ours <= allowed, f"{name_of(path)} imports {ours - allowed}"
    if path.name == "losses.py":
        assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_no_imports_go_in_a_circle():
    TopologicalSorter({name: (imports_of(path) & set(MODULES)) - {name}
                       for name, path in MODULES.items()}).prepare()  # a CycleError has the circle


@pytest.mark.slow
def test_flags_are_parsed_before_anything_heavy_is_imported():
    heavy = {"transformers", "vllm", "matplotlib", "sympy", "datasets",
             "torch.distributed.fsdp", "torch.nn.attention.varlen"}
    done = python("-c", "import sys, train, eval, analysis.__main__, anatomy.__main__\n"
                  "train.parse_args(['--loss', 'fade'])\neval.parse_args(['--samples', '2'])\n"
                  "analysis.__main__.make_parser().format_help()\n"
                  "analysis.__main__.make_parser().parse_args(['curves', 'runs'])\n"
                  "anatomy.__main__.make_parser().parse_args(['page', 'kept.pt'])\n"
                  f"print(sorted({heavy!r} & set(sys.modules)))")
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_the_files_of_quick_are_there():
    assert QUICK <= {path.name for path in (ROOT / "tests").rglob("*.py")}


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_users_files_are_not_the_projects(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # within a hook
        monkeypatch.delenv(name)
    ours, own = tmp_path / "train.py", tmp_path / "examples" / "own.py"
    own.parent.mkdir()
    ours.touch(), own.touch()
    assert own_files(tmp_path) == [ours, own]  # a download has no git
    for command in (["init", "-q"], ["add", "train.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert own_files(tmp_path) == [ours]


@pytest.mark.slow
def test_ruff_finds_nothing():
    done = python("-m", "ruff", "check", "--no-cache", *FILES)
    assert done.returncode == 0, done.stdout + done.stderr

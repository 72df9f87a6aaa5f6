"""How many mistakes do the tests notice? Small mistakes are put into a file, one at a time, and the
tests of that file run against each of them.

    pip install --target /tmp/mutators cosmic-ray
    python bench/mutants.py losses.py --sample 120

The mistakes are those of cosmic-ray's operators; --tools says where it is installed, outside of the
project's environment. The tests are run here and not by cosmic-ray: a process that has imported
torch and pytest once is forked for each mistake, which saves seconds each time. The tests run in
copies of the repository, and nothing is written into it. Linux only.

Left out are prints, docstrings, annotations, the block of `if __name__`, and what does not compile.
Some mistakes change nothing that could be observed, so 100% is out of reach: look at those that
survived. The exit code is 1 where the tests fail without any mistake.
"""

import argparse
import ast
import contextlib
import difflib
import functools
import importlib.util
import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = {"losses.py": ["tests/test_losses.py"],
         "rewards.py": ["tests/test_answers.py", "tests/test_rewards.py"],
         "graders/lexer.py": ["tests/test_answers.py", "tests/test_hedges.py"],
         "graders/answer.py": ["tests/test_answers.py", "tests/test_hedges.py"],
         "graders/equal.py": ["tests/test_answers.py", "tests/test_hedges.py"],
         "engine/policy.py": ["tests/test_policy.py"]}
SLOW = "not (test_memory_of_the_log_probabilities or labelled)"  # of forward.py, and of other files
WARM = "torch", "pytest", "mpmath", "transformers.models.qwen2.modeling_qwen2"  # for each fork


def mistakes(source):
    """-> [((line, column), name of the operator, function that returns the mutated source)]"""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider
    provider, nodes, found = OperatorProvider(), list(ast_nodes(get_ast(source))), []
    for name in provider:
        if name in ("VariableReplacer", "VariableInserter"):  # they must be told of variables
            continue
        operator = provider[name]()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        found += [(place, name, functools.partial(mutate_code, source, operator, i))
                  for i, place in enumerate(places)]
    return found


def left_out(source):
    """The pairs of (line, column) between which no mistake is made."""
    nodes = []
    for node in ast.walk(ast.parse(source)):
        nodes += filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None)))
        statement = ast.unparse(node.value) if isinstance(node, ast.Expr) else ""
        main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if main or statement.startswith(("print(", "'", '"')):
            nodes.append(node)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes]


def mutants(path, source, sample, seed):
    """-> [(line, operator, mutated source)], by line, and how many there would be of all."""
    ranges, made = left_out(source), {}
    found = [m for m in mistakes(source) if not any(a <= m[0] < b for a, b in ranges)]
    random.Random(seed).shuffle(found)
    for (line, _), name, make in found:
        if len(made) == sample:
            break
        text = make()
        with contextlib.suppress(SyntaxError):
            compile(text, path, "exec")
            made.setdefault(text, (line, name, text))
    made.pop(source, None)
    return sorted(made.values()), len(found)


def pytest_in(folder, tests):
    """What a forked process does: the tests of the copy in `folder`. Never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        import pytest
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", SLOW, *tests]))
    finally:
        os._exit(code)


def verdict(original, path, limit, job):
    """-> ("survived", "noticed" or "timed out", seconds) of a (number, mutated source).

    The number becomes the file's time, so that Python takes no other mutant's bytecode for it."""
    number, text = job
    folder = original.with_name(f"of-process-{os.getpid()}")
    if not folder.exists():
        shutil.copytree(original, folder)
    (folder / path).write_text(text)
    os.utime(folder / path, (10**9 + number, 10**9 + number))
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        pytest_in(folder, TESTS[path])
    handle = os.pidfd_open(pid)
    ended = select.select([handle], [], [], limit)[0]
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # it, or what it left behind
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kind = "timed out" if not ended else "noticed" if code else "survived"
    return kind, time.monotonic() - began


def judge_all(args):
    original = Path("original").resolve()
    shutil.copytree(ROOT, original, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    source = (original / args.path).read_text()
    found, total = mutants(args.path, source, args.sample, args.seed)
    kind, seconds = verdict(original, args.path, 900, (0, source))
    if kind != "survived":
        sys.exit(f"bench/mutants.py: {args.path}: its tests fail without any mistake")
    judge = functools.partial(verdict, original, args.path, 30 + 3 * seconds)
    jobs, kinds = enumerate((text for _, _, text in found), 1), Counter()
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for (line, name, text), (kind, _) in zip(found, pool.imap(judge, jobs), strict=True):
            kinds[kind] += 1
            if kind == "survived":
                changes = difflib.unified_diff(source.splitlines(), text.splitlines(), n=0)
                print(f"{args.path}:{line} {name}", *list(changes)[3:], sep="\n    ", flush=True)
    share = kinds["noticed"] / max(1, kinds["noticed"] + kinds["survived"])
    print(f"{args.path}: {len(found)} of {total} mutants, {dict(kinds)}; noticed: {share:.1%} of "
          "those that ended")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", choices=TESTS)
    parser.add_argument("--tools", default="/tmp/mutators", help="where cosmic-ray is installed")
    parser.add_argument("--sample", type=int, help="take so many of the mistakes, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    sys.path.append(os.path.abspath(args.tools))  # the project's own packages come first
    if not importlib.util.find_spec("cosmic_ray"):
        parser.error(f"pip install --target {args.tools} cosmic-ray brings what is missing there")
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # of what compiles, but not without a word
    for name in WARM:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        judge_all(args)


if __name__ == "__main__":
    main()

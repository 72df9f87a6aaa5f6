"""reasoning-gym's tasks (pip install reasoning-gym): their problems and their verifiers.

The package is imported where a task is used: it takes seconds. A problem's answer is {"task",
"index", "answer"}: the worker makes the same entry again, because entries hold what JSON does not
keep (tuples, fractions), and because some verifiers evaluate parts of an entry as Python, which a
data file must not be able to write.
"""

import contextlib
import functools
import io
import re

from graders import Unparsed

VERSION = "0.1.25"  # Another one makes other problems, and may evaluate other answers as Python.
SIZE = 1_000_000  # entries of a task

# Some verifiers evaluate the model's answer as Python. Of these tasks, only answers that cannot
# call anything but a function of mathematics are graded; the others count as unreadable. The forms
# also leave out sympy's Integral, with which the integrand, unsolved, would be a right answer.
LISTS = r"[\w\s\[\],'\"+-]*"
ARITHMETIC = r"(?!.*\*\*)[\d\s+*/().-]*"
ALGEBRA = (r"([\d\s+*/^()-]|(?<=\d)\.|\.(?=\d)|\b(a?sin|a?cos|a?tan|sec|csc|cot|sinh|cosh|tanh|exp|"
           r"log|sqrt|erf|pi|[A-Za-z])(?![A-Za-z_]))*")
EVALUATED = {
    "countdown": ARITHMETIC, "puzzle24": ARITHMETIC, "binary_matrix": LISTS,
    "n_queens": LISTS, "spiral_matrix": LISTS, "string_insertion": LISTS,
    "intermediate_integration": ALGEBRA, "simple_integration": ALGEBRA,
    "polynomial_multiplication": ALGEBRA,
    # This one evaluates nothing, but it takes nan for right.
    "complex_arithmetic": r"[\d\s+*/().ij-]*"}


@functools.cache
def dataset(task):
    """reasoning-gym's dataset of a task, with the settings that it has by default."""
    import reasoning_gym
    return reasoning_gym.create_dataset(task, seed=0, size=SIZE)


@functools.lru_cache(maxsize=256)
def entry(task, index):
    """Entry `index` of a task, {question, answer, metadata}: the same in every process."""
    with contextlib.redirect_stdout(io.StringIO()):  # Some tasks print while they make it.
        return dataset(task)[index]


def last_answer(completion):
    """What stands in the last <answer> after </think>. Raises Unparsed where there is none."""
    text = completion.split("</think>")[-1]
    _, opening, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
    if "<think>" in text or not opening or not inside.strip():
        raise Unparsed("no answer")
    return inside.strip()


def rg(completion, answer):
    """The task's own score, from 0 to 1, of the last <answer> after </think>; 1 is right."""
    text = last_answer(completion)
    task, problem = answer["task"], entry(answer["task"], answer["index"])
    if problem["answer"] != answer["answer"]:
        raise ValueError(f"problem {answer['index']} of {task} is another one here; the problems "
                         f"are those of reasoning-gym {VERSION}")
    if not re.fullmatch(EVALUATED.get(task, ".*"), text, re.S):
        raise Unparsed("not of the form of the task's answers")
    try:
        score = float(dataset(task).score_answer(text, problem))
    except Exception as e:  # Some verifiers raise where an answer is no number.
        raise Unparsed(f"{type(e).__name__}: {e}") from None
    if not 0 <= score <= 1:  # nan, too; some verifiers add up to a little more than 1
        raise Unparsed(f"the task's verifier gives it {score}")
    return score


def gold(_, answer):
    """Is the gold answer right? Tasks without one, which take any solution, give None."""
    if answer["answer"] is None:
        return bool(entry(answer["task"], answer["index"]))
    return rg(f"<answer>{answer['answer']}</answer>", answer) == 1


def prepare(names):
    """Imports the package for the verifiers `names`, before the time of a completion runs."""
    if {"rg", "gold_rg"} & set(names):
        with contextlib.suppress(ImportError):  # The jobs say so themselves, each as its error.
            import reasoning_gym  # noqa: F401

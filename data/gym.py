"""--data rg:NAME: the tasks of reasoning-gym (github.com/open-thought/reasoning-gym).

The package is optional; `python -c "from data import gym; print(*gym.tasks())"` lists the names.
Problem i is a function of (split, i): an entry of the task that is drawn by them. A hash of the
question says to which split an entry belongs, so that the two cannot share a question. The
verifier, `rg`, is the task's own; it stands in graders/gym.py.
"""

import difflib
import hashlib
import importlib.util
import random
from collections.abc import Sequence
from importlib.metadata import version

from data.sources import DataError
from rewards import gym

PREFIX = "rg:"
SIZES = dict(train=100_000, test=1024)
DRAWS = 200  # so many for one problem, at most
FORMAT = ("\nThink first. Then give the answer, and nothing else, within <answer> </answer> tags, "
          "in the form that is asked for.")

# tasks that are refused, and why
CHANGES = "the package makes other problems of it in every process, so that they cannot be graded"
UNUSABLE = {
    **dict.fromkeys(("acre", "codeio", "isomorphic_strings", "knight_swap", "list_functions",
                     "polynomial_multiplication", "ransom_note", "word_ladder"), CHANGES),
    "coin_flip": "its verifier takes 0 for right, whatever the probability",
    "composite": "it is a mixture of other tasks, which it does not name",
    "game_of_life_halting": "its verifier takes every answer for right",
    "puzzle24": "its verifier takes a solution of any other puzzle for right"}


def tasks():
    """The names that --data rg:NAME takes. Raises ImportError."""
    from reasoning_gym.factory import DATASETS
    return sorted(DATASETS.keys() - UNUSABLE)


def check(name):
    """Raises DataError, a sentence, for a name that cannot be used here."""
    task, install = name.removeprefix(PREFIX), f"pip install reasoning-gym=={gym.VERSION}"
    if not importlib.util.find_spec("reasoning_gym"):
        raise DataError(f"--data {name}: the package reasoning-gym is not installed ({install})")
    if (found := version("reasoning-gym")) != gym.VERSION:
        raise DataError(f"--data {name}: reasoning-gym {found} is installed, and the problems and "
                        f"verifiers that were tried are those of {gym.VERSION} ({install})")
    if task in UNUSABLE:
        raise DataError(f"--data {name}: this task of reasoning-gym cannot be learnt from: "
                        f"{UNUSABLE[task]}")
    if task not in (there := tasks()):
        near = difflib.get_close_matches(task, there, 4, 0.5)
        raise DataError(f"--data {name}: reasoning-gym has no task {task!r}; "
                        + (f"near it are {', '.join(near)}" if near else
                           """python -c "from data import gym; print(*gym.tasks())" lists them"""))


def split_of(question):
    """The split of a question: one in five is held out."""
    digest = hashlib.sha256(question.encode()).digest()
    return "test" if digest[0] % 5 == 0 else "train"


def problem(task, index, split):
    """Problem `index` of a split of a task. Raises DataError where no entry is of the split."""
    rng = random.Random(f"{task} {index} {split}")
    for _ in range(DRAWS):
        place = rng.randrange(gym.SIZE)
        entry = gym.entry(task, place)
        # an integral that the package could not solve is no answer, see graders/gym.py
        if split_of(entry["question"]) == split and "Integral(" not in str(entry["answer"]):
            answer = dict(task=task, index=place, answer=entry["answer"])
            return dict(prompt=entry["question"].rstrip() + FORMAT, answer=answer, reward="rg",
                        id=f"{PREFIX}{task}/{split}/{index}")
    raise DataError(f"--data {PREFIX}{task}: it has so few questions that none of {DRAWS} is of "
                    f"the {split} split")


class Generated(Sequence):
    """`size` problems of a split; each is made when it is asked for. As draws from the task, some
    may be the same."""

    def __init__(self, task, split, size):
        self.task, self.split, self.size = task, split, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not 0 <= index < self.size:
            raise IndexError(index)
        return problem(self.task, index, self.split)


def load(name, split):
    """The problems of rg:NAME. Raises DataError, see `check`."""
    check(name)
    return Generated(name.removeprefix(PREFIX), split, SIZES[split])

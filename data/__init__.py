"""Problems for training and evaluation: dicts {prompt, (messages,) answer, verifier, id}.

prompt is plain text; messages, where a problem has them, are for models with a chat template.
verifier is a name in rewards.REWARDS, and answer is its gold answer. data/sources.py reads rows;
data/sets.py has the table of sets; data/prompts.py makes token ids of a problem.
"""

import functools
import random
from pathlib import Path

from data import countdown, sources
from data.sets import SETS
from data.sources import DataError

BASE = str(Path(__file__).parent / "base")  # the embedded base, a model's folder
NAMES = *countdown.FORMS, *SETS  # computed, and read


def load(name, split, data_dir=None, **options):
    """The problems of a data set: split "train" to learn from, "test" held out.

    name: one of NAMES, or a file.jsonl with prompt (or messages), answer and verifier in each row,
    whose one split is both. data_dir: a folder of JSONL files with the Hub's fields, instead of the
    Hub. options: lcb_from and lcb_to (days such as 2024-08-01). Problems whose gold answer cannot
    be graded are left out: stderr has the first five. Raises DataError."""
    if name in countdown.FORMS:
        return countdown.Generated(name) if split == "train" else countdown.held_out(name, 1024)
    if name.endswith(".jsonl"):
        return sources.load_file(Path(name))
    if name in SETS:
        return sources.load_set(name, split, data_dir, options)
    raise DataError(f"--data {name}: there is no such data set; there are {', '.join(NAMES)}, and "
                    "files that end in .jsonl")


@functools.lru_cache(maxsize=4)
def order(size, seed, epoch):
    """The order in which an epoch goes through `size` problems."""
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


def batch(problems, n, seed, rollout, attempt=0):
    """The n problems of a rollout, a function of (seed, its number from 1): resuming needs no
    replay. attempt > 0 draws again, to refill it. A problem may come twice, from two epochs."""
    start = (attempt * 10**7 + rollout - 1) * n
    places = [divmod(start + i, len(problems)) for i in range(n)]
    return [problems[order(len(problems), seed, epoch)[place]] for epoch, place in places]


def cluster(problem):
    """Problems of one cluster are one draw: a puzzle in any order of its numbers, or a prompt."""
    if problem["verifier"] != "countdown":
        return str(problem.get("messages") or problem["prompt"])
    return f"{sorted(problem['answer']['nums'])} {problem['answer']['target']}"

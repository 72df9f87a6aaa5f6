"""Problems for training and evaluation: dicts {prompt or messages, answer, reward, id}.

prompt is plain text; messages, where a problem has them, are for models with a chat template. reward names a
verifier in rewards.py, answer is what that verifier compares with.
"""

import functools
import random

from data import countdown


class DataError(ValueError):
    """What is wrong with the data, where, and what would be right: train.py prints it and exits with 2."""


def load(name, split):
    """The problems of a data set: split "train" to learn from, "test" held out. Raises DataError."""
    if name not in countdown.FORMS:
        raise DataError(f"--data {name}: there is no such data set; there are {', '.join(countdown.FORMS)}")
    return countdown.Generated(name) if split == "train" else countdown.held_out(name, 1024)


@functools.lru_cache(maxsize=4)
def order(size, seed, epoch):
    """The order in which an epoch goes through `size` problems."""
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


def batch(problems, n, seed, rollout, attempt=0):
    """The n problems of a rollout, a function of (seed, rollout): resuming needs no replay.

    attempt > 0 are other problems for the same rollout, to refill it from."""
    start = (attempt * 10**7 + rollout) * n
    places = [divmod(start + i, len(problems)) for i in range(n)]
    return [problems[order(len(problems), seed, epoch)[place]] for epoch, place in places]


def decode(tokenizer, completion):
    """The text of a sampler.Completion without its end-of-sequence token; any other special token stays to be seen."""
    return tokenizer.decode(completion.tokens if completion.truncated else completion.tokens[:-1])


def encode(tokenizer, problem):
    """The token ids of a problem's prompt: by the tokenizer's chat template where both have one."""
    if "messages" in problem and tokenizer.chat_template:
        return tokenizer.apply_chat_template(problem["messages"], add_generation_prompt=True, return_dict=False)
    return tokenizer.encode(problem["prompt"])

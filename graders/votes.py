"""The votes of maj@n."""

from collections import Counter
from contextlib import suppress
from fractions import Fraction

from graders.answer import read
from graders.equal import closed, without_unit


def key(answer):
    """A number by its value, another answer as it is read, in small letters or not."""
    with suppress(ValueError, RecursionError):  # digits or depth beyond Python's limits
        node = without_unit(read(answer))
        value = closed(node) if len(answer) < 100 else None  # this process has no clock for it
        return value if isinstance(value, Fraction) else str(node).lower()
    return answer


def majority(wrong, right):
    """maj@n of a problem: 1 where its right answers, counted as one, are the most frequent, 0 where
    others are, 1 / m in a tie of m. wrong: the other answers; right: the number of right ones."""
    counts = [right, *Counter(map(key, wrong)).values()]
    return float(0 < right == max(counts)) / counts.count(max(counts))

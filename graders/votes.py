"""The votes of maj@n."""

from collections import Counter

from graders.answers import clean, number, tight


def key(answer):
    """A number by its value, another answer by its text without spacing."""
    text, _ = clean(answer)
    return tight(text) if number(text) is None else number(text)


def majority(wrong, right):
    """maj@n of a problem: 1 where its right answers, which are one, are the most frequent, 0 where
    others are, a share of 1 where several are. wrong: the other answers; right: their number."""
    counts = [right, *Counter(map(key, wrong)).values()]
    return float(0 < right == max(counts)) / counts.count(max(counts))

"""The votes of maj@n, for graders/worker.py's processes: a comparison may take 30 seconds."""

from collections import Counter

from graders.answers import clean, number, tight


def key(answer):
    """A number by its value, another answer by its text without spacing."""
    text, _ = clean(answer)
    return tight(text) if number(text) is None else number(text)


def majority(wrong, right, equal=None):
    """maj@n of one problem: 1 where its right answers are the most frequent, 0 where others are,
    and a share of 1 where several are.

    wrong: the answers that are not right. right: the number of those that are, which are one. equal
    merges wrong ones with other keys, each with the first that it equals."""
    votes, answers = Counter(map(key, wrong)), {key(answer): answer for answer in wrong}
    for name in [*votes] if equal and 0 < right <= len(wrong) else ():  # else it changes nothing
        same = next(m for m in votes if m == name or equal(answers[name], answers[m]))
        if same != name:
            votes[same] += votes.pop(name)
    counts = [right, *votes.values()]
    return float(0 < right == max(counts)) / counts.count(max(counts))


def call(name, wrong, right):
    equal = None
    if name == "math":
        from graders.math_equal import equal  # sympy takes a second
    return majority(wrong, right, equal)

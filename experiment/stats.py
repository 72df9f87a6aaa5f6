"""Statistics of scores: pass@k, the standard error, the bootstrap interval."""

import itertools
import math
import random
from statistics import stdev


def pass_at_k(n, correct, k):
    """The chance that k of n samples, drawn without replacement, hold a correct one.

    This is the unbiased estimate of arXiv 2107.03374, eq. 1."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples of each problem, there are {n}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def powers_of_two(n):
    """1, 2, 4, ... up to n: the k of pass@k that are worth showing for n samples."""
    return [2**i for i in range(n.bit_length())]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def standard_error(values):
    """Of the mean of the values of independent problems; None where there is one problem."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def by_problem(groups, ks):
    """{mean@n, pass@k: [the value of each problem]} of the rows of each; a reward of 1 is right."""
    n = len(groups[0])
    correct = [sum(row["score"] == 1 for row in rows) for rows in groups]
    return {f"mean@{n}": [c / n for c in correct],
            **{f"pass@{k}": [pass_at_k(n, c, k) for c in correct] for k in ks}}


def paired(values, others):
    """{metric: [value of each problem]} of two evaluations, in one order. -> {metric: mean of the
    first, of the second, the difference, and low and high of its 95% interval over the problems}"""
    result = {}
    for name, found in values.items():
        gaps = [a - b for a, b in zip(found, others[name], strict=True)]
        low, high = interval(gaps)
        result[name] = dict(value=mean(found), other=mean(others[name]), difference=mean(gaps),
                            low=low, high=high)
    return result


def interval(values, draws=2000):
    """The 95% percentile interval of the mean, by bootstrap.

    values: one per problem, because samples of one problem are not independent, or one per seed.
    Where there are at most 10,000 resamples (5 values have 3,125) all are used, else `draws` random
    ones. One value alone is both ends."""
    n, rng = len(values), random.Random(0)
    if n**n <= 10_000:
        resamples = itertools.product(values, repeat=n)
    else:
        resamples = (rng.choices(values, k=n) for _ in range(draws))
    means = sorted(map(mean, resamples))
    return means[int(0.025 * len(means))], means[math.ceil(0.975 * len(means)) - 1]

"""Statistics of scores: mean@n, pass@k, maj@n, standard errors, intervals; and their tables."""

import math
from collections import Counter, defaultdict
from contextlib import suppress
from fractions import Fraction
from statistics import fmean, variance

import data
from graders.answer import read
from graders.equal import closed, without_unit
from harness.log import of_rows
from rewards import verifier


def pass_at_k(n, correct, k):
    """The chance that k of n samples hold a correct one, unbiased: arXiv 2107.03374, eq. 1."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def standard_error(values, clusters):
    """Of the problems' mean value, over data.cluster's (arXiv 2411.00640, sec. 2.2), or None."""
    middle, sums = fmean(values), defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value - middle
    if len(sums) > 1:
        return (variance(sums.values(), 0) * len(sums)) ** 0.5 / len(values)


def by_problem(groups):
    """{mean@n, pass@k: [the value of each problem]} of the n rows of each; k: 1, 2, 4, ..."""
    n, correct = len(groups[0]), [sum(row["reward"] == 1 for row in rows) for rows in groups]
    return {f"mean@{n}": [c / n for c in correct], **{
        f"pass@{2**i}": [pass_at_k(n, c, 2**i) for c in correct] for i in range(n.bit_length())}}


def paired(problems, groups, others):
    """Compares two evaluations' rows. -> {metric: mean of the first, of the second, the difference,
    and low and high of its 95% interval over clusters of problems}"""
    clusters, of_others, result = list(map(data.cluster, problems)), by_problem(others), {}
    for name, values in by_problem(groups).items():
        gaps = [a - b for a, b in zip(values, of_others[name])]
        low, high = interval(gaps, clusters, (-1, 1))
        result[name] = dict(value=fmean(values), other=fmean(of_others[name]),
                            difference=fmean(gaps), low=low, high=high)
    return result


STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262  # of 2 to 10 values


def half_width(n, error):
    """Of Student's 95% interval of the mean of n values. error: the mean's standard error."""
    return error * (STUDENT[n - 2] if n <= 10 else 1.96 + 2.4 / (n - 2))  # to a thousandth


def interval(values, clusters, limits):
    """Student's 95% interval of the mean, over clusters. values: one per problem, because samples
    of one problem are not independent. limits: the least and the largest possible value. If all n
    are equal, up to 3.7 / n of all clusters may still lie at a limit (Clopper and Pearson)."""
    n, middle, error = len({*clusters}), fmean(values), standard_error(values, clusters)
    if min(values) == max(values):
        return tuple(middle + (1 - 0.025 ** (1 / n)) * (end - middle) for end in limits)
    half = half_width(n, error) if error else math.inf
    return max(limits[0], middle - half), min(limits[1], middle + half)


def summarise(problems, groups):
    """groups: for each problem its rows. -> {mean@n, pass@k, both with _stderr for their standard
    error over clusters of problems, and of_rows}. A completion is right with a reward of 1."""
    of_problems, clusters = by_problem(groups), list(map(data.cluster, problems))
    return {
        **{name: fmean(values) for name, values in of_problems.items()},
        **{f"{name}_stderr": standard_error(x, clusters) for name, x in of_problems.items()},
        **of_rows([row for rows in groups for row in rows])}


def vote_of(answer):
    """What an answer counts as: a number by its value, another as it is read, in small letters."""
    with suppress(ValueError, RecursionError):  # digits or depth beyond Python's limits
        node = without_unit(read(answer))
        value = closed(node) if len(answer) < 100 else None  # this process has no clock for it
        return value if isinstance(value, Fraction) else str(node).lower()
    return answer


def majority(wrong, right):
    """maj@n of a problem: 1 where its right answers, counted as one, are the most frequent, 0 where
    others are, 1 / m in a tie of m. wrong: the other answers; right: the number of right ones."""
    counts = [right, *Counter(map(vote_of, wrong)).values()]
    return float(0 < right == max(counts)) / counts.count(max(counts))


def benchmark_results(problems, groups):
    """The numbers of a benchmark in eval.json. groups: for each problem its rows."""
    n = len(groups[0])
    ends = interval(by_problem(groups)[f"mean@{n}"], [*map(data.cluster, problems)], (0, 1))
    results = dict(summarise(problems, groups), problems=len(problems), samples=n, interval=[*ends])
    vote, *others = {verifier(problem["verifier"]).vote for problem in problems}
    if vote and not others:  # all problems have one vote
        results[f"maj@{n}"] = fmean(majority(
            # an unread one, or where the verifier failed, has no vote
            [vote(row["completion"]) for row in rows if row["reward"] != 1 and not row["fault"]],
            sum(row["reward"] == 1 for row in rows)) for rows in groups)
    return results


def markdown_table(head, rows):
    """head: the columns' titles. rows: lists of cells, in which numbers are formatted already."""
    first, *others = ["| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows)]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def results_table(results):
    """results: {benchmark: benchmark_results}. In brackets: the standard error; "-": unknown."""
    def shown(value, digits=3):
        return "-" if value is None else f"{value:.{digits}f}"
    rows = []
    for name, r in results.items():
        n = r["samples"]
        rows.append({
            "benchmark": name, "problems": r["problems"],
            "mean@n": f"{r[f'mean@{n}']:.3f} (n={n}, se {shown(r[f'mean@{n}_stderr'])})",
            "95% interval": "-".join(map(shown, r["interval"])),
            **{f"{metric} (se)": f"{r[metric]:.3f} ({shown(r[f'{metric}_stderr'])})"
               for metric in r if metric.startswith("pass@") and f"{metric}_stderr" in r},
            "maj@n": shown(r.get(f"maj@{n}")), "unreadable": shown(r["unreadable_frac"]),
            "truncated": shown(r["truncated_frac"]), "length": shown(r["mean_length"], 0),
            "reward": shown(r["reward"])})
    return markdown_table(rows[0], [row.values() for row in rows])


def differences_table(benchmarks):
    """benchmarks: {name: stats.paired's}."""
    return markdown_table(
        ("benchmark", "", "here", "there", "difference", "95% interval, over problems"),
        [(name, metric, f"{d['value']:.3f}", f"{d['other']:.3f}", f"{d['difference']:+.3f}",
          f"{d['low']:+.3f} to {d['high']:+.3f}")
         for name, metrics in benchmarks.items() for metric, d in metrics.items()])

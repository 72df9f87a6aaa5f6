"""What may be said of a claim: a paired interval over seeds, and the verdict that follows from it.

A verdict is computed and never written down. It is about the setting that was measured, and no
wider: RESULTS.md says which setting.
"""

import math
import statistics
from typing import NamedTuple

# the kinds of verdicts, in the order in which RESULTS.md explains them
REPRODUCED = "reproduced"
NOT_SEEN = "not seen at this scale"
CONTRADICTED = "contradicted in this setting"
FOLLOWS = "follows from its assumptions"
INCONSISTENT = "inconsistent in the text"
NOT_JUDGED = "not judged"
NOT_MEASURED = "not measured yet"
KINDS = (REPRODUCED, NOT_SEEN, CONTRADICTED, FOLLOWS, INCONSISTENT, NOT_JUDGED, NOT_MEASURED)

MARGIN = 0.02  # of mean@16: "no worse" means that a larger loss is excluded

# Student's 97.5% quantiles for n values
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306,
           10: 2.262, 16: 2.131}


class Interval(NamedTuple):
    """A mean over seeds with its 95% interval, Student's."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values):
        """values: one per seed. Raises ValueError for fewer than two."""
        if len(values) < 2:
            raise ValueError("an interval over seeds needs two or more of them")
        mean = statistics.fmean(values)
        half = statistics.stdev(values) / len(values) ** 0.5 * STUDENT[len(values)]
        return cls(mean, mean - half, mean + half)

    @property
    def half_width(self):
        """What so many seeds can tell: a difference smaller than this is lost in the noise."""
        return (self.high - self.low) / 2

    def signed(self, digits=3):
        return f"{self.mean:+.{digits}f} ({self.low:+.{digits}f}, {self.high:+.{digits}f})"

    def plain(self, digits=3):
        return f"{self.mean:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def student_p(x, n):
    """The two-sided p of an Interval over n seeds that its mean is 0, by Student's t: the density
    of t with n - 1 degrees of freedom, integrated."""
    if x.half_width == 0:
        return float(x.mean == 0)
    freedom = n - 1
    t = abs(x.mean) / x.half_width * STUDENT[n]
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(freedom * math.pi)
    steps = 2000  # Simpson's rule from 0 to t
    weights = [1, *([4, 2] * (steps // 2))][:steps] + [1]
    inside = sum(w * (1 + (i * t / steps) ** 2 / freedom) ** (-(freedom + 1) / 2)
                 for i, w in enumerate(weights)) * t / steps / 3 * scale
    return max(0.0, 1 - 2 * inside)


def holm(p_values, level=0.05):
    """Which of several differences are still there when all were looked at (Holm 1979): a list of
    booleans."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    kept, survive = True, [False] * len(p_values)
    for rank, i in enumerate(order):
        kept = kept and p_values[i] <= level / (len(p_values) - rank)
        survive[i] = kept
    return survive


class Verdict(NamedTuple):
    kind: str
    remark: str = ""

    def __str__(self):
        return f"{self.kind}: {self.remark}" if self.remark else self.kind


# ---------------------------------------------------------------------------- tests
# of an Interval -> Verdict. What a paper has above, below or no worse than a value.


def more(x, than=0.0):
    """The paper has it above `than`."""
    if x.low > than:
        return Verdict(REPRODUCED)
    if x.high < than:
        return Verdict(CONTRADICTED)
    return Verdict(NOT_SEEN, f"more than {x.high:.3f} is excluded")


def less(x, than=0.0):
    """The paper has it below `than`."""
    if x.high < than:
        return Verdict(REPRODUCED)
    if x.low > than:
        return Verdict(CONTRADICTED)
    return Verdict(NOT_SEEN, f"less than {x.low:.3f} is excluded")


def holds(x, margin=MARGIN):
    """The paper has no loss: one larger than the margin is excluded, and the interval
    does not lie below 0."""
    if x.high < 0:
        return Verdict(CONTRADICTED, f"a loss above {-x.low:.3f} is excluded")
    if x.low > -margin:
        return Verdict(REPRODUCED, f"a loss above {max(0.0, -x.low):.3f} is excluded")
    return Verdict(NOT_SEEN, f"a loss of up to {-x.low:.3f} is not excluded")


def all_more(intervals):
    """The paper has every one of them above 0."""
    above = sum(x.low > 0 for x in intervals)
    below = sum(x.high < 0 for x in intervals)
    if above == len(intervals):
        return Verdict(REPRODUCED)
    kind = CONTRADICTED if below == len(intervals) else NOT_SEEN
    return Verdict(kind, f"{above} of {len(intervals)} are above 0, {below} below")


def between(x, low, high):
    """The paper has a value, and what lies from low to high is taken for it."""
    if low <= x.low and x.high <= high:
        return Verdict(REPRODUCED)
    if x.high < low or x.low > high:
        return Verdict(CONTRADICTED)
    return Verdict(NOT_SEEN, f"the interval reaches out of {low:.3g} to {high:.3g}")


def derived(errors, limit=4.0):
    """A formula against a simulation of its own assumptions; errors: the gaps between them, in
    standard errors of the simulation."""
    largest = max(map(abs, errors))
    kind = FOLLOWS if largest < limit else INCONSISTENT
    return Verdict(kind, f"the largest gap is {largest:.1f} standard errors")


def unjudged(x=None):
    """A number that no paper has a claim about, or a claim that we know from a note alone."""
    return Verdict(NOT_JUDGED)


def beside(paper_reports):
    """The test of a number that stands beside the one that the paper's claim is about."""
    def judge(x):
        return Verdict(NOT_JUDGED, f"the paper reports the {paper_reports}")
    return judge


def with_remark(test, remark):
    """The test, with a remark on what its verdict leaves out."""
    def judge(x):
        verdict = test(x)
        return Verdict(verdict.kind, "; ".join(filter(None, (verdict.remark, remark))))
    return judge


def of_a_note(test):
    """The test of a claim whose method we know from a note alone: what it says is said of the
    method as the note has it, and is no verdict on the paper."""
    def judge(x):
        return Verdict(NOT_JUDGED, f"as the note has the method, {test(x)}")
    return judge

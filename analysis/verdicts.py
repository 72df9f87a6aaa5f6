"""What may be said of a claim: a paired interval over seeds, and the verdict that follows from it.

A verdict is computed and never written down. It is about the setting that was measured, and no
wider: RESULTS.md says which setting.
"""

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

MARGIN = 0.03  # of mean@16: "no worse" means that a larger loss is excluded

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
    return Verdict(NOT_SEEN, f"more than {x.high:+.3g} is excluded")


def less(x, than=0.0):
    """The paper has it below `than`."""
    if x.high < than:
        return Verdict(REPRODUCED)
    if x.low > than:
        return Verdict(CONTRADICTED)
    return Verdict(NOT_SEEN, f"less than {x.low:+.3g} is excluded")


def holds(x, margin=MARGIN):
    """The paper has no loss: one larger than the margin is excluded, or it is certain."""
    if x.low > -margin:
        return Verdict(REPRODUCED, f"a loss of {max(0.0, -x.low):.3g} or more is excluded")
    if x.high < -margin:
        return Verdict(CONTRADICTED)
    return Verdict(NOT_SEEN, f"neither a loss of {-x.low:.3g} nor its absence is excluded")


def all_more(intervals):
    """The paper has every one of them above 0."""
    if all(x.low > 0 for x in intervals):
        return Verdict(REPRODUCED)
    below = [x for x in intervals if x.high < 0]
    if below:
        return Verdict(CONTRADICTED, f"{len(below)} of {len(intervals)} are below 0")
    above = sum(x.low > 0 for x in intervals)
    return Verdict(NOT_SEEN, f"{above} of {len(intervals)} are above 0, none below")


def between(x, low, high):
    """The paper has a value, and what lies from low to high is taken for it."""
    if low <= x.low and x.high <= high:
        return Verdict(REPRODUCED)
    if x.high < low or x.low > high:
        return Verdict(CONTRADICTED)
    return Verdict(NOT_SEEN, f"the interval reaches out of {low:g} to {high:g}")


def derived(errors, limit=4.0):
    """A formula against a simulation of its own assumptions; errors: the gaps between them, in
    standard errors of the simulation."""
    largest = max(map(abs, errors))
    kind = FOLLOWS if largest < limit else INCONSISTENT
    return Verdict(kind, f"the largest gap is {largest:.1f} standard errors")


def unjudged(x=None):
    """A number that no paper has a claim about, or a claim that we know from a note alone."""
    return Verdict(NOT_JUDGED)

"""Killable processes, equality of mathematical answers, a sandbox. No import from the project."""


class Ungraded(ValueError):
    """What a verifier raises in place of a reward: it gives its least one, counted by kind."""


class Unparsed(Ungraded):
    """The completion has no answer to be graded: counted apart from wrong ones."""
    kind = "unparsed_answer"


class UnparsedGold(Ungraded):
    """The gold answer cannot be graded."""
    kind = "unparsed_gold"

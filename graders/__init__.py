"""Killable processes, equality of mathematical answers, a sandbox. No import from the project."""


class Unparsed(ValueError):
    """What a verifier raises in place of a reward for a completion without an answer to be graded.
    The reward is its least one; these are counted apart from wrong ones."""
    kind = "unparsed_answer"


class UnparsedGold(Unparsed):
    """The gold answer cannot be graded."""
    kind = "unparsed_gold"

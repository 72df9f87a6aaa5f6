"""Killable processes, equality of mathematical answers, a sandbox. No import from the project."""


class Ungraded(ValueError):
    """What a verifier raises in place of a reward: it gives its least one, counted by kind."""


class Unparsed(Ungraded):
    """The completion has no answer to be graded: counted apart from wrong ones."""
    kind = "unparsed_answer"


class Hedge(Ungraded):
    """The answer is several candidates, a relation, or an operation left to do."""
    kind = "hedge"


class UnparsedGold(Ungraded):
    """The gold answer cannot be graded."""
    kind = "unparsed_gold"

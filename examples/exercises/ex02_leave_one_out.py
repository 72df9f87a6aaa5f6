"""2. Leave one out (RLOO, arXiv 2402.14740, eq. 7)

The group's mean has the completion's own reward in it. The mean of the others has not.
"""


def leave_one_out(rewards):
    """rewards [P, G] -> advantages [P, G]: reward less the mean reward of the other G - 1."""
    raise NotImplementedError

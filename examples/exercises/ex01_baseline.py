"""1. A baseline (Williams 1992; Sutton and Barto, chapter 13.4)

A policy answers right (r = 1) with probability p = sigmoid(theta), else wrong (r = 0). The gradient
estimate of one sample is (r - b) d log pi / d theta, and d log pi / d theta is 1 - p for the right
answer and -p for the wrong one.
"""


def mean_and_variance(p, b):
    """The exact mean and variance, two floats, of the estimate for a baseline b."""
    raise NotImplementedError


def centred(rewards):
    """rewards [P, G] of P groups -> advantages [P, G]: the baseline is the group's mean."""
    raise NotImplementedError

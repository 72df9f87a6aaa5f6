"""3. Division by the spread (GRPO, arXiv 2402.03300, sec. 4.1.2; Dr. GRPO, arXiv 2503.20783)

z-scores divide a group's centred rewards by their standard deviation. A prompt's part of the
gradient becomes larger where the spread is small: where it is nearly always solved, or never.
"""


def zscore(rewards):
    """rewards [P, G] -> advantages [P, G]: (r - mean) / (std + 1e-6), std with G - 1."""
    raise NotImplementedError


def difficulty_weight(p):
    """The factor, a float, by which z-scores multiply the centred rewards of a prompt that is
    solved with probability p, for a group so large that its std is the distribution's."""
    raise NotImplementedError

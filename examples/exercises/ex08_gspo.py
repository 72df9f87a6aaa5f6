"""8. The ratio of a whole completion (GSPO, arXiv 2507.18071, eq. 7)

The product of a completion's ratios grows with its length. GSPO takes their geometric mean.
"""


def sequence_ratio(logprobs, old_logprobs, mask):
    """All [B, T]; mask is False in padding -> [B]. The gradient is compared, too."""
    raise NotImplementedError

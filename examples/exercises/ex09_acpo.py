"""9. A clip range for each bin of probability (ACPO, arXiv 2606.22570)

Ratios spread more where the token's probability is small. ACPO cuts [0, 1] into equal bins of the
token's present probability, and a bin's range is base + alpha times the standard deviation of its
ratios (with n, not n - 1), at most `most`. A bin without a token has the range `base`.
"""


def clip_ranges(logprobs, old_logprobs, mask, bins, base, alpha, most):
    """The first three [B, T]; mask is False in padding -> ranges [bins]."""
    raise NotImplementedError

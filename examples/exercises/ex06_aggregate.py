"""6. One number from many tokens (Dr. GRPO, arXiv 2503.20783; DAPO, arXiv 2503.14476, eq. 8)

Completions have different lengths. The aggregation decides whose tokens weigh more.
"""


def aggregate(loss, mask, how, max_tokens):
    """loss [B, T]; mask [B, T], bool, False in padding -> a scalar.

    how: "sequence", the mean over completions of the mean over a completion's tokens; "token", the
    mean over all tokens; "constant", the sum over B times max_tokens."""
    raise NotImplementedError

"""10. The effective sample size (Kong 1992; P3O, arXiv 2605.12380)

n weighted samples are worth (sum rho)^2 / sum rho^2 samples that need no weights. P3O bounds the
ratios by this number's share of n.
"""


def effective_sample_size(logprobs, old_logprobs, mask):
    """All [B, T]; mask is False in padding -> a share of the tokens, a scalar in (0, 1]."""
    raise NotImplementedError

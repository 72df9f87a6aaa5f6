"""5. Three estimates of a KL divergence (Schulman 2020, "Approximating KL divergence")

The tokens are sampled from pi. With r = pi_ref / pi of a sampled token, k1 = -log r,
k2 = (log r)^2 / 2 and k3 = r - 1 - log r estimate KL(pi | pi_ref). Two of them are never negative,
two of them have the right mean.
"""


def kl_estimates(logprobs, ref_logprobs):
    """Both [B, T] -> k1, k2, k3, each [B, T]."""
    raise NotImplementedError

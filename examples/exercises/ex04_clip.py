"""4. The ratio and the clip (PPO, arXiv 1707.06347, eq. 7)

The ratio rho = pi / pi_old weighs a token that another policy sampled. The clip takes the gradient
away once the ratio has left [1 - low, 1 + high] in the direction that the advantage wants.
"""


def clip_loss(logprobs, old_logprobs, advantages, low, high):
    """All [B, T] -> loss [B, T] to minimise, - min(rho A, clip(rho) A).

    The gradient with respect to logprobs is compared, too."""
    raise NotImplementedError

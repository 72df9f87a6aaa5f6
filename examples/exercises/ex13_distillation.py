"""13. A teacher (MiniLLM, arXiv 2306.08543)

The student samples a token a from pi and asks a teacher for its probability q(a). With the
advantage A = log q(a) - log pi(a), held constant, the policy gradient descends the reverse KL.
"""


def reverse_kl(logits, teacher_logits):
    """logits of pi and of q, [V] each -> KL(pi | q) in nats, a scalar."""
    raise NotImplementedError


def policy_gradient(logits, teacher_logits):
    """[V] each -> the mean over a ~ pi of A d log pi(a) / d logits, [V]: the sum over all a."""
    raise NotImplementedError

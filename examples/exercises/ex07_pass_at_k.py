"""7. pass@k without bias (arXiv 2107.03374, eq. 1)

n samples of a problem were drawn, c of them are correct. pass@k is the chance that k of the n,
drawn without replacement, have a correct one. 1 - (1 - c / n)^k is too small.
"""


def pass_at_k(n, c, k):
    """Whole numbers -> a float."""
    raise NotImplementedError

"""11. Two schedules (FADE, arXiv 2607.01490)

FADE's advantage is (1 - rbar)^(alpha - 1) (r - rbar), and its negative values are divided by delta.
alpha, the weight of hard problems, falls from alpha_max to 1 as the solve rate p rises: it is
3 (1 - p) / (2 p) between those bounds. delta is 1 + H - target between delta_min and 1: an entropy
H below its target makes failures weigh more.
"""


def schedules(p, entropy, target, alpha_max, delta_min):
    """Floats -> alpha, delta. p may be 0."""
    raise NotImplementedError

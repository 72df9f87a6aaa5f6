"""FADE's gradient masses of each advantage by solve rate, for the figure `fade`."""

import math

import torch

from losses import gradient_mass, group_advantages, row


def balanced(mass):
    """p -> the same mass on successes and on failures, from mass(p, 1 - p)."""
    return lambda p: (mass(p, 1 - p),) * 2


# p -> m_S, m_F: the gradient masses of an infinitely large group with binary rewards and solve
# rate p. fade is taken as it begins, at a solve rate of 1/2: alpha = 3/2, delta = 1
MASSES = {
    "raw": lambda p: (p, 0.0),
    "centred": balanced(lambda p, q: p * q),
    "leave_one_out": balanced(lambda p, q: p * q),
    "zscore": balanced(lambda p, q: math.sqrt(p * q)),
    "asym": lambda p: (p * (1 - p), p * (1 - p) / 2),
    "power": balanced(lambda p, q: p * q**2),
    "fade": balanced(lambda p, q: p * q**1.5),
    "maxrl": balanced(lambda p, q: q),
    "passk": balanced(lambda p, q: p * q**2 / math.sqrt(1 - q**4)),
}


def masses(size=16):
    """{advantage: {"theory", "measured": [(solve rate, m_S, m_F)]}}, measured on groups of `size`
    completions of which 1, 2, ... succeed."""
    groups = [torch.tensor([[1.0] * k + [0.0] * (size - k)]) for k in range(1, size)]
    result = {}
    for name, formula in MASSES.items():
        method = row("dr_grpo", advantage=name)
        # fade's controllers must not move from group to group
        if "fade_ema" in method.flags:
            method = method.bind(fade_ema=0.0)
        measured = [(rewards.mean().item(),
                     *gradient_mass(group_advantages(method, rewards, dict(entropy=1.0))))
                    for rewards in groups]
        result[name] = dict(theory=[(i / 100, *formula(i / 100)) for i in range(1, 100)],
                            measured=measured)
    return result

"""Evaluation: accuracy over n samples of each problem, unbiased pass@k."""

from math import comb

import data
from rewards import grade


def pass_at_k(n, correct, k):
    """The chance that k of n samples, drawn without replacement, hold a correct one (arXiv 2107.03374, eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples of each problem, there are {n}")
    return 1 - comb(n - correct, k) / comb(n, k)


def powers_of_two(n):
    """1, 2, 4, ... up to n: the k of pass@k worth logging for n samples."""
    return [2**i for i in range(n.bit_length())]


def evaluate(sampler, tokenizer, problems, samples, *, seed, temperature, max_tokens):
    """Samples each problem `samples` times and grades all of it -> {mean@n, pass@k, truncated_frac, mean_length}."""
    groups = sampler.sample([data.encode(tokenizer, p) for p in problems], samples, seed=seed,
                            temperature=temperature, max_tokens=max_tokens)
    texts = [[data.decode(tokenizer, c) for c in group] for group in groups]
    rewards, _ = grade(problems, texts)
    correct = [sum(r == 1 for r in group) for group in rewards]
    every = [c for group in groups for c in group]

    def mean(values):
        return sum(values) / len(values)
    return {f"mean@{samples}": mean(correct) / samples,
            **{f"pass@{k}": mean([pass_at_k(samples, c, k) for c in correct]) for k in powers_of_two(samples)},
            "truncated_frac": mean([c.truncated for c in every]), "mean_length": mean([len(c.tokens) for c in every])}

"""A completion, seeds, and the words that both samplers share."""

import hashlib
from dataclasses import dataclass

RUINED = "the model's probabilities are nan: a step has ruined the weights (a lower --lr helps)"


@dataclass
class Completion:
    tokens: list           # ids, with the end-of-sequence token, where there is one
    logprobs: list         # of each token, after temperature; with top_p 1 as it was drawn
    truncated: bool        # stopped by max_tokens and not by an end-of-sequence token or a text
    stopped: bool = False  # by the text of --stop, which the last tokens hold


def seed_of(*parts):
    """A seed from (seed, rollout, ...): the same in every process, unrelated to its neighbours."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])

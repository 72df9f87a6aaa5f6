"""What countdown.yaml needs of this project: its problems, and the reward of a completion."""

from datasets import Dataset

import data
from rewards import REWARDS


def problems(**_):
    return {"test": Dataset.from_list(data.load("countdown", "test")[:256])}


def reward(doc, completions):
    return {"reward": REWARDS[doc["verifier"]](completions[0], doc["answer"])}

"""python -m examples.overlap TRAIN BENCHMARK [DATA_DIR]: which problems share 13 words in a row?"""

import re
import sys

import data
from harness.failures import refusing

WORDS = 13  # GPT-3's number (arXiv 2005.14165, appendix C)


def grams(text):
    """The runs of 13 words of a text, without punctuation and case; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i:i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


if __name__ == "__main__":
    with refusing("overlap.py"):
        train, benchmark, *data_dir = sys.argv[1:]
        learnt, held_out = (data.load(name, split, *data_dir)
                            for name, split in ((train, "train"), (benchmark, "test")))
    seen = set().union(*(grams(problem["prompt"]) for problem in learnt))
    for problem in held_out:
        if shared := grams(problem["prompt"]) & seen:
            print(f"{problem['id']}: {min(shared)}")

"""python -m examples.overlap TRAIN BENCHMARK [DATA_DIR]: which problems share 13 words in a row?"""

import re
import sys

import data

WORDS = 13  # GPT-3's number (arXiv 2005.14165, appendix C)


def grams(text):
    """The runs of 13 words of a text, without punctuation and case; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i:i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


if __name__ == "__main__":
    train, benchmark, *data_dir = sys.argv[1:]
    seen = set().union(*(grams(p["prompt"]) for p in data.load(train, "train", *data_dir)))
    for problem in data.load(benchmark, "test", *data_dir):
        if shared := grams(problem["prompt"]) & seen:
            print(f"{problem['id']}: {min(shared)}")

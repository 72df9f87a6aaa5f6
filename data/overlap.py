"""Do a training set and a benchmark share text? Every problem of the benchmark that shares 13 words in a row.

    python -m data.overlap TRAIN BENCHMARK [DATA_DIR]
"""

import re
import sys

import data

WORDS = 13  # GPT-3's number (arXiv 2005.14165, appendix C)


def grams(text):
    """The runs of 13 words of a text, punctuation and case apart; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i:i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


def overlap(train, benchmark):
    """-> [(problem of the benchmark, a shared run of words)]"""
    seen = set().union(*(grams(p["prompt"]) for p in train))
    return [(p, min(shared)) for p in benchmark if (shared := grams(p["prompt"]) & seen)]


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("data.overlap: python -m data.overlap TRAIN BENCHMARK [DATA_DIR]")
    try:
        train, benchmark = (data.load(name, split, *sys.argv[3:]) for name, split in zip(sys.argv[1:3], ("train", "test")))
    except data.DataError as e:
        sys.exit(f"data.overlap: {e}")
    found = overlap(train, benchmark)
    for problem, words in found:
        print(f"{problem['id']}: {words}")
    print(f"{len(found)} of {len(benchmark)} problems of {sys.argv[2]} share {WORDS} words in a row with {sys.argv[1]}")

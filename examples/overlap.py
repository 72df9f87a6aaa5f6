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
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    train, benchmark, *data_dir = sys.argv[1:]
    try:
        learnt = data.load(train, "train", *data_dir)
        held_out = data.load(benchmark, "test", *data_dir)
    except data.DataError as e:
        print(f"overlap.py: {e}", file=sys.stderr)
        sys.exit(2)
    seen = set().union(*(grams(problem["prompt"]) for problem in learnt))
    for problem in held_out:
        if shared := grams(problem["prompt"]) & seen:
            print(f"{problem['id']}: {min(shared)}")

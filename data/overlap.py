"""Do a training set and a benchmark share text?

Prints every problem of the benchmark that shares 13 words in a row with the training set:

    python -m data.overlap TRAIN BENCHMARK [DATA_DIR]
"""

import re
import sys

import data

WORDS = 13  # GPT-3's number (arXiv 2005.14165, appendix C)


def grams(text):
    """The runs of 13 words of a text, without punctuation and case; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i:i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


def overlap(train, benchmark):
    """-> [(problem of the benchmark, a run of words that it shares with a training problem)]"""
    train_grams = set().union(*(grams(problem["prompt"]) for problem in train))
    pairs = []
    for problem in benchmark:
        shared = grams(problem["prompt"]) & train_grams
        if shared:
            pairs.append((problem, min(shared)))
    return pairs


def refuse(message):
    print(f"data.overlap: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv):
    if len(argv) not in (2, 3):
        refuse("python -m data.overlap TRAIN BENCHMARK [DATA_DIR]")
    train_name, benchmark_name, *data_dir = argv
    try:
        train = data.load(train_name, "train", *data_dir)
        benchmark = data.load(benchmark_name, "test", *data_dir)
    except data.DataError as e:
        refuse(str(e))
    pairs = overlap(train, benchmark)
    for problem, words in pairs:
        print(f"{problem['id']}: {words}")
    print(f"{len(pairs)} of {len(benchmark)} problems of {benchmark_name} "
          f"share {WORDS} words in a row with {train_name}")


if __name__ == "__main__":
    main(sys.argv[1:])

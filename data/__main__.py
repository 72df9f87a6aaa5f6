"""A file of your own: can its problems be used? Of rows with a completion, how many are right?

    python -m data FILE.jsonl
"""

import sys
from collections import Counter

import data
from rewards import grade


def main(arguments):
    """Prints the counts, after the rows that are left out. -> a sentence on a fault, or None"""
    if len(arguments) != 1:
        return f"python -m data takes one FILE.jsonl; {len(arguments)} arguments are given"
    try:
        problems = data.load(arguments[0], "train")
    except data.DataError as e:
        return str(e)
    rows, details = [problem for problem in problems if "completion" in problem], []
    grade(rows, [[str(row["completion"])] for row in rows], details=details)
    counts = Counter(fault or ("right" if reward == 1 else "wrong") for reward, fault, _ in details)
    print(f"problems: {len(problems)}", *(f"{kind}: {n}" for kind, n in counts.most_common()),
          sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""python rewards.py FILE: the rows of a file, graded and counted."""

import json
from collections import Counter


def main(arguments, names, grade):
    """Prints how many completions of a file's rows {completion, answer, reward} are right, wrong,
    or have a fault. Of rows without a completion the gold answers are tried instead, and each that
    nothing could match is named.

    names: the verifiers. grade: rewards.grade. Returns None, or what is wrong with the file."""
    takes = "rewards.py FILE.jsonl takes one file, of rows {completion, answer, reward}"
    if len(arguments) != 1:
        return f"{takes}; {len(arguments)} arguments are given"
    rows = []
    try:
        for place, line in enumerate(open(arguments[0], encoding="utf-8"), 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict) or not {"answer", "reward"} <= set(row):
                    return f"{takes}; line {place} of {arguments[0]} has no answer or no reward"
                if row["reward"] not in names:
                    return (f"line {place} of {arguments[0]}: there is no verifier "
                            f"{row['reward']!r}; there are {', '.join(names)}")
                if not isinstance(row.get("completion", ""), str):
                    return f"{takes}; the completion in line {place} is no text"
                rows.append((place, row))
    except (OSError, ValueError) as e:
        return f"{takes}; {arguments[0]}: {e}"
    graded, details = [row for _, row in rows], []
    grade([row if "completion" in row else {**row, "reward": "gold_" + row["reward"]}
           for row in graded], [[row.get("completion", "")] for row in graded], details=details)
    counts = Counter()
    for (place, row), (reward, fault, _) in zip(rows, details, strict=True):
        kind = fault or ("right" if reward == 1 else "wrong")
        if "completion" not in row:
            kind = "gold answers that can be matched" if reward else "gold answers that cannot"
            if not reward:
                print(f"line {place}: {row['reward']} can match nothing with the gold answer "
                      f"{str(row['answer'])[:200]!r}")
        counts[kind] += 1
    for kind, count in counts.most_common():
        print(f"{kind}: {count}")

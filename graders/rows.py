"""python rewards.py FILE: the rows of a file, graded and counted."""

import json
from collections import Counter


def main(arguments, names, grade):
    """Prints how many completions of a file's rows are right, wrong, or have a fault. Of rows
    without a completion the gold answers are tried, and each that nothing could match is named.

    names: the verifiers. grade: rewards.grade. Returns None, or what is wrong with the file."""
    takes = ("rewards.py FILE.jsonl takes one file, of rows {completion, a text; answer; "
             f"reward, one of {', '.join(names)}}}")
    if len(arguments) != 1:
        return f"{takes}; {len(arguments)} arguments are given"
    try:
        lines = enumerate(open(arguments[0], encoding="utf-8"), 1)
        rows = {place: json.loads(line) for place, line in lines if line.strip()}
    except (OSError, ValueError, RecursionError) as e:
        return f"{takes}; {arguments[0]}: {e}"
    for place, row in rows.items():
        if not (isinstance(row, dict) and "answer" in row and row.get("reward") in [*names]
                and isinstance(row.get("completion", ""), str)):
            return f"{takes}; line {place} of {arguments[0]} is no such row"
    details, counts = [], Counter()
    grade([{**row, "reward": ("" if "completion" in row else "gold_") + row["reward"]}
           for row in rows.values()],
          [[row.get("completion", "")] for row in rows.values()], details=details)
    for (place, row), (reward, fault, _) in zip(rows.items(), details, strict=True):
        if "completion" in row:
            counts[fault or ("right" if reward == 1 else "wrong")] += 1
        else:
            counts[f"gold answers that can{'' if reward else 'not'} be matched"] += 1
            if not reward:
                print(f"line {place}: {row['reward']} can match nothing with the gold answer "
                      f"{str(row['answer'])[:200]!r}")
    for kind, count in counts.most_common():
        print(f"{kind}: {count}")

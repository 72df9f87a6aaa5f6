"""python rewards.py FILE: the rows of a file, graded and counted."""

import json
from collections import Counter


def problem_with(row, names):
    """What is wrong with a row, None if nothing is."""
    if not isinstance(row, dict) or not {"answer", "reward"} <= set(row):
        return "it has no answer or no reward"
    if row["reward"] not in names:
        return f"there is no verifier {row['reward']!r}; there are {', '.join(names)}"
    return None if isinstance(row.get("completion", ""), str) else "its completion is no text"


def main(arguments, names, grade):
    """Prints how many completions of a file's rows are right, wrong, or have a fault. Of rows
    without a completion the gold answers are tried, and each that nothing could match is named.

    names: the verifiers. grade: rewards.grade. Returns None, or what is wrong with the file."""
    takes = "rewards.py FILE.jsonl takes one file, of rows {completion, answer, reward}"
    if len(arguments) != 1:
        return f"{takes}; {len(arguments)} arguments are given"
    try:
        lines = enumerate(open(arguments[0], encoding="utf-8"), 1)
        rows = {place: json.loads(line) for place, line in lines if line.strip()}
    except (OSError, ValueError) as e:
        return f"{takes}; {arguments[0]}: {e}"
    for place, row in rows.items():
        if problem := problem_with(row, names):
            return f"{takes}; line {place} of {arguments[0]}: {problem}"
    details, counts = [], Counter()
    grade([row if "completion" in row else {**row, "reward": "gold_" + row["reward"]}
           for row in rows.values()],
          [[row.get("completion", "")] for row in rows.values()], details=details)
    for (place, row), (reward, fault, _) in zip(rows.items(), details, strict=True):
        if "completion" in row:
            counts[fault or ("right" if reward == 1 else "wrong")] += 1
        else:
            counts[f"gold answers that can{'' if reward else 'not'} be matched"] += 1
            if not reward:
                print(f"line {place}: nothing that {row['reward']} takes for an answer matches "
                      f"the gold answer {str(row['answer'])[:200]!r}")
    for kind, count in counts.most_common():
        print(f"{kind}: {count}")

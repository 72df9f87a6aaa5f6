"""The audit of a file: counts and examples of what the verifiers make of its rows."""

import json
import os
import sys

from graders.worker import FAULTS


def read_rows(path, rewards):
    """-> the (problem, completion) of each row {completion, answer, reward} of a JSONL file.

    rewards: the verifiers by name. Exits with a message at the first row that is wrong."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                rows.append(({"reward": row["reward"], "answer": row["answer"]},
                             row["completion"] + ""))
                if row["reward"] not in rewards:
                    raise KeyError(row["reward"])
            except (ValueError, KeyError, TypeError) as e:
                sys.exit(f"rewards.py: {path}, line {number}: a row is {{completion, answer, "
                         f"reward}}, reward one of {', '.join(rewards)}; {type(e).__name__}: {e}")
    return rows


def main(arguments, rewards, grade):
    """Prints the audit of the one file that the arguments name.

    `rewards` and `grade` are REWARDS and grade of rewards.py, which this does not import."""
    if len(arguments) != 1 or not os.path.isfile(arguments[0]):
        sys.exit("rewards.py: give one file that exists: python rewards.py FILE.jsonl")
    rows, details = read_rows(arguments[0], rewards), []
    _, counters = grade([problem for problem, _ in rows], [[text] for _, text in rows],
                        details=details)
    print(f"{len(rows)} completions, slowest {counters['seconds_max']:.2f} s")
    members = {kind: [] for kind in ("right", "wrong", *FAULTS)}
    for (problem, text), (reward, fault, seconds) in zip(rows, details, strict=True):
        kind = "right" if reward == 1 else (fault or "wrong").split(":")[0]
        members[kind].append((problem, text, fault, seconds))
    for kind, examples in members.items():
        print(f"\n{kind}: {len(examples)}")
        for problem, text, fault, seconds in examples[:3]:
            print(f"  {problem['reward']}, gold {str(problem['answer'])[:80]!r}, {seconds:.2f} s"
                  f"{', ' + fault if fault else ''}: ...{text[-160:]!r}")

"""Files of your own: can their problems be used? Of the completions, how many are right (reward 1)?

    python examples/own_file.py FILE.jsonl ...
"""

import sys
from collections import Counter

sys.path[0] += "/.."  # imports begin at the project's folder
import data
from rewards import grade

for path in sys.argv[1:] or sys.exit("which file? examples/own_file.py PATH"):
    try:
        problems = data.load(path, "train")
    except data.DataError as e:
        print(f"own_file.py: {e}", file=sys.stderr)
        sys.exit(2)
    rows = [problem for problem in problems if "completion" in problem]
    if not rows:
        print("no row has a completion: nothing is graded")
    graded = grade(rows, [[str(row["completion"])] for row in rows])
    counts = Counter(fault.kind if fault else "right" if reward == 1 else
                     "partial" if reward > 0 else "wrong" for (reward, fault), in graded)
    print(f"problems: {len(problems)}", *(f"{kind}: {n}" for kind, n in counts.most_common()),
          sep="\n")

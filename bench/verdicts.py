"""Verdicts of the verifier of mathematics beside those of published evaluations.

    python bench/verdicts.py FILE.jsonl ...

The files are those of ToRA's, Rho-1's and Qwen2.5-Math's evaluations: rows {"gt": gold answer,
"pred": [answers], "score": [verdicts]}. Prints the answers whose verdicts differ, and counts."""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from graders.equal import equal  # noqa: E402

if __name__ == "__main__":
    table, verdicts = Counter(), {True: "right", False: "wrong"}
    paths = map(Path, sys.argv[1:] or sys.exit(__doc__))
    for row in (json.loads(line) for path in paths for line in path.open()):
        for pred, there in zip(row["pred"], row["score"]):
            table[here := equal(pred, row["gt"]), there] += 1
            if here != there:
                print(f"{verdicts[here]} here, {verdicts[there]} there: {pred!r} for {row['gt']!r}")
    for (here, there), n in sorted(table.items()):
        print(f"{n} {verdicts[here]} here, {verdicts[there]} there")

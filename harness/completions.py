"""The rows of completions.jsonl, of an evaluation or from elsewhere, read and graded again."""

import json

from harness.failures import refusing
from losses import require
from rewards import grade


def read_rows(path):
    """-> {(benchmark, id): rows} of a file of completions, not graded. Raises ValueError for a line
    that is no row, but for the last one, which a killed process was writing."""
    found = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                x = json.loads(line)
                row = dict(benchmark=x["benchmark"], id=str(x["id"]),
                           completion="" + x["completion"], reward=None,
                           tokens=x.get("tokens") and int(float(x["tokens"])),  # None: not counted
                           truncated=x.get("truncated") and x["truncated"] is True)
                found.setdefault((row["benchmark"], row["id"]), []).append(row)
            except Exception as e:  # such a line may raise anything
                require(not line.endswith(b"\n"),
                        f"{path}, line {number} is no row {{benchmark, id, completion}}: {e!r}")
    return found


@refusing("eval.py")
def read_groups(path, problems, n=None, flag=None, size=1):
    """-> for each problem its rows in a file, with the rewards and faults of today's verifiers.

    Each problem has n rows, without n as many as the others. The file of a flag is refused
    otherwise; --out's own, which may be cut, counts by whole chunks of `size`."""
    require(not flag or path.is_file(), f"{flag}: there is no file {path}")
    found = read_rows(path) if path.exists() else {}
    groups = [found.get((problem["benchmark"], problem["id"]), []) for problem in problems]
    n = n or max(1, *map(len, groups))
    whole = next((i for i, rows in enumerate(groups) if len(rows) != n), len(groups))
    if whole < len(groups):
        if flag:
            raise ValueError(
                f"{flag}: {path} has {len(groups[whole])} completions of problem "
                f"{problems[whole]['id']} of {problems[whole]['benchmark']}, not {n}; its rows are "
                f"of {', '.join({str(x) for x, _ in found})}; --limit N takes the first N problems")
        whole -= whole % size
    groups = groups[:whole]
    graded = grade(problems[:whole], [[row["completion"] for row in rows] for rows in groups])
    return [[dict(row, reward=result.reward, fault=result.fault and str(result.fault))
             for row, result in zip(rows, results)] for rows, results in zip(groups, graded)]

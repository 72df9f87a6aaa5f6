"""The updates of a run's last ten rollouts: seconds with every row through the model, over seconds
without the rows that have no gradient. They take turns, with nothing else running.

    python bench/skip.py                trains fade for 50 rollouts first, 16 steps each
    python bench/skip.py runs/fade      a run with --save_rollouts --save_every 1 --keep 99

A rollout's optimizer steps are taken again from the weights before it.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from analysis.rollout import open_rollout, walk
from engine import policy

TURNS, LAST = 5, 10


def seconds(kept):
    """-> of the update, and the share of the rollout's tokens that go through the model in it."""
    learnt, own = [], policy.rows_to_learn

    def counted(batch, *given, **named):
        rows = own(batch, *given, **named)
        learnt.append(int((batch.prompt_len + batch.completion_len)[rows].sum()))
        return rows
    with mock.patch.object(policy, "rows_to_learn", counted):
        began = time.perf_counter()
        for _ in walk(kept):
            pass
        took = time.perf_counter() - began
    return took, sum(learnt) / int((kept.batch.prompt_len + kept.batch.completion_len).sum())


def all_rows(batch, *_, **__):
    return [*range(len(batch.ids))]


def main(run):
    ratios, shares, times = [], [], {"all rows": [], "those that learn": []}
    paths = sorted((run / "rollouts").glob("rollout_*.pt"))[-LAST:]
    if not paths:
        sys.exit(f"{run} holds no kept rollouts: train it with --save_rollouts --save_every 1 "
                 "--keep 99")
    for path in paths:
        before = run / "checkpoints" / f"rollout_{int(path.stem[-6:]) - 1:06d}"
        of_rollout = {name: [] for name in times}
        for _ in range(TURNS):
            for name, taken in of_rollout.items():
                kept = open_rollout(path, str(before))
                with mock.patch.object(policy, "rows_to_learn", all_rows if name == "all rows"
                                       else policy.rows_to_learn):
                    took, share = seconds(kept)
                taken.append(took)
        whole, some = (statistics.median(taken) for taken in of_rollout.values())
        ratios.append(whole / some)
        shares.append(share)
        for name, taken in of_rollout.items():
            times[name].append(statistics.median(taken))
        print(f"{path.stem}: {share:.2f} of the tokens learn; {whole:.3f} s over {some:.3f} s: "
              f"{ratios[-1]:.2f}", flush=True)
    print(f"update with all rows over update with those that learn: "
          f"{sum(times['all rows']) / sum(times['those that learn']):.2f} (rollouts: "
          f"{min(ratios):.2f} to {max(ratios):.2f}), {statistics.fmean(shares):.2f} of the tokens")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "train.py", "--loss", "fade", "--steps_per_rollout",
                            "16", "--save_rollouts", "--save_every", "1", "--keep", "99", "--out",
                            f"{folder}/run"], cwd=ROOT, check=True)
            main(Path(folder, "run"))

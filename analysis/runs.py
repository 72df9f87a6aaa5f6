"""The numbers of runs, grouped over seeds, and as a table."""

import json
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median, stdev

from harness.stats import half_width, markdown_table

OF_A_RUN = dict.fromkeys(("seed", "out", "tokens_per_micro_batch"))  # the last: of the memory


def grouped(runs):
    """{label: [run]}: runs whose flags differ in no more than seed and folder; a second run of a
    seed, as after a change of the code, is of a second group. A second label gets a number."""
    by_flags, times, groups = defaultdict(list), Counter(), {}
    for run in runs:
        flags = json.dumps(run["flags"] | OF_A_RUN)
        by_flags[flags, times[flags, run["seed"]]].append(run)
        times[flags, run["seed"]] += 1
    for members in by_flags.values():
        label = members[0]["name"]
        groups[label if label not in groups else f"{label} ({len(groups) + 1})"] = members
    return groups


def interval(values):
    """Student's 95% interval of the mean over seeds, two or more."""
    mean, half = fmean(values), half_width(len(values), stdev(values) / len(values) ** 0.5)
    return mean - half, mean + half


def values(run, name):
    """A metric's values over the rollouts; the base's score before training is none of them."""
    return [r[name] for r in run["records"] if r["rollout"] and r.get(name) is not None]


last = itemgetter(-1)
# column: metric, and its number of a run from the values over the rollouts
COLUMNS = {"mean@n": ("mean@n", last), "pass@n": ("pass@n", last),
           "entropy": ("policy/entropy", last), "clipped": ("clip/frac", fmean),
           "s/rollout": ("time/rollout", median)}

# the console has it under the table
NOTES = """\
mean@n: share of right completions of the held-out problems. pass@n: share of the problems of which
at least one in n completions is right. Both are of the last evaluation, and compare only where
"held out", the problems x n, is the same. entropy: of the last rollout, in nats per token. clipped:
mean share of tokens that the clip took the gradient from. s/rollout: median of the seconds.
In brackets: Student's 95% interval of the mean over the seeds; of one seed there is none, and
another seed may order the lines otherwise.
Look at mean@n and pass@n together: where the first rises and the second falls, training has made
the model surer, not more able.
"""


def cell(found):
    """0.512 (0.496 to 0.528): the mean over seeds and its interval; "-" without a value."""
    if not found:
        return "-"
    ends = " ({:.3f} to {:.3f})".format(*interval(found)) if len(found) > 1 else ""
    return f"{fmean(found):.3f}{ends}"


def table(groups):
    """A line for each group of runs: numbers at the end, means over seeds with 95% intervals."""
    rows = []
    for label, members in groups.items():
        flags = members[0]["flags"]
        done = [max((record["rollout"] for record in run["records"]), default=0) for run in members]
        held_out = f"{Path(flags['eval_data'] or flags['data']).name}, " \
                   f"{flags['eval_problems']} x {flags['eval_samples']}"
        rows.append([label, flags["loss"], flags["steps_per_rollout"],
                     "-".join(map(str, sorted({min(done), max(done)}))), len(members),
                     held_out if flags["eval_every"] else "-",
                     *(cell([of(x) for run in members if (x := values(run, name))])
                       for name, of in COLUMNS.values())])
    head = ("run", "method", "steps", "rollouts", "seeds", "held out", *COLUMNS)
    return markdown_table(head, rows) + "\n"

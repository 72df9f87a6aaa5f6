"""The runs behind RESULTS.md: which there are (study/results/grid.txt), which learning rate each
method takes, and what the finished ones gave (grid.jsonl beside it). train_grid.py trains them.

A line of grid.txt is a setting: task, name, steps per rollout (a setting for each), tuned
or the setting whose learning rate it takes, and flags of train.py. A tuned setting is trained with
every learning rate of RATES, and with every alternative in braces of its flags, on the tuning
seeds; where the best rate is the least or the largest, with one more beyond it. What validates best
is trained again on the seeds that are reported.
"""

import itertools
import json
import re
import statistics
import zlib
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
GRID, FINISHED = RESULTS / "grid.txt", RESULTS / "grid.jsonl"

# by the steps per rollout: fewer steps bear larger rates
RATES = {16: (2.5e-5, 5e-5, 1e-4, 2e-4), 2: (1e-4, 2e-4, 4e-4, 8e-4)}
TUNING_SEEDS = (100, 101)
SEEDS = range(8)
ROLLOUTS = {"countdown": 20, "worked": 30}
# worked is a file of problems and a base, see study/worked.py
TASKS = {"countdown": "--data countdown",
         "worked": "--data study/worked/train.jsonl --model study/worked/base"}
VALIDATE_EVERY = 5  # rollouts
BESIDE = 10  # seconds, about, that a run loads, evaluates and saves


class Setting(NamedTuple):
    """A method as it is compared: `rate_of` is None where it is tuned itself."""

    task: str
    name: str
    steps: int
    rate_of: str | None
    flags: str

    @property
    def key(self):
        return f"{self.task}/{self.name}-{self.steps}"

    @property
    def alternatives(self):
        """The flags with every choice of what stands in braces."""
        parts = re.split(r"\{(.*?)\}", self.flags)
        choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
        return ["".join(choice) for choice in itertools.product(*choices)]


class Planned(NamedTuple):
    """One run: `role` is "tune" or "final"."""

    setting: str
    role: str
    lr: float
    flags: str
    seed: int
    task: str
    steps: int

    @property
    def id(self):
        return f"{self.setting} {self.role} {self.lr:g} {self.seed} {self.flags}"

    def command(self):
        """What train.py is called with, but for folders and what is evaluated."""
        return (f"{self.flags} --steps_per_rollout {self.steps} --lr {self.lr:g} "
                f"--seed {self.seed} --rollouts {ROLLOUTS[self.task]} {TASKS[self.task]} "
                "--problems_per_rollout 32 --group_size 16 --sampler transformers "
                f"--save_every 0 --rank_every 5 --eval_every {VALIDATE_EVERY} "
                "--eval_problems 50 --eval_samples 8")


def read_grid(path=GRID):
    """The Settings of a file. Raises ValueError for a line that is none, and for a setting that
    takes the learning rate of one that is not tuned."""
    settings = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        head, dashes, flags = line.partition(" --")
        words = head.split()
        if len(words) < 4 or not dashes or not all(w.isdigit() for w in words[2:-1]):
            raise ValueError(f"{path}, line {number} is not: task name steps... tuned|NAME --flags")
        task, name, *steps, rate_of = words
        if unknown := set(map(int, steps)) - RATES.keys():
            raise ValueError(f"{path}, line {number}: there are learning rates for "
                             f"{', '.join(map(str, RATES))} steps, not for {min(unknown)}")
        for s in map(int, steps):
            setting = Setting(task, name, s, None if rate_of == "tuned" else
                              f"{task}/{rate_of}-{s}", f"--{flags.strip()}")
            if setting.key in settings:
                raise ValueError(f"{path}, line {number}: there are two settings {setting.key}")
            settings[setting.key] = setting
    for setting in settings.values():
        if setting.rate_of and (setting.rate_of not in settings
                                or settings[setting.rate_of].rate_of):
            raise ValueError(f"{path}: {setting.key} takes the learning rate of "
                             f"{setting.rate_of}, which is not tuned")
        if setting.rate_of and len(setting.alternatives) > 1:
            raise ValueError(f"{path}: {setting.key} is not tuned and has alternatives")
    return settings


def validation(run):
    """A run's validation score: the mean of its last two evaluations, for one alone is noisy."""
    return statistics.fmean([score for _, score in run["validation"]["mean"]][-2:])


def best(runs, finished):
    """-> the learning rate and the flags of the best mean validation score, of planned runs of
    several seeds; None while one of them is missing."""
    if any(run.id not in finished for run in runs):
        return None
    scores = {}
    for run in runs:
        scores.setdefault((run.lr, run.flags), []).append(validation(finished[run.id]))
    return max(scores, key=lambda choice: statistics.fmean(scores[choice]))


def tuning_runs(setting, finished):
    """One seed of every rate and alternative after the other; then those of one rate more, half
    the least or twice the largest, where that is the best. finished: {id: run}."""
    def at(rates):
        return [Planned(setting.key, "tune", lr, flags, seed, setting.task, setting.steps)
                for seed in TUNING_SEEDS for lr in rates for flags in setting.alternatives]
    rates = RATES[setting.steps]
    beyond = {rates[0]: rates[0] / 2, rates[-1]: rates[-1] * 2} if len(rates) > 1 else {}
    runs = at(rates)
    choice = best(runs, finished)
    return runs + at([beyond[choice[0]]]) if choice and choice[0] in beyond else runs


def tuned(setting, finished):
    """-> the learning rate and the flags with the best mean validation score over the tuning
    seeds, or None while one of these runs is missing. finished: {id: run}."""
    return best(tuning_runs(setting, finished), finished)


def at_edge(setting, finished):
    """Is the best learning rate of a tuned setting the least or the largest of those tried?"""
    tried = [run.lr for run in tuning_runs(setting, finished)]
    choice = tuned(setting, finished)
    return choice is not None and choice[0] in (min(tried), max(tried))


def final_runs(setting, settings, finished):
    """The runs of a setting that are reported; none while its learning rate is not known."""
    source = settings[setting.rate_of] if setting.rate_of else setting
    if (choice := tuned(source, finished)) is None:
        return []
    lr, flags = choice
    if setting.rate_of:
        flags = setting.flags
    return [Planned(setting.key, "final", lr, flags, seed, setting.task, setting.steps)
            for seed in SEEDS]


def missing(settings, finished):
    """The runs that can be trained now, in the order of the file, and are not finished."""
    planned = [run for setting in settings.values()
               for run in [*([] if setting.rate_of else tuning_runs(setting, finished)),
                           *final_runs(setting, settings, finished)]]
    return [run for run in planned if run.id not in finished]


def left(settings, finished):
    """-> the number of runs that are left in all, and about how many core-hours they take: by the
    seconds of finished runs of their task and steps, and 1.1 or 3 s a rollout where there are
    none."""
    seconds, count, total = {}, 0, 0.0
    for run in finished.values():
        seconds.setdefault((run["task"], run["steps"]), []).append(run["seconds"])
    for setting in settings.values():
        tuning = [] if setting.rate_of else tuning_runs(setting, finished)
        final = final_runs(setting, settings, finished)
        here = (sum(run.id not in finished for run in tuning + final)
                + (0 if final else len(SEEDS)))
        of_rollout = seconds.get((setting.task, setting.steps),
                                 [1.1 if setting.task == "countdown" else 3.0])
        count += here
        total += here * (ROLLOUTS[setting.task] * statistics.median(of_rollout) + BESIDE)
    return count, total / 3600


def checksum(path):
    return zlib.crc32(Path(path).read_bytes())


def of_other_bases(finished, bases):
    """A sentence where finished runs do not begin from these bases, {task: checksum of weights}:
    runs of two bases do not compare. None where all do."""
    others = [run for run in finished.values()
              if run["base"] != bases.get(run["task"], run["base"])]
    if others:
        return (f"{len(others)} finished runs are of another base than the one in data/, as "
                f"{others[0]['id']}")


def read_finished(path=FINISHED):
    """{id: run} of the finished runs; a last line that was cut off is left out."""
    if not Path(path).exists():
        return {}
    lines = Path(path).read_text().split("\n")[:-1]
    return {run["id"]: run for run in map(json.loads, lines)}

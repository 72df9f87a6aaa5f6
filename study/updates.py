"""Measures what study/mechanism.py has of single updates: study/results/updates.json, of the first
rollouts of eight runs, and updates_gemma.json."""

import json
import tempfile
from pathlib import Path

from anatomy.rollout import open_rollout
from anatomy.subsets import compare_subsets
from harness.files import write
from study import theory
from study.quantities import measured_steps
from study.runs import RESULTS, TASKS, four_digits, write_problems

UPDATES, UPDATES_OF_GEMMA = RESULTS / "updates.json", RESULTS / "updates_gemma.json"


def steps_of(file):
    """The numbers of a rollout of Gemma's: those of the run's own steps."""
    kept = open_rollout(file)
    own = measured_steps(kept)
    return dict(near=own.pop("reversal"), **own, solve_rates=kept.rewards.mean(1).tolist())


def anatomy_of(file):
    """The numbers of one kept rollout of a run in 16 steps; near is of its own steps, far of 64,
    each on a fourth of the completions: reversal by their number. Every analysis opens the rollout
    anew: the one before has moved the policy."""
    return dict(steps_of(file), far=measured_steps(open_rollout(file), 64)["reversal"],
                subsets=compare_subsets(open_rollout(file))["subsets"])


def write_updates(path, measure_one, flags, **more):
    """Writes measure_one(file) of the first rollout of GRPO's runs of eight seeds."""
    import train
    seeds = []
    for seed in range(8):
        with tempfile.TemporaryDirectory() as folder:
            train.main(["--out", f"{folder}/run", *(
                f"--seed {seed} --loss grpo --rollouts 1 --save_rollouts --eval_every 0 "
                f"--sampler transformers {flags}").split()])
            seeds.append(measure_one(Path(folder, "run/rollouts/rollout_000001.pt")))
    write(path, json.dumps(four_digits(dict(more, seeds=seeds))) + "\n")


def measure():
    """Writes UPDATES: anatomy_of the first rollouts, and the theory's numbers: Remark 1 for a
    symmetric clip and for DAPO's, and Lemma 1 with a vocabulary so large that the term which eq. 15
    leaves out is small."""
    write_updates(UPDATES, anatomy_of, "--lr 1e-4 --problems_per_rollout 32", theory=dict(
        proposition_1=theory.proposition_1(), remark_1=[theory.scan(0.2), theory.scan(0.3)],
        lemma_1=theory.tabular_model(1000, 10**5)))


def measure_gemma():
    """Writes UPDATES_OF_GEMMA: steps_of the first rollouts, all weights trained."""
    task = TASKS["comparisons"]
    with tempfile.TemporaryDirectory() as folder:
        write_problems("comparisons", Path(folder))
        write_updates(UPDATES_OF_GEMMA, steps_of, "--lr 5e-7 --problems_per_rollout 16 "
                      "--steps_per_rollout 16 "
                      f"{task.flags} {task.training.format(folder=folder)}")

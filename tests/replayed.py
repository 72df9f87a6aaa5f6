"""train.py with the rollouts of another run, as --save_rollouts kept them, in place of its own
samples.

python tests/replayed.py RUN/rollouts --out DIR --resume
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train
from engine.policy import Batch

if __name__ == "__main__":
    folder, sample_and_grade = Path(sys.argv[1]), train.sample_and_grade
    saved = {}

    def sampled(sampler, tokenizer, train_set, args, rollout, timed):
        path = folder / f"rollout_{rollout + 1:06d}.pt"
        saved.update(torch.load(path))
        return sample_and_grade(sampler, tokenizer, train_set, args, rollout, timed)

    def scored(trainer, groups, args):
        return Batch(**saved["batch"]), {"policy/entropy": saved["state"]["entropy"]}

    train.sample_and_grade, train.score = sampled, scored
    train.shaped = lambda rewards, batch, args: saved["rewards"]
    train.main(sys.argv[2:])

"""Seconds of each rollout of TRL's GRPOTrainer on the embedded base: trl_step.py MODEL ROLLOUTS
STEPS. See step.py.

The same model, prompts, group size, completions and optimizer steps per rollout, learning rate,
clip and reward; generation by transformers, which is what TRL has on a CPU.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
from rewards import countdown

model, rollouts, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
train_set = data.load("countdown", "train")
dataset = Dataset.from_list([dict(prompt=p["prompt"], **p["answer"]) for rollout in range(rollouts)
                             for p in data.batch(train_set, 64, 0, rollout)])


def reward(completions, nums, target, **_):
    return [countdown(c, dict(nums=n, target=t)) for c, n, t in zip(completions, nums, target)]


class Clock(TrainerCallback):
    marks = []

    def on_train_begin(self, *args, **kwargs):
        self.marks.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % steps == 0:
            self.marks.append(time.perf_counter())


with tempfile.TemporaryDirectory() as folder:
    config = GRPOConfig(
        output_dir=folder, max_steps=rollouts * steps, steps_per_generation=steps,
        per_device_train_batch_size=1024 // steps, num_generations=16, max_completion_length=16,
        learning_rate=5e-5, lr_scheduler_type="constant", loss_type="grpo", beta=0.0, epsilon=0.2,
        temperature=1.0, bf16=False, use_cpu=True, gradient_checkpointing=False,
        dataloader_pin_memory=False, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True)
    GRPOTrainer(model=model, reward_funcs=reward, train_dataset=dataset, callbacks=[Clock()],
                args=config).train()
print(json.dumps([b - a for a, b in zip(Clock.marks, Clock.marks[1:])]))

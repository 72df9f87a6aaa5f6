"""Rollouts of TRL's GRPOTrainer: step.py runs this, and gives settings as JSON on standard input.

The same model, prompts, group size, completions and optimizer steps per rollout, learning rate,
clip and reward; generation by transformers, which is what TRL has on a CPU.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))
from rewards import REWARDS

s = json.load(sys.stdin, object_hook=lambda fields: SimpleNamespace(**fields))
completions = s.problems_per_rollout * s.group_size // s.steps_per_rollout  # of an optimizer step
micro_batch = s.micro_batch or completions
accumulation = completions // micro_batch
graded = []


def reward(completions, prompts, answer, verifier, **_):
    graded.append([REWARDS[name](text, json.loads(gold))
                   for text, gold, name in zip(completions, answer, verifier, strict=True)])
    return graded[-1]


class Clock(TrainerCallback):
    marks = []

    def on_train_begin(self, *args, **kwargs):
        self.marks.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % s.steps_per_rollout == 0:
            self.marks.append(time.perf_counter())


with tempfile.TemporaryDirectory() as folder:
    config = GRPOConfig(
        output_dir=folder, max_steps=s.rollouts * s.steps_per_rollout,
        steps_per_generation=s.steps_per_rollout * accumulation,
        gradient_accumulation_steps=accumulation, per_device_train_batch_size=micro_batch,
        num_generations=s.group_size, max_completion_length=s.max_tokens, learning_rate=s.lr,
        lr_scheduler_type="constant", loss_type="grpo", beta=0.0, epsilon=0.2, temperature=1.0,
        bf16=False, use_cpu=True, gradient_checkpointing=False, dataloader_pin_memory=False,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        shuffle_dataset=False, model_init_kwargs=dict(dtype="float32"))
    GRPOTrainer(
        model=s.model, reward_funcs=reward, callbacks=[Clock()], args=config,
        processing_class=AutoTokenizer.from_pretrained(s.model, padding_side="left"),
        train_dataset=Dataset.from_list([
            dict(prompt=p.prompt, answer=json.dumps(p.answer, default=vars), verifier=p.verifier)
            for p in s.problems])).train()
print(json.dumps(dict(
    seconds=[b - a for a, b in zip(Clock.marks, Clock.marks[1:])],
    rewards=[sum(rewards) / len(rewards) for rewards in graded],
    peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)))

"""Seconds per rollout by phase, and two ratios from one run on one machine, with nothing else
running.

    python bench/step.py                            (a) our rollout over its parts done bare
    python bench/step.py --shuffle groups           the same with prompts shared in the update, too
    python bench/step.py --trl OTHER/bin/python     and (b) TRL's GRPOTrainer over ours; that
                                                    interpreter has bench/requirements-trl.txt

The parts done bare: the engine's generate for the same prompts, one forward without gradient over
the same tokens, in the run's layout, and forward, backward and AdamW on as many of them a step, but
for completions without an advantage, in the simplest loop.
Ours and the others take turns; medians over rollouts, the first two of each turn left out, and the
median of the turns' ratios.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import train
from data.recipe import BASE
from engine import policy
from engine.layout import lay, micro_batches
from engine.sampler import default_kind, make_sampler

SKIP = 2


def ours(folder, args):
    """-> records of metrics.jsonl; and of each rollout the prompts and the Batch."""
    kept, make_batch = [], train.make_batch

    def keep(prompts, *rest):
        kept.append((prompts, make_batch(prompts, *rest)))
        return kept[-1][1]
    with mock.patch.object(train, "make_batch", keep):
        train.main([
            "--loss=grpo", "--eval_every=0", "--save_every=0", f"--rollouts={args.rollouts}",
            f"--steps_per_rollout={args.steps}", f"--shuffle={args.shuffle}",
            f"--sampler={args.sampler}", f"--out={folder}"])
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], kept


def bare(kept, kind, steps, shuffle):
    """-> (generate, score, update) seconds of each rollout, for the prompts and tokens kept."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    sampler = make_sampler(kind, BASE, dtype="float32", max_length=48, eos=[1])
    policy.Policy(model, layout="shared")  # gives the model its attention

    def logprobs(batch):
        inputs, predicts, targets = lay(batch, "shared")
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0, predicts]
        return model.lm_head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def generate(prompts):
        if kind != "vllm":
            sampler.sample(prompts, 16, seed=0, temperature=1.0, max_tokens=16)
            return
        params = sampler.vllm.SamplingParams(n=16, max_tokens=16, stop_token_ids=[1], logprobs=0,
                                             detokenize=False)
        sampler.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    seconds = []
    for prompts, batch in kept:
        marks = [time.perf_counter()]
        generate(prompts[::16])
        marks.append(time.perf_counter())
        with torch.no_grad():
            for part in micro_batches(batch, 4096, "shared"):
                logprobs(batch.rows(part))
        marks.append(time.perf_counter())
        together = 16 if shuffle == "groups" else 1
        for share in policy.shuffled_shares(len(prompts), steps, 0, 0, together):
            share = share[batch.advantages[share].any(1)]  # the others have no gradient
            optimizer.zero_grad()
            for part in micro_batches(batch.rows(share), 4096, "shared"):
                logprobs(batch.rows(share[part])).mean().backward()
            optimizer.step()
        marks.append(time.perf_counter())
        seconds.append([b - a for a, b in zip(marks, marks[1:])])
    sampler.close()
    return seconds


def theirs(args):
    """-> the seconds of a rollout of TRL's."""
    done = subprocess.run(
        [args.trl, Path(__file__).with_name("trl_step.py"), BASE, str(args.rollouts),
         str(args.steps)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return statistics.median(json.loads(done.stdout.splitlines()[-1])[SKIP:])


def over_turns(ratios):
    return f"{statistics.median(ratios):.3f}  (turns: {', '.join(f'{r:.3f}' for r in ratios)})"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps per rollout")
    parser.add_argument("--shuffle", default="completions", choices=("completions", "groups"))
    parser.add_argument("--sampler", default=default_kind(), choices=("vllm", "transformers"))
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment with TRL")
    args = parser.parse_args()
    phases, ratios, of_trl = defaultdict(list), [], []
    for _ in range(args.turns):
        with tempfile.TemporaryDirectory() as folder:
            records, kept = ours(folder + "/run", args)
        mine = statistics.median(record["time/rollout"] for record in records[SKIP:])
        parts = bare(kept, args.sampler, args.steps, args.shuffle)[SKIP:]
        for record, seconds in zip(records[SKIP:], parts, strict=True):
            for name in record:
                if name.startswith("time/"):
                    phases[f"ours  {name[5:]}"].append(record[name])
            for name, x in zip(("sample", "logp", "update"), seconds, strict=True):
                phases[f"bare  {name}"].append(x)
        ratios.append(mine / statistics.median(map(sum, parts)))
        if args.trl:
            of_trl.append(theirs(args) / mine)
    print(f"\n{args.sampler}, {args.steps} steps per rollout of shuffled {args.shuffle}, 1024 "
          "completions; median seconds per rollout")
    for name, seconds in sorted(phases.items()):
        print(f"{name:16}{statistics.median(seconds):.3f}")
    print(f"(a) ours / its parts done bare: {over_turns(ratios)}")
    if of_trl:
        print(f"(b) TRL / ours: {over_turns(of_trl)}")


if __name__ == "__main__":
    main()

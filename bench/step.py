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
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import train
from data.recipe import BASE
from engine import policy
from engine.layout import lay, micro_batches
from engine.sampler import default_kind, make_sampler

SKIP = 2


def ours(folder, rollouts, args):
    """-> records of metrics.jsonl, the batches that were learnt from."""
    batches, make_batch = [], train.make_batch

    def keep(prompts, completions, device="cpu"):
        batches.append((prompts, completions, make_batch(prompts, completions, device)))
        return batches[-1][2]

    train.make_batch = keep
    train.main(
        [
            "--loss",
            "grpo",
            "--rollouts",
            str(rollouts),
            "--steps_per_rollout",
            str(args.steps),
            "--shuffle",
            args.shuffle,
            "--eval_every",
            "0",
            "--save_every",
            "0",
            "--out",
            folder,
            "--sampler",
            args.sampler,
        ]
    )
    train.make_batch = make_batch
    return [
        json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
    ], batches


def bare(batches, kind, steps, shuffle):
    """-> (generate, score, update) seconds of each rollout, for the prompts and tokens of
    `batches`."""
    folder = BASE
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    sampler = make_sampler(kind, folder, dtype="float32", max_length=48, eos=[1])
    policy.Policy(model, layout="shared")  # gives the model its attention

    def logprobs(batch):
        inputs, predicts, targets = lay(batch, "shared")
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0, predicts]
        return model.lm_head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    seconds = []
    for prompts, _, batch in batches:
        marks = [time.perf_counter()]
        unique = prompts[::16]
        if kind == "vllm":
            params = sampler.vllm.SamplingParams(
                n=16, max_tokens=16, stop_token_ids=[1], logprobs=0, detokenize=False
            )
            sampler.engine.generate(
                [{"prompt_token_ids": p} for p in unique], params, use_tqdm=False
            )
        else:
            sampler.sample(unique, 16, seed=0, temperature=1.0, max_tokens=16)
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=10, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps per rollout")
    parser.add_argument("--shuffle", default="completions", choices=("completions", "groups"))
    parser.add_argument("--sampler", default=default_kind(), choices=("vllm", "transformers"))
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment with TRL")
    args = parser.parse_args()
    phases, parts, ratios, trl = {}, [], [], []
    for _ in range(args.turns):
        with tempfile.TemporaryDirectory() as folder:
            records, batches = ours(folder + "/run", args.rollouts, args)
        for record in records[SKIP:]:
            for name in record:
                if name.startswith("time/"):
                    phases.setdefault(name, []).append(record[name])
        mine = statistics.median(r["time/rollout"] for r in records[SKIP:])
        done = bare(batches, args.sampler, args.steps, args.shuffle)[SKIP:]
        parts += done
        ratios.append(mine / statistics.median(map(sum, done)))
        if args.trl:
            out = subprocess.run(
                [
                    args.trl,
                    str(Path(__file__).with_name("trl_step.py")),
                    BASE,
                    str(args.rollouts),
                    str(args.steps),
                ],
                capture_output=True,
                text=True,
            )
            if out.returncode:
                sys.exit(out.stderr[-3000:])
            trl.append((statistics.median(json.loads(out.stdout.splitlines()[-1])[SKIP:]), mine))
    print(
        f"\n{args.sampler}, {args.steps} steps per rollout of shuffled {args.shuffle}, 1024 "
        "completions; median seconds per rollout"
    )
    print(
        "ours  " + ", ".join(f"{name[5:]} {statistics.median(v):.3f}" for name, v in phases.items())
    )
    print(
        "bare  "
        + ", ".join(
            f"{name} {statistics.median(v):.3f}"
            for name, v in zip(("sample", "logp", "update"), zip(*parts))
        )
    )
    print(
        f"(a) ours / its parts done bare: {statistics.median(ratios):.3f}  "
        f"(turns: {', '.join(f'{r:.3f}' for r in ratios)})"
    )
    if trl:
        over = [theirs / mine for theirs, mine in trl]
        print(
            f"(b) TRL / ours: {statistics.median(over):.2f}  "
            f"(turns: {', '.join(f'{r:.2f}' for r in over)}; "
            f"TRL {statistics.median(t for t, _ in trl):.2f} s)"
        )


if __name__ == "__main__":
    main()

"""Seconds per rollout by phase, and ratios from one run on one machine, with nothing else running.

    python bench/step.py                            (a) our rollout over its parts done bare
    python bench/step.py --shuffle groups           the same with prompts shared in the update, too
    python bench/step.py --trl OTHER/bin/python     and (b) TRL's GRPOTrainer over ours; that
                                                    interpreter has bench/requirements-trl.txt
    python bench/step.py --model FOLDER --data FILE ...     of another model and other problems

Other flags are train.py's. The parts done bare: the engine's generate for the same prompts,
one forward without gradient over the same tokens, in the run's layout, and forward, backward and
AdamW on as many of them a step, but for completions without an advantage, in the simplest loop.
Ours and the others take turns; medians over rollouts, the first --skip of each turn left out, and
the median of the turns' ratios. TRL ends completions at end-of-sequence tokens alone: compare
without --stop.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import train
from engine import policy
from engine.forward import lay, micro_batches
from engine.loading import eos_ids
from engine.sampler import make_sampler
from harness import curves


def ours(flags):
    """-> records of metrics.jsonl; and of each rollout the prompts and the Batch; and the
    micro-batches' tokens."""
    kept, make_batch = [], train.make_batch

    def keep(groups, device):
        kept.append(([prompt for prompt, _ in groups], make_batch(groups, device)))
        return kept[-1][1]
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(train, "make_batch", keep):
            train.main([*flags, f"--out={folder}/run"])
        run = curves.read(Path(folder, "run"))
    return run["records"], kept, run["flags"]["tokens_per_micro_batch"]


def bare_sampler(args):
    """-> generate(prompts), and its end."""
    eos = eos_ids(args.model, AutoTokenizer.from_pretrained(args.model))
    sampler = make_sampler(args.sampler, args.model, dtype="float32", eos=eos, stop=args.stop,
                           max_length=args.max_prompt_tokens + args.max_tokens)

    def generate(prompts):
        if args.sampler != "vllm":
            sampler.sample(prompts, args.group_size, seed=0, temperature=1.0,
                           max_tokens=args.max_tokens)
            return
        params = sampler.vllm.SamplingParams(
            n=args.group_size, max_tokens=args.max_tokens, stop_token_ids=eos, stop=args.stop,
            logprobs=0, detokenize=bool(args.stop))
        sampler.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return generate, sampler.close


def bare_trainer(args, budget):
    """-> score(batch), update(batch)"""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    policy.Policy(model, layout="shared")  # gives the model its attention

    def logprobs(batch):
        inputs, predicts, targets = lay(batch, "shared")
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0, predicts]
        return model.lm_head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    @torch.no_grad()
    def score(batch):
        for part in micro_batches(batch, budget, "shared"):
            logprobs(batch.rows(part))

    def update(batch):
        together = args.group_size if args.shuffle == "groups" else 1
        for share in policy.shuffled_shares(len(batch.ids), args.steps_per_rollout, 0, 0, together):
            share = share[batch.advantages[share].any(1)]  # the others have no gradient
            optimizer.zero_grad()
            for part in micro_batches(batch.rows(share), budget, "shared"):
                logprobs(batch.rows(share[part])).mean().backward()
            optimizer.step()
    return score, update


def bare(kept, budget, args):
    """-> seconds of each rollout, {part: list}, for the prompts and tokens kept."""
    (generate, close), (score, update) = bare_sampler(args), bare_trainer(args, budget)
    seconds = defaultdict(list)
    for prompts, batch in kept:
        for part, action, given in (("sample", generate, prompts), ("logp", score, batch),
                                    ("update", update, batch)):
            began = time.perf_counter()
            action(given)
            seconds[part].append(time.perf_counter() - began)
    close()
    return seconds


def theirs(python, args, micro_batch):
    """-> the seconds of each rollout of TRL's, its rewards, and its peak of memory in GB."""
    train_set = data.load(args.data, "train", args.data_dir)
    problems = [dict(prompt=p["prompt"], answer=p["answer"], verifier=p["verifier"])
                for rollout in range(1, args.rollouts + 1)
                for p in data.batch(train_set, args.problems_per_rollout, args.seed, rollout)]
    settings = dict(problems=problems, micro_batch=micro_batch, **{name: getattr(args, name) for
                    name in ("model", "rollouts", "problems_per_rollout", "group_size",
                             "steps_per_rollout", "max_tokens", "lr")})
    done = subprocess.run([python, Path(__file__).with_name("trl_step.py")],
                          input=json.dumps(settings), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def apart(function, *given):
    """function(*given) in a new process, which frees its memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def over_turns(ratios):
    return f"{statistics.median(ratios):.3f}  (turns: {', '.join(f'{r:.3f}' for r in ratios)})"


def parse_args():
    """-> our flags, train.py's as texts, and these as its namespace."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--skip", type=int, default=2, help="rollouts left out, of each turn")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment with TRL")
    parser.add_argument("--trl_micro_batch", type=int, help="its completions at once; default all")
    own, given = parser.parse_known_args()
    flags = ["--loss=grpo", "--rollouts=10", "--eval_every=0", "--save_every=0", *given]
    args, _ = train.parse_args(flags)
    if args.rollouts <= own.skip:
        parser.error(f"--rollouts {args.rollouts} leaves none after --skip {own.skip}")
    if (args.dtype, args.temperature, args.lora_rank, args.kl_coef, args.share_prompts) != (
            "float32", 1, 0, 0, True):
        parser.error("the bare parts know float32, shared prompts, temperature 1, all weights, no "
                     "KL")
    completions = args.problems_per_rollout * args.group_size // args.steps_per_rollout
    if own.trl and (args.stop or args.template not in (None, "none")
                    or completions % (own.trl_micro_batch or 1)):
        parser.error("TRL gets bare prompts and no --stop, and its micro-batches divide a step")
    return own, flags, args


def say(name, seconds, rewards, peak):
    print(f"{name}: seconds {', '.join(f'{x:.3g}' for x in seconds)}; rewards "
          f"{', '.join(f'{x:.2f}' for x in rewards)}; at most {peak:.1f} GB", flush=True)


def main():
    own, flags, args = parse_args()
    phases, ratios, of_trl = defaultdict(list), [], []
    for _ in range(own.turns):
        records, kept, budget = apart(ours, flags)
        counted = records[own.skip:]
        mine = statistics.median(record["time/rollout"] for record in counted)
        for name in counted[0]:
            if name.startswith("time/"):
                phases[f"ours  {name[5:]}"] += [record[name] for record in counted]
        if own.trl:
            trl = theirs(own.trl, args, own.trl_micro_batch)
            phases["TRL   rollout"] += trl["seconds"][own.skip:]
            of_trl.append(statistics.median(trl["seconds"][own.skip:]) / mine)
            say("ours", [r["time/rollout"] for r in records], [r["reward/mean"] for r in records],
                records[-1]["perf/mem_peak_gb"])
            say("TRL", trl["seconds"], trl["rewards"], trl["peak_gb"])
        parts = {part: seconds[own.skip:]
                 for part, seconds in apart(bare, kept, budget, args).items()}
        for part, seconds in parts.items():
            phases[f"bare  {part}"] += seconds
        ratios.append(mine / statistics.median(map(sum, zip(*parts.values(), strict=True))))
    print(f"\n{args.sampler}, {args.steps_per_rollout} steps per rollout of shuffled "
          f"{args.shuffle}, {args.problems_per_rollout * args.group_size} completions; median "
          "seconds per rollout")
    for name, seconds in sorted(phases.items()):
        print(f"{name:16}{statistics.median(seconds):.3f}")
    print(f"(a) ours / its parts done bare: {over_turns(ratios)}")
    if of_trl:
        print(f"(b) TRL / ours: {over_turns(of_trl)}")


if __name__ == "__main__":
    main()

"""train.py --check: everything that goes wrong in silence, tried on a few completions before the
GPU hours are spent.

Each check returns rows (what, figure, is it right, what to change). Each has failed where somebody
meant to break it: tests/test_check.py.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

import data
from engine import parallel
from engine.completion import seed_of
from engine.parallel import say
from engine.policy import Batch, backward, compute_logprobs, make_batch, minibatches
from engine.sampler import Completion
from rewards import GOLDS, grade

PROMPTS, EACH = 16, 4  # completions of the check: few, but enough to see an end-of-sequence token


@dataclass
class Setting:
    """What a run starts with, and the completions that it is tried on."""

    args: Any
    method: Any
    policy: Any
    sampler: Any
    tokenizer: Any
    eos: list
    train_set: Any
    test_set: list
    left_out: list
    problems: list = None     # PROMPTS of them
    prompts: list = None      # their token ids
    completions: list = None  # EACH of every prompt
    batch: Batch = None       # of all of them

    @property
    def exact(self):
        """Is everything computed in float32? bfloat16 rounds here and there."""
        return self.args.dtype == self.args.sampler_dtype == "float32"


def sampled(s, temperature, seed):
    """-> completions of each prompt, and the Batch of them; each engine samples its share."""
    def completions_of(prompts, engine):
        return s.sampler.sample(prompts, EACH, seed=seed_of("check", seed, engine),
                                temperature=temperature, max_tokens=s.args.max_tokens)
    groups = parallel.map_over_engines(completions_of, s.prompts, s.args.tp)
    pairs = [(prompt, c) for prompt, group in zip(s.prompts, groups) for c in group]
    return groups, make_batch(*zip(*pairs), parallel.device())


def agreement(s, what, batch, temperature):
    """Log probabilities of sampler and trainer at a temperature, for the same weights."""
    s.policy.temperature = temperature
    gaps = (compute_logprobs(s.policy, batch)[0] - batch.sampler_logprobs)[batch.mask].abs()
    s.policy.temperature = s.args.temperature
    # in bfloat16 single tokens are off: there the mean counts
    kind, gap, limit = ("largest", gaps.max(), 1e-3) if s.exact else ("mean", gaps.mean(), 0.05)
    return (f"log probabilities of sampler and trainer, {what}",
            f"{kind} gap {gap.item():.1e}, limit {limit}", gap.item() < limit,
            "--sampler_dtype, --sampler; the versions in requirements.txt")


def check_sampler(s):
    yield agreement(s, "first weights", s.batch, s.args.temperature)
    cool = 0.7 * s.args.temperature
    yield agreement(s, f"T = {cool:g}", sampled(s, cool, 1)[1], cool)


def check_ends(s):
    """Do completions end, and only where an end-of-sequence token stands?"""
    completions = [c for group in s.completions for c in group]
    ended, eos = [c for c in completions if not c.truncated], set(s.eos)
    right = (bool(ended) and all(c.tokens[-1] in eos for c in ended)
             and all(not set(c.tokens[:-1]) & eos for c in completions))
    names = ", ".join(f"{i} {s.tokenizer.decode([i])!r}" for i in s.eos)
    yield (f"completions end with one of {names}", f"{len(ended)} of {len(completions)} do", right,
           "--template, --max_tokens; eos_token_id in the model's generation_config.json")


def check_rewards(s):
    """Are some completions right and some wrong? Otherwise there is nothing to learn."""
    texts = [[data.decode(s.tokenizer, c, prompt) for c in group]
             for prompt, group in zip(s.prompts, s.completions)]
    rewards, counters = grade(s.problems, texts)
    solved, n = sum(r == 1 for group in rewards for r in group), PROMPTS * EACH
    example = "" if 0 < solved < n else (
        f": {s.tokenizer.decode(s.prompts[0])[-80:]!r} -> {texts[0][0][-80:]!r}, "
        f"gold {s.problems[0]['answer']!r}")
    yield ("some completions are right and some wrong",
           f"{solved} of {n} right, {counters['unparsed_answer']} unreadable{example}",
           0 < solved < n, "--data, --template, --model, --max_tokens")


def wrong_answer(problem):
    """A completion that does not solve the problem."""
    gold = problem["answer"]
    longer = [*gold, 7] if isinstance(gold, list) else 0
    texts = {"math": f"\\boxed{{{gold}7}}", "table": f"<answer>{json.dumps(longer)}</answer>",
             "countdown": "<answer>7</answer>", "code": "```python\n7\n```"}
    return texts.get(problem["reward"], "")  # an empty text solves no problem


def right_answer(problem):
    """-> verifier, completion: the gold answer as a completion, where it can be written as one."""
    gold = problem["answer"]
    texts = {"math": f"\\boxed{{{gold}}}", "table": f"<answer>{json.dumps(gold)}</answer>"}
    if problem["reward"] in texts:
        return problem["reward"], texts[problem["reward"]]
    return "gold_" + problem["reward"], ""


def check_golds(s):
    """Do gold answers grade themselves right, and wrong ones wrong?"""
    listed = isinstance(s.train_set, list)
    rows = s.train_set if listed else data.batch(s.train_set, 256, s.args.seed, 0)
    problems = rows[:256] + s.test_set[:256]
    checked = [p for p in problems if p["reward"] in GOLDS]
    unknown = sorted({p["reward"] for p in problems} - set(GOLDS))
    rewards = []
    if checked:
        verifiers, texts = zip(*map(right_answer, checked))
        rewards, _ = grade([dict(p, reward=name) for p, name in zip(checked, verifiers)],
                           [[text] for text in texts])
    right, left_out = sum(r == 1 for r, in rewards), len(s.left_out)
    loaded = len(s.train_set) + len(s.test_set) + left_out
    yield ("gold answers grade themselves right",
           f"{right} of {len(checked)}, {left_out} left out at loading, limit 99%"
           + (f"; not checked: {', '.join(unknown)}, which GOLDS in rewards.py lacks"
              if unknown else ""),
           right >= 0.99 * len(checked) and left_out <= 0.01 * loaded,
           "--data, the answers in it")
    rewards, _ = grade(problems, [[wrong_answer(p)] for p in problems])
    wrong = sum(r == 1 for r, in rewards)
    yield ("a wrong answer grades as wrong", f"{wrong} of {len(problems)} taken for right",
           wrong == 0, "--data, REWARDS in rewards.py")


def gradient(s, batch, budget):
    """The gradient of an optimizer step on the batch, in micro-batches of at most `budget` tokens:
    this rank's shards of it. In float16 it is scaled on the way, as in a run: by 2^16, or less
    where that overflows."""
    own_budget, s.policy.budget = s.policy.budget, budget
    for scale in (2.0**16, 2.0**12, 2.0**8, 1.0) if s.args.dtype == "float16" else (1.0,):
        for _, in_pass in minibatches(batch, s.method, steps=1, seed=0, rollout=0):
            backward(s.policy, in_pass, s.method, s.args.max_tokens,
                     scale=lambda x, scale=scale: x * scale)
        shards = [parallel.shard_of(p.grad).div_(scale) for p in s.policy.parameters()
                  if p.grad is not None]
        s.policy.zero_grad()
        if math.isfinite(norm(shards)):
            break
    s.policy.budget = own_budget
    return shards


def norm(shards):
    return parallel.all_reduce(sum(x.double().square().sum() for x in shards)).sqrt().item()


def check_split(s):
    """The same gradient, whole and cut into micro-batches."""
    batch, device = s.batch, parallel.device()
    # ratios that are not 1, or a batch statistic would have nothing to depend on
    logprobs, batch.entropy = compute_logprobs(s.policy, batch)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch.old_logprobs = batch.ref_logprobs = logprobs + 0.3 * noise.to(device)
    rewards = (torch.arange(PROMPTS * EACH, device=device) % 3 == 0).float().view(PROMPTS, EACH)
    advantages = rewards - rewards.mean(1, keepdim=True)
    batch.advantages = advantages.view(-1, 1).expand(batch.mask.shape)
    longest = int((batch.prompt_len + batch.completion_len).max())
    n = max(2, min(PROMPTS * EACH, s.policy.budget // longest))  # no more than go through at once
    rows = batch.rows(torch.arange(n))
    whole, cut = (gradient(s, rows, count * longest) for count in (n, max(1, n // 8)))
    difference = norm([a - b for a, b in zip(cut, whole)]) / (norm(whole) or math.nan)
    limit = 1e-4 if s.exact else 0.15  # 16 bits move tokens over the border of clipping
    yield ("the gradient does not depend on the micro-batches",
           f"relative difference {difference:.1e}, limit {limit}, norm {norm(whole):.3g}",
           difference < limit and math.isfinite(difference),
           "whole_step in losses.py; --tokens_per_micro_batch")


def check_memory(s):
    """An update with the longest rows that the flags allow."""
    args, device = s.args, parallel.device()
    longest = args.max_prompt_tokens + args.max_tokens
    n = max(1, s.policy.budget // longest) * parallel.world()
    prompt, tokens = s.prompts[0][:1] * args.max_prompt_tokens, [s.eos[0]] * args.max_tokens
    completion = Completion(tokens, [-1.0] * args.max_tokens, True)
    batch = make_batch([prompt] * n, [completion] * n, device)
    batch.old_logprobs = batch.entropy = batch.ref_logprobs = batch.sampler_logprobs
    batch.advantages = torch.ones_like(batch.sampler_logprobs)
    s.sampler.sleep()  # until check_sync: the trainer has the memory for itself
    backward(s.policy, batch, s.method, args.max_tokens)
    s.policy.zero_grad()
    # AdamW's two moments are not there yet
    moments = 8 * sum(p.numel() for p in s.policy.parameters() if p.requires_grad)
    used = parallel.peak_memory() + (0 if args.offload else moments / parallel.world())
    there = parallel.memory()
    yield (f"memory of an update of {n} x {longest} tokens",
           f"{used / 2**30:.2f} of {there / 2**30:.1f} GiB, limit 95%", used < 0.95 * there,
           "--tokens_per_micro_batch, --activation_checkpointing, --offload, --lora_rank")


def check_sync(s):
    """Last of all, since it changes the weights: so much that bfloat16's rounding is nothing beside
    it."""
    s.sampler.wake()
    for factor in (-1.0, 0.5):
        with torch.no_grad():
            for p in s.policy.parameters():
                p.mul_(factor)
        s.sampler.load_weights(parallel.weights(s.policy))
    temperature = s.args.temperature
    yield agreement(s, "after two more weight syncs", sampled(s, temperature, 2)[1], temperature)


CHECKS = (check_sampler, check_ends, check_rewards, check_golds, check_memory, check_split,
          check_sync)


def run(*setting):
    """Prints the rows as they come -> the exit code: 0 where all of it is right, else 1."""
    s = Setting(*setting)
    s.problems = data.batch(s.train_set, PROMPTS, s.args.seed, 0)
    s.prompts = [data.encode(s.tokenizer, p, s.args.template) for p in s.problems]
    s.completions, s.batch = sampled(s, s.args.temperature, 0)
    failed = 0
    for check in CHECKS:
        for what, figure, right, change in check(s):
            failed += not right
            say(f"{' ok ' if right else 'FAIL'}  {what}: {figure}"
                + ("" if right else f"\n      to change: {change}"))
    say(f"{failed} of the rows failed" if failed else "all of it is as it should be")
    s.sampler.close()
    parallel.stop()
    return 1 if failed else 0

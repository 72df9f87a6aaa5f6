"""train.py --check: everything that goes wrong in silence, tried on a few completions before the GPU hours are spent.

A row is (what, figure, is it right, what to change). It has failed where somebody meant to break it: tests/test_check.py.
"""

import json
import math

import torch

import data
import parallel
from policy import backward, make_batch, score
from rewards import grade
from sampler import Completion, seed_of

PROMPTS, EACH = 16, 4  # completions of the check: few, but enough to see an end-of-sequence token


def batch_of(sampler, prompts, args, n, seed, tp, temperature):
    """-> completions of each prompt, and the Batch of them; each engine samples its share."""
    def share(own, engine):
        return sampler.sample(own, n, seed=seed_of("check", seed, engine), temperature=temperature, max_tokens=args.max_tokens)
    groups = parallel.spread(share, prompts, tp)
    flat = [(p, c) for p, g in zip(prompts, groups) for c in g]
    return groups, make_batch(*zip(*flat), parallel.device())


def gap(policy, batch):
    """The largest and the mean difference of the trainer's and the sampler's log probabilities."""
    difference = (score(policy, batch)[0] - batch.sampler_logprobs)[batch.mask].abs()
    return difference.max().item(), difference.mean().item()


def wrong_answer(problem):
    """A completion that does not solve the problem."""
    gold = problem["answer"]
    return {"math": f"\\boxed{{{gold}7}}", "table": f"<answer>{json.dumps([*gold, 7] if isinstance(gold, list) else 0)}</answer>",
            "countdown": "<answer>7</answer>", "code": "```python\n7\n```"}.get(problem["reward"], "")  # nothing solves no problem


def right_answer(problem):
    """-> verifier, completion: the gold answer said aloud, where there is a way to say it."""
    said = {"math": f"\\boxed{{{problem['answer']}}}", "table": f"<answer>{json.dumps(problem['answer'])}</answer>"}
    return (problem["reward"], said[problem["reward"]]) if problem["reward"] in said else ("gold_" + problem["reward"], "")


def gradient(policy, batch, method, hp, args, budget):
    """The gradient of an optimizer step on the batch, micro-batches of at most `budget` tokens: this rank's shards of it."""
    own, policy.budget = policy.budget, budget
    for only in method.passes:
        backward(policy, batch, method, hp, args.max_tokens, only)
    policy.budget = own
    shards = [parallel.shard_of(p.grad) for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    return shards


def norm(shards):
    return parallel.total(sum(x.double().square().sum() for x in shards)).sqrt().item()


def rows(args, policy, sampler, tokenizer, eos, train_set, test_set, method, hp, left_out):
    """The rows of the table, one after the other."""
    problems = data.batch(train_set, PROMPTS, args.seed, 0)
    prompts = [data.encode(tokenizer, p, args.template) for p in problems]
    exact = args.dtype == args.sampler_dtype == "float32"
    limit, which = (1e-3, 0) if exact else (0.05, 1)  # bfloat16 rounds here and there: there the mean counts

    def agreement(what, batch, temperature):
        policy.temperature, own = temperature, policy.temperature
        found = gap(policy, batch)
        policy.temperature = own
        return f"log probabilities of sampler and trainer, {what}", f"{('largest', 'mean')[which]} gap {found[which]:.1e}, limit {limit}", \
            found[which] < limit, "--sampler_dtype, --sampler; the versions in requirements.txt"

    groups, batch = batch_of(sampler, prompts, args, EACH, 0, args.tp, args.temperature)
    yield agreement("first weights", batch, args.temperature)
    cool = 0.7 * args.temperature
    yield agreement(f"T = {cool:g}", batch_of(sampler, prompts, args, EACH, 1, args.tp, cool)[1], cool)

    flat = [c for group in groups for c in group]
    ended = [c for c in flat if not c.truncated]
    right = bool(ended) and all(c.tokens[-1] in eos for c in ended) and all(not set(c.tokens[:-1]) & set(eos) for c in flat)
    yield ("completions end with one of " + ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in eos),
           f"{len(ended)} of {len(flat)} do", right, "--template, --max_tokens; eos_token_id in the model's generation_config.json")

    texts = [[data.decode(tokenizer, c, prompt) for c in group] for prompt, group in zip(prompts, groups)]
    rewards, counted = grade(problems, texts)
    solved = sum(r == 1 for group in rewards for r in group)
    example = "" if 0 < solved < len(flat) else f": {tokenizer.decode(prompts[0])[-80:]!r} -> {texts[0][0][-80:]!r}, gold {problems[0]['answer']!r}"
    yield ("some completions are right and some wrong", f"{solved} of {len(flat)} right, {counted['unparsed_answer']} unreadable{example}",
           0 < solved < len(flat), "--data, --template, --model, --max_tokens")

    some = [p for p in (train_set if isinstance(train_set, list) else data.batch(train_set, 256, args.seed, 0))[:256]] + test_set[:256]
    said = [right_answer(p) for p in some]
    taken, _ = grade([dict(p, reward=verifier) for p, (verifier, _) in zip(some, said)], [[text] for _, text in said])
    right = sum(r == 1 for r, in taken)
    yield ("gold answers grade themselves right", f"{right} of {len(some)}, {len(left_out)} left out at loading, limit 99%",
           right >= 0.99 * len(some) and len(left_out) <= 0.01 * (len(train_set) + len(test_set) + len(left_out)), "--data, the answers in it")
    taken, _ = grade(some, [[wrong_answer(p)] for p in some])
    wrong = sum(r == 1 for r, in taken)
    yield "a wrong answer grades as wrong", f"{wrong} of {len(some)} taken for right", wrong == 0, "--data, REWARDS in rewards.py"

    # ratios that are not 1, or a batch statistic would have nothing to depend on; no more rows than go through at once
    batch.old_logprobs, batch.entropy = score(policy, batch)
    batch.old_logprobs = batch.old_logprobs + 0.3 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)).to(batch.ids.device)
    batch.ref_logprobs = batch.old_logprobs
    fake = (torch.arange(len(flat), device=parallel.device()) % 3 == 0).float().view(PROMPTS, EACH)
    batch.advantages = (fake - fake.mean(1, keepdim=True)).view(-1, 1).expand(batch.mask.shape)
    tokens = int((batch.prompt_len + batch.completion_len).max())
    n = max(2, min(len(flat), policy.budget // tokens))
    whole, cut = (gradient(policy, batch.rows(torch.arange(n)), method, hp, args, rows * tokens) for rows in (n, max(1, n // 8)))
    off, bound = norm([a - b for a, b in zip(cut, whole)]) / (norm(whole) or math.nan), 1e-4 if exact else 0.05
    yield ("the gradient does not depend on the micro-batches", f"relative difference {off:.1e}, limit {bound}, norm {norm(whole):.3g}",
           off < bound and math.isfinite(off), "whole_step in losses.py; --tokens_per_micro_batch")

    longest = args.max_prompt_tokens + args.max_tokens
    n = max(1, policy.budget // longest) * parallel.world()
    full = make_batch([prompts[0][:1] * args.max_prompt_tokens] * n, [Completion([eos[0]] * args.max_tokens, [-1.0] * args.max_tokens, True)] * n,
                      parallel.device())
    full.old_logprobs, full.entropy = full.sampler_logprobs, full.sampler_logprobs
    full.ref_logprobs, full.advantages = full.sampler_logprobs, torch.ones_like(full.sampler_logprobs)
    sampler.sleep()
    gradient(policy, full, method, hp, args, policy.budget)
    sampler.wake()
    state = 8 * sum(p.numel() for p in policy.parameters() if p.requires_grad) / parallel.world()  # AdamW's, not there yet
    used, there = parallel.peak_memory() + (0 if args.offload else state), parallel.memory()
    yield (f"memory of an update of {n} x {longest} tokens", f"{used / 2**30:.2f} of {there / 2**30:.1f} GiB, limit 95%", used < 0.95 * there,
           "--tokens_per_micro_batch, --activation_checkpointing, --offload, --lora_rank")

    for factor in (-1.0, 0.5):  # last of all: it changes the weights, so much that bfloat16's rounding is nothing beside it
        with torch.no_grad():
            for p in policy.parameters():
                p.mul_(factor)
        sampler.load_weights(parallel.weights(policy))
    yield agreement("after two more weight syncs", batch_of(sampler, prompts, args, EACH, 2, args.tp, args.temperature)[1], args.temperature)


def table(*settings):
    """Prints the rows as they come; -> is all of it right?"""
    failed = 0
    for what, figure, right, change in rows(*settings):
        failed += not right
        if parallel.rank() == 0:
            print(f"{' ok ' if right else 'FAIL'}  {what}: {figure}" + ("" if right else f"\n      to change: {change}"), flush=True)
    if parallel.rank() == 0:
        print(f"{failed} of the rows failed" if failed else "all of it is as it should be")
    return not failed

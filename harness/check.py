"""train.py --check: silent faults, tried on a few completions before the GPU hours are spent.

Each check takes s, the parts of a run and the completions that they are tried on, and yields rows
(subject, figure, is it right, flags to change). tests/test_check.py breaks each of them.
"""

import math
from types import SimpleNamespace

import torch

import data
from engine import parallel
from engine.forward import lay, micro_batches
from engine.parallel import say
from engine.policy import Completion, compute_logprobs, make_batch, shuffled_shares
from harness import log
from harness.failures import room_for
from rollout import sample_on_engines

PROMPTS, EACH = 16, 4  # completions of the check: few, but enough to see an end-of-sequence token


def sampled(s, temperature, seed):
    """-> EACH completions of PROMPTS problems, as Groups."""
    problems = data.batch(s.train_set, PROMPTS, s.args.seed, 1)
    return sample_on_engines(
        s.sampler, s.tokenizer, problems, s.args.template, ("check", seed), s.args.tp,
        n=EACH, temperature=temperature, max_tokens=s.args.max_tokens)


def agreement(s, when, temperature, groups):
    """A row: log probabilities of sampler and trainer at a temperature, for the same weights."""
    batch = make_batch([(g.prompt, g.completions) for g in groups], parallel.device())
    s.policy.temperature = temperature
    logprobs, _ = compute_logprobs(s.policy, batch)
    s.policy.temperature = s.args.temperature
    # in bfloat16 single tokens are off: there the mean counts, and float8 is another policy
    limit = math.inf if s.args.sampler_dtype == "float8" else 0.05
    kind, name, limit = ("largest", "max", 1e-3) if s.exact else ("mean", "mean", limit)
    gap = log.sampler_gap(logprobs, batch)[f"sampler/logp_absdiff_{name}"]
    return (f"log probabilities of sampler and trainer, {when}",
            f"{kind} gap {gap:.1e}, limit {limit}", gap < limit,
            "--sampler_dtype, --sampler; the versions in requirements.txt")


def check_sampler(s):
    yield agreement(s, "first weights", s.args.temperature, s.groups)
    cool = 0.7 * s.args.temperature
    yield agreement(s, f"T = {cool:g}", cool, sampled(s, cool, 1))


def check_ends(s):
    """Is an end-of-sequence token the last of completions, and none inside them?"""
    completions = [c for group in s.groups for c in group.completions]
    ended, eos = [c for c in completions if not c.truncated], set(s.sampler.eos)
    right = (2 * len(ended) >= len(completions)
             and all(c.stopped or c.tokens[-1] in eos for c in ended)
             and all(not set(c.tokens[:-1]) & eos for c in completions))
    names = ", ".join(f"{i} {s.tokenizer.decode([i])!r}" for i in s.sampler.eos)
    yield (f"completions end with one of {names}{f' or {s.args.stop!r}' if s.args.stop else ''}",
           f"{len(ended)} of {len(completions)} do, limit a half", right,
           "--stop, --template, --max_tokens; eos_token_id in generation_config.json")


def check_rewards(s):
    """Are some completions right and some wrong? Otherwise there is nothing to learn."""
    n, first = PROMPTS * EACH, s.groups[0]
    rewards = [reward for group in s.groups for reward in group.rewards]
    solved, mixed = rewards.count(1), len({*rewards}) > 1  # some may be fractions
    faults = [(fault.kind, text) for group in s.groups
              for text, fault in zip(group.texts, group.faults) if fault]
    for kind, text in dict(faults).items():
        say(f"      {kind}, such as {text[-160:]!r}")
    figure = f"{solved} of {n} right, {len(faults)} unreadable"
    if not mixed:
        figure += (f": {s.tokenizer.decode(first.prompt)[-80:]!r} -> {first.texts[0][-80:]!r}, "
                   f"gold {first.problem['answer']!r}")
    yield ("some completions are right and some wrong", figure,
           mixed and not {*dict(faults)} & {"error", "timeout"},
           "--data, --template, --model, --max_tokens")


def longest_rollout(args, device):
    """-> the Batch of a rollout as long as it may be, with an advantage for each token."""
    completion = Completion([2] * args.max_tokens, [-1.0] * args.max_tokens, True)
    batch = make_batch([([3] * args.max_prompt_tokens, [completion] * args.group_size)]
                       * args.problems_per_rollout, device)
    batch.old_logprobs = batch.entropy = batch.ref_logprobs = batch.sampler_logprobs
    batch.advantages = batch.mask.float()
    return batch


def step_of(args, rollout):
    """-> the Batch of a rollout's first optimizer step."""
    rows = shuffled_shares(len(rollout.ids), args.steps_per_rollout, args.seed, 0,
                           args.group_size if args.shuffle == "groups" else 1)[0]
    return rollout.rows(rows.sort().values)


def by_size(batch, policy):
    """-> the lists of rows of a batch's micro-batches, the largest last."""
    def places(rows):
        return lay(batch.rows(rows or [0]), policy.layout)[0]["input_ids"].numel()
    return sorted(micro_batches(batch, policy.budget, policy.layout, parallel.world()), key=places)


def check_memory(s):
    """The largest micro-batches, twice: beside others' gradients, then beside AdamW's moments."""
    step = step_of(s.args, longest_rollout(s.args, parallel.device()))
    batch = step.rows(sum(by_size(step, s.policy)[-2 * parallel.world():], []))
    s.sampler.sleep()  # until check_sync: the trainer has the memory for itself
    for _ in range(2):
        s.trainer.step(batch)
    used, there = parallel.peak_memory(), parallel.memory()
    yield (f"memory of an update of {len(batch.ids)} x {batch.ids.shape[1]} tokens",
           f"{used / 1e9:.2f} of {there / 1e9:.1f} GB, limit 95%", used < 0.95 * there,
           "--tokens_per_micro_batch, --activation_checkpointing, --offload, --lora_rank")


@torch.no_grad()
def check_sync(s):
    """The last check: it changes the weights by more than bfloat16 rounds."""
    temperature = s.args.temperature
    for factor in (-1.0, 0.5):
        for name, p in s.policy.named_parameters():
            if "lora_B" in name:  # about 0 until now; an adapter adds a quarter of its input's size
                p.normal_(std=0.5 * s.args.lora_rank**0.5 / s.args.lora_alpha)
            elif p.requires_grad:
                p.mul_(factor)
        s.sampler.load_weights(s.trainer.weights(s.sampler.merged))
    yield agreement(s, "after two more weight syncs", temperature, sampled(s, temperature, 2))


def run(args, trainer, sampler, tokenizer, train_set):
    """Prints the rows as they come -> the exit code: is one of them wrong?"""
    s = SimpleNamespace(**locals(), policy=trainer.policy,
                        exact=args.dtype == args.sampler_dtype == "float32")
    failed = 0
    with room_for("check"):
        s.groups = sampled(s, args.temperature, 0)
        for check in (check_sampler, check_ends, check_rewards, check_memory, check_sync):
            say(f"      {check.__name__.replace('_', ' ')} ...")  # each may take minutes
            for subject, figure, right, change in check(s):
                failed += not right
                say(f"{' ok ' if right else 'FAIL'}  {subject}: {figure}"
                    + ("" if right else f"\n      to change: {change}"))
    say(f"{failed} of the rows failed" if failed else "all of it is as it should be")
    sampler.close()
    parallel.stop()
    return failed > 0

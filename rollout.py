"""What a rollout and an evaluation are made of: groups of completions, sampled and graded."""

from contextlib import nullcontext
from typing import NamedTuple

from data.prompts import decode, encode
from engine import parallel
from rewards import grade


class Sampling(NamedTuple):
    """How completions are sampled, besides their prompts and the seed."""

    samples: int              # completions of each problem
    temperature: float        # 0 is greedy
    max_tokens: int           # of a completion
    template: str | None      # of data.prompts.TEMPLATES
    top_p: float = 1.0        # of an evaluation; a rollout has 1


class Group(NamedTuple):
    """The completions of one problem, with their rewards as graded."""

    problem: dict
    prompt: list        # token ids, as encoded
    completions: list   # engine.policy.Completion
    texts: list
    rewards: list
    faults: list        # of each completion, a worker.Fault or None

    def rows(self):
        """A row of each completion, of completions.jsonl but for benchmark and id."""
        _, _, *of_completions = self
        return [dict(completion=text, reward=reward, tokens=len(c.tokens), truncated=c.truncated,
                     fault=fault and str(fault)) for c, text, reward, fault in zip(*of_completions)]


def sample_on_engines(sampler, tokenizer, problems, sampling, seed, tp=1, timed=nullcontext):
    """-> each problem's Group, in order, on every rank: each engine samples and grades its share.

    sampler: of engine/sampler.py. seed: parts of seed_of, before an engine's number; tp:
    ranks of one engine, which all do the same; timed: phase -> a context, "sample" and "reward"."""
    engines, engine = parallel.world() // tp, parallel.rank() // tp
    share = problems[engine::engines]
    prompts = [encode(tokenizer, problem, sampling.template) for problem in share]
    with timed("sample"):
        completions = sampler.sample(
            prompts, sampling.samples, seed=parallel.seed_of(*seed, engine), top_p=sampling.top_p,
            temperature=sampling.temperature, max_tokens=sampling.max_tokens)
    with timed("reward"):
        texts = [[decode(tokenizer, c, prompt) for c in group]
                 for prompt, group in zip(prompts, completions, strict=True)]
        graded = grade(share, texts)
    own = [Group(*group, rewards=[x.reward for x in results], faults=[x.fault for x in results])
           for *group, results in zip(share, prompts, completions, texts, graded)]
    groups = [None] * len(problems)
    for number, its in enumerate(parallel.gather(own)[::tp]):
        groups[number::engines] = its
    return groups

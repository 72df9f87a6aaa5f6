"""What a rollout and an evaluation are made of: groups of completions, sampled and graded."""

from contextlib import nullcontext
from typing import NamedTuple

from data.prompts import decode, encode
from engine import parallel
from rewards import grade


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


def sample_on_engines(sampler, tokenizer, problems, template, seed, tp=1, timed=nullcontext,
                      **settings):
    """-> each problem's Group, in order, on every rank: each engine samples and grades its share.

    template: of TEMPLATES; None: by tokenizer and verifier. seed: parts of seed_of, before the
    engine's number; tp: ranks of one engine, which all do the same; timed: phase -> a context,
    "sample" and "reward". settings: n, temperature, max_tokens, top_p of VLLMSampler.sample."""
    engines, engine = parallel.world() // tp, parallel.rank() // tp
    share = problems[engine::engines]
    prompts = [encode(tokenizer, problem, template) for problem in share]
    with timed("sample"):
        completions = sampler.sample(prompts, seed=parallel.seed_of(*seed, engine), **settings)
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

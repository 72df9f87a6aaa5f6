"""Problems for training and evaluation: dicts {prompt, (messages,) answer, reward, id}.

prompt is plain text; messages, where a problem has them, are for models with a chat template.
reward names a verifier in rewards.py, and answer is its gold answer. data/sources.py reads rows;
data/sets.py has the table of sets.
"""

import functools
import random
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from data import countdown, sources
from data.sets import SETS
from data.sources import DataError
from rewards import grade

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.{extra}\nUser: {question}\nAssistant: <think>")
ORZ = (
    " You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here "
    "</answer>. And your final answer will be extracted automatically by the \\boxed{} tag. "
    "This is the problem:")
MADE = tuple(countdown.FORMS)  # computed, not read
TEMPLATES = ("chat", "qwen_boxed", "r1_zero", "orz", "none")


def names():
    return [*MADE, *SETS]


def load(name, split, data_dir=None, left_out=None, **options):
    """The problems of a data set: split "train" to learn from, "test" held out.

    name: one of names(), or a file.jsonl with prompt, answer and reward in every row, whose one
    split is both. data_dir: a folder of JSONL files with the Hub's field names, used instead of the
    Hub. left_out: a list, to which the ids of problems are added whose gold answer cannot be
    graded. options: lcb_release, lcb_from and lcb_to (days such as 2024-08-01). Raises DataError.
    """
    if name in countdown.FORMS:
        return countdown.Generated(name) if split == "train" else countdown.held_out(name, 1024)
    if name.endswith(".jsonl"):
        return sources.load_file(Path(name), left_out)
    if name in SETS:
        return sources.load_set(name, split, data_dir, left_out, options)
    raise DataError(f"--data {name}: there is no such data set; there are {', '.join(names())}, "
                    "and files that end in .jsonl")


@functools.lru_cache(maxsize=4)
def order(size, seed, epoch):
    """The order in which an epoch goes through `size` problems."""
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


def batch(problems, n, seed, rollout, attempt=0):
    """The n problems of a rollout, a function of (seed, rollout): resuming needs no replay.

    attempt > 0 gives other problems for the same rollout, from which it can be refilled."""
    start = (attempt * 10**7 + rollout) * n
    places = [divmod(start + i, len(problems)) for i in range(n)]
    return [problems[order(len(problems), seed, epoch)[place]] for epoch, place in places]


def encode(tokenizer, problem, template=None):
    """The token ids of a problem's prompt.

    template: one of TEMPLATES. None is "none" where the tokenizer has no chat template,
    else for "qwen_boxed" for mathematics without messages, and "chat" for the rest."""
    if template is None:
        mathematics = problem["reward"] == "math" and "messages" not in problem
        chat = "qwen_boxed" if mathematics else "chat"
        template = chat if tokenizer.chat_template else "none"
    if template == "none":
        return tokenizer.encode(problem["prompt"])
    if template in ("r1_zero", "orz"):
        extra = ORZ if template == "orz" else ""
        return tokenizer.encode(R1_ZERO.format(extra=extra, question=problem["prompt"]))
    messages = problem.get("messages") or [dict(role="user", content=problem["prompt"])]
    if template == "qwen_boxed":
        messages = [dict(role="system", content=BOXED),
                    dict(role="user", content=problem["prompt"])]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                             return_dict=False)
    # Qwen's form, ChatML
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return tokenizer.encode("".join(turns) + "<|im_start|>assistant\n")


def decode(tokenizer, completion, prompt=()):
    """The text of a sampler.Completion, without the end-of-sequence token that ends it.

    Any other special token stays visible. A <think> that ends the prompt (token ids) is put in
    front of the text: a verifier has to know that thinking had begun."""
    tokens = completion.tokens if completion.truncated else completion.tokens[:-1]
    text = tokenizer.decode(tokens)
    prompt_thinks = tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
    return "<think>" + text if prompt_thinks else text


class Group(NamedTuple):
    """The completions of one problem, with their rewards as graded."""

    problem: dict
    prompt: list        # token ids
    completions: list   # engine.sampler.Completions
    texts: list
    rewards: list
    faults: list        # of each completion: None, or why it could not be graded
    seconds: float      # of the slowest grading

    def rows(self):
        """The completions as rows of eval.py's completions.jsonl."""
        return [dict(completion=text, score=reward, tokens=len(c.tokens), truncated=c.truncated)
                for text, reward, c in zip(self.texts, self.rewards, self.completions, strict=True)]


def sample_groups(sampler, tokenizer, problems, samples, *, seed, temperature, max_tokens,
                  top_p=1.0, template=None, timed=nullcontext):
    """-> a Group of `samples` completions of each problem, sampled and graded. timed: phase -> a
    context, for "sample" and "reward"."""
    prompts = [encode(tokenizer, problem, template) for problem in problems]
    with timed("sample"):
        completions = sampler.sample(prompts, samples, seed=seed, temperature=temperature,
                                     max_tokens=max_tokens, top_p=top_p)
    with timed("reward"):
        texts = [[decode(tokenizer, c, prompt) for c in group]
                 for prompt, group in zip(prompts, completions, strict=True)]
        details = []
        rewards, _ = grade(problems, texts, details=details)
    found = [details[i:i + samples] for i in range(0, len(details), samples)]
    faults = [[fault for _, fault, _ in group] for group in found]
    slowest = [max(seconds for *_, seconds in group) for group in found]
    columns = zip(problems, prompts, completions, texts, rewards, faults, slowest, strict=True)
    return [Group(*fields) for fields in columns]

r"""Countdown with worked steps: four numbers, and a completion that reasons before it answers.

    python -m study.worked               writes its problems: study/worked/{train,test}.jsonl
    python -m study.worked base          trains its base again, in some minutes: study/worked/base
    python train.py --model study/worked/base --data study/worked/train.jsonl \
        --eval_data study/worked/test.jsonl

A prompt is `5 6 4 6 = 28 :`. A completion works backwards: it takes one number off the target,
writes what is left to be made of which numbers, and so on, until two are left; then it answers:

    28 = 7 * 4 ; 5 6 6 = 7 : 7 = 1 + 6 ; 5 6 = 1 : 1 = 6 - 5
    <answer> ( 6 - 5 + 6 ) * 4 </answer>

Where the last step does not hold, it may write `no` and begin again. Every whole number up to
LARGEST, every sign and every tag is one token. The verifier `countdown` grades the answer alone:
steps earn nothing themselves.
"""

import json
import random
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data import countdown
from harness.files import write
from study import tiny

FOLDER = Path(__file__).parent / "worked"
BASE = str(FOLDER / "base")
TRAINING = 10_000  # problems of train.jsonl
LARGEST = 120  # no number or intermediate result is larger
NUMBERS, DRAWN = 4, 9  # how many numbers a puzzle gives, and the largest of them
TARGETS = range(15, 61)  # a random expression seldom makes a number of this size
OPERATORS = "+-*"
WORDS = ["<pad>", "<eos>", "<answer>", "</answer>", "+", "-", "*", "(", ")", "=", ";", ":", "no",
         *map(str, range(LARGEST + 1))]  # the vocabulary

# heads share one head of keys and values: copying these is most of what sampling costs
RECIPE = dict(seed=0, steps=1200, batch=64, lr=3e-3, weight_decay=0.1, demonstrations=100_000,
              wrong=0.2, again=0.2, hidden=128, mlp=256, layers=3, heads=4, kv_heads=1)
MINIATURE = dict(steps=90, batch=8, demonstrations=512, hidden=32, mlp=32, layers=1, heads=2)
# of the type llama, for which transformers opens a saved tokenizer of any class
empty_model = partial(tiny.empty_model, vocabulary=len(WORDS), kind=LlamaForCausalLM,
                      positions=1024)


def combine(a, op, b):
    """a op b, None where it is no number of the vocabulary, or a is none."""
    if a is not None and 0 <= (value := countdown.OPERATIONS[op](a, b)) <= LARGEST:
        return value


def puzzle(seed, index, split):
    """-> the numbers of puzzle `index`, its target, and a solution: links, [(operator, number)],
    and results, of which the first is the number that the links begin from."""
    rng = random.Random(f"worked {seed} {index} {split}")
    while True:
        nums = [rng.randint(1, DRAWN) for _ in range(NUMBERS)]
        first, *others = rng.sample(nums, len(nums))
        links = [(rng.choice(OPERATORS), n) for n in others]
        results = [*accumulate(links, lambda x, link: combine(x, *link), initial=first)]
        if results[-1] in TARGETS and countdown.split_of(nums, results[-1]) == split:
            return nums, results[-1], links, results


def problem(seed, index, split):
    """A problem as data.load returns them: {prompt, answer, verifier, id}."""
    nums, target, *_ = puzzle(seed, index, split)
    return dict(prompt=prompt_of(nums, target), answer=dict(nums=nums, target=target),
                verifier="countdown", id=f"worked/{split}/{seed}/{index}")


def prompt_of(nums, target):
    return f"{' '.join(map(str, nums))} = {target} :"


def held_out():
    """1,024 held-out problems with different prompts."""
    return countdown.distinct((problem(0, index, "test") for index in range(100 * 1024)), 1024)


def write_problems():
    """Writes train.jsonl and test.jsonl, if they are not there."""
    training = (problem(0, index, "train") for index in range(TRAINING))
    for name, problems in (("train.jsonl", training), ("test.jsonl", held_out())):
        if not (FOLDER / name).exists():
            write(FOLDER / name, "".join(json.dumps(p) + "\n" for p in problems))


def inverse(value, op, n):
    """The x with x op n = value, None where there is none in the vocabulary, or value is none."""
    if op != "*" or value is None:
        return combine(value, "-" if op == "+" else "+", n)
    return value // n if value % n == 0 else None


def missed(rng, nums, target):
    """-> links and results of a chain that works back from the target by random steps and does
    not meet its first number: as a solution looks whose last step is wrong."""
    while True:
        first, *others = rng.sample(nums, len(nums))
        links = [(rng.choice(OPERATORS), n) for n in others]
        back = [*accumulate(links[:0:-1], lambda x, link: inverse(x, *link), initial=target)]
        if back[-1] is not None and combine(first, *links[0]) != back[-1]:
            return links, [first, *reversed(back)]


def steps_of(nums, links, results):
    """The steps of a chain as a text, backwards: what is left to be made, of which numbers."""
    left, steps = list(nums), []
    for (op, n), x, value in reversed([*zip(links, results[:-1], results[1:], strict=True)]):
        left.remove(n)
        steps.append(f"{value} = {x} {op} {n}")
        if len(left) > 1:
            steps.append(f"; {' '.join(map(str, left))} = {x} :")
    return " ".join(steps)


def expression(links, results):
    """A chain as an expression."""
    text = str(results[0])
    for op, n in links:
        text = f"{text} {op} {n}" if op != "*" or text.isdigit() else f"( {text} ) * {n}"
    return text


def demonstration(recipe, index):
    """-> prompt and completion for training puzzle `index`: a solution, in the share `again` after
    an attempt that missed. In the second half of the demonstrations the share `wrong` answers with
    a miss."""
    rng = random.Random(f"{recipe['seed']} {index}")
    nums, target, *solution = puzzle(recipe["seed"], index, "train")
    attempts = [missed(rng, nums, target)] if rng.random() < recipe["again"] else []
    wrong = index >= recipe["demonstrations"] // 2 and rng.random() < recipe["wrong"]
    attempts.append(missed(rng, nums, target) if wrong else solution)
    steps = " no ".join(steps_of(nums, *attempt) for attempt in attempts)
    return prompt_of(nums, target), f"{steps} <answer> {expression(*attempts[-1])} </answer>"


def tokenizer():
    """A tokenizer of WORDS with spaces between them. Any other word is an error, never a token that
    stands for what is unknown: two prompts could look the same to the model."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>",
                                   clean_up_tokenization_spaces=False)


def batches(recipe, pairs, generator):
    """Rows of eight batches are drawn at once, of which like lengths go together."""
    length = torch.tensor([len(prompt) + len(c.tokens) for prompt, c in pairs])
    for step in range(0, recipe["steps"], 8):
        chosen = tiny.drawn(recipe, step, 8 * recipe["batch"], generator)
        eight = chosen[length[chosen].argsort(stable=True)].view(8, -1)
        for i in torch.randperm(8, generator=generator)[:recipe["steps"] - step]:
            yield [pairs[row] for row in eight[i]]


def train(recipe):
    return tiny.train_base(recipe, tokenizer(), empty_model(recipe), demonstration, batches)


if __name__ == "__main__":
    if sys.argv[1:] == ["base"]:
        tiny.save_base(BASE, RECIPE, train, MINIATURE)
    else:
        write_problems()

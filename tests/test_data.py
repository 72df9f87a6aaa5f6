"""data/: problems are functions of their index, splits do not overlap."""

import hashlib
import json
import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

import data
from data import countdown
from rewards import REWARDS
from study import tiny


def key(problem):
    return tuple(sorted(problem["answer"]["nums"])), problem["answer"]["target"]


@pytest.mark.parametrize("form", countdown.FORMS)
def test_puzzles(form):
    shape = countdown.FORMS[form]
    sizes = Counter()
    for i in range(300):
        nums, target, solution = countdown.puzzle(form, 0, i, "train")
        answer = dict(nums=nums, target=target)
        assert REWARDS["countdown"](f"<answer>{solution}</answer>", answer) == 1
        assert all(1 <= n <= shape["largest"] for n in nums) and 1 <= target <= shape["highest"]
        sizes[len(nums)] += 1
    assert set(sizes) == set(shape["counts"]) and min(sizes.values()) > 100
    assert countdown.puzzle(form, 1, 0, "train") != countdown.puzzle(form, 0, 0, "train")


def test_the_same_puzzle_in_every_process():
    text = json.dumps([countdown.puzzle(form, 3, i, split) for form in countdown.FORMS
                       for i in range(20) for split in ("train", "test")])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "cbdd6fb2c8b3e878"


@pytest.mark.parametrize("form", countdown.FORMS)
def test_splits_never_overlap(form):
    train = {key(countdown.problem(form, 0, i, "train")) for i in range(3000)}
    held_out = data.load(form, "test")
    test = {key(p) for p in held_out}
    assert not train & test and len(test) > 200
    assert len({p["prompt"] for p in held_out}) == len(held_out) == 1024


def test_the_bases_demonstrations_are_of_the_training_split():
    test = {p["prompt"] for p in data.load("countdown", "test")}
    half = tiny.RECIPE["demonstrations"] // 2
    # all are right, then half; a random expression is right now and then
    for start, least, most in ((0, 1, 1), (half, 0.5, 0.6)):
        rewards = []
        for i in range(start, start + 2000):
            prompt, completion = tiny.demonstration(tiny.RECIPE, i)
            nums, target = prompt[:-1].split("=")
            assert prompt not in test
            answer = dict(nums=[int(n) for n in nums.split(",")], target=int(target))
            rewards.append(REWARDS["countdown"](completion, answer))
        assert least <= sum(rewards) / len(rewards) <= most


def test_batches_are_functions_of_seed_and_rollout():
    def ids(*where):
        return data.batch(range(10), 4, *where)
    assert ids(0, 2) == ids(0, 2) != ids(1, 2)
    epoch = ids(0, 1) + ids(0, 2) + ids(0, 3)[:2]
    assert sorted(epoch) == list(range(10))  # each problem once before any comes again
    assert ids(0, 1, 1) != ids(0, 1, 0)


def test_tokenizer_round_trip(tokenizer, base):
    text = "7,1,9=16:<answer>(7+9)*1</answer>\n the  rest ~!{}\t\\frac{1}{2}"
    for tok in (tokenizer, AutoTokenizer.from_pretrained(base)):
        ids = tok.encode(text)
        assert tok.decode(ids) == text and len(ids) == len(re.sub("</?answer>", "1", text))
        assert tok.decode(ids + [tok.eos_token_id], skip_special_tokens=True) == text
        unicode = "\u00e9\u4e2d\U0001f600 ok"  # any text has tokens, those of its bytes
        assert tok.decode(tok.encode(unicode)) == unicode
        assert tok.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<eos>", "<unk>"]

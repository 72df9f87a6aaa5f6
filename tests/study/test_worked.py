"""study/worked.py: puzzles, their demonstrations and their verifier; test_base.py has the base."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

import data
import eval as evaluation
import train
from data.prompts import decode, encode
from engine.sampler import Completion
from harness.flags import settings_of
from harness.start import read_tokenizer
from helpers import refused, write_rows
from rewards import REWARDS, arithmetic
from study import worked

HALF = worked.RECIPE["demonstrations"] // 2
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@pytest.fixture(scope="module")
def tok():
    return worked.tokenizer()


@pytest.fixture(scope="module")
def untrained(tok, tmp_path_factory):
    """The folder of an untrained model with the base's tokenizer."""
    folder = tmp_path_factory.mktemp("untrained")
    for part in (worked.empty_model({**worked.RECIPE, **worked.MINIATURE}), tok):
        part.save_pretrained(folder)
    return str(folder)


def reward(completion, nums, target):
    return REWARDS["countdown"](completion.removesuffix("<eos>"), dict(nums=nums, target=target))


def numbers(text):
    return [int(n) for n in text.split()]


def steps_hold(text, nums, target):
    """-> for each step, whether its equation holds. Each repeats what the step before it leaves."""
    left, held = list(nums), []
    for step in text.split(" ; "):
        if held:
            task, step = step.split(" : ")
            listed, repeated = task.split(" = ")
            assert numbers(listed) == left and int(repeated) == target
        value, equals, x, op, n = step.split()
        assert int(value) == target and equals == "="
        left.remove(int(n))
        held.append(int(value) == OPERATORS[op](int(x), int(n)))
        target = int(x)
    assert left == [target] and len(held) == len(nums) - 1
    return held


def test_puzzles_are_functions_of_seed_index_and_split_which_never_overlap_and_a_file(
        tmp_path, monkeypatch):
    for i in range(300):
        nums, target, links, results = worked.puzzle(0, i, "train")
        assert len(nums) == 4 and all(1 <= n <= worked.DRAWN for n in nums)
        assert target in worked.TARGETS and target == results[-1]
        assert sorted([results[0], *(n for _, n in links)]) == sorted(nums)
        assert all(OPERATORS[op](x, n) == value and 0 <= value <= worked.LARGEST
                   for (op, n), x, value in zip(links, results, results[1:]))
    assert len({str(worked.puzzle(*which)) for which in (
        (0, 0, "train"), (1, 0, "train"), (0, 1, "train"), (0, 0, "test"))}) == 4
    assert worked.puzzle(3, 7, "test") == (  # in every process and every edition
        [8, 7, 4, 2], 21, [("+", 2), ("+", 4), ("+", 8)], [7, 9, 13, 21])
    def asked(problems):
        return {(*sorted(p["answer"]["nums"]), p["answer"]["target"]) for p in problems}
    test_set = worked.held_out()
    assert len({p["prompt"] for p in test_set}) == len({p["id"] for p in test_set}) == 1024
    learnt = asked(worked.problem(0, i, "train") for i in range(5000))
    assert len(learnt) > 2500 and not learnt & asked(test_set)
    monkeypatch.setattr(worked, "FOLDER", tmp_path)
    monkeypatch.setattr(worked, "TRAINING", 50)
    worked.write_problems()
    problems = data.load(str(tmp_path / "train.jsonl"), "train")
    assert problems == [worked.problem(0, i, "train") for i in range(50)]
    assert data.load(str(tmp_path / "test.jsonl"), "test") == worked.held_out()


@pytest.mark.parametrize("start, wrong", [(0, 0), (HALF, worked.RECIPE["wrong"])])
def test_demonstrations_are_right_and_then_wrong_in_part(start, wrong):
    held_out = {p["prompt"] for p in worked.held_out()}
    rewards, again, limit = [], [], settings_of(worked.BASE)["max_tokens"]
    for i in range(start, start + 1000):
        prompt, completion = worked.demonstration(worked.RECIPE, i)
        assert prompt not in held_out and prompt.endswith(" :")
        nums, target = prompt.removesuffix(" :").split(" = ")
        nums, target = numbers(nums), int(target)
        steps, answer = completion.removesuffix(" </answer>").split(" <answer> ")
        *missed, last = [steps_hold(text, nums, target) for text in steps.split(" no ")]
        # all that is taken off a target is right; an attempt fails at its last step, if at all
        assert all(all(held[:-1]) for held in (*missed, last))
        assert not any(held[-1] for held in missed)  # `no` stands behind what does not hold
        value, used = arithmetic(answer)
        assert sorted(used) == sorted(nums) and (value == target) == last[-1]
        rewards.append(reward(completion, nums, target))
        assert rewards[-1] == last[-1]
        again.append(len(missed))
        assert len(completion.split()) <= limit
    # 1,000 draws: four standard deviations are 0.05
    assert set(again) == {0, 1} and sum(again) / 1000 == pytest.approx(0.2, abs=0.05)
    assert 1 - sum(rewards) / 1000 == pytest.approx(wrong, abs=0.05 if wrong else 0)


@pytest.mark.parametrize("before", [
    "28 = 7 * 4 ; 5 6 6 = 7 : 7 = 1 + 6 ; 5 6 = 1 : 1 = 6 - 5", "28 = 28 no 28 = 28", ""])
def test_the_answer_counts_and_not_the_steps(before):
    """5 6 4 6 = 28, with right and with wrong steps. What else is no answer: test_rewards.py"""
    for answer, right in (("( 6 - 5 + 6 ) * 4", 1), ("28", 0), ("6 - 5 + 6 * 4", 0)):
        assert reward(f"{before} <answer> {answer} </answer>", [5, 6, 4, 6], 28) == right
        assert reward(f"{before} {answer}", [5, 6, 4, 6], 28) == 0


def test_a_number_is_one_token_and_texts_come_back(tok, untrained):
    assert len(tok) == len(worked.WORDS) == 134 and tok.eos_token == "<eos>"
    for tokenizer in (tok, AutoTokenizer.from_pretrained(untrained)):
        for i in range(50):
            text = " ".join(worked.demonstration(worked.RECIPE, i))
            ids = tokenizer.encode(text)
            assert len(ids) == len(text.split()) and tokenizer.decode(ids) == text
        problem = worked.problem(0, 0, "train")
        encoded = encode(tokenizer, problem)
        assert len(encoded) == 7 and tokenizer.decode(encoded) == problem["prompt"]
        # digits that stand side by side stay two numbers: 1 and 2 are not 12
        ids = tokenizer.encode("<answer> 1 2 </answer> <eos>")
        completion = Completion(ids, [0.0] * len(ids), truncated=False)
        assert decode(tokenizer, completion) == "<answer> 1 2 </answer>"
        for text in ("7,1,9=16:", "3 7 2 5 = 121 :", "why ?", "5 / 6"):
            with pytest.raises(Exception, match="UNK"):
                tokenizer.encode(text)
    _, eos, lengths = read_tokenizer(untrained, worked.held_out(), longest=1024)
    assert eos == [tok.eos_token_id] and set(lengths) == {7}
    with pytest.raises(ValueError, match="1025 in sum, and the model has 1024 positions"):
        read_tokenizer(untrained, worked.held_out(), longest=1025)


CANNOT_ENCODE = "--model {}: its tokenizer cannot encode the prompt of problem countdown/"


@pytest.mark.parametrize("command, flags, sentence", [
    (train.main, ["--data", "countdown"], CANNOT_ENCODE),
    (train.main, ["--data", "own.jsonl", "--template", "chat"],
     "--template chat: --model {} has no chat template; --template none leaves prompts bare"),
    (evaluation.main, ["--benchmarks", "own.jsonl,countdown"], f"{CANNOT_ENCODE}test/0/")])
def test_problems_that_the_base_cannot_read_are_one_sentence(
        command, flags, sentence, untrained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("own.jsonl"), worked.held_out()[:300])
    said = refused(capsys, command, *flags, "--model", untrained, "--out", "out")
    assert sentence.format(untrained) in said

"""data/: rows of each set become problems; files, and their errors; problems that are made."""

import base64
import hashlib
import json
import pickle
import re
import runpy
import sys
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import data
from conftest import BENCHMARKS, needs_benchmarks
from data import countdown
from data.prompts import encode
from data.sets import SETS
from helpers import write_rows
from rewards import REWARDS
from study import tiny

TESTS = [dict(input="1\n", output="2\n", testtype="stdin")]
LCB = dict(question_title="t", question_content="Double it.", question_id="q1",
           contest_date="2024-08-21T00:00:00", starter_code="",
           public_test_cases=json.dumps(TESTS), private_test_cases=json.dumps(TESTS), metadata="{}")
TABLE = dict(
    title="sales", texts=[["", "2019", ""], ["", "north", "south"], ["apples", "1.5", "2.5"]],
    merged_regions=[dict(first_row=0, last_row=0, first_column=1, last_column=2),
                    dict(first_row=1, last_row=9, first_column=0, last_column=0)])
CONTEST = dict(
    description="Double it.", public_tests=dict(input=["1\n"], output=["2\n"]),
    private_tests=dict(input=[], output=[]), generated_tests=dict(input=["2\n"], output=["4\n"]))

# for each set a row in the Hub's field names and the answer that it becomes
ROWS = {
    "orz": ({"0": dict(value="2+2?"), "1": dict(ground_truth=dict(value=" 4 "))}, "4"),
    "deepscaler": (dict(problem="2+2?", answer="4", solution="..."), "4"),
    "math": (dict(problem="2+2?", solution="it is \\boxed{3+1 = \\boxed{4}}"), "4"),
    "gsm8k": (dict(question="2+2?", answer="two and two\n#### 1,004"), "1004"),
    "hitab": (dict(id="h", question="how many?", answer=[1.5], table=TABLE), [1.5]),
    "code_contests": (CONTEST, dict(tests=[dict(input="1\n", output="2\n"),
                                           dict(input="2\n", output="4\n")], fn_name=None)),
    "aime24": (dict(id=60, problem="2+2?", answer="073"), "073"),
    "aime25": (dict(id="1", problem="2+2?", answer="4"), "4"),
    "aime26": (dict(problem_idx=1, problem="2+2?", answer=4), "4"),
    "amc23": (dict(id=0, question="2+2?", answer=27.0), "27"),
    "amc": (dict(id=0, problem="2+2?", answer=-1.0), "-1"),
    "math500": (dict(unique_id="a/b", problem="2+2?", answer="\\frac{1}{2}"), "\\frac{1}{2}"),
    "minerva": (dict(question="2+2?", answer="4.5e33"), "4.5e33"),
    "olympiad": (dict(id=1, question="2+2?", final_answer=["$4$"]), "$4$"),
    "livecodebench": (LCB, dict(tests=TESTS + TESTS, fn_name=None))}


def write(folder, name, *rows):
    return Path(write_rows(folder / f"{name}.jsonl", rows))


@pytest.mark.parametrize("name", ROWS)  # a set that a fork adds has none
def test_a_row_of_each_set(name, tmp_path):
    row, answer = ROWS[name]
    folder = tmp_path / "set[1]"  # a name that is a pattern, too
    folder.mkdir()
    write(folder, name, row)
    problem, = data.load(name, "test", folder)
    assert problem["answer"] == answer and isinstance(problem["id"], str)
    assert problem["verifier"] == SETS[name].verifier and problem["verifier"] in REWARDS
    assert any(text in problem["prompt"] for text in ("2+2?", "Double it.", "how many?"))
    if name == "hitab":  # a table is written out, with merged cells
        rows = "|  | 2019 | 2019 |\n|  | north | south |\n|  | 1.5 | 2.5 |"
        assert rows in problem["prompt"] and "<answer>" in problem["prompt"]


def test_the_files_of_a_set_in_a_folder(tmp_path):
    """NAME.jsonl is both splits, and NAME_SPLIT.jsonl one."""
    row, _ = ROWS["gsm8k"]
    for name, read in (("gsm8k", ["gsm8k", "gsm8k"]), ("gsm8k_train", ["gsm8k_train", "gsm8k"]),
                       ("gsm8k_test", ["gsm8k_train", "gsm8k_test"])):
        write(tmp_path, name, dict(row, question=name))
        assert [data.load("gsm8k", split, tmp_path)[0]["prompt"]
                for split in ("train", "test")] == read


def test_livecodebench_dates_private_tests_and_functions(tmp_path):
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(TESTS)))).decode()
    days = ("2024-07-31", "2024-08-01", "2024-09-30", "2024-10-01")
    rows = [dict(LCB, question_id=str(i), contest_date=day + "T00:00:00")
            for i, day in enumerate(days)]
    rows[1].update(private_test_cases=packed, metadata=json.dumps(dict(func_name="f")),
                   starter_code="class Solution:\n    def f(self):")
    write(tmp_path, "livecodebench", *rows)
    problems = data.load("livecodebench", "test", tmp_path,
                         lcb_from="2024-08-01", lcb_to="2024-09-30")
    assert [p["id"] for p in problems] == ["1", "2"]
    assert problems[0]["answer"] == dict(tests=TESTS + TESTS, fn_name="f")
    assert "class Solution" in problems[0]["prompt"] and "STDOUT" in problems[1]["prompt"]
    assert problems[1]["messages"][0]["role"] == "system"
    write(tmp_path, "gsm8k", dict(question="1+1?", answer="#### 2"))  # a set without days
    assert len(data.load("gsm8k", "test", tmp_path, lcb_from="2024-08-01")) == 1
    with pytest.raises(data.DataError, match="livecodebench has no problem"):
        data.load("livecodebench", "test", tmp_path, lcb_from="2999-01-01")


def test_a_pickle_that_would_do_something_or_is_above_a_gigabyte_is_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("it ran",)
    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    write(tmp_path, "livecodebench", dict(LCB, private_test_cases=packed))
    with pytest.raises(data.DataError, match=r"line 1 .*builtins\.print"):
        data.load("livecodebench", "test", tmp_path)
    assert "it ran" not in capsys.readouterr().out
    packer = zlib.compressobj(1)  # a text "[]" with spaces behind it
    begin, spaces, end = (packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH) for part in (
        b"\x80\x04\x8d" + (2**24 * 65 + 2).to_bytes(8, "little") + b"[]", b" " * 2**24, b"."))
    packed = begin + spaces * 65 + end
    write(tmp_path, "livecodebench", dict(
        LCB, private_test_cases=base64.b64encode(packed).decode()))
    with pytest.raises(data.DataError, match="line 1 is not a row"):
        data.load("livecodebench", "test", tmp_path)


def test_golds_that_cannot_be_graded_are_left_out_and_repeated_ids_told_apart(tmp_path, capsys):
    """The first five; the others are counted."""
    bad = [dict(unique_id=f"b{i}", problem="?", answer="\\frac{1}{2") for i in range(8)]
    write(tmp_path, "math500", dict(bad[0], unique_id="good", answer="5"), *bad)
    assert [p["id"] for p in data.load("math500", "test", tmp_path)] == ["good"]
    *said, rest = capsys.readouterr().err.splitlines()
    assert rest == "math500: 3 more are left out, for such answers" and len(said) == 5
    write(tmp_path, "amc23", *[dict(id=7, question="?", answer=1.0)] * 2)
    assert len({p["id"] for p in data.load("amc23", "test", tmp_path)}) == 2


@pytest.mark.parametrize("name, lines, message", [
    ("aime25", ['{"problem": "?", "answer": "1"}', "{"], "line 2 is not a JSON object"),
    ("aime25", ["[1]"], "line 1 is not a JSON object"),
    ("aime25", ['{"problem": ' + "[" * 100_000], "line 1 is not a JSON object"),
    ("aime25", ['{"answer": "1"}'], "line 1 .*problem or question"),
    ("aime25", ['{"problem": "?"}'], "line 1 .*answer or final_answer"),
    ("olympiad", ['{"question": "?", "final_answer": []}'], "line 1 .*final_answer"),
    ("code_contests", ['{"question": "?", "input_output": "{"}'], "line 1 "),
    ("code_contests", [r'{"question": "?", "input_output": "{\"inputs\": [1], \"outputs\": []}"}'],
     "line 1 "),
    ("livecodebench", ['{"contest_date": "2024-08-01"}'], "line 1 .*private_test_cases")])
def test_errors_name_file_line_and_field(name, lines, message, tmp_path):
    path = write(tmp_path, name)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(data.DataError, match=re.escape(str(path)) + ".*" + message):
        data.load(name, "test", tmp_path)


@pytest.mark.parametrize("rows, message", [
    ([dict(prompt="?", answer="1")], "line 1 has no field verifier"),
    ([dict(prompt="?", answer="1", verifier="maths")], "'maths' is none of"),
    ([], "own.jsonl has no problem that can be used"),
    *[([dict(fields, answer="1", verifier="math")], "line 1 has no prompt")
      for fields in ({}, dict(prompt=5), dict(prompt=""), dict(messages=[]))],
    ([dict(prompt="?", answer="1", verifier="math", id=1)] * 2, "same id")])
def test_own_files(rows, message, tmp_path):
    path = tmp_path / "own.jsonl"
    with pytest.raises(data.DataError, match=message):
        data.load(write_rows(path, rows), "train")
    row = dict(prompt="2+2?", answer="4", verifier="math")
    assert data.load(write_rows(path, [row]), "train") == [dict(row, id="0")]
    turns = [dict(role="user", content="2+2?"), dict(role="assistant", content="It is")]
    several = dict(messages=turns, answer="4", verifier="math")
    prompts = [p["prompt"] for p in data.load(write_rows(path, [several, row]), "train")]
    assert prompts == ["2+2?\n\nIt is", "2+2?"]  # other puzzles, with one last text or not


def test_answers_that_a_reward_cannot_grade_are_left_out_and_named(tmp_path, capsys):
    """Which: see test_which_golds_can_be_graded. Of some the verifier's check itself fails."""
    tests = [dict(input="1", output="2")]
    wrong = [("math", 1e400), ("countdown", "8"), ("countdown", dict(nums=[3, 5])),
             ("table", "north"), ("code", tests)]
    right = [("math", 0.5), ("countdown", dict(nums=[3, 5], target=8)), ("table", ["north"]),
             ("code", dict(tests=tests)), ("code", dict(tests=tests, fn_name="f"))]
    path = write_rows(tmp_path / "own.jsonl", [
        dict(prompt="?", answer=answer, verifier=verifier) for verifier, answer in wrong + right])
    assert [(p["verifier"], p["answer"]) for p in data.load(path, "train")] == right
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(path)]
    for i, (line, (verifier, answer)) in enumerate(zip(said, wrong, strict=True)):
        assert line.startswith(f"{path}, line {i + 1} (id {i}) is left out: {verifier} ")
        assert str(answer) in line and "data/README.md" in line


def test_templates(tokenizer, monkeypatch):
    def text(problem, template=None):
        return tokenizer.decode(encode(tokenizer, problem, template))
    problem, puzzle = dict(prompt="2+2?", verifier="math"), data.load("countdown34", "train")[0]
    table = dict(problem, verifier="table")
    # this tokenizer has no chat template
    assert f"equals {puzzle['answer']['target']}." in text(puzzle) == puzzle["prompt"]
    assert text(problem) == text(problem, "none") == "2+2?"
    r1_zero, orz = text(problem, "r1_zero"), text(problem, "orz")
    assert r1_zero.endswith("</answer>.\nUser: 2+2?\nAssistant: <think>")
    assert "the \\boxed{} tag" in orz and orz.startswith(r1_zero.split("\n")[0])
    chat = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}:"
    monkeypatch.setattr(tokenizer, "chat_template", chat, raising=False)
    assert text(problem).startswith("[system]Please reason")
    assert text(problem, "chat") == text(table) == "[user]2+2?:"
    system, user = (message["content"] for message in puzzle["messages"])
    assert text(puzzle) == f"[system]{system}[user]{user}:" and user in puzzle["prompt"]
    # messages that are null are none; a last one of the assistant's is begun and goes on
    assert text(dict(problem, messages=None)) == text(problem)
    turns = [dict(role="user", content="2+2?"), dict(role="assistant", content="It is")]
    several = dict(problem, prompt="2+2?\n\nIt is", messages=turns)
    assert text(several) == "[user]2+2?[assistant]It is"
    with monkeypatch.context() as patch:  # without a template the question would be lost
        patch.setattr(tokenizer, "chat_template", None)
        with pytest.raises(ValueError, match="several messages take a chat template"):
            text(several)
        assert text(dict(several, prompt="2+2 is")) == "2+2 is"
        assert text(dict(several, prompt="2+2?", messages=turns[:1])) == "2+2?"
    # a template that refuses the role, or leaves it out: its text begins the user's turn
    for says in ("{{ raise_exception('no system') }}", ""):
        monkeypatch.setattr(tokenizer, "chat_template", chat.replace(
            "%}[", "%}{% if m.role == 'system' %}" + says + "{% else %}[").replace(
            "{% endfor", "{% endif %}{% endfor"))
        assert re.fullmatch(r"\[user\]Please reason .*\{\}\.\n\n2\+2\?:", text(problem))
        assert text(puzzle) == f"[user]{system}\n\n{user}:" and text(table) == "[user]2+2?:"


def test_solved_problems_stand_in_front_of_each_prompt_and_overlaps_are_found(
        tmp_path, monkeypatch, capsys):
    """GSM8K's own solutions, with the answer in a box; those shown are left out of the rows."""
    def said(module, *args):
        monkeypatch.setattr(sys, "argv", [module, *map(str, args)])
        with suppress(SystemExit):
            runpy.run_module(module, run_name="__main__")
        out, error = capsys.readouterr()
        return error or out

    def shots(*args):
        text = said("examples.shots", *args, "--data_dir", tmp_path)
        return [json.loads(line) for line in text.splitlines()] if text[0] == "{" else text
    for split, numbers in (("train", range(1200, 1206)), ("test", [2, 1201])):
        write_rows(tmp_path / f"gsm8k_{split}.jsonl", [
            dict(question=f"{i} and 1?", answer=f"It is {i} + 1.\n#### {i + 1:,}")
            for i in numbers])
    rows = shots("gsm8k", "--n", "6")
    assert [(row["id"], row["answer"], row["verifier"]) for row in rows] == [("0", "3", "math")]
    *shown, asked = rows[0]["prompt"].split("\n\n")
    assert asked == "Question: 2 and 1?\nAnswer:" and sorted(shown) == [
        f"Question: {i} and 1?\nAnswer: It is {i} + 1.\nThe answer is \\boxed{{{i + 1}}}."
        for i in range(1200, 1206)]
    path = write_rows(tmp_path / "shots.jsonl", shots("gsm8k", "--n", "2", "--split", "train"))
    assert len(data.load(path, "test")) == 4  # the other two are in front
    write_rows(tmp_path / "math500.jsonl", [dict(problem="3?", answer="3", unique_id="a")])
    one, other = (shots("math500", "--n", "5", "--seed", seed)[0]["prompt"] for seed in "01")
    assert one != other and one.endswith("\n\nQuestion: 3?\nAnswer:")
    assert "--n 7: 6 of the problems to learn from have a solution" in shots("gsm8k", "--n", "7")
    assert "deepscaler.jsonl cannot be read" in shots("gsm8k", "--solved", "deepscaler")
    words = [f"word{i}" for i in range(14)]
    write(tmp_path, "deepscaler", dict(problem="zero " + " ".join(words).upper(), answer="1"))
    write(tmp_path, "aime25", dict(id="a", problem=", ".join(words), answer="1"),
          dict(id="b", problem=" ".join(words[:12]), answer="1"))
    found = said("examples.overlap", "deepscaler", "aime25", tmp_path)
    assert found == f"a: {' '.join(words[:13])}\n"


def key(problem):
    return tuple(sorted(problem["answer"]["nums"])), problem["answer"]["target"]


@pytest.mark.parametrize("form", countdown.FORMS)
def test_puzzles_are_right_and_their_splits_never_overlap(form):
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
    train = {key(countdown.problem(form, 0, i, "train")) for i in range(3000)}
    held_out = data.load(form, "test")
    test = {key(p) for p in held_out}
    assert not train & test and len(test) > 200
    assert len({p["prompt"] for p in held_out}) == len(held_out) == 1024


def test_the_same_puzzles_in_every_process_and_batches_by_seed_and_rollout():
    text = json.dumps([countdown.puzzle(form, 3, i, split) for form in countdown.FORMS
                       for i in range(20) for split in ("train", "test")])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "cbdd6fb2c8b3e878"
    def ids(*where):
        return data.batch(range(10), 4, *where)
    assert ids(0, 2) == ids(0, 2) != ids(1, 2)
    epoch = ids(0, 1) + ids(0, 2) + ids(0, 3)[:2]
    assert sorted(epoch) == list(range(10))  # each problem once before any comes again
    assert ids(0, 1, 1) != ids(0, 1, 0)


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


def test_tokenizer_round_trip(tokenizer):
    """The base's is the same: test_base.py"""
    text = "7,1,9=16:<answer>(7+9)*1</answer>\n the  rest ~!{}\t\\frac{1}{2}"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == len(re.sub("</?answer>", "1", text))
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    unicode = "\u00e9\u4e2d\U0001f600 ok"  # any text has tokens, those of its bytes
    assert tokenizer.decode(tokenizer.encode(unicode)) == unicode
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<eos>", "<unk>"]


@pytest.mark.slow
@pytest.mark.benchmarks
@needs_benchmarks
@pytest.mark.parametrize("name, file, rows", [
    ("aime24", "aime_2024", 30), ("aime25", "aime_2025", 30), ("aime26", "aime_2026", 30),
    ("amc23", "amc_2023", 40), ("amc", "amc_2022_2023", 83), ("math500", "math500", 500),
    ("minerva", "minerva_math", 272), ("olympiad", "olympiadbench", 674),
    ("hitab", "hitab_test_sample", 300), ("livecodebench", "livecodebench_sample", 60),
    ("orz", "orz_math_57k_sample", 400)])
def test_real_rows(name, file, rows, tmp_path):
    """All of them load, and all golds grade themselves right but olympiad 2349 ($221,$8$)."""
    (tmp_path / f"{name}.jsonl").symlink_to(BENCHMARKS / f"{file}.jsonl")
    assert len(data.load(name, "test", tmp_path)) == rows

"""eval.py: its numbers, its refusals, grading without a model, and a killed command continued."""

import errno
import fcntl
import json
import os
import shutil
import sys
import time
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

import data
import eval
import helpers
from engine.parallel import seed_of
from engine.sampler import Completion
from graders import sandbox
from harness import stats
from harness.stats import benchmark_results, interval, pass_at_k, results_table, standard_error
from helpers import read_rows, write_rows
from rewards import REWARDS, Verifier

SMALL = "--limit 24 --samples 4 --max_tokens 16 --max_prompt_tokens 32".split()


@pytest.mark.quick
def test_pass_at_k_is_the_share_of_choices_with_a_correct_one_and_majority_by_hand():
    for n in range(1, 9):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                choices = list(combinations([1] * correct + [0] * (n - correct), k))
                share = sum(map(max, choices)) / len(choices)
                assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)
    assert stats.majority(["2", "2"], 1) == 0 and stats.majority(["2"], 2) == 1
    assert stats.majority(["2"], 1) == 0.5  # equally frequent: the mean of both
    assert stats.majority([], 1) == 1 and stats.majority([], 0) == 0
    assert stats.majority(["0.5", "1/2"], 1) == 0 and stats.majority(["x+1", "1+x"], 1) == 1 / 3


@pytest.mark.parametrize("answer, same", [
    ("1" * 5000,) * 2, ("5" + " " * 4000 + "x}", "5 x}"), ("{" * 4000,) * 2, ("~5\\,", "5"),
    ("0.5", "\\frac{1}{2}"), ("Evelyn", "\\text{evelyn}"), ("[" * 200_000,) * 2,
    ("\\binom{5}{2}", "10"), ("\\lfloor -1.5 \\rfloor", "-2"),
    ("x + 1e9999",) * 2, ("A. " * 1600,) * 2])
def test_votes_are_quick_and_of_values(answer, same):
    began = time.process_time()
    assert stats.vote_of(answer) == stats.vote_of(same)
    assert time.process_time() - began < 10


@pytest.mark.quick
def test_intervals_and_errors_over_clusters():
    """Without a spread it is Clopper and Pearson's, of 0 in n: the p with (1 - p)^n = 1/40."""
    low, high = interval([0.0, 1.0] * 50, range(100), (0, 1))
    assert 0.38 < low < 0.43 and 0.57 < high < 0.62
    for n, bound in ((1, 0.975), (8, 0.3694), (100, 0.0362)):
        assert interval([0.0] * n, range(n), (0, 1)) == pytest.approx((0, bound), abs=1e-4)
        assert interval([1.0] * n, range(n), (0, 1)) == pytest.approx((1 - bound, 1), abs=1e-4)
        assert interval([0.5] * n, range(n), (0, 1))[1] == pytest.approx(0.5 + bound / 2, abs=1e-4)
        assert interval([0.0] * n, range(n), (-1, 1)) == pytest.approx((-bound, bound), abs=1e-4)
    assert interval([0.0, 1.0, 0.0, 1.0], [1, 1, 2, 2], (0, 1)) == (0, 1)  # of clusters as good
    assert interval([0.0] * 8, "aaaabbbb", (0, 1)) == interval([0.0] * 2, "ab", (0, 1))
    # problems that come twice tell no more than once; other clusters by hand
    values, twice = [0.0, 0.25, 1.0, 0.5], [0.0, 0.25, 1.0, 0.5] * 2
    assert standard_error(twice, "abcdabcd") == pytest.approx(standard_error(values, "abcd"))
    assert standard_error(twice, range(8)) < 0.7 * standard_error(values, "abcd")
    assert interval(twice, "abcdabcd", (0, 1)) == interval(values, "abcd", (0, 1))
    # the deviations of a are -0.5 and -0.5, of b 0.5 and 0.5: sqrt(2 x (1 + 1)) / 4
    assert standard_error([0.0, 0.0, 1.0, 1.0], "aabb") == 0.5
    assert standard_error([0.0, 1.0], "aa") is None
    shuffled = [dict(verifier="countdown", answer=dict(nums=nums, target=9)) for nums in (
        [1, 2, 3], [3, 1, 2], [3, 3, 2])]
    for problems in (shuffled, [dict(verifier="math", prompt=prompt) for prompt in "aab"]):
        a, same, b = map(data.cluster, problems)
        assert a == same != b


def rows_with(correct, n):
    """The rows of one problem, of which `correct` are right."""
    row = dict(completion="", truncated=False, tokens=3, fault=None)
    return [dict(row, reward=float(i < correct)) for i in range(n)]


@pytest.mark.quick
def test_the_numbers_of_a_benchmark(monkeypatch):
    """A reward of 1 is right; the mean of all rewards is beside it. Errors are over problems."""
    monkeypatch.setitem(REWARDS, "own", lambda completion, answer: 1.0)
    groups = [rows_with(correct, 4) for correct in (4, 2, 0, 1)]
    groups[2][3]["reward"] = 0.5
    problems = [dict(verifier="own", prompt=str(i)) for i in range(4)]
    scores = stats.summarise(problems, groups)
    of_problems = {"mean@4": [1, 0.5, 0, 0.25], "pass@1": [1, 0.5, 0, 0.25],
                   "pass@2": [1, 5 / 6, 0, 0.5], "pass@4": [1, 1, 0, 1]}
    assert set(scores) == {"reward", "unreadable_frac", "truncated_frac", "mean_length",
                           *of_problems, *(f"{name}_stderr" for name in of_problems)}
    for name, values in of_problems.items():
        assert scores[name] == pytest.approx(np.mean(values))
        assert scores[f"{name}_stderr"] == pytest.approx(np.std(values, ddof=1) / 4**0.5)
    table = results_table({"own": benchmark_results(problems, groups)})
    assert f"(n=4, se {scores['mean@4_stderr']:.3f})" in table and "| 0.750 (0.250) |" in table
    assert table.endswith("| 0.469 |")  # 7.5 / 16
    results = benchmark_results(problems[:1], [rows_with(1, 2)])
    assert [value for name, value in results.items() if "err" in name] == [None] * 3
    assert "se -" in results_table({"own": results})  # of one problem
    assert "maj@2" not in results
    monkeypatch.setitem(REWARDS, "own", Verifier(lambda *_: 1.0, vote=lambda text: "7"))
    assert benchmark_results(problems[:1], [rows_with(1, 3)])["maj@3"] == 0


def model_folder(folder, **files):
    """A folder that has what flags are checked with, and no model."""
    folder.mkdir(parents=True)
    for name, content in dict(dict(config={}), **files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_a_model_brings_its_settings(tmp_path, capsys):
    other = model_folder(tmp_path / "other")
    own = model_folder(tmp_path / "own", recipe=dict(settings=dict(
        max_tokens=99, lr=1.0, template="r1_zero", stop="</answer>", allow_unsafe_code=True)))
    args = eval.parse_args(["--model", own, "--template", "orz"])
    assert (args.template, args.stop) == ("orz", "</answer>") and not args.allow_unsafe_code
    assert (args.origin["template"], args.origin["stop"]) == ("given", "the model's recipe.json")
    assert eval.parse_args(["--model", own, "--max_tokens", "98"]).max_tokens == 98
    for flags, tokens in (([], (16, 32)), (["--model", other], (8192, 2048)),
                          (["--model", own], (99, 2048))):
        args = eval.parse_args(flags)
        assert (args.max_tokens, args.max_prompt_tokens) == tokens
        with pytest.raises(SystemExit) as stop:
            eval.main([*flags, "--help"])
        page = " ".join(capsys.readouterr().out.split())
        assert not stop.value.code and f"the longest completion, in tokens ({tokens[0]})" in page


@pytest.fixture
def refused(capsys):
    """refused(*flags) -> the sentence with which the command is refused."""
    return partial(helpers.refused, capsys, eval.main)


@pytest.mark.quick
@pytest.mark.parametrize("flags, words", [
    ("--top_p 2", "--top_p"), ("--temperature nan", "--temperature"), ("--split dev", "--split"),
    ("--temperature 0.009", "--temperature must be 0 (greedy) or at least 0.01"),
    ("--samples 0", "--samples must be 1 or more"), ("--model {tmp}", "no config.json"),
    ("--benchmarks mat500", "--benchmarks mat500: there is no such data set; there are"),
    ("--benchmarks aime24 --split train", "--benchmarks aime24 has no train split"),
    ("--benchmarks {tmp}/none.jsonl", "{tmp}/none.jsonl cannot be read: No such file"),
    ("--data_dir {tmp}", "countdown is none of them"),
    ("--benchmarks aime24 --data_dir {tmp}", "{tmp}/aime24.jsonl cannot be read: No such file"),
    ("--benchmarks aime24 --lcb_from 2024-08-01", "--lcb_from"),
    ("--lcb_to 2024-8-1", "argument --lcb_to: '2024-8-1' is no day, such as 2024-08-01"),
    ("--benchmarks {tmp}/code.jsonl", "--allow_unsafe_code"),
    ("--model {tmp}/run", "its checkpoints: {tmp}/run/checkpoints/rollout_0000"),
    ("--model /nowhere", "--model /nowhere: there is no such folder"),
    ("--model no-such-model", "is no folder here, and as an id of the Hub"),
    ("--completions {tmp}/none.jsonl", "--completions: there is no file {tmp}/none.jsonl"),
    ("--completions {tmp}/few.jsonl --temperature 0.5", "--temperature is for sampling"),
    ("--completions {tmp}/few.jsonl --benchmarks {tmp}/own.jsonl",
     "0 completions of problem 0 of {tmp}/own.jsonl, not 1; its rows are of countdown"),
    ("--benchmark countdown", "there is no such flag; did you mean --benchmarks?"),
    ("--completions {tmp}/more.jsonl --limit 2", "has 1 completions of problem"),
    ("--completions {tmp}/bad.jsonl", "line 2 is no row {{benchmark, id, completion}}")])
def test_bad_input_is_one_sentence_and_exit_code_2(flags, words, tmp_path, monkeypatch, refused):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    first, second = (dict(benchmark="countdown", id=problem["id"], completion="x")
                     for problem in data.load("countdown", "test")[:2])
    program = dict(prompt="?", answer=dict(tests=[dict(input="", output="1")]), verifier="code")
    files = dict(bad=[first, {}], few=[first], more=[first, first, second], code=[program])
    for name, rows in files.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
    own_file(tmp_path / "own.jsonl")
    (tmp_path / "run/checkpoints/rollout_000020").mkdir(parents=True)
    (tmp_path / "run/metrics.jsonl").touch()
    monkeypatch.setattr(sandbox, "obstacle", lambda: "no namespaces")
    error = refused(*flags.format(tmp=tmp_path).split(), "--out", tmp_path / "out")
    assert words.format(tmp=tmp_path) in error
    assert not (tmp_path / "out" / "completions.jsonl").exists() or "--model" in flags


@pytest.mark.parametrize("flags, words", [
    (["--limit", "2", "--max_tokens", "4090"], "4096 positions"),
    (["--benchmarks", "{tmp}/own.jsonl"],
     "--max_prompt_tokens 32: the prompt of problem 1 has 33 tokens, and a benchmark's score"),
    (["--template_kwargs", "[1]", *SMALL], "--template_kwargs is a JSON object, such as "),
    (["--template_kwargs", "{{\"x\": 1}}", *SMALL], "has no variable x to be set"),
    (["--model", "{small}", *SMALL], "--model {small}: --sampler transformers cannot load it: "),
    (["--sampler", "vllm", *SMALL], "--sampler vllm cannot load it: ")])
def test_a_model_that_cannot_sample_them_is_refused(flags, words, small, tmp_path, refused,
                                                    monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    own_file(tmp_path / "own.jsonl", prompts=["?" * 3, "?" * 33, "?" * 4])
    damaged = shutil.copytree(small(), tmp_path / "damaged")
    os.truncate(damaged / "model.safetensors", 1000)
    flags = [flag.format(tmp=tmp_path, small=damaged) for flag in flags]
    assert words.format(small=damaged) in refused("--sampler", "transformers", *flags, "--out",
                                                  tmp_path / "out")


def own_file(path, n=2, answer="1", prompts=()):
    return write_rows(path, [dict(prompt=prompt, answer=answer, verifier="math", id=i)
                        for i, prompt in enumerate(prompts or [f"{i}?" for i in range(n)])])


def results_in(out):
    return json.loads((out / "eval.json").read_text())["results"]


def graded(out, own, texts, *flags):
    """Grades a file of completions: for each problem its texts. -> the results"""
    rows = [dict(benchmark=own, id=i, reward=9e9, completion=text)
            for i, of_problem in enumerate(texts) for text in of_problem]
    given = write_rows(out.with_suffix(".jsonl"), rows[::-1])
    eval.main(["--completions", given, "--benchmarks", own, *flags, "--out", str(out)])
    return results_in(out)[own]


def test_existing_completions_are_graded_again(tmp_path, capsys):
    out, own = tmp_path / "out", write_rows(tmp_path / "own.jsonl", [
        dict(prompt="?", answer=dict(nums=[i, 2], target=i + 2), verifier="countdown", id=i)
        for i in range(30)])
    result = graded(out, own, [
        [f"<answer>{i} + 2</answer>", f"<answer>{'no' if i % 2 else f'2 + {i}'}</answer>"]
        for i in range(30)], "--limit", "20")
    assert result["mean@2"] == 0.75 and result["pass@2"] == 1 and result["problems"] == 20
    assert result["interval"][0] < 0.75 < result["interval"][1]
    assert result["mean_length"] is result["truncated_frac"] is None  # nobody has counted
    table = capsys.readouterr().out
    assert f"| {own} | 20 | 0.750 (n=2" in table and (out / "eval.md").read_text() == table
    rows = read_rows(out / "completions.jsonl")
    assert [row["id"] for row in rows[::2]] == [str(i) for i in range(20)]
    assert {row["reward"] for row in rows} == {0, 1}
    settings = json.loads((out / "eval.json").read_text())["settings"]
    assert settings["samples"] is settings["temperature"] is None  # nobody knows


def test_majorities_and_unreadable_answers_of_a_file(tmp_path, capsys):
    own, texts = own_file(tmp_path / "own.jsonl", 1, "1/2"), ("0.5", "\\frac{1}{2}", "x+1", "")
    found = graded(tmp_path / "out", own, [[f"\\boxed{{{x}}}" for x in texts]])
    assert found["maj@4"] == 1  # two spellings of one answer win
    capsys.readouterr()
    own = own_file(tmp_path / "own.jsonl", 4)
    for texts, share in ((["\\boxed{1}", "1", "so 1"], 2 / 3), (["\\boxed{1}", "\\boxed{2}"], 0)):
        result = graded(tmp_path / f"out{len(texts)}", own, [texts] * 4)
        said = capsys.readouterr().out
        assert result["unreadable_frac"] == pytest.approx(share) and f"| {share:.3f} | " in said


def test_two_evaluations_of_the_same_problems_are_compared(tmp_path, capsys, refused):
    """By hand: per problem, 1 of 2 and 2 of 2 right, against 0 and 2: +0.5 and 0. No model."""
    own, right, wrong = own_file(tmp_path / "own.jsonl"), "\\boxed{1}", "\\boxed{0}"
    graded(tmp_path / "base", own, [[wrong, wrong], [right, right]])
    graded(tmp_path / "three", own, [[right, wrong, wrong]] * 2)
    new = [[right, wrong], [right, right]]
    graded(tmp_path / "new", own, new)
    capsys.readouterr()
    graded(tmp_path / "new", own, new, "--against", str(tmp_path / "base"))  # it is continued
    table = capsys.readouterr().out
    assert f"| {own} | mean@2 | 0.750 | 0.500 | +0.250 | -1.000 to +1.000 |" in table
    files = f"; completions {tmp_path}/new.jsonl, there {tmp_path}/base.jsonl"
    assert f"against {tmp_path}/base{files}:" in table
    assert (tmp_path / "new" / "eval.md").read_text() == table
    against = json.loads((tmp_path / "new" / "eval.json").read_text())["against"][own]
    assert against["pass@2"] == dict(value=1, other=0.5, difference=0.5, low=-1, high=1)
    again = ["--completions", tmp_path / "new.jsonl", "--benchmarks", own, "--out",
             tmp_path / "new", "--against"]
    for folder, words in (("none", "--against: there is no file "),
                          ("three", f"has 3 completions of problem 0 of {own}, not 2")):
        assert words in refused(*again, tmp_path / folder)


def test_a_complete_folder_is_compared_without_a_model(sampled, tmp_path, capsys, refused):
    own, base = sampled.own[0], tmp_path / "base"
    graded(base, own, [["\\boxed{1}"] * 2] * 2, "--limit", "2")
    sampled.run("whole")
    for _ in range(2):
        sampled.run("other", "--against", str(tmp_path / "whole"))
    assert not sampled.sampler.asked and "| +0.000 | -0.522 to +0.522 |" in capsys.readouterr().out
    error = refused(*sampled.flags, "--out", tmp_path / "third", "--against", base)
    assert f"--against: {base}/completions.jsonl has 0 completions of problem 2 of {own}" in error
    assert not sampled.sampler.asked


class Sampler:
    """Answers with its seed and the prompt's place, and notes its calls."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked, self.left = tokenizer, [], None

    def sample(self, prompts, n, *, seed, **settings):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left = self.left and self.left - 1
        self.asked.append((len(prompts), seed))
        return [[Completion(self.tokenizer.encode(f"{seed} {i} {j}"), [], True) for j in range(n)]
                for i in range(len(prompts))]

    def close(self):
        pass


@pytest.fixture
def sampled(tmp_path, monkeypatch, tokenizer):
    """Four benchmarks of 11 problems in chunks of three. sampled.run(name, more flags) evaluates
    into a folder and returns the text of its completions."""
    own = [own_file(tmp_path / f"{name}.jsonl", n) for name, n in dict(a=4, b=1, c=1, d=5).items()]
    flags = ["--model", model_folder(tmp_path / "model"), "--benchmarks", ",".join(own),
             "--samples", "2", "--seed", "7", "--sampler", "transformers"]
    sampler = Sampler(tokenizer)
    monkeypatch.setattr(eval, "AT_ONCE", 6)
    monkeypatch.setattr(eval, "load_model", lambda args, problems: (sampler, tokenizer))

    def run(name, *more):
        sampler.asked.clear()
        eval.main([*flags, *more, "--out", str(tmp_path / name)])
        return (tmp_path / name / "completions.jsonl").read_text()
    return SimpleNamespace(run=run, sampler=sampler, own=own, flags=flags)


def test_chunks_go_across_benchmarks_and_continue_at_any_of_them(sampled, tmp_path, capsys):
    whole = sampled.run("whole")
    # chunks of three problems, each with the seed of its first one: a 0, a 3 with b and c, ...
    firsts = [(sampled.own[0], 0), (sampled.own[0], 3), (sampled.own[3], 0), (sampled.own[3], 3)]
    asked = [(n, seed_of("eval.py", 7, *first, 0))
             for n, first in zip((3, 3, 3, 2), firsts, strict=True)]
    assert sampled.sampler.asked == asked
    results = results_in(tmp_path / "whole")
    assert [results[name]["problems"] for name in sampled.own] == [4, 1, 1, 5]
    for _ in range(3):  # from the beginning, within a benchmark, and from a benchmark's first
        sampled.sampler.left = 1
        said = helpers.refused(capsys, lambda _: sampled.run("cut"), code=130)
        assert said.endswith("interrupted; the same command continues\n")
        assert len(sampled.sampler.asked) == 1
    sampled.sampler.left = None
    assert sampled.run("cut") == whole and results_in(tmp_path / "cut") == results
    assert sampled.sampler.asked == asked[3:]
    assert sampled.run("cut") == whole and sampled.sampler.asked == []  # it is complete


def test_a_file_cut_off_anywhere_ends_as_if_it_had_not_been(sampled, tmp_path, monkeypatch):
    whole = sampled.run("whole")
    path, lines = tmp_path / "whole" / "completions.jsonl", whole.splitlines(keepends=True)
    monkeypatch.setattr(eval, "report", lambda *args: None)
    for rows in (0, 1, 5, 6, 7, 17, 18, 21):
        for torn in ("", '{"benchmark": "countd', lines[rows][:-1]):
            path.write_text("".join(lines[:rows]) + torn)
            assert sampled.run("whole") == whole
            there = rows + torn.endswith("}")
            assert len(sampled.sampler.asked) == (4 - there // 6 if there < 22 else 0)


@pytest.mark.quick
@pytest.mark.parametrize("text", [
    "[1]", "{", "\udcff", "[" * 200_000, '{"benchmark": "OWN", "id": 1}',
    '{"benchmark": "OWN", "id": 1, "completion": null}',
    '{"benchmark": "OWN", "id": 1, "completion": "x", "tokens": 1e999}',
    '{"benchmark": "OWN", "id": 1, "completion": "x", "tokens": 1' + "0" * 400 + "}"])
def test_damaged_completions_are_one_sentence(text, sampled, tmp_path, refused):
    sampled.run("out")
    path = tmp_path / "out" / "completions.jsonl"
    before = path.read_bytes() + f"{text}\n".encode(errors="surrogateescape")
    path.write_bytes(before)
    assert f"{path}, line 23 is no row" in refused(*sampled.flags, "--out", path.parent)
    assert path.read_bytes() == before  # nothing is lost by asking


@pytest.mark.quick
def test_another_value_of_any_flag_does_not_continue_a_folder(tmp_path, capsys):
    args = eval.parse_args(["--out", str(tmp_path), "--samples", "1"])
    problems = [dict(id="0", prompt="?", answer="1")]
    eval.claim(args, problems, tmp_path)
    write_rows(tmp_path / "completions.jsonl", [dict(benchmark="own", id="0", completion="x")])
    for flag in {*vars(args)} - {"out", "against", "allow_unsafe_code", "origin"}:
        changed = SimpleNamespace(**{**vars(args), flag: "other"})
        said = helpers.refused(capsys, lambda _: eval.claim(changed, problems, tmp_path))
        assert f"was begun with {flag} {getattr(args, flag)}, not other; give another\n" in said
    said = helpers.refused(capsys, lambda _: eval.claim(args, [dict(problems[0], answer="2")],
                                                        tmp_path))
    assert "was begun with problems " in said
    same = SimpleNamespace(**{**vars(args), "against": "x", "allow_unsafe_code": 1})
    eval.claim(same, problems, tmp_path)


def test_unknown_settings_another_process_and_a_full_disk_are_a_sentence(
        sampled, tmp_path, refused, monkeypatch, capsys):
    sampled.run("out")
    (tmp_path / "out" / "settings.json").unlink()
    assert "settings.json" in refused(*sampled.flags, "--out", tmp_path / "out")
    (tmp_path / "out" / "completions.jsonl").write_text("")  # an evaluation that never began
    assert sampled.run("out", "--samples", "1").count("\n") == 11
    out = tmp_path / "held"
    out.mkdir()
    holder = os.open(out, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert "is another process's at this moment" in refused(*sampled.flags, "--out", out)
    os.close(holder)
    assert not list(out.iterdir()) and sampled.run("held")
    def full(path, rows):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(eval, "append", full)
        error = helpers.refused(capsys, lambda _: sampled.run("full"), code=1)
    assert error.startswith("eval.py: ") and "No space left" in error
    assert error.endswith("the same command continues\n") and sampled.run("full")


def test_a_text_that_ends_a_completion(tmp_path):
    eval.main([*SMALL, "--stop", "</answer>", "--out", str(tmp_path), "--sampler", "transformers"])
    rows = read_rows(tmp_path / "completions.jsonl")
    assert {(row["completion"][-9:], row["truncated"]) for row in rows} == {("</answer>", False)}

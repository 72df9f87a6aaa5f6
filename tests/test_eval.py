"""eval.py: its numbers, its refusals, grading without a model, and that nothing is lost when it is
killed."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations, permutations, product
from pathlib import Path

import numpy as np
import pytest

import data
import eval
from conftest import ROOT
from data.hub import reason
from engine.completion import seed_of
from engine.sampler import Completion
from eval import benchmark_results, majority, summarise
from experiment import completions, files
from experiment.failures import RunFailed
from experiment.log import line
from experiment.report import results_table, short_names
from experiment.stats import interval, pass_at_k, powers_of_two
from graders import sandbox


def test_pass_at_k_is_the_share_of_choices_with_a_correct_one():
    for n in range(1, 9):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                choices = list(combinations([1] * correct + [0] * (n - correct), k))
                share = sum(map(max, choices)) / len(choices)
                assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_samples_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(4, 2, k)


def test_powers_of_two():
    assert [powers_of_two(n) for n in (1, 2, 3, 16)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8, 16]]


def test_majority():
    assert majority(["1", "2", "2"], [1.0, 0.0, 0.0]) == 0
    assert majority(["1", "1", "2"], [1.0, 1.0, 0.0]) == 1
    assert majority(["1", "2"], [1.0, 0.0]) == 0.5  # equally frequent: the mean of both
    assert majority([None, None, "1"], [0.0, 0.0, 1.0]) == 1 and majority([None], [0.0]) == 0


def test_interval():
    low, high = interval([0.0, 1.0] * 50)
    assert 0.38 < low < 0.43 and 0.57 < high < 0.62
    assert interval([0.5] * 9) == interval([0.5]) == (0.5, 0.5)


def rows_with(correct, n):
    """The rows of one problem: of n completions, so many are right."""
    return [dict(completion="", score=float(i < correct), truncated=False, tokens=3)
            for i in range(n)]


def test_standard_errors_are_over_problems():
    groups = [rows_with(correct, 4) for correct in (4, 2, 0, 1)]
    scores = summarise(groups, [1, 2, 4])
    assert set(scores) == {"reward", "truncated_frac", "mean_length", *(
        f"{name}{end}" for name in ("mean@4", "pass@1", "pass@2", "pass@4")
        for end in ("", "_stderr"))}
    of_problems = {"mean@4": [1, 0.5, 0, 0.25], "pass@1": [1, 0.5, 0, 0.25],
                   "pass@2": [1, 5 / 6, 0, 0.5], "pass@4": [1, 1, 0, 1]}
    for name, values in of_problems.items():
        assert scores[name] == pytest.approx(np.mean(values))
        assert scores[f"{name}_stderr"] == pytest.approx(np.std(values, ddof=1) / 4**0.5)
    results = benchmark_results([dict(reward="countdown")] * 4, groups, [1, 2, 4])
    assert results["standard_error"] == scores["mean@4_stderr"]
    table = results_table({"own": results}, [1, 2, 4])
    assert "| 0.750 (0.250) |" in table and "mean reward" not in table  # pass@4


def test_rewards_between_0_and_1_are_shown_beside_the_share_of_right_completions():
    rows = rows_with(1, 4)
    rows[1]["score"] = rows[2]["score"] = 0.5
    results = benchmark_results([dict(reward="own")] * 2, [rows, rows_with(2, 4)], [1])
    assert results["mean@4"] == 0.375 and results["reward"] == 0.5
    assert "mean reward |" in results_table({"own": results}, [1])
    assert results_table({"own": results}, [1]).endswith("| 0.500 |")
    record = {"rollout": 1, "time/rollout": 1.0, "eval/own/mean@4": 0.375}
    assert "mean@4 0.375  mean reward 0.500" in line({**record, "eval/own/reward": 0.5})
    assert "mean reward" not in line({**record, "eval/own/reward": 0.375 + 1e-17})


def test_one_problem_has_no_standard_error():
    results = benchmark_results([dict(reward="countdown")], [rows_with(1, 2)], [1, 2])
    errors = [value for name, value in results.items() if "err" in name]
    assert errors == [None] * 4 and "se -" in results_table({"own": results}, [1, 2])


@pytest.mark.parametrize("rewards, right", [([1, 0.5], 0.5), ([-1, 0.25], 0), ([1, 1], 1)])
def test_a_right_completion_has_the_reward_1(rewards, right):
    rows = [dict(score=reward, truncated=False, tokens=1) for reward in rewards]
    assert summarise([rows], [1])["mean@2"] == right


def test_names_in_tables_are_short_where_they_can_be():
    def shown(*names):
        return list(short_names(names).values())
    assert shown("aime24", "a/own.jsonl") == ["aime24", "own.jsonl"]
    assert shown("a/own.jsonl", "b/own.jsonl") == ["a/own.jsonl", "b/own.jsonl"]


def model_folder(folder, **files):
    """A folder that has what flags are checked with, and no model."""
    folder.mkdir(parents=True)
    for name, content in dict(dict(config={}), **files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_a_model_brings_its_settings(tmp_path, capsys):
    other = model_folder(tmp_path / "other")
    own = model_folder(tmp_path / "own", recipe=dict(settings=dict(max_tokens=99, lr=1.0)))
    for flags, tokens, origin in (
            ([], (16, 32), ("the embedded base's recipe.json",) * 2),
            (["--model", other], (8192, 2048), ("the default",) * 2),
            (["--model", own], (99, 2048), ("the model's recipe.json", "the default")),
            (["--model", own, "--max_tokens", "99"], (99, 2048), ("given", "the default"))):
        args = eval.parse_args(flags)
        assert (args.max_tokens, args.max_prompt_tokens) == tokens
        assert (args.origin["max_tokens"], args.origin["max_prompt_tokens"]) == origin
    for flags, default in (("", 16), (f"--model {other}", 8192), (f"--model {own}", 99)):
        with pytest.raises(SystemExit) as stop:
            eval.main([*flags.split(), "--help"])
        page = " ".join(capsys.readouterr().out.split())
        assert not stop.value.code and f"the longest completion, in tokens ({default})" in page


@pytest.mark.parametrize("flags, words", [
    ("--k 32 --samples 16", "--k 32"),
    ("--k x", "--k x"),
    ("--k 0 --completions {tmp}/few.jsonl", "--k 0"),
    ("--temperature inf", "--temperature"),
    ("--split dev", "--split"),
    ("--benchmarks foo", "--benchmarks foo: there is no such data set"),
    ("--benchmarks aime24 --split train", "--benchmarks aime24 has no train split"),
    ("--model {tmp}/run", "{tmp}/run/checkpoints/rollout_000020 is its newest checkpoint"),
    ("--model {tmp}/run/checkpoints", "rollout_000020 is its newest checkpoint"),
    ("--model {tmp}/young", "it has no checkpoint yet"),
    ("--model {tmp}", "no config.json"),
    ("--model=", "--model is empty"),
    ("--model {tmp}/damaged", "recipe.json is not"),
    ("--model {tmp}/words", "max_tokens = '16'"),
    ("--model runs/no/such", "--model runs/no/such: there is no such folder"),
    ("--model no-such-model", "is no folder here, and as an id of the Hub"),
    ("--completions {tmp}/few.jsonl --samples 16", "--samples is for sampling"),
    ("--completions {tmp}/few.jsonl --model some/model", "--model is for sampling"),
    ("--completions {tmp}/few.jsonl --benchmarks {tmp}/own.jsonl", "completions for countdown"),
    ("--completions {tmp}/gap.jsonl", "no completion for 1022 of countdown's 1024"),
    ("--samples 0", "--samples"),
    ("--top_p 2", "--top_p"),
    ("--temperature -1", "--temperature"),
    ("--benchmarks nope", "nope"),
    ("--benchmarks {tmp}/none.jsonl", "--benchmarks {tmp}/none.jsonl: there is no such file"),
    ("--benchmarks aime24 --data_dir {tmp}", "aime_2024.jsonl"),
    ("--benchmarks livecodebench --lcb_release v9", "v9"),
    ("--template other", "other"),
    ("--benchmarks aime24 --lcb_from 2024-08-01", "--lcb_from"),
    ("--benchmarks livecodebench --data_dir {tmp} --lcb_release v1", "--lcb_release"),
    ("--benchmarks {tmp}/code.jsonl", "--allow_unsafe_code"),
    ("--sampel 3", "--sampel"),
    ("--model /nowhere", "--model /nowhere: there is no such folder"),
    ("--completions {tmp}/bad.jsonl", "line 2"),
    ("--completions {tmp}/few.jsonl", "--limit 1 grades those"),
])
def test_bad_input_is_one_sentence_and_exit_code_2(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ids = [problem["id"] for problem in data.load("countdown", "test")[:3]]
    first, _, third = (json.dumps(dict(benchmark="countdown", id=i, completion="x")) + "\n"
                       for i in ids)
    program = dict(prompt="?", answer=dict(tests=[dict(input="", output="1")]), reward="code")
    (tmp_path / "bad.jsonl").write_text(first + "{}\n")
    (tmp_path / "few.jsonl").write_text(first)
    (tmp_path / "gap.jsonl").write_text(first + third)
    (tmp_path / "code.jsonl").write_text(json.dumps(program) + "\n")
    (tmp_path / "own.jsonl").write_text(json.dumps(dict(prompt="?", answer="1", reward="math")))
    for rollout in (9, 20):
        (tmp_path / f"run/checkpoints/rollout_{rollout:06d}").mkdir(parents=True)
    model_folder(tmp_path / "young")
    for run in ("run", "young"):
        (tmp_path / run / "metrics.jsonl").write_text("")
    model_folder(tmp_path / "damaged", recipe=[])
    model_folder(tmp_path / "words", recipe=dict(settings=dict(max_tokens="16")))
    monkeypatch.setattr(sandbox, "unshared", lambda: ((), []))  # as where nothing isolates
    with pytest.raises(SystemExit) as stop:
        eval.main([*flags.format(tmp=tmp_path).split(), "--out", str(tmp_path / "out")])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.count("\n") == 1
    assert words.format(tmp=tmp_path) in message


def test_the_sentence_of_an_error_is_whole():
    """Libraries break lines within a sentence."""
    assert reason(OSError("It is none of:\n(1) this,\n(2) that.\n\nPlease read.")) == \
        "It is none of: (1) this, (2) that."
    assert reason(OSError()) == "OSError"


def test_importing_eval_is_light():
    """train.py imports it before it refuses flags, and these take seconds to load."""
    slow = ("transformers", "tokenizers", "datasets", "vllm", "sympy", "matplotlib")
    code = f"import sys, eval; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


SMALL = ["--limit", "24", "--samples", "4", "--sampler", "transformers",
         "--max_tokens", "16", "--max_prompt_tokens", "32"]


def test_existing_completions_are_graded_again(tmp_path, capsys):
    problems = data.load("countdown", "test")[:20]
    rows = []
    for i, problem in enumerate(problems):
        right = f"<answer>{solution(problem)}</answer>"
        for text in (right, "no" if i % 2 else right):
            rows.append(dict(benchmark="countdown", id=problem["id"], completion=text))
    given, out = tmp_path / "given.jsonl", tmp_path / "out"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    eval.main(["--completions", str(given), "--limit", "20", "--out", str(out)])
    result = json.loads((out / "eval.json").read_text())["results"]["countdown"]
    assert result["mean@2"] == 0.75 and result["pass@2"] == 1 and result["problems"] == 20
    assert result["interval"][0] < 0.75 < result["interval"][1]
    table = capsys.readouterr().out
    assert "| countdown | 20 | 0.750 (n=2" in table and (out / "eval.md").read_text() == table
    assert (out / "passk.png").exists()


def test_majority_of_mathematical_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, given = tmp_path / "own.jsonl", tmp_path / "given.jsonl"
    own.write_text(json.dumps(dict(prompt="?", answer="1/2", reward="math")) + "\n")
    # two spellings of one answer win
    texts = ["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{3}", "no answer"]
    for name, out in ((str(own), tmp_path / "out"), ("own.jsonl", tmp_path / "again")):
        rows = [dict(benchmark=name, id=0, completion=text) for text in texts]
        given.write_text("".join(json.dumps(row) + "\n" for row in rows))
        eval.main(["--completions", "given.jsonl", "--benchmarks", name, "--out", str(out)])
        report = json.loads((out / "eval.json").read_text())
        result, settings = report["results"][name], report["settings"]
        assert result["maj@4"] == 1 and result["mean@4"] == 0.5
        assert result["pass@2"] == pytest.approx(5 / 6)
        assert settings["samples"] is None and settings["temperature"] is None  # nobody knows
        assert "| own.jsonl | 1 |" in (out / "eval.md").read_text()


def test_benchmarks_may_have_different_numbers_of_completions(tmp_path):
    given, flags = tmp_path / "given.jsonl", []
    for name, n in (("a", 4), ("b", 2)):
        own = tmp_path / f"{name}.jsonl"
        own.write_text(json.dumps(dict(prompt="?", answer="1", reward="math")) + "\n")
        row = dict(benchmark=str(own), id=0, completion="\\boxed{1}")
        with open(given, "a") as file:
            file.write((json.dumps(row) + "\n") * n)
        flags.append(str(own))
    eval.main(["--completions", str(given), "--benchmarks", ", ".join(flags),
               "--out", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "eval.json").read_text())["results"]
    for name, n in zip(flags, (4, 2), strict=True):
        assert results[name]["samples"] == n and results[name]["pass@2"] == 1
        assert "pass@4" not in results[name]


def test_a_folder_belongs_to_one_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ids = [problem["id"] for problem in data.load("countdown", "test")[:2]]
    (tmp_path / "given.jsonl").write_text("".join(
        json.dumps(dict(benchmark="countdown", id=i, completion="x")) + "\n" for i in ids))
    flags = ["--completions", "given.jsonl"]
    eval.main([*flags, "--limit", "2"])
    eval.main([*flags, "--limit", "2", "--k", "1"])  # the completions are the same

    def refused(*more):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            eval.main([*flags, *more])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1
        return error
    error = refused("--limit", "1", "--lenient")
    assert "--out eval (the default folder) holds" in error
    assert "--limit was 2 and is now 1; --lenient was False and is now True;" in error
    (tmp_path / "eval").rename(tmp_path / "other")
    assert "--out other holds" in refused("--limit", "1", "--out", "other")
    for content in ("{", "[1]", "3"):
        (tmp_path / "other" / "settings.json").write_text(content)
        assert "other/settings.json cannot be read" in refused("--limit", "2", "--out", "other")
    (tmp_path / "other" / "settings.json").write_bytes(b"\xff")
    assert "settings.json cannot be read" in refused("--limit", "2", "--out", "other")


def own_file(path, n=2, answer="1"):
    """A benchmark of n problems."""
    rows = [dict(prompt=f"{i}?", answer=answer, reward="math", id=i) for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sampled(name, ids=(0, 1), samples=2, **changes):
    """The text of a completions.jsonl, as sampling leaves it."""
    row = dict(dict(completion="x", score=0.0, tokens=1, truncated=False), **changes)
    return "".join(json.dumps(dict(dict(benchmark=name, id=str(i)), **row)) + "\n"
                   for i in ids for _ in range(samples)) + "\n"


@pytest.fixture
def refused(capsys):
    """refused(*flags) -> the one sentence with which the command is refused."""
    def run(*flags):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            eval.main(list(map(str, flags)))
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1, error
        return error
    return run


@pytest.fixture
def finished(tmp_path):
    """(flags, out) of an evaluation whose completions are all there, so that it needs no model."""
    model = model_folder(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    own, out = own_file(tmp_path / "own.jsonl"), tmp_path / "out"
    flags = ["--model", model, "--benchmarks", own, "--samples", "2", "--sampler", "transformers",
             "--out", str(out)]
    args = eval.parse_args(flags)
    completions.claim_folder(out, vars(args), eval.load_benchmarks(args))
    (out / "completions.jsonl").write_text(sampled(own))
    return flags, out


def test_finished_completions_need_no_model(finished):
    flags, out = finished
    eval.main(flags)
    result, = json.loads((out / "eval.json").read_text())["results"].values()
    assert result["problems"] == 2 and result["mean@2"] == 0


@pytest.mark.parametrize("checksums", [False, True])
def test_other_weights_do_not_continue_a_folder(checksums, finished, refused):
    flags, out = finished
    model = Path(flags[1])
    if checksums:  # as a checkpoint has them
        (model / "checksums.json").write_text('{"model.safetensors": 1}')
        (out / "completions.jsonl").unlink()
        args = eval.parse_args(flags)
        completions.claim_folder(out, vars(args), eval.load_benchmarks(args))
        (out / "completions.jsonl").write_text(sampled(flags[3]))
        os.utime(model / "model.safetensors", (1, 1))  # a copy has another time
        eval.main(flags)
        (model / "checksums.json").write_text('{"model.safetensors": 2}')
    else:
        eval.main(flags)
        (model / "model.safetensors").write_bytes(b"WEIGHTS.")
    assert f"the weights of --model {model} are not those that it had" in refused(*flags)
    settings = json.loads((out / "settings.json").read_text())
    del settings["fingerprints"]  # as before there were any
    (out / "settings.json").write_text(json.dumps(settings))
    eval.main(flags)


def test_weights_put_into_a_checkpoint_are_other_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "checksums.json").write_text("{}")
    before = completions.weights_fingerprint(tmp_path)
    later = (tmp_path / "checksums.json").stat().st_mtime_ns + 1
    os.utime(tmp_path / "model.safetensors", ns=(later, later))
    assert completions.weights_fingerprint(tmp_path) not in (before, None)
    assert completions.weights_fingerprint(tmp_path / "OWNER" / "NAME") is None


@pytest.mark.parametrize("change", [dict(answer="2"), dict(n=3), dict(n=1)])
def test_other_problems_do_not_continue_a_folder(change, finished, refused):
    flags, _ = finished
    own_file(Path(flags[3]), **change)
    assert f"the problems of {flags[3]} are not those that it had" in refused(*flags)


OTHER = dict(
    model="{tmp}/other", benchmarks="{tmp}/other.jsonl", data_dir="{tmp}", split="train", limit=1,
    samples=3, temperature=0.5, top_p=0.5, max_tokens=9, max_prompt_tokens=9, template="none",
    lcb_release="v1", lcb_from="2024-08-01", lcb_to="2024-08-01", dtype="bfloat16", seed=1,
    sampler="other", lenient=True, completions="{tmp}/given.jsonl")


@pytest.mark.parametrize("flag", OTHER)
def test_another_value_of_any_flag_does_not_continue_a_folder(flag, finished, tmp_path, capsys):
    flags, out = finished
    args = vars(eval.parse_args(flags))
    assert set(args) == set(OTHER) | completions.FREE  # a new flag has to be among them
    value = OTHER[flag]
    value = value.format(tmp=tmp_path) if isinstance(value, str) else value
    with pytest.raises(SystemExit):
        completions.claim_folder(out, {**args, flag: value}, {})
    assert f": --{flag} was {args[flag]} and is now {value}; " in capsys.readouterr().err


@pytest.mark.parametrize("flag, value", dict(k=[1], allow_unsafe_code=True, origin={}).items())
def test_free_flags_continue_a_folder(flag, value, finished):
    flags, out = finished
    args = eval.parse_args(flags)
    completions.claim_folder(out, {**vars(args), flag: value}, eval.load_benchmarks(args))


def test_a_folder_of_another_process_is_refused(finished, refused):
    flags, out = finished
    code = (f"import pathlib; from experiment.files import lock; lock(pathlib.Path({str(out)!r})); "
            "print(1, flush=True); input()")
    files.LOCKED.clear()  # this process has held it since it claimed the folder
    out.rename(out.with_name("old"))
    shutil.copytree(out.with_name("old"), out)
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    holder.stdout.readline()
    before = (out / "completions.jsonl").read_text()
    assert "is another process's at this moment" in refused(*flags)
    holder.communicate(b"\n")
    assert (out / "completions.jsonl").read_text() == before
    eval.main(flags)


NESTED = "[" * 200_000


@pytest.mark.parametrize("text, words", [
    (sampled("OWN")[:-1].rpartition("{")[0] + "\n", "has 1 completions of OWN's problem 1"),
    (sampled("OWN") + sampled("OWN"), "line 6 is not what was written there"),
    (sampled("OWN", ids=(1, 0)), "problem 1, where 0 is due"),
    (sampled("OWN", ids=(0, 2)), "problem 2, where 1 is due"),
    (sampled("OWN", samples=1), "problem 1, where 0 is due"),
    (sampled("other"), "it is of other's problem 0"),
    (sampled("OWN", score="1"), "line 1 is not what was written there (TypeError: score is '1')"),
    (sampled("OWN", completion=None), "completion is None"),
    (sampled("OWN").replace("score", "scores", 1), "KeyError: 'score'"),
    ("[1]\n\n", "line 1"), ("{\n\n", "line 1"), (NESTED + "\n\n", "line 1"),
    ("\udcff\n\n", "line 1"),
])
def test_damaged_completions_are_one_sentence(text, words, finished, refused):
    flags, out = finished
    text = text.replace('"OWN"', json.dumps(flags[3]))
    (out / "completions.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    assert words.replace("OWN", flags[3]) in refused(*flags)
    kept = (out / "completions.jsonl").read_bytes()
    assert kept == text.encode(errors="surrogateescape")  # nothing is lost by asking


def test_completions_that_change_under_way_are_one_sentence(finished):
    flags, out = finished
    path, sets = out / "completions.jsonl", {flags[3]: [dict(id="0"), dict(id="1")]}
    for text, words in ((sampled(flags[3], ids=(0,)), "has 0 completions of"), ("{\n", "again")):
        path.write_text(text)
        with pytest.raises(RunFailed, match=words):
            completions.rows_by_problem(path, sets, 2)


def test_a_folder_in_place_of_the_completions(finished, refused):
    flags, out = finished
    (out / "completions.jsonl").unlink()
    (out / "completions.jsonl").mkdir()
    assert "completions.jsonl is a folder" in refused(*flags)


def test_completions_of_unknown_settings(finished, refused):
    flags, out = finished
    noted = (out / "settings.json").read_text()
    (out / "settings.json").write_text(NESTED)
    assert "settings.json cannot be read" in refused(*flags)
    for damaged in ([], {}, dict(problems=[])):
        content = dict(json.loads(noted), fingerprints=damaged)
        (out / "settings.json").write_text(json.dumps(content))
        error = refused(*flags)
        assert "settings.json cannot be read" in error or "the problems of" in error
    (out / "settings.json").unlink()
    assert "holds completions.jsonl without settings.json" in refused(*flags)
    (out / "completions.jsonl").write_text("")
    assert "cannot be loaded" in refused(*flags) or "cannot be used" in refused(*flags)


@pytest.mark.parametrize("changes, words", [
    (dict(benchmark=3), "benchmark is not a text"), (dict(benchmark=[]), "benchmark"),
    (dict(completion=3), "completion is not a text"), (dict(tokens="3"), "tokens"),
    (dict(tokens=-1), "tokens"), (dict(tokens=1.5), "tokens"), (dict(tokens=True), "tokens"),
    (dict(tokens=2**31), "tokens"), (dict(truncated="false"), "truncated"), (None, "line 2"),
])
def test_rows_of_a_given_file(changes, words, tmp_path, refused):
    own, given = own_file(tmp_path / "own.jsonl", n=1), tmp_path / "given.jsonl"
    row = dict(benchmark=own, id=0, completion="x", tokens=2**31 - 1, truncated=None)
    wrong = NESTED if changes is None else json.dumps(dict(row, **changes))
    flags = ["--completions", given, "--benchmarks", own, "--out", tmp_path / "out"]
    given.write_text(f"{json.dumps(row)}\n{wrong}\n")
    assert words in refused(*flags) and f"{given}, line 2: a row is" in refused(*flags)
    given.write_text(json.dumps(row) + "\n")
    eval.main(list(map(str, flags)))


LONG = "n" * 5000


@pytest.mark.parametrize("flags, words", [
    (["--model", LONG], "File name too long"),
    (["--model", f"/{LONG}"], "File name too long"),
    (["--benchmarks", LONG], "there is no such data set"),
    (["--benchmarks", f"{LONG}.jsonl"], "cannot be read: File name too long"),
    (["--benchmarks", "gsm8k", "--data_dir", LONG], "has no"),
    (["--completions", LONG], "File name too long"),
    (["--out", LONG], "File name too long"),
    (["--model", "locked"], "cannot be read: Permission denied"),
    (["--benchmarks", "locked.jsonl"], "cannot be read: Permission denied"),
    (["--benchmarks", "\udcff.jsonl"], r"--benchmarks '\udcff.jsonl' is not UTF-8"),
    (["--completions", ""], "--completions is empty"),
    (["--data_dir", ""], "--data_dir is empty"),
    (["--temperature", "0.0009"], "--temperature must be 0, which is greedy, or 0.001"),
    (["--temperature", "nan"], "--temperature"),
])
def test_names_and_numbers_that_cannot_be_used(flags, words, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    stat = os.stat

    def locked(path, **options):  # permissions do not bind root, who may run the tests
        if Path(path).parts[:1] in [("locked",), ("locked.jsonl",)]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, **options)
    monkeypatch.setattr(os, "stat", locked)
    assert words in refused(*flags, *([] if "--out" in flags else ["--out", "out"]))
    assert not (tmp_path / "out").exists() or "--completions" in flags


@pytest.mark.parametrize("temperature", ["0", "0.001"])
def test_temperatures_that_can_be_used(temperature):
    assert eval.parse_args(["--temperature", temperature]).temperature == float(temperature)


def test_a_recipe_of_many_brackets(tmp_path, refused):
    model = model_folder(tmp_path / "model")
    (tmp_path / "model/recipe.json").write_text(NESTED)
    assert "recipe.json is not" in refused("--model", model)


def solution(problem):
    """By brute force."""
    from rewards import arithmetic
    for a, b, c in permutations(problem["answer"]["nums"]):
        for p, q in product("+-*/", repeat=2):
            for text in (f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"):
                try:
                    if arithmetic(text)[0] == problem["answer"]["target"]:
                        return text
                except ValueError:
                    pass
    raise AssertionError(problem)


class Sampler:
    """Answers with its seed and the prompt's place, and notes what it was asked."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def sample(self, prompts, n, *, seed, **settings):
        self.asked.append((len(prompts), seed))
        return [[Completion(self.tokenizer.encode(f"{seed} {i} {j}"), [], True) for j in range(n)]
                for i in range(len(prompts))]

    def close(self):
        pass


def test_chunks_go_across_benchmarks_and_continue_at_any_of_them(tmp_path, monkeypatch, tokenizer):
    sizes = dict(a=4, b=1, c=1, d=5)
    own = [own_file(tmp_path / f"{name}.jsonl", n) for name, n in sizes.items()]
    flags = ["--model", model_folder(tmp_path / "model"), "--benchmarks", ",".join(own),
             "--samples", "2", "--seed", "7", "--sampler", "transformers"]
    sampler, append = Sampler(tokenizer), completions.append_chunk
    monkeypatch.setattr(eval, "CHUNK", 6)
    monkeypatch.setattr(eval, "load_model", lambda args, sets: (sampler, tokenizer))
    eval.main([*flags, "--out", str(tmp_path / "whole")])
    # chunks of three problems, each with the seed of its first one: a 0, a 3 with b and c, ...
    firsts = [(own[0], 0), (own[0], 3), (own[3], 0), (own[3], 3)]
    assert sampler.asked == [(n, seed_of("eval.py", 7, *first, 0))
                             for n, first in zip((3, 3, 3, 2), firsts, strict=True)]

    def stop_after_one(path, rows):
        append(path, rows)
        raise RunFailed("stopped")
    sampler.asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(completions, "append_chunk", stop_after_one)
        for _ in range(4):  # from the beginning, within a benchmark, and from a benchmark's first
            with pytest.raises(RunFailed, match="stopped"):
                eval.main([*flags, "--out", str(tmp_path / "cut")])
    eval.main([*flags, "--out", str(tmp_path / "cut")])
    assert len(sampler.asked) == 4
    texts = [(tmp_path / name / "completions.jsonl").read_text() for name in ("whole", "cut")]
    assert texts[0] == texts[1] and texts[0].count("\n\n") == 4
    results = json.loads((tmp_path / "cut" / "eval.json").read_text())["results"]
    assert [results[name]["problems"] for name in own] == list(sizes.values())


def test_killed_and_started_again_is_as_if_it_had_not_been(base, tmp_path):
    def start(out):
        flags = ["--model", base, *SMALL, "--out", str(out)]
        code = f"import eval; eval.CHUNK = 16; eval.main({flags!r})"
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE)
    process = start(tmp_path / "whole")
    assert process.wait() == 0, process.stderr.read()[-2000:]
    path, kills = tmp_path / "cut" / "completions.jsonl", 0
    # after so many lines and half of one more, as if it had died within a write
    for lines in (3, 30, 70):
        process = start(tmp_path / "cut")
        while process.poll() is None and (
                not path.exists() or path.read_text().count("\n") < lines):
            time.sleep(0.02)
        kills += process.poll() is None
        process.kill()
        process.wait()
        with open(path, "a") as file:
            file.write('{"benchmark": "countdown", "id"')
    assert kills and start(tmp_path / "cut").wait() == 0
    assert path.read_text() == (tmp_path / "whole" / "completions.jsonl").read_text()
    whole, cut = (json.loads((tmp_path / name / "eval.json").read_text())["results"]
                  for name in ("whole", "cut"))
    assert whole == cut
    with pytest.raises(SystemExit):  # other settings do not continue it
        eval.main(["--model", base, *SMALL, "--temperature", "0.5",
                   "--out", str(tmp_path / "cut")])


def test_more_tokens_than_the_model_has_positions_are_refused(base, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        eval.main(["--model", base, "--limit", "2", "--max_tokens", "4090",
                   "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "4096 positions" in error and error.count("\n") == 1


def test_a_prompt_that_is_too_long_is_refused(base, tmp_path, capsys):
    own = tmp_path / "own.jsonl"
    rows = [dict(prompt="?" * n, answer="1", reward="math", id=f"of {n}") for n in (3, 33, 4)]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as stop:
        eval.main(["--model", base, "--benchmarks", str(own), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "--max_prompt_tokens 32 (the model's recipe.json)" in error
    assert "problem of 33 has 33 tokens" in error


def test_weights_that_cannot_be_read_are_one_sentence(small, tmp_path, capsys):
    folder = small()
    with open(f"{folder}/model.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(SystemExit) as stop:
        eval.main(["--model", folder, *SMALL, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"--model {folder} cannot be loaded" in error
    assert error.count("\n") == 1


def command(*flags, **settings):
    return subprocess.Popen(
        [sys.executable, "eval.py", "--sampler", "transformers", *map(str, flags)], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def test_a_full_disk_is_one_sentence_and_the_same_command_continues(base, tmp_path):
    def little_room():  # a file that grows beyond it is an OSError
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    flags = ["--model", base, "--limit", 16, "--samples", 4, "--out", tmp_path / "out"]
    failed = command(*flags, preexec_fn=little_room)
    _, error = failed.communicate()
    last = error.splitlines()[-1]
    assert failed.returncode == 1 and "Traceback" not in error
    assert last.startswith("eval.py: ") and "cannot be written" in last and "continues" in last
    again = command(*flags)
    output, error = again.communicate()
    assert again.returncode == 0, error
    assert "max_tokens 16 (the model's recipe.json)" in output and "sampler transformers" in output
    lines = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
    assert len([line for line in lines if line]) == 16 * 4


def test_an_interrupted_evaluation_says_that_it_continues(base, tmp_path):
    process = command("--model", base, "--out", tmp_path / "out", start_new_session=True)
    path = tmp_path / "out" / "completions.jsonl"
    while process.poll() is None and not path.exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the graders, too
    _, error = process.communicate()
    assert process.returncode == 130 and "Traceback" not in error
    assert error.endswith("eval.py: interrupted; the same command continues\n")

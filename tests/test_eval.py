"""eval.py: its numbers, its refusals, grading without a model, and that nothing is lost when it is
killed."""

import json
import subprocess
import sys
import time
from itertools import combinations, permutations, product

import pytest

import eval
from conftest import ROOT
from data.countdown import held_out
from eval import interval, majority, pass_at_k, powers_of_two
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


@pytest.mark.parametrize("flags, words", [
    ("--k 32 --samples 16", "--k 32"),
    ("--k x", "--k x"),
    ("--samples 0", "--samples"),
    ("--top_p 2", "--top_p"),
    ("--temperature -1", "--temperature"),
    ("--benchmarks nope", "nope"),
    ("--benchmarks {tmp}/none.jsonl", "none.jsonl"),
    ("--benchmarks aime24 --data_dir {tmp}", "aime_2024.jsonl"),
    ("--benchmarks livecodebench --lcb_release v9", "v9"),
    ("--template other", "other"),
    ("--benchmarks aime24 --lcb_from 2024-08-01", "--lcb_from"),
    ("--benchmarks livecodebench --data_dir {tmp} --lcb_release v1", "--lcb_release"),
    ("--benchmarks {tmp}/code.jsonl", "--allow_unsafe_code"),
    ("--sampel 3", "--sampel"),
    ("--model /nowhere", "/nowhere"),
    ("--completions {tmp}/bad.jsonl", "line 2"),
    ("--completions {tmp}/few.jsonl", "no completion for 1023"),
])
def test_bad_input_is_one_sentence_and_exit_code_2(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first_id = held_out("countdown", 1)[0]["id"]
    row = json.dumps(dict(benchmark="countdown", id=first_id, completion="x")) + "\n"
    program = dict(prompt="?", answer=dict(tests=[dict(input="", output="1")]), reward="code")
    (tmp_path / "bad.jsonl").write_text(row + "{}\n")
    (tmp_path / "few.jsonl").write_text(row)
    (tmp_path / "code.jsonl").write_text(json.dumps(program) + "\n")
    monkeypatch.setattr(sandbox, "unshared", lambda: ((), []))  # as where nothing isolates
    with pytest.raises(SystemExit) as stop:
        eval.main([*flags.format(tmp=tmp_path).split(), "--out", str(tmp_path / "out")])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and words in message and message.count("\n") == 1


def test_importing_eval_is_light():
    """train.py imports it before it refuses flags, and these take seconds to load."""
    slow = ("transformers", "tokenizers", "datasets", "vllm", "sympy", "matplotlib")
    code = f"import sys, eval; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


SMALL = ["--limit", "24", "--samples", "4", "--sampler", "transformers",
         "--max_tokens", "16", "--max_prompt_tokens", "32"]


def test_existing_completions_are_graded_again(tmp_path, capsys):
    problems = held_out("countdown", 1024)[:20]
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


def test_majority_of_mathematical_answers(tmp_path):
    own, given, out = tmp_path / "own.jsonl", tmp_path / "given.jsonl", tmp_path / "out"
    own.write_text(json.dumps(dict(prompt="?", answer="1/2", reward="math")) + "\n")
    # two spellings of one answer win
    texts = ["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{3}", "no answer"]
    rows = [dict(benchmark=str(own), id=0, completion=text) for text in texts]
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    eval.main(["--completions", str(given), "--benchmarks", str(own), "--out", str(out)])
    result = json.loads((out / "eval.json").read_text())["results"][str(own)]
    assert result["maj@4"] == 1 and result["mean@4"] == 0.5
    assert result["pass@2"] == pytest.approx(5 / 6)


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
    for lines in (3, 14, 30, 47, 70):
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
        eval.main(["--model", base, "--limit", "2", "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "4096 positions" in error and error.count("\n") == 1

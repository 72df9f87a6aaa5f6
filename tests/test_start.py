"""What a user is told when a run starts and while it goes on: settings, errors, dead rollouts."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import Gemma2Config

import rollout
import train
from data.prompts import encode
from graders import worker
from harness import log
from harness.flags import Parser, settings_of
from harness.run import banner
from harness.start import read_tokenizer
from helpers import SMALL, read_rows, refused, run, write_rows


def graded_alike(reward, fault=None):
    """A stand-in for rewards.grade that gives every completion this reward and this fault."""
    def grade(problems, texts):
        return [[worker.Result(reward, fault)] * len(t) for t in texts]
    return grade


def help_of(capsys, *flags):
    with pytest.raises(SystemExit):
        train.parse_args([*flags, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_a_model_made_of_the_embedded_base_keeps_its_settings(base, tmp_path, capsys):
    assert settings_of(base) == settings_of(None)
    run(base, tmp_path / "run", "--save_every", "1", "--keep", "9")
    folder = tmp_path / "run" / "checkpoints" / "rollout_000001"
    own = settings_of(None) | dict(max_tokens=12, max_prompt_tokens=16)  # as the run asked
    assert settings_of(folder) == own
    args, _ = train.parse_args(["--model", str(folder), "--lr", "1e-3"])
    assert (args.max_tokens, args.rollouts, args.lr) == (12, 50, 1e-3)
    said = refused(capsys, train.parse_args, "--model", tmp_path / "run")
    assert "is a run's folder" in said and "rollout_000002" in said
    run(str(folder), tmp_path / "next", "--eval_every", "0")
    said = capsys.readouterr().out
    assert "lr 0.0001 (given), max_tokens 12 (given), rollouts 2 (given), dtype float32" in said
    last = tmp_path / "next" / "checkpoints" / "rollout_000002"
    assert settings_of(last) == own
    folder.joinpath("recipe.json").write_text('{"settings": {"stop": "+", "max_tokens": 9}}')
    args, _ = train.parse_args(["--model", str(folder), "--stop", ""])
    assert (args.stop, args.max_tokens) == ("", 9)  # it is switched off


@pytest.mark.parametrize("flags, line", [
    ("", "lr 5e-05 (the embedded base's), max_tokens 16 (the embedded base's), rollouts 50"),
    ("--model x", "lr 1e-06 (default), max_tokens 1024 (default), rollouts 200 (default)"),
    ("--rollouts=7 --model x --dtype bfloat16", "rollouts 7 (given), dtype bfloat16 (given)"),
    ("--model {recipe}", "lr 0.5 (the model's recipe.json), max_tokens 1024 (default)")])
def test_the_banner_says_what_is_in_force_and_where_it_comes_from(flags, line, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "recipe.json").write_text('{"settings": {"lr": 0.5}}')
    args, method = train.parse_args(flags.format(recipe=tmp_path).split())
    trainer = SimpleNamespace(method=method, policy=SimpleNamespace(budget=1, layout="padded"))
    assert line in banner(args, trainer, None, 0)


@pytest.mark.parametrize("recipe, named", [
    ({"settings": {"learning_rate": 1}}, "learning_rate = 1"),
    ({"settings": {"lr": "high"}}, "recipe.json: argument --lr: invalid float value: 'high'"),
    ({"settings": {"loss": "fade"}}, "loss = 'fade'"),  # the row is chosen before
    ({"settings": {"seed": 3}}, "seed = 3"), ({"lr": 1}, "recipe.json is not")])
def test_a_recipe_that_holds_no_settings_is_refused(recipe, named, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert named in refused(capsys, train.parse_args, "--model", tmp_path)


def test_help_shows_the_defaults_that_are_in_force_and_a_bool_is_a_switch(kept_run, capsys):
    text = help_of(capsys, "--lr", "5")
    assert "learning rate (5e-05)" in text and "longest completion, in tokens (16)" in text
    assert "learning rate; 0 is off (0)" in text  # of --lora_rank
    text = help_of(capsys, "--model", "x", "--loss", "dapo")
    assert "learning rate (1e-06)" in text and "(None)" not in text and "(False)" not in text
    assert "--eps_high X (0.28)" in text and "--ratio_max" not in text  # the method's alone
    assert train.parse_args(["--mask_truncated"])[0].mask_truncated is True
    args, _ = train.parse_args(["--mask_truncated", "--no-mask_truncated"])
    assert args.mask_truncated is False
    for flags, value in ([], True), (["--no-ess_cap"], False):
        assert train.parse_args(["--loss", "p3o", *flags])[1].flags["ess_cap"] is value
    out = ["--out", str(kept_run), "--resume"]
    assert train.parse_args(out)[0].save_rollouts is True
    args, _ = train.parse_args([*out, "--no-save_rollouts"])
    assert args.save_rollouts is False and args.origin["lr"] == "the run's config.json"
    assert "rollouts in all (1)" in help_of(capsys, *out)
    parser = Parser("x")  # its config.json has it as off, where the default is on
    parser.flag("soft", True, "a switch that is on")
    assert parser.merge({}, ("config.json", dict(soft=False))).soft is False


def test_evaluation_may_change_and_stop_when_a_run_is_resumed(base, tmp_path, capsys):
    run(base, tmp_path / "run")
    out = ["--out", str(tmp_path / "run"), "--resume"]
    train.main([*out, "--rollouts", "3", "--eval_every", "0"])
    assert "problems" not in capsys.readouterr().out.split("model ")[0]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["history"][-1]["checksums"]["held-out problems"]  # should evaluations go on
    train.main([*out, "--rollouts", "4", "--eval_every", "1", "--eval_problems", "3"])
    said = capsys.readouterr().out
    assert "resuming, but --eval_problems was 4 and is now 3" in said
    assert [("eval/countdown/mean@2" in r) for r in read_rows(tmp_path / "run")] == [
        True, True, True, False, True]


def test_with_a_lag_other_rollouts_are_other_training(base, tmp_path, capsys):
    """The last ones are not sampled ahead of the end."""
    out = ["--out", str(tmp_path / "run"), "--resume"]
    run(base, tmp_path / "run", "--rollout_lag", "1")
    said = refused(capsys, train.main, *out, "--rollouts", "3")
    assert "--rollouts was 2 and is now 3: training depends on that" in said
    _, first, last = read_rows(tmp_path / "run")  # of which the first has sampled for both
    sampled = first["perf/tokens_per_s"] * first["seconds"]
    assert sampled == pytest.approx(first["len/sum"] + last["len/sum"])
    assert last["perf/tokens_per_s"] == 0


def test_a_tied_head_is_saved_once(small, tmp_path):
    run(small(True), tmp_path / "run", "--eval_every", "0")
    saved = load_file(tmp_path / "run" / "checkpoints" / "rollout_000002" / "model.safetensors")
    assert "model.embed_tokens.weight" in saved and "lm_head.weight" not in saved


def own_file(tmp_path, answer):
    return write_rows(tmp_path / "own.jsonl", [
        dict(prompt=f"1,2,{i}={i + 3}:", answer=answer, verifier="math") for i in range(1, 5)])


def test_a_run_without_rewards_shows_the_same_scores_and_says_so_once(base, tmp_path, capsys):
    """Weights do not change, so neither may a score: a curve that moves would be noise."""
    records = run(base, tmp_path / "run", "--data", own_file(tmp_path, "123454321"),
                  "--eval_data", "countdown", "--eval_problems", "16", "--rollouts", "3")
    scores = [{k: v for k, v in r.items() if k.startswith("eval/")} for r in records]
    assert len(scores) == 4 and all(s == scores[0] for s in scores)
    assert scores[0]["eval/countdown/mean@2_stderr"] > 0
    assert [r["groups/mixed"] for r in records[1:]] == [0, 0, 0]
    said = capsys.readouterr().out
    assert said.count("WARNING") == 1 and "rollout 1: every advantage is 0" in said
    assert "samples.jsonl has some" in said


def test_rewards_that_a_method_does_not_take_are_a_sentence(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rollout, "grade", graded_alike(0.5))
    assert "passk counts successes" in refused(
        capsys, train.main, "--model", base, *SMALL, "--loss", "passk", "--out", tmp_path / "run")


def test_the_warning_is_of_advantages_and_not_of_rewards(base, tmp_path, capsys, monkeypatch):
    """A method without a baseline learns from groups that are all right."""
    monkeypatch.setattr(rollout, "grade", graded_alike(1.0))
    run(base, tmp_path / "run", "--eval_every", "0", "--rollouts", "1", "--loss", "reinforce")
    assert "WARNING" not in capsys.readouterr().out


def test_the_console_shows_mixed_groups_unreadable_answers_and_errors():
    record = {"rollout": 3, "reward/mean": 0.25, "groups/mixed": 0.5, "time/rollout": 1.0,
              "reward/unreadable_frac": 0.125, "len/truncated_frac": 0.75,
              "eval/x/mean@16": 0.3, "eval/x/mean@16_stderr": 0.02, "eval/x/reward": 0.3,
              "eval/x/pass@1": 0.3, "eval/x/pass@16": 0.6, "eval/x/pass@16_stderr": 0.03}
    assert log.line(record) == ("   3  reward 0.250  mixed 0.500  unread 0.125  cut 0.750  "
                                "mean@16 0.300 +- 0.020  pass@16 0.600 +- 0.030  1.0s")


@pytest.mark.parametrize("fault", [worker.Fault("error", "always"), worker.Fault("timeout", "")])
def test_a_verifier_that_always_fails_ends_the_run(fault, base, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "grade", graded_alike(0.0, fault))
    with pytest.raises(train.RunFailed, match="16 of 16 calls of a verifier failed"):
        run(base, tmp_path / "run", "--eval_every", "0")
    assert (tmp_path / "run" / "metrics.jsonl").read_text()  # what was computed is there


def test_prompts_that_are_too_long_or_hold_half_a_surrogate_pair_are_said(base, tmp_path, capsys):
    rows, files = read_rows(own_file(tmp_path, "4")), []
    for long in (1, 2, 4):
        rows[:long] = [dict(row, prompt="1,2,1=4:" * 3) for row in rows[:long]]
        files.append(write_rows(tmp_path / f"{long}.jsonl", rows))
    one, two, all_long = files
    run(base, tmp_path / "run", "--data", one, "--eval_data", two, "--rollouts", "1")
    said = capsys.readouterr().out
    for name, count in ((f"--data {one}", 1), (f"--eval_data {two}", 2)):
        assert f"{name}: left out {count} of 4 problems, their prompts are longer" in said
    for rollouts in "123":  # no others are left out where it is resumed
        train.main(["--resume", "--rollouts", rollouts, "--out", str(tmp_path / "run")])
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        assert config["flags"]["eval_problems"] == 2
    train.main(["--resume", "--rollouts", "4", "--eval_data", one, "--out", str(tmp_path / "run")])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["flags"]["eval_problems"] == 3  # as many as the other file has
    said = refused(capsys, train.main, "--model", base, *SMALL, "--eval_data", all_long)
    assert f"--max_prompt_tokens 16: a prompt of --eval_data {all_long}" in said
    path = Path(own_file(tmp_path, "5"))
    path.write_text(path.read_text() + json.dumps(
        dict(prompt="a \ud800", answer="5", verifier="math")) + "\n")
    assert "line 5 has no prompt, a text" in refused(capsys, train.main, "--data", path)


def test_a_chat_template_gets_its_arguments_and_a_missing_one_or_no_tokenizer_is_said(
        base, tmp_path, capsys):
    problem = dict(prompt="1?", answer="1", verifier="math", id="0")
    for template in ("chat", "qwen_boxed"):
        with pytest.raises(ValueError, match=f"--template {template}: --model .* has no chat temp"):
            read_tokenizer(base, [problem], template)
    folder = shutil.copytree(base, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(
        "{{ messages[-1].content }}{% if think is defined %}{{ think }}{% endif %}"
        "{% if add_generation_prompt %}:{% endif %}")
    for text, end in ((None, ":"), ('{"think": "hm"}', "hm:"), ("{}", ":")):
        tokenizer, *_ = read_tokenizer(str(folder), [problem], "chat", text)
        assert tokenizer.decode(encode(tokenizer, problem, "chat")) == "1?" + end
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="has no variable thin to be set"):
        read_tokenizer(str(folder), [problem], "chat", '{"thin": 1}')
    run(str(folder), tmp_path / "run", "--template_kwargs", '{"think": "hm"}', "--template", "chat",
        "--rollouts", "1", "--eval_every", "0", "--problems_per_rollout", "1")
    prompt, again = (row["prompt"] for row in read_rows(tmp_path / "run" / "samples.jsonl"))
    assert prompt == again and prompt.endswith(":hm:")  # two completions of the one group
    args, _ = train.parse_args(["--out", str(tmp_path / "run"), "--resume"])
    assert args.template_kwargs == '{"think": "hm"}' and args.template == "chat"
    (folder / "recipe.json").write_text(json.dumps(dict(settings=dict(
        template="chat", template_kwargs=dict(think="hm")))))  # an object, as its text
    args, _ = train.parse_args(["--model", str(folder)])
    assert args.template_kwargs == '{"think": "hm"}'
    # of Gemma transformers makes a tokenizer that knows no word
    Gemma2Config().save_pretrained(tmp_path / "gemma")
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_tokenizer(str(tmp_path / "gemma"))


def test_prompts_that_a_model_cannot_take_are_refused(base, tmp_path):
    path = Path(shutil.copytree(base, tmp_path / "model")) / "config.json"
    problem, config = dict(prompt="1?", answer="1", verifier="math", id="0"), path.read_text()
    largest = max(encode(read_tokenizer(base)[0], problem))
    for size, words in ((largest + 1, None), (1, "names no end-of-sequence token"), (
            largest, f"a token {largest} in its tokenizer, and {largest} in its embedding")):
        path.write_text(json.dumps(dict(json.loads(config), vocab_size=size)))
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            read_tokenizer(str(path.parent), [problem])

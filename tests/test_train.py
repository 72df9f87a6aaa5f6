"""train.py: flags and their errors, whole small runs, what they leave behind."""

import argparse
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import losses
import train
from conftest import ROOT
from engine import loading, policy
from engine.sampler import Completion
from engine.trainer import Trainer
from forked import script
from graders import sandbox
from harness import files
from harness.flags import flags_of
from helpers import SMALL, needs_vllm, read_rows, records, refused, run, write_rows
from losses import METHODS, Method, asym, centred, token_mean


@pytest.mark.quick
@pytest.mark.parametrize("flags, named", [
    ("--advantage weigh_failures",  # which no row uses
     "--advantage 'weigh_failures' is none of raw, leave_one_out, zscore"),
    ("--objective nope", "nope"), ("--sampler other", "other"),
    ("--loss opd", "from a teacher alone"), ("--los grpo", "--los"), ("--top_p 1", "--top_p"),
    ("--loss grpo --clip_alpha 3", "--clip_alpha is a flag of acpo; grpo has"),
    ("--loss reinforce --eps_low 0.1", "reinforce has none"),  # another method's
    ("--loss fade --objective p3o --eps_low 0.1", "eps_low"),
    ("--problems_per_rollout 4 --group_size 4 --steps_per_rollout 7",
     "16 completions do not divide into --steps_per_rollout 7"),
    ("--problems_per_rollout 4 --group_size 4 --steps_per_rollout 8 --shuffle groups",
     "4 groups do not divide into --steps_per_rollout 8"),
    ("--steps_per_rollout 0", "--steps_per_rollout"), ("--rollouts two", "--rollouts"),
    ("--eps_low --lr 1e-3 0.3", "--eps_low: expected one argument"),
    ("--mask_truncated False", "a switch takes no value"),
    ("--lr 0", "--lr"), ("--lr nan", "--lr"), ("--temperature 1e-30", "must be 0.01 or more"),
    ("--entropy_coef -1e6", "--entropy_coef must be -10 or more and below 10"),
    ("--seed -1", "--seed"), ("--gpu_memory_utilization 1.5", "--gpu_memory_utilization"),
    ("--group_size 1099511627776 --steps_per_rollout 1", "below 1048576"),
    ("--model=", "--model is empty"), ("--out=", "--out is empty"),
    ("--loss FADE", "did you mean fade?"), ("--clip_alph 2", "did you mean --clip_alpha?"),
    ("--loss grpo --group_size 1", "--group_size"), ("--loss passk --k 17", "--k"),
    ("--loss cispo --ratio_max 0.2", "--ratio_max 1.2"), ("--loss ascend", "none of reinforce"),
    ("--eps_low -5", "--eps_low"), ("--loss fade --entropy_target nan", "--entropy_target"),
    ("--select token", "each once, of own, every_token, "),
    ("--select own,token_mask --old_logprobs sampler", "--select own,token_mask corrects"),
    ("--loss p3o --select sequence_mask", "a second time"),
    ("--token_mask_low 0.5", "there is no such flag"),
    ("--select token_mask --token_mask_low 2", "--token_mask_low must be from 0 to 1"),
    ("--loss passk --overlong_penalty 4", "passk"), ("--overlong_penalty 99", "--overlong"),
    ("--loss maxrl --overlong_penalty 4", "maxrl"),
    ("--model /nowhere/at/all", "/nowhere/at/all"), ("--model {root}", "config.json"),
    ("--model " + "x" * 5000, "too long"),
    ("--eval_data nope", "--eval_data nope: "), ("--data_dir {root}", "countdown is none of them"),
    ("--eval_data countdown --data countdown5", " --data countdown5: "),
    ("--data {root}/code.jsonl", "--allow_unsafe_code"), ("--out {root}/tests/run", "already"),
    ("--resume --out {root}/none", "there is no run in {root}/none"),
    ("--tp 1 --force", "is for --resume, which"), ("--lora_alpha 8", "is for --lora_rank"),
    ("--lora_rank 2 --lora_alpha 0", "0.001 or more"), ("--offload", "torchrun --nproc_per_node 1"),
    ("--tp 2", "are for --sampler vllm"), ("--max_num_seqs 9", "are for --sampler vllm"),
    ("--sampler vllm --sampler_dtype float8", "float8 is for --sampler transformers"),
    ("--check --resume", "--check starts a run anew"),
    ("--template_kwargs [] --template chat", "--template_kwargs is a JSON object, such as"),
    ('--template_kwargs {{"a":1}} --template orz', "for the templates chat and qwen_boxed"),
], ids=lambda text: text[:60])
def test_bad_flags_are_one_sentence_and_exit_code_2(flags, named, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "tests" / "run").mkdir(parents=True)
    (tmp_path / "tests" / "run" / "metrics.jsonl").touch()
    program = dict(prompt="?", answer=dict(tests=[dict(input="", output="1")]), verifier="code")
    write_rows(tmp_path / "code.jsonl", [program])
    monkeypatch.setattr(sandbox, "obstacle", lambda: "no namespaces")
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", None)  # none is loaded
    said = refused(capsys, train.main, *flags.format(root=tmp_path).split())
    assert named.format(root=tmp_path) in said


def test_exit_codes_of_the_command(tmp_path, base, monkeypatch, capsys):
    def ends(code, *flags):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, flags)])
        return refused(capsys, lambda _: runpy.run_path(
            str(ROOT / "train.py"), run_name="__main__"), code=code)

    assert "--clip_alpha is a flag of acpo" in ends(2, "--loss", "grpo", "--clip_alpha", 3)
    broken = ["--lr", "1e30", "--entropy_coef", "0.1"]  # which has a gradient in any case
    assert re.search(
        r"rollout 1, optimizer step 2: loss .*; its batch is in .*/failed_batch.pt",
        ends(1, "--model", base, "--out", tmp_path / "run", *SMALL, *broken))
    batch = torch.load(tmp_path / "run" / "failed_batch.pt")
    assert batch["ids"].shape[0] == 8 and batch["advantages"].shape == batch["mask"].shape
    assert "ruined the weights" in ends(  # the next to see it is the sampler
        1, "--model", base, "--out", tmp_path / "two", *SMALL, *broken, "--steps_per_rollout", 1)


def folder_with(base, tmp_path, changes):
    """A copy of the base model with files changed: None removes one, bytes or a dict replace it."""
    folder = shutil.copytree(base, tmp_path / "model")
    for name, content in changes.items():
        path = folder / name
        path.unlink(missing_ok=True) if content is None else path.write_bytes(
            content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(folder)


@pytest.mark.parametrize("changes, flags, named", [
    ({"model.safetensors": None}, "", "cannot be loaded"),
    ({"tokenizer.json": None, "vocab.json": None, "merges.txt": None}, "", "tokenizer"),
    ({}, "--max_prompt_tokens 3", "--max_prompt_tokens 3"),
    ({}, "--max_tokens 5000", "4096 positions"),
    ({}, "--lora_rank 100000000", "of rank 128 at most, and --lora_rank is 100000000"),
    ({}, "--data countdown34", "has 4")])
def test_models_that_cannot_be_used_are_refused(base, tmp_path, changes, flags, named, capsys):
    said = refused(capsys, train.main, "--model", folder_with(base, tmp_path, changes), *SMALL,
                   "--out", tmp_path / "run", *flags.split())
    assert named in said and not (tmp_path / "run").exists()


def test_a_model_without_some_of_its_weights_is_refused(base, tmp_path):
    folder = folder_with(base, tmp_path, {})
    weights = load_file(folder + "/model.safetensors")
    weights = {name: x for name, x in weights.items() if "layers.1.mlp" not in name}
    save_file(weights, folder + "/model.safetensors", metadata=dict(format="pt"))
    done = script("train.py", "--model", folder, *SMALL, "--out", tmp_path / "run")
    assert done.returncode == 2 and "lacks weights: model.layers.1.mlp" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr  # without the table of transformers


def test_a_generation_config_that_does_not_validate_does_no_harm(base, tmp_path):
    config = json.loads((Path(base) / "config.json").read_text())
    folder = folder_with(base, tmp_path, {"generation_config.json": dict(
        do_sample=False, temperature=0.6, top_p=0.9, eos_token_id=1),
        "config.json": dict(config, bos_token_id=3)})
    run(folder, tmp_path / "run", "--rollouts", "1")
    saved = tmp_path / "run" / "checkpoints" / "rollout_000001"
    config, generation = (json.loads((saved / f"{name}.json").read_text())
                          for name in ("config", "generation_config"))
    assert generation["pad_token_id"] == config["pad_token_id"] is not None
    assert generation["bos_token_id"] == config["bos_token_id"] == 3


def test_problems_from_a_file_and_programs(base, tmp_path, capsys):
    rows = [
        dict(prompt="1,2,3=6:", answer=dict(nums=[1, 2, 3], target=6), verifier="countdown"),
        dict(prompt="2+2=", answer="4", verifier="math"),
        dict(prompt="x=", answer=["a"], verifier="table"),
        dict(prompt="def", answer=dict(tests=[dict(input="", output="1")]), verifier="code")]
    learnt, held_out = (write_rows(tmp_path / f"{name}.jsonl", some)
                        for name, some in (("a", rows), ("b", rows[:1] * 4)))
    records = run(base, tmp_path / "run", "--data", learnt, "--eval_data", held_out)
    assert len(records) == 3 and f"eval/{held_out}/mean@2" in records[0]
    assert "4 of the 4 held-out problems of" in capsys.readouterr().out
    assert all(r["grader/error"] == 0 for r in records[1:])


@pytest.mark.quick
def test_flags_reach_the_method_and_none_is_of_two_axes_or_a_common_one():
    _, method = train.parse_args("--loss acpo --clip_alpha 2 --aggregate constant --bins 4".split())
    assert method.flags == dict(clip_base=0.2, clip_alpha=2.0, clip_max=3.0, bins=4, dual_clip=3.0)
    assert method.aggregate.__name__ == "constant" and method.objective is METHODS["acpo"].objective
    args, method = train.parse_args(["--loss", "acpo", "--dual_clip", "0"])
    assert method.flags["dual_clip"] == flags_of(args)["dual_clip"] == 0
    assert train.parse_args(["--loss", "p3o"])[0].old_logprobs == "sampler"
    assert train.parse_args(["--loss", "grpo"])[0].old_logprobs == "trainer"
    assert train.parse_args(["--temperature", "0.6"])[0].sampler_temperature == 0.6
    common = set(vars(train.parse_args(["--loss", "reinforce"])[0]))
    owners = {}
    for method in METHODS.values():
        assert not set(method.flags) & common
        for axis in ("advantage", "select", "objective", "aggregate"):
            for flag in losses.keyword_only(getattr(method, axis)):
                owners.setdefault(flag, set()).add(axis)
    assert all(len(axes) == 1 for axes in owners.values()), owners  # so that rows can be crossed


def plain(tokens):
    return -tokens.advantages * tokens.ratio


def mine(**cells):
    return Method(**{**dict(advantage=centred, objective=plain, aggregate=token_mean), **cells})


def clipped_by_entropy(t):
    """No token of the toy step crosses a bound that another half moves."""
    wide = torch.where(t.entropy > t.entropy[t.mask].quantile(0.5), 0.15, 0.1)
    return -torch.minimum(t.ratio * t.advantages, t.ratio.clamp(1 - wide, 1 + wide) * t.advantages)


def of_other_completions(tokens):
    return -(tokens.advantages - tokens.mean(tokens.advantages)) * tokens.ratio


def learns_without_an_advantage(tokens):
    return plain(tokens) + (tokens.logprobs - tokens.sampler_logprobs) ** 2


def prefers_failures(rewards, state):
    return -centred(rewards, state)


CUT = "mine: its gradient depends on how the optimizer step is cut"


@pytest.mark.quick
@pytest.mark.parametrize("row, named", [
    (mine(objective=lambda t, *, x: plain(t)), "x has to be keyword-only"),
    (mine(objective=lambda t, x=0.5: plain(t)), "x has to be keyword-only and have"),
    (mine(objective=lambda t, *, temperature=1.0: plain(t)), "--temperature is a flag"),
    (mine(objective=lambda t, *, help=1.0: plain(t)), "--help is a flag"),
    (mine(objective=lambda t, *, state=1.0: plain(t)), "--state is a flag"),
    (mine(objective=lambda t, *, x=(0.2, 0.3): plain(t)), "a number, a text or None"),
    (mine(advantage=asym, objective=lambda t, *, delta=3.0: plain(t)), "has one default"),
    (mine(old_logprobs="Sampler"), "'Sampler' is none of trainer, sampler, proximal"),
    (mine(advantage=lambda r, state: state.update(mean=r.mean()) or centred(r, state)),
     "logs 'mean', which is not one"),
    (mine(advantage=lambda r, state: r.mean(1)), "returns [4], where"),
    (mine(objective=lambda t: plain(t).mean()), "of losses.py returns [], where"),
    (mine(objective=lambda t: -t.advantages * t.probs), "has no gradient"),
    (mine(objective=lambda t: t.ratios), "raises AttributeError"),
    (mine(objective=lambda t: t.advantages.clamp_(-9, 9) * t.ratio), "writes into its arg"),
    (mine(objective=lambda t: setattr(t, "mask", ~t.mask) or plain(t)), "writes into its arg"),
    (mine(advantage=lambda r, state: r.sub_(r.mean(1, keepdim=True))), "writes into its arg"),
    (mine(objective=lambda t: plain(t) * ~t.mask), "it has no gradient at any token"),
    (mine(objective=lambda t: plain(t) - 0.01 * t.entropy), "adds tokens.entropy, which has no"),
    (mine(objective=lambda t: (plain(t), dict(kl_ref=0.5))), "'kl_ref', which is measured for"),
    (mine(objective=lambda t: (plain(t), dict(lr=0.5))), "'lr', which is measured for every"),
    (mine(objective=lambda t: (plain(t), dict(kl_old_k1=0.5))), "'kl_old_k1', which is measured"),
    (mine(objective=lambda t: (plain(t), dict(kl_teacher=0.5))), "'kl_teacher', which is measured"),
    (mine(objective=lambda t: (plain(t), dict(kl_age=0.5))), "'kl_age', which is measured"),
    (mine(advantage=lambda r, state: state.update(mass_pos=1.0) or r), "'mass_pos', which is"),
    (mine(objective=lambda t: plain(t) - 0.01 * t.entropy * (t.advantages != 0)), "adds tokens."),
    (mine(objective=lambda t: (plain(t), dict(x=t.ratio[0]))), "'x', which is not one number"),
    (mine(select=lambda t: (t.probs, dict(pg_loss=0.5))), "'pg_loss', which is measured for"),
    (mine(objective=lambda t: (plain(t), t.ratio.mean())), "returns a tuple that is not a tensor"),
    (mine(objective=lambda t: (plain(t), {}, 3)), "returns a tuple that is not a tensor and its"),
    (mine(objective=lambda t: (plain(t), dict(x=t.probs[0, 0].numpy()[()]))), "'x', which is"),
    (mine(select=lambda t: 0.5), "returns a float"),
    (mine(advantage=plain, objective=centred), "given; a row has advantage, objective, aggregate"),
    (mine(objective=of_other_completions), CUT),
    (mine(objective=clipped_by_entropy), CUT),
    (mine(passes=(lambda t: (t.probs, {}),)), "returns a tuple, where a tensor of shape"),
    (mine(select=lambda t: (t.entropy > t.mean(t.entropy)).float()), CUT),
    (mine(aggregate=lambda loss, mask, size: (loss * mask).sum() / mask.sum()), CUT),
    # each half of the toy step has some of a prompt's completions
    (mine(aggregate=lambda loss, mask, size, group: losses.prompt_mean(
        loss, mask, losses.step_size(mask, size.max_tokens, group), group)), CUT),
    (mine(aggregate=lambda loss, mask, size: loss.sum() / size.tokens), "depends on padding"),
    (mine(objective=lambda t: plain(t) / t.ratio.mean(1, keepdim=True).detach()),
     "mine: its gradient depends on padding"),
    (mine(objective=lambda t: plain(t) + torch.where(t.ratio == 1, 0, abs(t.ratio - 1)**0.5)),
     "mine: its gradient is nan or infinity"),
    (mine(objective=lambda t: plain(t) / t.advantages.abs()), "returns nan"),
    (mine(advantage=lambda r, state: centred(r, state) / r.std(1, keepdim=True)), "returns nan"),
    (mine(objective=learns_without_an_advantage), "are in BY_ADVANTAGE, and it"),
    (mine(objective=lambda t: -plain(t)), "losses.py has the other sign"),
    (mine(objective=lambda t: -abs(t.advantages) * t.ratio), "has the other sign than"),
    (mine(objective=lambda t: -t.advantages * t.ratio * t.logprobs), "a .detach() of the ratio"),
    (mine(select=lambda t: t.ratio.clamp(max=2)), "returns a weight with a gradient"),
    (mine(select=lambda t: -torch.ones_like(t.entropy)), "returns a weight below 0"),
    (mine(preset=dict(eps_hgh=0.3)), "{'eps_hgh': 0.3}, has a name that none of its"),
    (mine(advantage=lambda r, state: r.argsort(1).argsort(1) - 3.5), "the order of a group's"),
    (mine(advantage=lambda r, state: r - r.mean(0)), "the order of a group's"),
    (mine(advantage=lambda r, state: centred(r, state) + r.std(1, keepdim=True).eq(0)
          * (torch.arange(r.shape[1]) == 0)), "the order of a group's"),
    (mine(aggregate=lambda loss, mask, size: ((loss * mask).sum(1) / mask.sum(1)).sum()),
     "returns nan"), (mine(advantage=prefers_failures), "gives successes less than"),
], ids=lambda x: x if isinstance(x, str) else "row")
def test_mistakes_in_a_row_of_ones_own_are_a_sentence(row, named, monkeypatch, capsys):
    monkeypatch.setitem(METHODS, "mine", row)
    by_advantage = losses.BY_ADVANTAGE | {learns_without_an_advantage}
    monkeypatch.setattr(losses, "BY_ADVANTAGE", by_advantage)
    assert named in refused(capsys, train.parse_args, "--loss", "mine")


def test_a_function_of_losses_that_is_defined_twice_is_refused(monkeypatch, capsys):
    code = files.CODE["losses.py"] + "\n\ndef clipped(ratio):\n    return ratio\n"
    monkeypatch.setitem(files.CODE, "losses.py", code)
    assert "defines clipped twice" in refused(capsys, train.parse_args, "--loss", "fade")


@pytest.mark.parametrize("row", [
    mine(), mine(objective=lambda t, *, shift=-1.0: plain(t)),
    mine(objective=lambda t: -(t.advantages + 0.1 * t.entropy) * t.ratio),
    mine(objective=losses.whole_step(lambda tokens: of_other_completions(tokens))),
    mine(select=lambda t: (torch.rand_like(t.entropy) < 0.5).float()),
    mine(advantage=prefers_failures, objective=lambda t: -plain(t), like_reinforce=False),
    mine(advantage=lambda r, state: centred(r, state) * float(np.random.rand())),
    mine(objective=lambda t: plain(t) + 0.1 * (t.logprobs - t.ref_logprobs)),  # has a reference
    mine(objective=lambda t: -t.advantages * (t.ratio - 1)**2, like_reinforce=False),
], ids=["no docstring", "negative flag", "entropy", "whole step", "random", "another sign", "numpy",
        "KL", "flat at 1"])
def test_sketches_that_are_not_refused(row, request, monkeypatch, capsys):
    """They leave torch's generator of random numbers as it was. Of one a warning is said."""
    monkeypatch.setitem(METHODS, "mine", row)
    before = torch.get_rng_state()
    assert train.parse_args(["--loss", "mine", "--kl_coef", "0.1"])[0].loss == "mine"
    assert torch.equal(before, torch.get_rng_state())
    assert "mine = " in losses.card("mine")
    warned = "at ratio 1 the method has no gradient" in capsys.readouterr().err
    assert warned == ("flat at 1" in request.node.name)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.quick] * (name == "fade")) for name in METHODS])
def test_every_method_runs(name, base, tmp_path, graded):
    teacher = ["--teacher", base] if name == "opd" else []
    records = run(base, tmp_path / "run", "--loss", name, "--eval_every", "0", *teacher)
    assert [r["rollout"] for r in records] == [1, 2]
    steps = 2 * len(METHODS[name].passes)
    for record in records:
        assert all(math.isfinite(x) for x in record.values() if isinstance(x, (int, float)))
        assert len(record["steps"]) == steps and record["step"] == steps * record["rollout"]
        assert record["sampler/logp_absdiff_max"] < 1e-4
        assert {"policy/ess", "policy/ratio_std/bin0", "policy/ratio_std/bin4", "clip/frac",
                "loss/pg", "adv/mass_pos", "optim/grad_norm", "groups/mixed", "tokens",
                "seconds"} <= set(record)
    if name == "acpo":
        assert {f"clip/range/bin{i}" for i in range(5)} <= set(records[0]["steps"][1])


@pytest.mark.draws
def test_the_run_folder(base, tmp_path, graded):
    out = tmp_path / "run"
    run(base, out, *"--loss grpo --save_every 1 --keep 1 --rollouts 3".split())
    assert {p.name for p in out.iterdir()} == {
        "config.json", "losses.py", "rewards.py", "metrics.jsonl", "samples.jsonl", "curves.png",
        "checkpoints"}
    assert (out / "curves.png").stat().st_size > 10_000
    last = out / "checkpoints" / "rollout_000003"
    state = torch.load(last / "trainer.pt")
    assert state["run"]["rollout"] == 3 and state["run"]["totals"]["step"] == 6
    assert state["trainer"]["optimizer"]["state"]
    assert [p.name for p in (out / "checkpoints").iterdir()] == [last.name]  # nothing unfinished
    config = json.loads((out / "config.json").read_text())
    assert config["flags"]["lr"] == 1e-4 and config["method"].startswith("grpo = zscore")
    assert config["versions"]["torch"]
    # an ordinary Hugging Face folder
    model, before = (AutoModelForCausalLM.from_pretrained(p) for p in (last, base))
    texts = [AutoTokenizer.from_pretrained(p).decode([10]) for p in (last, base)]
    assert texts[0] == texts[1]
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))
    samples = read_rows(out / "samples.jsonl")
    assert set(samples[0]) == {
        "rollout", "prompt", "completion", "answer", "verifier", "reward", "fault", "tokens",
        "truncated"}
    assert [x["rollout"] for x in samples] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert len({x["prompt"] for x in samples}) == 6  # of two groups


def test_a_text_that_ends_a_completion(base, tmp_path):
    """It stays in the completion, which has no end-of-sequence token and is not cut off."""
    out = tmp_path / "run"
    records = run(base, out, "--stop", "+", "--save_rollouts", "--max_tokens", "16")[1:]
    assert all(r["len/mean"] < 8 and r["len/truncated_frac"] == 0 for r in records)
    texts = [row["completion"] for row in read_rows(out / "samples.jsonl")]
    assert {text.find("+") - len(text) for text in texts if "+" in text} == {-1}
    batch = torch.load(out / "rollouts" / "rollout_000001.pt")["batch"]
    assert torch.equal(batch["mask"].sum(1), batch["completion_len"])  # its tokens are learnt


def test_two_runs_of_a_seed_are_the_same_run_in_a_default_folder_of_its_own(base, tmp_path,
                                                                            monkeypatch):
    monkeypatch.chdir(tmp_path)
    locked = []
    monkeypatch.setattr("harness.run.lock", lambda out: locked.append(out.name))
    for seed in "0001":
        train.main(["--model", base, *SMALL, "--loss", "fade", "--seed", seed])
    assert locked == ["fade-2-0", "fade-2-0.2", "fade-2-0.3", "fade-2-1"]  # none of another run
    first, *again, other = (records(Path(f"runs/fade-2-{name}")) for name in (
        "0", "0.2", "0.3", "1"))
    assert again == [first, first] and other[-1] != first[-1]


def test_every_option_together(base, tmp_path, graded):
    graded(groups=(0, 2))
    records = run(base, tmp_path / "run", *(
        "--loss dapo --kl_coef 0.1 --entropy_coef 0.01 --select token_mask "
        "--token_mask_low 0.9 --drop_uniform_groups --mask_truncated "
        "--overlong_penalty 4 --rollout_lag 1 --warmup 2 --schedule cosine --weight_decay 0.1 "
        "--sampler_temperature 1.3 --sampler_dtype bfloat16 --rollouts 3 "
        "--tokens_per_micro_batch 40").split())[1:]
    assert [r["rollout"] for r in records] == [1, 2, 3]
    assert [r["groups/sampled"] for r in records] == [8, 8, 8]  # of the first four, two teach
    assert all(r["policy/kl_ref"] >= 0 and r["sampler/k3"] > 1e-4 for r in records)
    dropped = [r["sampler/token_mask_dropped"] for r in records]
    assert 0 < sum(dropped) and max(dropped) < 1
    assert all(r["policy/weight_mean"] > 0 for r in records)
    lrs = [step["optim/lr"] for r in records for step in r["steps"]]
    assert lrs[0] < lrs[1] and lrs[-1] < 0.2e-4


def test_the_proximal_reference_is_the_policy_before_the_update(base, tmp_path, graded):
    """With lagging rollouts its ratios are 1 at the first step, and the distance to the weights
    that sampled is in the correction; against the trainer's reference it is the other way round."""
    flags = "--rollout_lag 1 --rollouts 3 --lr 1e-3 --select token_truncate".split()
    kept = {}
    for reference in ("proximal", "trainer"):
        records = run(base, tmp_path / reference, "--old_logprobs", reference, *flags)[2:]
        kept[reference] = ([r["steps"][0]["policy/kl_old"] for r in records],
                           [abs(r["policy/weight_mean"] - 1) for r in records])
        assert all(bool(r.get("policy/kl_age")) == (reference == "proximal") for r in records)
    # float32's unit. For x of 0 but for the rounding of log probabilities (to 30 units in SMALL),
    # the mean of e^-x - 1 + x is below one unit, and that of e^x within 100 of 1
    unit = torch.finfo(torch.float32).eps
    assert max(kept["proximal"][0]) < unit and min(kept["proximal"][1]) > 100 * unit
    assert min(kept["trainer"][0]) > 100 * unit > max(kept["trainer"][1])


def test_a_step_of_uniform_groups_has_no_gradient(base, tmp_path, monkeypatch):
    """Steps of one group each, by --shuffle groups, of which one alone has an advantage."""
    steps, step = [], Trainer.step

    def advantages(method, rewards, state):
        return torch.tensor([1.0, 0, 0, 0])[:, None].expand_as(rewards)

    def watched(trainer, minibatch):
        steps.append((len(set(minibatch.group.tolist())), len(minibatch.ids)))
        return step(trainer, minibatch)

    monkeypatch.setattr(train, "group_advantages", advantages)
    monkeypatch.setattr(Trainer, "step", watched)
    records = run(base, tmp_path / "run", "--shuffle", "groups", "--steps_per_rollout", "4")[1:]
    assert [record["optim/no_gradient"] for record in records] == [3, 3]
    assert steps == [(1, 4)] * 8
    monkeypatch.undo()
    records = run(base, tmp_path / "other", "--loss", "reinforce", "--entropy_coef", "0.1")[1:]
    assert [record["optim/no_gradient"] for record in records] == [0, 0]


def test_overlong_penalty_and_masking(base, tmp_path, graded):
    """The penalty reaches the advantages, not the logged reward; truncated completions leave the
    loss; a share without any is skipped. No puzzle is answered in 2 tokens."""
    # of 12 tokens at most, over the last 4: DAPO, eq. 13
    lengths, rewards = [4, 8, 9, 10, 11, 12], [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    completions = [Completion([1] * n, [0.0] * n, n == 12) for n in lengths]
    rewards, batch = torch.tensor(rewards).view(2, 3), policy.make_batch([([1], completions)])
    args = argparse.Namespace(max_tokens=12, overlong_penalty=4)
    shaped = [[1, 1, 0.75], [-0.5, -0.75, 0]]
    assert train.shaped(rewards, batch, args).tolist() == shaped
    args.overlong_penalty = 0
    assert train.shaped(rewards, batch, args) is rewards
    short = ("--loss", "grpo", "--max_tokens", "2")
    plain, shaped = (run(base, tmp_path / str(n), *short, "--save_rollouts",
                         "--overlong_penalty", str(n)) for n in (0, 2))
    assert plain[1]["reward/mean"] == shaped[1]["reward/mean"] > 0
    assert shaped[1]["reward/shaped"] == pytest.approx(shaped[1]["reward/mean"] - 1)
    kept = [torch.load(tmp_path / str(n) / "rollouts/rollout_000001.pt") for n in (0, 2)]
    assert torch.equal(kept[0]["rewards"] - 1, kept[1]["shaped_rewards"])
    assert torch.equal(kept[0]["rewards"], kept[1]["rewards"])
    masked = run(base, tmp_path / "masked", *short, "--mask_truncated")[1]
    assert masked["len/truncated_frac"] == 1 and not masked["steps"]


@needs_vllm
def test_the_reward_rises_with_vllm(tmp_path):
    done = script("train.py", "--out", tmp_path / "run", *(
        "--loss fade --steps_per_rollout 16 --sampler vllm --rollouts 3 --lr 1e-4 --eval_every 3 "
        "--eval_problems 64").split())
    assert done.returncode == 0, done.stderr[-3000:]
    first, *records = read_rows(tmp_path / "run")
    assert records[-1]["eval/countdown/mean@16"] > first["eval/countdown/mean@16"] + 0.02
    assert max(r["sampler/logp_absdiff_max"] for r in records) < 1e-4
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000

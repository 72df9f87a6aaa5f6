"""Rows and options that other frameworks have, each against a loop over tokens in plain floats that
follows the source of its framework, values and gradients."""

import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import losses
import train
from engine.policy import Batch, Policy, compute_logprobs
from harness import log
from helpers import SMALL, refused, run, torchrun
from losses import METHODS, Method, none, policy_loss, ppo_clip, token_mean
from test_losses import random_tokens


def same(method, reference, seed=0, **options):
    """Are a loss and its gradient the means of reference(dicts) -> [(loss, d loss / d log pi)]?"""
    tokens = random_tokens(seed)
    real = [dict(row=i, **{name: getattr(tokens, name)[i, t].item() for name in (
                "logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "advantages")})
            for i, t in tokens.mask.nonzero().tolist()]
    loss = policy_loss(method, tokens, 8, **options)
    loss.backward()
    values, slopes = zip(*reference(real))
    assert loss.item() == pytest.approx(sum(values) / len(real), abs=1e-9)
    slopes = torch.tensor(slopes, dtype=torch.float64) / len(real)
    assert torch.allclose(tokens.logprobs.grad[tokens.mask], slopes, rtol=0, atol=1e-9)
    assert not tokens.logprobs.grad[~tokens.mask].any()
    return slopes


def rho(t, old="old_logprobs"):
    return math.exp(t["logprobs"] - t[old])


@pytest.mark.quick
@pytest.mark.parametrize("beta", [0.05, 0.7])
def test_dro(beta):
    """Tinker, verl: -(A log pi - beta / 2 (log pi - log pi_old)^2)"""
    def reference(real):
        for t in real:
            away = t["logprobs"] - t["old_logprobs"]
            yield (-(t["advantages"] * t["logprobs"] - beta / 2 * away * away),
                   -t["advantages"] + beta * away)
    same("dro", reference, dro_beta=beta)


def covariances(real):
    a, p = (sum(t[name] for t in real) / len(real) for name in ("advantages", "logprobs"))
    return [(t["advantages"] - a) * (t["logprobs"] - p) for t in real]


@pytest.mark.parametrize("seed, share, low, high", [
    (0, 2e-4, 0.1, 5.0), (1, 0.2, 0.3, 5.0), (2, 0.5, 0.0, 0.5), (3, 0.1, 90.0, 99.0)])
def test_clip_cov(seed, share, low, high):
    """verl's compute_policy_loss_clip_cov, where it draws as many at random the largest."""
    def reference(real):
        cov, clip = covariances(real), []
        for t in real:
            pg1 = -t["advantages"] * rho(t)
            pg2 = -t["advantages"] * min(max(rho(t), 0.8), 1.2)
            clip.append(pg2 > pg1)
        free = sorted((i for i, c in enumerate(cov) if low < c < high and not clip[i]),
                      key=lambda i: -cov[i])
        gone = free[:max(int(share * len(real)), 1)]
        for i, t in enumerate(real):
            value = -t["advantages"] * (min(max(rho(t), 0.8), 1.2) if clip[i] else rho(t))
            slope = 0.0 if clip[i] else -t["advantages"] * rho(t)
            yield (0.0, 0.0) if i in gone else (value, slope)
    slopes = same("clip_cov", reference, seed, cov_share=share, cov_low=low, cov_high=high)
    assert (slopes == 0).sum() > (low < 90)


@pytest.mark.parametrize("seed, share, weight", [(0, 2e-4, 1.0), (1, 0.25, 0.5)])
def test_kl_cov(seed, share, weight):
    """verl's compute_policy_loss_kl_cov: the absolute log ratio for the largest covariances."""
    def reference(real):
        cov = covariances(real)
        order = sorted(range(len(real)), key=lambda i: -cov[i])
        chosen = order[:max(1, int(len(real) * share))]
        for i, t in enumerate(real):
            away = t["logprobs"] - t["old_logprobs"]
            penalty = weight * (i in chosen)
            yield (-t["advantages"] * rho(t) + penalty * abs(away),
                   -t["advantages"] * rho(t) + penalty * math.copysign(1, away))
    same("kl_cov", reference, seed, cov_share=share, cov_kl=weight)


def test_kl_cov_has_no_slope_from_rounding():
    tokens = random_tokens()
    for noise in (0, 1e-7, -1e-7):
        leaf = tokens.old_logprobs.clone().requires_grad_()
        at = losses.replace(tokens, logprobs=leaf + noise)
        gradient, = torch.autograd.grad(policy_loss("kl_cov", at, 8, cov_share=1.0), leaf)
        expected = -tokens.advantages * tokens.mask / tokens.mask.sum()
        assert torch.allclose(gradient, expected, atol=1e-6)


def test_the_kl_times_the_ratio():
    """TRL's use_bias_correction_kl, slime's --use-unbiased-kl. Without it: test_losses.py"""
    def reference(real):
        for t in real:
            x = t["logprobs"] - t["ref_logprobs"]
            k3, slope = math.exp(-x) - 1 + x, 1 - math.exp(-x)
            yield (rho(t) * (0.3 * k3 - t["advantages"]),
                   rho(t) * (0.3 * (slope + k3) - t["advantages"]))
    unclipped = Method(none, ppo_clip, token_mean, preset=dict(eps_low=1.0, eps_high=1e9))
    same(unclipped, reference, kl_coef=0.3, kl_unbiased=True)


@pytest.mark.parametrize("bounds", [
    {}, dict(geo_low=0.9, geo_high=1.1, token_truncate_high=1.05),
    dict(geo_low=0.8, geo_high=1.02)])
def test_two_corrections_are_multiplied(bounds):
    """verl's decoupled_geo_rs_token_tis: a mask of completions times a weight of tokens."""
    method = losses.row("reinforce", select="geometric_mask,token_truncate")

    def reference(real):
        least, most, top = ({**method.flags, **bounds}[name] for name in (
            "geo_low", "geo_high", "token_truncate_high"))
        for t in real:
            own = [s["old_logprobs"] - s["sampler_logprobs"] for s in real if s["row"] == t["row"]]
            kept = least <= math.exp(sum(own) / len(own)) <= most
            u = math.exp(t["old_logprobs"] - t["sampler_logprobs"])
            weight = kept * min(u, top)
            yield -weight * t["advantages"] * t["logprobs"], -weight * t["advantages"]
    for seed in range(3):
        same(method, reference, seed, **bounds)


def test_selects_by_name():
    """own is the row's, with its preset; any other name is an error."""
    assert losses.row("top_entropy", select="own,token_mask").selects == (
        *METHODS["top_entropy"].selects, losses.token_mask)
    assert losses.row("grpo", select="token_mask") == losses.row("grpo", select=" token_mask ")
    assert losses.row("dapo", select="own,token_mask").flags["eps_high"] == 0.28
    for names in ("token_mask,", "correct", "own,every", "token_mask,token_mask"):
        with pytest.raises(ValueError, match="--select .* takes names with commas"):
            losses.row("grpo", select=names)


loaded = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)


@pytest.fixture(scope="module")
def teacher(base, tmp_path_factory):
    """The folder of the base with other weights in its head."""
    folder, model = tmp_path_factory.mktemp("teacher"), loaded(base)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    for part in (model, AutoTokenizer.from_pretrained(base)):
        part.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("loss", ["opd", "grpo"])
def test_a_teacher_is_added_to_each_tokens_advantage(loss, base, teacher, tmp_path):
    """A = the row's + log pi_teacher - log pi_old, as the two models have them."""
    first, *_ = run(base, tmp_path / "run", "--loss", loss, "--teacher", teacher,
                    "--save_rollouts")[1:]
    kept = torch.load(tmp_path / "run" / "rollouts" / "rollout_000001.pt")
    batch = Batch(**kept["batch"])
    its, own = (compute_logprobs(Policy(loaded(x)), batch)[0] for x in (teacher, base))
    assert torch.allclose(batch.teacher_logprobs, its, atol=1e-5)
    assert not batch.teacher_logprobs[~batch.mask].any()
    gap = (own - its)[batch.mask].mean().item()
    assert first["policy/kl_teacher"] == pytest.approx(gap, abs=1e-5) and gap > 0.01
    rewards = losses.group_advantages(loss, kept["rewards"], dict(entropy=1.0))
    batch.set_advantages(rewards)
    assert torch.allclose(batch.advantages, rewards.reshape(-1, 1) + its - own, atol=1e-5)


def test_a_teacher_that_cannot_teach_is_refused(base, teacher, tmp_path, capsys):
    other = shutil.copytree(teacher, tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"+"', '"plus"'))
    damaged = shutil.copytree(base, tmp_path / "damaged")
    os.truncate(damaged / "model.safetensors", 1000)
    for folder, words in ((other, "has another tokenizer than --model"),
                          (damaged, f"--model {base} or --teacher {damaged} cannot be loaded"),
                          ("/nowhere", "--teacher, as --model /nowhere is no folder here")):
        assert words in refused(capsys, train.main, "--model", base, *SMALL, "--loss", "opd",
                                "--teacher", folder, "--out", tmp_path / "run")


def test_the_teachers_part_on_two_ranks(base, teacher, tmp_path):
    flags = ("--rollouts 1 --save_rollouts --loss opd --tokens_per_micro_batch 40 "
             "--eval_every 0").split()
    out = tmp_path / "run"
    torchrun(2, "train.py", "--model", base, "--teacher", teacher, "--out", out, *SMALL, *flags,
             forks=True)
    batch = Batch(**torch.load(out / "rollouts" / "rollout_000001.pt")["batch"])
    its, _ = compute_logprobs(Policy(loaded(teacher)), batch)
    assert torch.allclose(batch.teacher_logprobs, its, atol=1e-4)


RECORD = {"rollout": 7, "reward/mean": 1.0, "reward/unreadable_frac": 0.0,
          "len/truncated_frac": 0.1, "policy/entropy": 1.0, log.GAP: 1e-6}


@pytest.mark.parametrize("change, kind, words", [
    ({}, None, ""),
    ({"policy/entropy": 0.09}, "entropy", "--eps_high (arXiv 2503.14476), --loss clip_cov"),
    ({"len/truncated_frac": 0.29}, None, ""),
    ({"len/truncated_frac": 0.31}, "cut off", "31% of the completions are cut off at max_tokens, "),
    ({"reward/mean": 1.01}, "rewards", "a reward of exactly 1 alone"),
    ({log.GAP: 1e-3}, "gap", "--check tries it")])
def test_a_collapse_is_said(change, kind, words):
    first = {**RECORD, "rollout": 1}
    found = log.warnings({**RECORD, **change}, first, torch.ones(1),
                         SimpleNamespace(dtype="float32"))
    assert list(found) == [kind] * bool(kind) and words in " ".join(found.values())


def test_a_model_that_does_not_end_and_a_sampler_that_differs_are_said_at_once_and_once(
        base, tmp_path, capsys):
    first = {**RECORD, "rollout": 1, "len/truncated_frac": 0.51, log.GAP: 0.06}
    for sampler_dtype, temperature, kinds in (("bfloat16", 1.0, ["cut off", "gap"]), (
            "float8", 1.0, ["cut off"]), ("bfloat16", 1.2, ["cut off"])):
        found = log.warnings(first, first, torch.ones(1), SimpleNamespace(
            dtype="bfloat16", sampler_dtype=sampler_dtype, temperature=1.0,
            sampler_temperature=temperature))
        assert list(found) == kinds and "--stop TEXT" in found["cut off"]
    run(base, tmp_path / "run", "--max_tokens", "4", "--rollouts", "3", "--eval_every", "0")
    assert capsys.readouterr().out.count("are cut off at max_tokens, ") == 1

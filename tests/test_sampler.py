"""sampler.py: both samplers give the trainer's logprobs, after weight syncs, at any temperature;
how completions end."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import policy
from engine.loading import eos_ids
from engine.sampler import default_kind, make_sampler, seed_of

KINDS = [
    "transformers",
    pytest.param(
        "vllm", marks=pytest.mark.skipif(default_kind() != "vllm", reason="vllm is not installed")
    ),
]
PROMPTS = ["1,2,3=6:", "7,1,9=16:", "4,4,9=1:", "12"]


def gap(model, prompts, groups, temperature):
    """Largest difference between the sampler's logprobs and the trainer's."""
    batch = policy.make_batch(
        [p for p, g in zip(prompts, groups) for _ in g], [c for g in groups for c in g]
    )
    ours, _ = policy.compute_logprobs(policy.Policy(model, temperature), batch)
    return (ours - batch.sampler_logprobs)[batch.mask].abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logprobs_after_two_syncs(kind, tied, small, tokenizer):
    folder = small(tied)
    prompts = [tokenizer.encode(p) for p in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampler = make_sampler(
        kind, folder, dtype="float32", max_length=48, eos=eos_ids(folder, tokenizer)
    )

    def sample(**changes):
        return sampler.sample(
            prompts, 8, **dict(dict(seed=1, temperature=1.0, max_tokens=12), **changes)
        )

    first = sample()
    assert gap(model, prompts, first, 1.0) < 1e-4
    for sync in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(
                    0.1
                    * p.std()
                    * torch.randn(p.shape, generator=torch.Generator().manual_seed(sync))
                )
        if sync == 1:
            assert gap(model, prompts, sample(), 1.0) > 1e-2  # this test sees stale weights
        sampler.load_weights(model.state_dict().items())
        for temperature in (1.0, 0.7):
            assert gap(model, prompts, sample(temperature=temperature), temperature) < 1e-4
            assert (
                gap(model, prompts, sample(temperature=temperature), 1.7 - temperature) > 1e-2
            )  # and a wrong temperature

    # what is sampled is a function of the seed and nothing before it
    tokens = [[c.tokens for c in g] for g in sample(seed=5)]
    assert tokens != [[c.tokens for c in g] for g in sample(seed=6)]
    assert tokens == [[c.tokens for c in g] for g in sample(seed=5)]
    before = torch.get_rng_state()
    sample()
    assert torch.equal(before, torch.get_rng_state())  # the trainer's generator is left alone
    assert len({tuple(c.tokens) for c in sample()[0]}) > 4  # the completions of a group differ

    # how they end: by any of several ids, which then is the last token; or by the limit
    ended = [c for g in sample(max_tokens=12) for c in g]
    assert all(
        c.truncated == (len(c.tokens) == 12 and c.tokens[-1] not in sampler.eos) for c in ended
    )
    assert all(
        len(c.tokens) == len(c.logprobs) and all(lp <= 0 for lp in c.logprobs) for c in ended
    )
    common = max(
        set(t for c in ended for t in c.tokens), key=[t for c in ended for t in c.tokens].count
    )
    sampler.eos = sorted([*sampler.eos, common])
    stopped = [c for g in sample() for c in g]
    assert any(not c.truncated and c.tokens[-1] == common for c in stopped)
    assert all(common not in c.tokens[:-1] for c in stopped)
    assert all(len(c.tokens) == 1 for g in sample(max_tokens=1) for c in g)
    sampler.close()


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_the_policy(kind, small, tokenizer):
    """No top-k, no top-p, the right temperature: first tokens as often as the policy says."""
    folder = small()
    prompt = tokenizer.encode("1,2=")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampler = make_sampler(
        kind, folder, dtype="float32", max_length=32, eos=eos_ids(folder, tokenizer)
    )
    groups = sampler.sample([prompt], 4000, seed=2, temperature=1.5, max_tokens=1)
    seen = (
        torch.bincount(torch.tensor([c.tokens[0] for c in groups[0]]), minlength=len(tokenizer))
        / 4000
    )
    with torch.no_grad():
        wanted = (model(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(-1)
    assert (seen - wanted).abs().max() < 0.03 and (seen - wanted).abs().sum() < 0.2
    assert seen[wanted < wanted.median()].sum() > 0  # the tail is sampled too
    sampler.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_sampler_is_a_mismatch(kind, base, tokenizer):
    prompts = [tokenizer.encode(p) for p in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    sampler = make_sampler(
        kind, base, dtype="bfloat16", max_length=32, eos=eos_ids(base, tokenizer)
    )
    sampler.load_weights(model.state_dict().items())
    groups = sampler.sample(prompts, 8, seed=1, temperature=1.0, max_tokens=12)
    assert 1e-4 < gap(model, prompts, groups, 1.0) < 0.5
    sampler.close()


def test_seeds_are_spread_and_stable():
    seeds = [seed_of(seed, rollout) for seed in range(50) for rollout in range(50)]
    assert len(set(seeds)) == 2500 and all(0 <= s < 2**63 for s in seeds)
    assert seed_of(0, 1) == seed_of(0, 1) and seed_of(0, 1) != seed_of(1, 0)


def test_every_eos_id_is_found(tmp_path, tokenizer, base):
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    assert eos_ids(str(folder), tokenizer) == [1]
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[7, 9])))
    assert eos_ids(str(folder), tokenizer) == [1, 7, 9]

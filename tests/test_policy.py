"""policy.py: the gradient of an optimizer step does not depend on how it is cut up."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

import policy
from data import tiny
from losses import METHODS
from sampler import Completion

BIG = 10**9
ROWS = 11


@pytest.fixture(scope="module")
def model():
    recipe = dict(tiny.RECIPE, hidden=32, mlp=48, layers=2, heads=2, seed=3)
    model = tiny.empty_model(recipe, 101).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    return policy.Policy(model, temperature=0.8, budget=BIG)


@pytest.fixture(scope="module")
def batch(model):
    g = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(5, 101, (n,), generator=g).tolist()
    lengths = [(4 + i % 3, 1 + (5 * i) % 9) for i in range(ROWS)]
    batch = policy.make_batch([ids(p) for p, _ in lengths], [Completion(ids(c), [0.0] * c, False) for _, c in lengths])
    logprobs, batch.entropy = policy.score(model, batch)
    noise = 0.3 * torch.randn(logprobs.shape, generator=g, dtype=torch.float64)
    batch.old_logprobs, batch.sampler_logprobs = logprobs - noise, logprobs - noise / 2
    batch.ref_logprobs = logprobs + noise.roll(1, 0)
    batch.advantages = torch.randn(ROWS, 1, generator=g, dtype=torch.float64).expand(batch.mask.shape)
    return batch


def gradient(model, batch, method, size, monkeypatch, **coefficients):
    def parts(batch, *_):
        return [list(range(i, min(i + size, len(batch.ids)))) for i in range(0, len(batch.ids), size)]
    monkeypatch.setattr(policy, "micro_batches", parts)
    model.zero_grad()
    hp = dict(method.flags)
    if "prob_split" in hp:  # so that both passes have tokens
        hp["prob_split"] = batch.old_logprobs[batch.mask].exp().median().item()
    metrics = policy.backward(model, batch, method, hp, 9, **coefficients)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), metrics


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("coefficients", [{}, dict(kl_coef=0.1, tis_cap=1.5, entropy_coef=0.05)], ids=["plain", "all"])
def test_the_split_does_not_matter(model, batch, name, coefficients, monkeypatch):
    for only in METHODS[name].passes:
        whole, told = gradient(model, batch, METHODS[name], ROWS, monkeypatch, only=only, **coefficients)
        assert whole.norm() > 1e-6
        for size in (1, 3, 8):
            cut, metrics = gradient(model, batch, METHODS[name], size, monkeypatch, only=only, **coefficients)
            assert (cut - whole).norm() <= 1e-9 * whole.norm()
            for key, value in told.items():
                assert metrics[key].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12), key


def test_without_the_gathering_acpo_would_depend_on_the_split(model, batch, monkeypatch):
    """The test above can fail: per-micro-batch statistics give another gradient."""
    naive = replace(METHODS["acpo"], objective=lambda tokens: METHODS["acpo"].objective(tokens))
    assert METHODS["acpo"].whole_step and not naive.whole_step
    whole, _ = gradient(model, batch, naive, ROWS, monkeypatch)
    cut, _ = gradient(model, batch, naive, 1, monkeypatch)
    assert (cut - whole).norm() > 1e-2 * whole.norm()


def test_forward_is_the_model_at_the_temperature(model, batch):
    logprobs, entropy = model(batch)
    for i in range(ROWS):
        p, c = int(batch.prompt_len[i]), int(batch.completion_len[i])
        with torch.no_grad():
            wanted = (model.model(batch.ids[i:i + 1, :p + c]).logits[0] / 0.8).log_softmax(-1)
        tokens = batch.ids[i, p:p + c]
        assert torch.allclose(logprobs[i, :c], wanted[p - 1:-1].gather(-1, tokens[:, None])[:, 0], atol=1e-10)
        assert torch.allclose(entropy[i, :c], -(wanted.exp() * wanted).sum(-1)[p - 1:-1], atol=1e-10)
        assert not logprobs[i, c:].any() and not entropy[i, c:].any()


def test_score_restores_the_order_of_rows(model, batch):
    whole, _ = policy.score(model, batch)
    cut, _ = policy.score(policy.Policy(model.model, 0.8, budget=20), batch)
    assert torch.allclose(whole, cut, atol=1e-12)


def test_micro_batches_keep_to_the_budget(batch):
    lengths = (batch.prompt_len + batch.completion_len).tolist()
    for budget in (1, 16, 30, 1000):
        parts = policy.micro_batches(batch, budget)
        assert sorted(sum(parts, [])) == list(range(ROWS))
        assert all(len(p) == 1 or len(p) * max(lengths[r] for r in p) <= budget for p in parts)
    assert len(policy.micro_batches(batch, 1000)) == 1 and len(policy.micro_batches(batch, 1)) == ROWS


def test_the_end_of_sequence_token_is_trained(small, tokenizer):
    """Its logprob has a gradient: masks go by length and not by token, so eos = pad would do no harm."""
    model = policy.Policy(AutoModelForCausalLM.from_pretrained(small(), dtype=torch.float32), 0.8)
    eos = tokenizer.eos_token_id
    batch = policy.make_batch([[10, 11]] * 2, [Completion([20, eos], [-1.0, -1.0], False), Completion([20, 21, 22], [-1.0] * 3, True)])
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    batch.old_logprobs, batch.entropy = policy.score(model, batch)
    batch.advantages = torch.tensor([[1.0], [0.0]]).expand(2, 3)
    policy.backward(model, batch, METHODS["grpo"], METHODS["grpo"].flags, 3)
    before = policy.score(model, batch)[0][0, 1]
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1e-2 * p.grad)
    assert policy.score(model, batch)[0][0, 1] > before


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path):
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                           num_key_value_heads=2, head_dim=16, final_logit_softcapping=0.1))
    model.save_pretrained(tmp_path)
    batch = policy.make_batch([[1]] * 4, [Completion(ids, [0.0], False) for ids in ([5, 6, 7], [5, 6], [5], [7])])
    with pytest.raises(ValueError, match="changes its logits after the LM head"):
        policy.load(tmp_path, [1], batch)
    model.config.final_logit_softcapping = None
    model.save_pretrained(tmp_path)
    assert policy.load(tmp_path, [1], batch).model.generation_config.eos_token_id == [1]

"""sampler.py: both samplers give the trainer's logprobs, after weight syncs, at any temperature;
how completions end. hf_sampler.py: what is drawn, and which models it refuses."""

import json
import math
import operator
import shutil
import statistics

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from data.prompts import decode
from engine import policy
from engine.hf_sampler import TransformersSampler, draw, float8_linear, to_float8
from engine.loading import eos_ids, pretrained
from engine.parallel import seed_of
from engine.sampler import make_sampler
from helpers import needs_vllm
from test_layout import random_model


def gap(model, prompts, groups, temperature):
    """Largest difference between the sampler's logprobs and the trainer's."""
    batch = policy.make_batch([*zip(prompts, groups)])
    ours, _ = policy.compute_logprobs(policy.Policy(model, temperature), batch)
    return (ours - batch.sampler_logprobs)[batch.mask].abs().max().item()


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=needs_vllm)])
def both(request, tokenizer):
    """both(folder) -> a sampler, which is closed in the end; the trainer's model; the prompts."""
    made = []

    def make(folder, **settings):
        made.append(make_sampler(request.param, folder, dtype="float32", max_length=48,
                                 eos=eos_ids(folder, tokenizer), **settings))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompts = "1,2,3=6:", "7,1,9=16:", "4,4,9=1:", "12"
        return made[-1], model, [tokenizer.encode(p) for p in prompts]
    yield make
    for sampler in made:
        sampler.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_samples_are_those_of_the_policy_after_two_syncs_too(both, tied, small, tokenizer):
    sampler, model, prompts = both(small(tied))

    def sample(seed=1, temperature=1.0, max_tokens=12):
        return sampler.sample(prompts, 8, seed=seed, temperature=temperature, max_tokens=max_tokens)

    assert gap(model, prompts, sample(), 1.0) < 1e-4
    # no top-k, no top-p, the right temperature: first tokens as often as the policy says
    prompt = tokenizer.encode("1,2=")
    group, = sampler.sample([prompt], 4000, seed=2, temperature=1.5, max_tokens=1)
    first = torch.tensor([c.tokens[0] for c in group])
    seen = torch.bincount(first, minlength=len(tokenizer)) / 4000
    with torch.no_grad():
        wanted = (model(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(-1)
    assert (seen - wanted).abs().max() < 0.03 and (seen - wanted).abs().sum() < 0.2
    assert seen[wanted < wanted.median()].sum() > 0  # the tail is sampled too
    for sync in range(2):
        with torch.no_grad():
            for p in model.parameters():
                g = torch.Generator().manual_seed(sync)
                p.add_(0.1 * p.std() * torch.randn(p.shape, generator=g))
        if sync == 1:
            assert gap(model, prompts, sample(), 1.0) > 1e-2  # this test sees stale weights
        sampler.load_weights(model.state_dict().items())
        for temperature in (1.0, 0.7):
            groups = sample(temperature=temperature)
            assert gap(model, prompts, groups, temperature) < 1e-4
            assert gap(model, prompts, groups, 1.7 - temperature) > 1e-2  # and a wrong temperature

    # what is sampled is a function of the seed and nothing before it
    first, other, again = ([[c.tokens for c in g] for g in sample(seed)] for seed in (5, 6, 5))
    assert first == again != other
    before = torch.get_rng_state()
    groups = sample()
    assert torch.equal(before, torch.get_rng_state())  # the trainer's generator is left alone
    assert len({tuple(c.tokens) for c in groups[0]}) > 4  # the completions of a group differ

    # how they end: by any of several ids, which then is the last token; or by the limit
    ended = sum(groups, [])
    for c in ended:
        assert c.truncated == (len(c.tokens) == 12 and c.tokens[-1] not in sampler.eos)
        assert len(c.tokens) == len(c.logprobs) and max(c.logprobs) <= 0
    common = statistics.mode(token for c in ended for token in c.tokens)
    sampler.eos = sorted([*sampler.eos, common])
    stopped = sum(sample(), [])
    assert any(not c.truncated and c.tokens[-1] == common for c in stopped)
    assert all(common not in c.tokens[:-1] for c in stopped)
    assert all(len(c.tokens) == 1 for c in sum(sample(max_tokens=1), []))


def test_a_text_ends_a_completion_and_stays_in_it(both, base, tokenizer):
    """Of two tokens, also where it is complete at the last token of all."""
    sampler, model, prompts = both(base, stop="+(")
    groups = sampler.sample(prompts, 40, seed=1, temperature=1.0, max_tokens=12)
    assert gap(model, prompts, groups, 1.0) < 1e-4
    for c in sum(groups, []):
        text = decode(tokenizer, c)
        assert (c.stopped, c.truncated) == ("+(" in text, len(c.tokens) == 12 and not c.stopped)
        assert text.find("+(") in (-1, len(text) - 2) and len(c.tokens) == len(c.logprobs)
        assert tokenizer.decode(c.tokens).startswith(text)
    assert 20 < sum(c.stopped for c in sum(groups, [])) < 140
    short = [c for c in sampler.sample(prompts, 40, seed=1, temperature=1.0, max_tokens=4)[0]
             if len(c.tokens) == 4]
    assert {c.truncated for c in short} == {c.stopped for c in short} == {True, False}


SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
MODELS = [  # the config's class, what it takes beyond SIZES; a window is smaller than the texts
    ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)), ("Qwen2", {}),
    ("Qwen3", dict(head_dim=8)), ("Llama", {}), ("Gemma2", dict(head_dim=8, sliding_window=6)),
    ("Gemma3Text", dict(head_dim=8, sliding_window=6)), ("Mistral", dict(sliding_window=6)),
    ("Lfm2", dict(layer_types=["conv", "full_attention"], block_multiple_of=8)), ("GPT2", {})]


def random_sampler(tmp_path, name="Qwen2", more=None, chunk=None):
    """A sampler of a random model with opinions; several ids end a completion, so that many do."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **(more or {})})
    random_model(config, 3).save_pretrained(tmp_path)
    sampler = TransformersSampler(str(tmp_path), dtype="float32", max_length=64,
                                  eos=[1, 20, 21, 22, 23, 24])
    sampler.chunk = chunk or sampler.chunk
    return sampler


def with_vision(name, folder, tokenizer):
    """The folder of a small model that has a vision tower, too, as the real ones are saved."""
    text = dict(SIZES, head_dim=32, vocab_size=len(tokenizer), sliding_window=6, eos_token_id=1)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    more = {
        "Gemma3": dict(image_token_index=7, boi_token_index=5, eoi_token_index=6),
        "Gemma4": dict(image_token_id=7, boi_token_id=5, eoi_token_id=6, audio_config=None),
        "Qwen3_5": dict(vision_config=dict(vision, depth=1, num_heads=2, out_hidden_size=32))}[name]
    if name == "Gemma3":
        vision.update(image_size=28, patch_size=14)
    if name == "Gemma4":
        text.update(vocab_size_per_layer_input=len(tokenizer), global_head_dim=32,
                    hidden_size_per_layer_input=8)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(getattr(transformers, f"{name}Config")(
        **{"text_config": text, "vision_config": vision, **more}))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.1)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    assert "vision_config" in json.loads((folder / "config.json").read_text())
    return str(folder)


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4"])
def test_of_a_model_with_vision_the_text_model_is_trained_and_sampled(
        name, both, tmp_path, tokenizer):
    folder, saved = with_vision(name, tmp_path / "all", tokenizer), str(tmp_path / "saved")
    sampler, _, prompts = both(folder)
    model = pretrained(folder)
    for _ in range(2):
        groups = sampler.sample(prompts, 8, seed=1, temperature=1.0, max_tokens=12)
        assert gap(model, prompts, groups, 1.0) < 1e-4
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * p.abs().mean() * torch.randn_like(p))
        assert gap(model, prompts, groups, 1.0) > 1e-2
        sampler.load_weights(model.state_dict().items())
    # its checkpoint is that of an ordinary text model
    model.save_pretrained(saved)
    assert type(AutoModelForCausalLM.from_pretrained(saved)) is type(model)
    ids = torch.tensor([prompts[0]])
    assert torch.equal(pretrained(saved)(ids).logits, model(ids).logits)
    assert b"language_model" not in (tmp_path / "saved/model.safetensors").read_bytes()


def test_a_text_model_that_keeps_a_state_is_not_sampled_and_quantised_weights_are_refused(
        base, tmp_path, tokenizer):
    folder = with_vision("Qwen3_5", tmp_path / "state", tokenizer)
    assert type(pretrained(folder)).__name__ == "Qwen3_5ForCausalLM"
    with pytest.raises(ValueError, match="Qwen3_5ForCausalLM, which decodes .* --sampler vllm"):
        TransformersSampler(folder, dtype="float32", eos=[1])
    shutil.copytree(base, tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()),
                                    quantization_config=dict(quant_method="fp8"))))
    with pytest.raises(ValueError, match="has quantised weights"):
        pretrained(tmp_path / "model")


def against_own(sampler, prompts, groups, temperature):
    """-> the largest gap of the sampler's logprobs to the model's own, by passes without a cache;
    and by how much a token is less probable than the most probable one, at most."""
    gaps, below = [], []
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            ids = torch.tensor([prompt + c.tokens])
            with torch.no_grad():
                logits = sampler.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / temperature).log_softmax(-1)
            own = logprobs.gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
            gaps.append((own - torch.tensor(c.logprobs)).abs().max().item())
            below.append((logprobs.max(1).values - own).max().item())
    return max(gaps), max(below)


@pytest.mark.parametrize("name, more", MODELS)
def test_logprobs_are_those_of_a_pass_without_cache(name, more, tmp_path):
    sampler = random_sampler(tmp_path, name, more, chunk=20)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [3, 4] * 7]
    groups = sampler.sample(prompts, 8, seed=3, temperature=1.3, max_tokens=20)
    gap, below = against_own(sampler, prompts, groups, 1.3)
    assert gap < 1e-4 and below > 1
    lengths = [len(c.tokens) for group in groups for c in group]
    assert min(lengths) < 5 and max(lengths) == 20  # some have ended long before others
    # temperature 0 takes the most probable token, but for what kernels round
    greedy = sampler.sample(prompts, 2, seed=3, temperature=0, max_tokens=20)
    assert max(against_own(sampler, prompts, greedy, 1)) < 1e-4


@pytest.mark.parametrize("name, more", [  # Phi3 prepares its inputs itself, Bloom has no positions
    ("Phi3", dict(pad_token_id=0)), ("Bloom", {}), ("Mamba", dict(state_size=8))])
def test_models_that_decode_otherwise_are_refused(name, more, tmp_path):
    with pytest.raises(ValueError, match="^is a \\w+, which decodes .* take --sampler vllm$"):
        random_sampler(tmp_path, name, more)


def test_a_prompt_is_computed_once_and_who_has_ended_leaves(tmp_path, monkeypatch):
    sampler = random_sampler(tmp_path, chunk=48)
    shapes, own = [], sampler.model.forward
    monkeypatch.setattr(sampler.model, "forward", lambda **inputs: (
        shapes.append(tuple(inputs["input_ids"].shape)), own(**inputs))[1])
    groups = sampler.sample([[5, 6], [7, 8, 9]], 24, seed=1, temperature=1.0, max_tokens=20)
    assert shapes[0] == (2, 3)
    sizes = [rows for rows, _ in shapes[1:]]
    lengths = [len(c.tokens) for g in groups for c in g]
    for step, size in enumerate(sizes, 1):
        going = sum(length > step for length in lengths)
        assert going <= size <= max(going / 0.9, sizes[step - 2] if step > 1 else 48)
    assert sizes[-1] < 30 and {columns for _, columns in shapes[1:]} == {1}


def test_tokens_are_drawn_as_often_as_they_are_probable():
    """Also behind and before tokens of probability 0, at a temperature, and under top_p."""
    torch.manual_seed(0)
    logits = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf, 2.0, -5.0, 0.5, -torch.inf])
    rows = 200_000
    for temperature, top_p in ((2.0, 1.0), (1.0, 0.8)):
        tokens, logprobs = draw(logits.expand(rows, -1), temperature, top_p)
        p = (logits / temperature).softmax(-1)
        assert torch.allclose(logprobs.exp(), p[tokens])  # of all tokens, whatever top_p leaves out
        if top_p < 1:
            assert p[[4, 2]].sum() < 0.8  # and with the next one, which is kept, above
            p[[0, 1, 3, 5, 7]] = 0
            p /= p.sum()
        seen = torch.bincount(tokens[:, 0], minlength=8) / rows
        assert ((seen - p).abs() < 4 * (p * (1 - p) / rows).sqrt() + 1e-9).all()
    assert (draw(logits.expand(3, -1), 0, 1.0)[0] == 4).all()


V = 262_144  # Gemma's


def test_the_same_random_numbers_give_the_tokens_of_a_sum_in_float64():
    torch.manual_seed(0)
    for size in (V, 1000):
        logits = torch.randn(100, size) * 4
        logits[::2, ::3] = -torch.inf
        tokens, logprobs = draw(logits, 0.7, 1.0, torch.Generator().manual_seed(1))
        log_pi = (logits.double() / 0.7).log_softmax(-1)
        point = torch.rand(100, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        below = log_pi.exp().cumsum(-1)
        exact = torch.searchsorted(below, point * below[:, -1:], right=True)
        assert (tokens == exact).float().mean() >= 0.99  # a point may lie 1e-7 beside a border
        assert (logprobs - log_pi.gather(1, tokens)).abs().max() < 2e-6  # 1e-6, and the division


def e4m3(x):
    """The nearest number of e4m3: three bits after the leading one, exponents from -6 on."""
    step = 2.0 ** (max(math.floor(math.log2(abs(x))), -6) - 3) if x else 1.0
    return round(x / step) * step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float8_is_a_loop_over_plain_floats(dtype):
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 5).to(getattr(torch, dtype))
    x = (torch.randn(3, 24) * torch.tensor([[1e-3], [1.0], [300.0]])).to(layer.weight.dtype)

    def rounded(row):
        scale = max(map(abs, row)) / 448
        return [e4m3(v / scale) for v in row], scale
    weights = [rounded(row) for row in layer.weight.tolist()]
    bias, expected = layer.bias.tolist(), []
    for row in x.tolist():
        numbers, scale = rounded(row)
        expected.append([sum(map(operator.mul, numbers, w)) * scale * s + b
                         for (w, s), b in zip(weights, bias)])
    with torch.no_grad():
        layer.weight[:], scale = to_float8(layer.weight)
        layer.scale = scale[:, 0]
        found = float8_linear(layer, x)
    assert found.dtype == x.dtype
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_float8_rounds_all_linear_layers_but_the_head_at_each_sync(base, tokenizer):
    eos = eos_ids(base, tokenizer)
    exact, coarse = (TransformersSampler(base, dtype="float32", eos=eos, float8=float8)
                     for float8 in (False, True))
    prompts = [tokenizer.encode("1,2,3=6:")]
    weights = {name: 0.5 * w.clone() for name, w in exact.model.state_dict().items()}
    gaps = []
    for new in ({}, weights):
        for sampler in (exact, coarse) * bool(new):
            sampler.load_weights(new.items())
        found = [sampler.model(torch.tensor(prompts)).logits.detach()
                 for sampler in (exact, coarse)]
        gaps.append((found[0] - found[1]).abs().mean())
    assert all(1e-3 < gap < 0.5 for gap in gaps), gaps
    head = coarse.model.get_output_embeddings()
    assert torch.equal(head.weight, weights["lm_head.weight"]) and len(coarse.float8) == sum(
        isinstance(m, torch.nn.Linear) for m in coarse.model.modules()) - 1
    for layer in coarse.float8:
        real = (layer.weight * layer.scale[:, None]).float()
        assert len(layer.weight.unique()) <= 255 and real.abs().max() > 0


def test_seeds_are_spread_and_sequences_at_once_fewer_where_the_vocabulary_is_large(tmp_path):
    seeds = [seed_of(seed, rollout) for seed in range(50) for rollout in range(50)]
    assert len(set(seeds)) == 2500 and all(0 <= s < 2**63 for s in seeds)
    assert seed_of(0, 1) == seed_of(0, 1) and seed_of(0, 1) != seed_of(1, 0)
    for vocabulary, chunk in ((97, 512), (V, 256)):
        assert random_sampler(tmp_path, more=dict(vocab_size=vocabulary)).chunk == chunk


def test_every_eos_id_is_found(tmp_path, tokenizer, base):
    folder = shutil.copytree(base, tmp_path / "model")
    assert eos_ids(str(folder), tokenizer) == [1]
    for said, more in (([7, 9], [7, 9]), (-1, []), ([-1, 99999], []), (None, []), ("</s>", [])):
        (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=said)))
        assert eos_ids(str(folder), tokenizer) == [1, *more]

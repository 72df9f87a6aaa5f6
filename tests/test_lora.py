"""LoRA learns at its default rate; all that is trained reaches sampler and checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import train
from engine import loading, parallel, vllm_settings
from engine.hf_sampler import TransformersSampler
from engine.policy import compute_logprobs, make_batch
from engine.sampler import make_sampler
from helpers import needs_vllm, read_rows, weights, without
from ranks import load, rollout
from study import tiny
from test_layout import random_model
from test_policy import SIZES, UNEVEN, batch_of

SHORT = ("--loss fade --lora_rank 1 --rollouts 4 --eval_every 0 --save_every 0 "
         "--sampler transformers").split()


def rollouts(model, out, *flags):
    """-> the records of a run's four rollouts."""
    train.main(["--model", model, "--out", str(out), *SHORT, *flags])
    return read_rows(out)


def test_rank_one_learns_at_the_default_rate_ten_times_that_of_all_weights(base, tmp_path):
    """Rewards of the last two rollouts are 0.09 to 0.10 higher with seeds 0, 1 and 2, and by
    chance, on the same problems, about 0.02 apart."""
    few = "--problems_per_rollout", "32"
    learnt = rollouts(base, tmp_path / "default", *few)
    still = rollouts(base, tmp_path / "low", *few, "--lr", "1e-6")
    assert learnt[0]["optim/lr"] == pytest.approx(5e-4)
    assert still[0]["optim/lr"] == pytest.approx(1e-6)
    gains = [a["reward/mean"] - b["reward/mean"] for a, b in zip(learnt, still, strict=True)]
    assert gains[0] == 0  # sampled before the first step: the same problems, weights and seed
    assert (gains[2] + gains[3]) / 2 > 0.05, gains
    args, _ = train.parse_args(["--lora_rank", "1", "--model", "x"])
    assert args.lr == pytest.approx(1e-5) and "ten times" in args.origin["lr"]
    assert train.parse_args(["--lora_rank", "1", "--lr", "1e-4"])[0].lr == 1e-4
    (tmp_path / "config.json").write_text("{}")
    for settings, lr in (dict(lora_rank=1), 1e-5), (dict(lora_rank=1, lr=1e-3), 1e-3):
        (tmp_path / "recipe.json").write_text(json.dumps(dict(settings=settings)))
        assert train.parse_args(["--model", str(tmp_path)])[0].lr == pytest.approx(lr)


def adapted(folder, dtype="float32", **options):
    """A policy whose adapters change something."""
    torch.manual_seed(0)
    p = loading.load(folder, [1], batch_of(*UNEVEN), loading.Compute(
        budget=60, dtype=dtype, lora_rank=4, **options))
    with torch.no_grad():
        for name, x in p.named_parameters():
            if "lora_B" in name:
                x.normal_(std=0.02)
    return p


def forward_and_gradient(p, batch):
    outputs = p(batch)
    (outputs[0].sum() + 0.3 * outputs[1].sum()).backward()
    gradients = [x.grad.flatten() for x in p.parameters() if x.requires_grad]
    return torch.cat([*(x.detach().flatten() for x in outputs), *gradients])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frozen_layers_in_half_precision_give_the_same_bits(small, dtype):
    """Autocast computes in them anyhow. Without its adapters the model is the initial one."""
    folder, batch = small(), rollout(101)
    halved, whole = adapted(folder, dtype), adapted(folder)
    assert {x.dtype for x in halved.parameters()} == {getattr(torch, dtype), torch.float32}
    assert {x.dtype for x in whole.parameters()} == {torch.float32}
    whole.dtype = dtype
    first = loading.load(folder, [1], batch_of(*UNEVEN), loading.Compute(budget=60, dtype=dtype),
                         frozen=True)
    off, wanted, on = (compute_logprobs(p, batch) for p in (
        loading.WithoutAdapters(halved), first, halved))
    assert all(map(torch.equal, off, wanted)) and not torch.equal(off[0], on[0])
    assert torch.equal(*(forward_and_gradient(p, batch) for p in (halved, whole)))


def test_frozen_experts_are_halved_too(tmp_path):
    """Autocast would compute in them in float32."""
    folder, batch = folder_of("glm4_moe", tmp_path), batch_of(*UNEVEN)
    whole, halved = (loading.load(folder, [1], batch, loading.Compute(
        budget=100, dtype=dtype, lora_rank=4)) for dtype in ("float32", "bfloat16"))
    assert {p.dtype for p in loading.experts_of(halved.model)} == {torch.bfloat16}
    gap = (whole(batch)[0] - halved(batch)[0])[batch.mask].abs().mean()
    assert 0 < gap < 0.01 and forward_and_gradient(halved, batch).isfinite().all()


def test_adapters_are_scaled_by_alpha_over_rank(small):
    plain, *more = (dict(parallel.weights(p))["model.layers.0.mlp.up_proj.weight"] for p in (
        load(small()), adapted(small(), lora_alpha=4), adapted(small(), lora_alpha=8)))
    once, twice = (weight - plain for weight in more)
    assert once.norm() > 0 and torch.allclose(2 * once, twice, atol=1e-6)


@pytest.mark.parametrize("kind, dtype, more", [
    ("transformers", "bfloat16", {}), ("transformers", "bfloat16", dict(float8=True)),
    ("transformers", "float32", dict(float8=True)),
    pytest.param("vllm", "bfloat16", dict(max_length=48), marks=needs_vllm)])
def test_adapters_stay_beside_the_rounded_weights_of_a_sampler(kind, dtype, more, small):
    """Merged, nine tenths of a small step are rounded away. They come with the second sync, too."""
    folder = small()
    policy = loading.load(folder, [1], batch_of(*UNEVEN), loading.Compute(
        budget=60, dtype=dtype, lora_rank=4))
    sampler = make_sampler(kind, folder, dtype=dtype, eos=[1], adapters=(4, 32.0), **more)
    assert not sampler.merged
    for step in (1e-6, 0.02):
        with torch.no_grad():
            for name, x in policy.named_parameters():
                if "lora_B" in name:
                    x.copy_(step * (torch.rand_like(x) - 0.5).sign())
        sampler.load_weights(parallel.weights(policy, sampler.merged))
        prompts = [5, 6, 7], [8, 9, 10, 11]
        batch = make_batch([*zip(map(list, prompts), sampler.sample(
            [*map(list, prompts)], 8, seed=1, temperature=1.0, max_tokens=12))])
    off, on = ((compute_logprobs(p, batch)[0] - batch.sampler_logprobs)[batch.mask].abs().mean()
               for p in (loading.WithoutAdapters(policy), policy))
    sampler.close()
    assert on < (0.5 if more.get("float8") else 0.1) * off


MIXTURE = dict(  # under all the names of these numbers
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4,
    num_experts_per_tok=2, moe_topk=2, moe_k=2, moe_intermediate_size=16, n_group=1, topk_group=1,
    n_shared_experts=1, moe_num_shared_experts=1, shared_expert_intermediate_size=16,
    shared_intermediate_size=16, first_k_dense_replace=1, moe_layer_start_index=1)
LATENT = dict(head_dim=8, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
              v_head_dim=8)
LINEAR = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
              linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
BOTH = dict(layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True)
FAMILIES = {
    **dict.fromkeys("llama qwen2 qwen3 phi phi3 olmo2 granite".split(), {}), "gemma3_text": BOTH,
    **dict.fromkeys("qwen2_moe mixtral olmoe granitemoeshared glm4_moe ernie4_5_moe "
                    "hunyuan_v1_moe".split(), MIXTURE),
    "deepseek_v2": MIXTURE | LATENT, "deepseek_v3": MIXTURE | LATENT, "dots1": MIXTURE | BOTH,
    "gpt_oss": MIXTURE | BOTH, "qwen3_moe": MIXTURE | dict(mlp_only_layers=[0]),
    "qwen3_next": MIXTURE | LINEAR,
    "jamba": MIXTURE | dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False)}


def folder_of(family, folder, **sizes):
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | sizes)
    random_model(config, 2).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family, rank", [
    *((family, 4) for family in FAMILIES),
    *((family, 0) for family in ("llama", "gemma3_text", "qwen3_moe"))])  # 0: all weights
def test_what_is_trained_reaches_sampler_and_checkpoint(family, rank, tmp_path):
    folder, batch = folder_of(family, tmp_path / "first"), batch_of(*UNEVEN)
    plain, trained = (loading.load(folder, [1], batch, loading.Compute(budget=100, lora_rank=r))
                      for r in (0, rank))
    with torch.no_grad():
        for p in trained.parameters():  # frozen ones, too: at first experts change next to nothing
            p.add_(0.2 * torch.randn(p.shape))
    expected, weights = trained(batch)[0], dict(parallel.weights(trained))
    assert (expected - plain(batch)[0]).abs().max() > 1e-2
    plain.model.load_state_dict(weights)
    trained.model.save_pretrained(tmp_path / "saved", state_dict=weights)
    saved = loading.load(tmp_path / "saved", [1], batch)
    for policy in (plain, saved):
        assert (expected - policy(batch)[0]).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "mixtral", "granitemoeshared", "jamba"])
def test_vllm_gets_the_names_and_the_weights_of_a_checkpoint(family, tmp_path, monkeypatch):
    """transformers fuses the experts of a mixture, and vLLM knows some of them by other names."""
    model = loading.pretrained(folder_of(family, tmp_path))
    empty, weights = vllm_settings.empty_model(model.config), model.state_dict().items()
    if family != "qwen2":
        with pytest.raises(ValueError, match="vLLM packs only once on a CPU"):
            vllm_settings.as_saved(empty, weights, {})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    told = dict(vllm_settings.as_saved(empty, weights, {}))
    saved = load_file(tmp_path / "model.safetensors")
    assert told.keys() == saved.keys() and all(torch.equal(told[k], saved[k]) for k in saved)


SMALL = ("--loss grpo --rollouts 3 --problems_per_rollout 2 --group_size 4 --max_tokens 8 "
         "--steps_per_rollout 2 --save_every 1 --lora_rank 4 --lr 0.05 --seed 1").split()


def test_a_run_on_a_mixture(tmp_path, graded, capsys):
    tokenizer = tiny.tokenizer()
    folder = folder_of("glm4_moe", tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    out, flags = tmp_path / "whole", [*SMALL, "--kl_coef", "0.1", "--keep", "9"]
    records = rollouts(folder, out, *flags)
    assert all(r["sampler/logp_absdiff_max"] < 1e-4 for r in records)
    assert records[0]["steps"][0]["loss/kl"] < 1e-6 < 1e-3 < records[2]["loss/kl"]
    said = capsys.readouterr().out
    assert "adapters on 14 linear layers" in said and "apart on average" not in said
    cut = without(out, tmp_path / "cut", 3)
    train.main(["--out", str(cut), "--resume"])
    assert weights(cut, 3) == weights(out, 3)
    # adapters of other layers, or under other names: not with their moments forgotten
    state = torch.load(cut / "checkpoints" / "rollout_000003" / "trainer.pt")
    owned = state["trainer"]
    owned["adapter"] = {f"{name}.default": x for name, x in owned["adapter"].items()}
    torch.save(state, cut / "checkpoints" / "rollout_000003" / "trainer.pt")
    with pytest.raises(train.RunFailed, match="adapters that this model lacks"):
        train.main(["--out", str(cut), "--resume", "--rollouts", "4"])


def test_a_sampler_that_lacks_trained_weights_is_said_once(base, tmp_path, graded, monkeypatch,
                                                           capsys):
    """Also after a resume: the first rollout's gap is in the checkpoint."""
    out, said = tmp_path / "run", "log probabilities of sampler and trainer are"
    rollouts(base, out, *SMALL, "--rollouts", "2")
    assert said not in capsys.readouterr().out
    own = TransformersSampler.load_weights
    monkeypatch.setattr(TransformersSampler, "load_weights", lambda self, weights: own(
        self, [(n, w) for n, w in weights if "mlp" not in n]))
    train.main(["--out", str(out), "--resume", "--rollouts", "5"])
    text = capsys.readouterr().out
    assert text.count(said) == 1 and "in rollout 1." in text

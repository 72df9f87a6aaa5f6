"""A prompt that goes through the model once gives what it gives with each completion."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AutoModelForCausalLM

import test_policy
from engine import forward, loading, policy
from losses import METHODS
from test_policy import batch_of, same_metrics

SIZES = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4)
CONFIGS = dict(
    qwen2=transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
    llama=transformers.LlamaConfig(**SIZES),
    mistral=transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16),
    gpt2=transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=900,
                                 bos_token_id=1, eos_token_id=1))
# lengths of the prompts, completions of each, and their longest
GROUPS = dict(short=([4, 6, 5, 1], 4, 12), long_prompts=([70, 100, 70], 3, 12),
              long_completions=([20, 9], 3, 600), one_token=([5, 3], 3, 1), alone=([4, 9, 7], 1, 9))


def random_model(config, factor):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


@pytest.fixture(scope="module")
def models():
    """In float64; transformers' own RMSNorm would compute in float32 all the same."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, norm in dict(qwen2="Qwen2", llama="Llama", mistral="Mistral").items():
            patch.setattr(f"transformers.models.{kind}.modeling_{kind}.{norm}RMSNorm",
                          torch.nn.RMSNorm)
        return {name: random_model(config, 3).double() for name, config in CONFIGS.items()}


def groups(prompt_lengths, each, longest, seed=1):
    """A Batch of so many completions of each prompt, of any lengths, in an order of their own."""
    g = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(5, 101, (n,), generator=g).tolist()

    prompts = [prompt for prompt in map(ids, prompt_lengths) for _ in range(each)]
    completions = [ids(n) for n in torch.randint(1, longest + 1, (len(prompts),), generator=g)]
    order = torch.randperm(len(prompts), generator=g)
    return batch_of(*(completions[i] for i in order), prompts=[prompts[i] for i in order])


def outcome(model, batch, name, dtype="float32"):
    """-> logprobs, entropy and the gradient of both, each in one tensor, with a layout."""
    chosen = policy.Policy(model, 0.8, dtype, layout=name)
    model.zero_grad()
    logprobs, entropy = chosen(batch)
    weigh = torch.linspace(-1, 2, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape)
    (logprobs * weigh + entropy * weigh.flip(0)).sum().backward()
    chosen.use_layout("padded")
    return (logprobs.detach(), entropy.detach(),
            torch.cat([p.grad.flatten() for p in model.parameters()]).double())


@pytest.mark.parametrize("lengths", GROUPS)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_layouts_agree(models, architecture, lengths):
    batch = groups(*GROUPS[lengths])
    wanted, shared, again = (outcome(models[architecture], batch, layout)
                             for layout in ("padded", "shared", "padded"))
    assert wanted[0].abs().max() > 1 and wanted[2].norm() > 1
    for a, b, c in zip(wanted, shared, again, strict=True):
        assert (a - b).norm() <= 1e-11 * a.norm() + 1e-12 and torch.equal(a, c)


@pytest.mark.parametrize("lengths", ["short", "long_prompts"])
def test_in_float32_and_in_16_bits(lengths):
    """bfloat16 is as far from float64 as unshared, though many gradients meet in one prompt."""
    model = random_model(CONFIGS["qwen2"], 2)
    off = {"padded": [], "shared": []}
    prompts, _, longest = GROUPS[lengths]
    for seed in range(6):
        batch = groups(prompts, 16, longest, seed)
        exact = outcome(copy.deepcopy(model).double(), batch, "padded")
        for a, b in zip(exact, outcome(model, batch, "shared"), strict=True):
            assert (a - b).norm() < 1e-5 * a.norm()
        for name, errors in off.items():
            rough = outcome(model, batch, name, "bfloat16")
            errors.append([((a - b).norm() / a.norm()).item()
                           for a, b in zip(exact, rough, strict=True)])
    padded, shared = (torch.tensor(off[name]).mean(0) for name in ("padded", "shared"))
    assert (padded > 1e-5).all() and (shared < 1.1 * padded).all()


def step_gradient(model, batch, name, weigh, **settings):
    gradient = test_policy.step_gradient(policy.Policy(model, 0.8, **settings), batch,
                                         METHODS[name], weigh, kl_coef=0.1, entropy_coef=0.05)
    policy.Policy(model)  # padded again
    return gradient


@pytest.mark.parametrize("name, how", [
    *((name, "") for name in METHODS), ("acpo", "lora"), ("acpo", "checkpointing")])
def test_every_method_and_every_split_has_the_unshared_gradient(models, name, how):
    model, g = copy.deepcopy(models["qwen2"]), torch.Generator().manual_seed(3)
    batch = test_policy.scored(policy.Policy(model, 0.8), groups(*GROUPS["short"]), g)
    if how == "lora":
        loading.add_adapters(model, 4, 32)
        with torch.no_grad():
            for p in (p for n, p in model.named_parameters() if "lora_B" in n):
                p.normal_(std=0.1)
        model.double()
    plain = [step_gradient(model, batch, name, weigh) for weigh in METHODS[name].passes]
    if how == "checkpointing":
        for layer in loading.layers_of(model):
            layer.training = True
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    for weigh, (wanted, told) in zip(METHODS[name].passes, plain, strict=True):
        assert wanted.norm() > 1e-6
        for budget in (14, 10**9):  # of groups in parts, a row or more, and all at once
            shared, metrics = step_gradient(model, batch, name, weigh, budget=budget,
                                            layout="shared")
            assert (shared - wanted).norm() <= 1e-9 * wanted.norm()
            same_metrics(metrics, told)


def test_what_goes_through_the_model():
    """Prompts once, completions without their last tokens."""
    batch = batch_of([11, 12, 13], [14], [15, 16], [17, 18], prompts=[[7, 8, 9]] * 3 + [[5]])
    inputs, *_ = forward.lay(batch, "shared")
    assert inputs["input_ids"].tolist() == [[7, 8, 9, 5, 11, 12, 15, 17]]


def varlen_by_hand(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size, enable_gqa=False):
    """torch's kernel as it is documented: segment by segment, causal from the last key."""
    assert window_size[1] == 0 and cu_q.diff().max() == max_q and cu_k.diff().max() == max_k
    assert cu_q.dtype == cu_k.dtype == torch.int32
    out = torch.zeros_like(q)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        sees = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        if window_size[0] >= 0:
            sees &= sees.triu(d - c - (b - a) - window_size[0])
        out[a:b] = functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])), attn_mask=sees,
            scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_call_of_a_gpus_kernel(models, architecture, monkeypatch):
    """The kernel itself is not here: its call is answered by hand."""
    from torch.nn.attention import varlen
    assert {"cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"} <= {
        *inspect.signature(varlen.varlen_attn).parameters}
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_hand)
    batch = groups(*GROUPS["short"])
    wanted = outcome(models[architecture], batch, "padded")
    lay = forward.lay
    monkeypatch.setattr(policy, "lay", lambda batch, name, _: lay(batch, name, by_kernel=True))
    for a, b in zip(wanted, outcome(models[architecture], batch, "shared"), strict=True):
        assert (a - b).norm() <= 1e-11 * a.norm()


BATCHES = dict(  # rows of 9, 5, 8, 2, 2 and 7; groups of 3 + 2, 3 + 4 + 1, 1 + 9, 2 + 1 and 1 + 2
    padded=batch_of(*([5] * n for n in (8, 4, 7, 1, 1, 6))),
    shared=batch_of(*([5] * n for n in (2, 4, 1, 9, 1, 2)),
                    prompts=[[1, 1, 1], [2, 2, 2], [2, 2, 2], [3], [4, 4], [5]]),
    long=batch_of(*([5] * n for n in (2, 1, 2, 1)), prompts=[[1] * 16, [2], [1] * 16, [1] * 16]))


@pytest.mark.parametrize("name, budget, ranks, parts", [
    ("padded", 18, 1, [[0, 2], [5, 1], [3, 4]]),   # 9 twice is 18; 7 thrice would be 21
    ("padded", 26, 1, [[0, 2], [5, 1, 3], [4]]),   # 9 thrice, not 9 + 9 + 8: the longest counts
    ("padded", 99, 1, [[0, 2, 5, 1, 3, 4]]), ("padded", 99, 2, [[0, 2, 5], [1, 3, 4]]),
    ("padded", 18, 2, [[0], [2], [5, 1], [3, 4]]),  # the first of the largest is halved
    ("padded", 8, 1, [[0], [2], [5], [1], [3, 4]]),  # 9 is more than the budget, and alone
    ("shared", 99, 1, [[3, 1, 2, 0, 4, 5]]), ("shared", 99, 2, [[3, 1, 2], [0, 4, 5]]),
    ("shared", 17, 1, [[3], [1, 2, 0, 4], [5]]),    # 10, and 7 for 1 alone: a group stays whole
    ("shared", 10, 1, [[3], [1, 2], [0, 4], [5]]),  # 10; 8, and 5 more would not fit; 5 + 3
    ("shared", 7, 1, [[3], [1], [2], [0], [4, 5]]),   # a group that does not fit is cut
    ("shared", 7, 8, [[], [], [3], [1], [2], [0], [4], [5]]),  # as many as ranks, some empty
    ("long", 24, 1, [[0, 2, 3], [1]]),  # 16, a sixteenth thrice, 2 + 2 + 1; and 2
    ("long", 23, 1, [[0, 2], [3, 1]])])
def test_micro_batches_by_hand(name, budget, ranks, parts):
    layout = "padded" if name == "padded" else "shared"
    assert forward.micro_batches(BATCHES[name], budget, layout, ranks) == parts


def probe():
    return loading.probe_batch([7, 9, 8, 12, 30, 31, 32, 33], 1)


def test_a_model_that_looks_across_places_or_whose_kernel_fails_is_padded(models, capsys):
    assert probe().group.tolist() == [0, 0, 0, 1] and probe().prompt_len.tolist() == [3, 3, 3, 1]
    for name in ("qwen2", "mistral"):
        chosen = policy.Policy(models[name])
        assert loading.try_shared(chosen, probe()) and chosen.layout == "shared"
        chosen.use_layout("padded")
    assert not capsys.readouterr().out

    mixed = copy.deepcopy(models["qwen2"])
    mixed.model.layers[0].mlp.register_forward_pre_hook(  # each place sees the one before it
        lambda _, given: given[0] + functional.pad(given[0], (0, 0, 1, 0))[:, :-1])
    chosen = policy.Policy(mixed)
    assert not loading.try_shared(chosen, probe()) and chosen.layout == "padded"
    assert "the model does not allow for the layout 'shared' (log prob" in capsys.readouterr().out

    # a kernel may fail in its backward pass
    chosen = policy.Policy(copy.deepcopy(models["qwen2"]))
    assert loading.try_shared(chosen, probe(), backward=True)
    assert all(p.grad is None for p in chosen.parameters())

    def fail(*_):
        raise RuntimeError("head size 256")
    chosen.model.model.layers[0].register_full_backward_hook(fail)
    assert not loading.try_shared(chosen, probe(), backward=True)
    assert chosen.layout == "padded" and "'shared' (head size 256)" in capsys.readouterr().out
    assert all(p.grad is None for p in chosen.parameters())


@pytest.mark.parametrize("kind, sizes, said", [
    # a window that the masks alone know of, and longer than the probe
    ("Qwen2Moe", dict(SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=40,
                      max_window_layers=2, num_experts=4, moe_intermediate_size=24,
                      shared_expert_intermediate_size=24), "masks limit"),
    ("GptOss", dict(SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4,
                    layer_types=["full_attention"] * 2), "sinks"),
    ("Bloom", dict(vocab_size=101, hidden_size=32, n_layer=2, n_head=4), ""),
    ("Lfm2", dict(SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"],
                  block_auto_adjust_ff_dim=False), "off by")])
def test_attention_that_does_more_is_left_to_padding(kind, sizes, said, capsys):
    chosen = policy.Policy(random_model(getattr(transformers, f"{kind}Config")(**sizes), 2))
    assert not loading.try_shared(chosen, probe())
    told = capsys.readouterr().out
    assert "does not allow for the layout 'shared'" in told and said in told
    assert chosen.model.config._attn_implementation != "shared"


@pytest.mark.parametrize("share, checked", [(True, ["float32", "bfloat16"]), (False, [])])
def test_what_load_chooses(small, share, checked, monkeypatch):
    """Checked in float32 first, whatever --dtype is: 16 bits would hide small errors."""
    found, own = [], loading.try_shared
    monkeypatch.setattr(loading, "try_shared", lambda policy, *given, **more: (
        found.append(policy.dtype), own(policy, *given, **more))[1])
    chosen = loading.load(small(), [1], probe(), loading.Compute(
        dtype="bfloat16", share_prompts=share))
    assert chosen.layout == ("shared" if share else "padded") and found == checked


@pytest.mark.parametrize("name", ["padded", "shared"])
@pytest.mark.parametrize("batch", ["long_prompts", "long_completions"])
@pytest.mark.parametrize("kind", ["qwen2", "mistral"])  # mistral: a window
def test_repeated_heads_are_grouped_ones(models, name, batch, kind, monkeypatch):
    """Where a GPU has no flash kernels, keys and values are repeated for each query head."""
    batch = groups(*GROUPS[batch])
    wanted = outcome(models[kind], batch, name)
    heads, own = set(), forward.repeated
    monkeypatch.setattr(forward, "must_repeat", lambda _: True)
    monkeypatch.setattr(forward, "repeated", lambda *given: (
        heads.update(x.shape[1] for x in own(*given)), own(*given))[1])
    for a, b in zip(outcome(models[kind], batch, name), wanted, strict=True):
        assert (a - b).abs().max() < 1e-11 * b.abs().max()
    assert heads == {4}


@pytest.mark.parametrize("device, dtype, capability, flash", [
    ("cuda", "float16", (7, 5), False), ("cuda", "bfloat16", (8, 0), True),
    ("cuda", "float32", (9, 0), False), ("cpu", "bfloat16", None, False)])
def test_where_flash_attention_runs(device, dtype, capability, flash, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    there, dtype = torch.device(device), getattr(torch, dtype)
    assert forward.flash_runs(there, dtype) == flash
    values = SimpleNamespace(is_cuda=device == "cuda", device=there, dtype=dtype)
    assert forward.must_repeat(values) == (device == "cuda" and not flash)

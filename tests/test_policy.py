"""policy.py: the gradient of an optimizer step does not depend on how it is cut up."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from conftest import ROOT, between
from engine import forward, loading, policy
from engine.sampler import Completion
from losses import METHODS, row
from ranks import EXACT_NORMS
from study import tiny

ROWS = 11
UNEVEN = [5, 6, 7, 8], [5, 6], [5], [7]  # completions
# the sampler's difference in products and means over a completion
CORRECTED = row("grpo", select="sequence_mask,geometric_mask").bind(
    sequence_mask_high=1.4, geo_low=0.85, geo_high=1.15)


@pytest.fixture(scope="module")
def model():
    recipe = dict(tiny.RECIPE, hidden=32, mlp=48, layers=2, heads=2, seed=3)
    with EXACT_NORMS:
        model = tiny.empty_model(recipe, 101).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    return policy.Policy(model, temperature=0.8, budget=10**9)


def batch_of(*completions, prompts=None):
    """A batch of these completions, lists of token ids, of one prompt of one token, or of a prompt
    each: rows of equal prompts are one group, also where they lie apart, as in shuffled shares."""
    prompts = prompts or [[1]] * len(completions)
    batch = policy.make_batch([(prompt, [Completion(ids, [0.0] * len(ids), False)])
                               for prompt, ids in zip(prompts, completions, strict=True)])
    batch.group = torch.tensor([prompts.index(p) for p in prompts]).unique(return_inverse=True)[1]
    return batch


def scored(model, batch, g):
    logprobs, batch.entropy = policy.compute_logprobs(model, batch)
    noise = 0.3 * torch.randn(logprobs.shape, generator=g, dtype=torch.float64)
    batch.old_logprobs, batch.sampler_logprobs = logprobs - noise, logprobs - noise / 2
    batch.ref_logprobs = logprobs + noise.roll(1, 0)
    advantages = torch.randn(len(batch.ids), 1, generator=g, dtype=torch.float64)
    batch.advantages = advantages.expand(batch.mask.shape)
    return batch


@pytest.fixture(scope="module")
def batch(model):
    """Completions that end with token 0, an end of sequence that is also the padding: it counts."""
    g = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(5, 101, (n,), generator=g).tolist()

    lengths = [(4 + i % 3, 1 + (5 * i) % 9) for i in range(ROWS)]
    prompts = [ids(p) for p, _ in lengths]
    return scored(model, batch_of(*(ids(c)[:-1] + [0] for _, c in lengths), prompts=prompts), g)


def lengths_of(batch):
    return batch.prompt_len + batch.completion_len


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def gradient(model, batch, method, size, monkeypatch, weigh=None, **coefficients):
    """-> the gradient of a step in micro-batches of `size` rows, and the step's metrics."""
    batch = replace(batch, group=torch.arange(ROWS) % 4)  # four prompts, whose rows lie apart
    monkeypatch.setattr(policy, "micro_batches", lambda batch, *given: [
        rows.tolist() for rows in torch.tensor(given[-1] or range(len(batch.ids))).split(size)])
    return step_gradient(model, batch, method, weigh, **coefficients)


def step_gradient(model, batch, method, weigh=None, **coefficients):
    model.zero_grad()
    if "prob_split" in method.flags:  # so that both passes have tokens
        method = method.bind(prob_split=between(batch.old_logprobs[batch.mask].exp()))
    if weigh:
        scored = batch.tokens(batch.old_logprobs, batch.entropy)
        batch = replace(batch, weight=method.call(weigh, scored))
    metrics = policy.backward(model, batch, method, 9, **coefficients)
    return gradient_of(model), metrics


def same_metrics(found, wanted):
    for key, value in wanted.items():
        assert found[key].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12,
                                                  nan_ok=True), key


def only(batch, rows):
    """The batch with an advantage in these rows alone."""
    learnt = torch.tensor([[row in rows] for row in range(ROWS)])
    return replace(batch, advantages=batch.advantages * learnt)


@pytest.mark.parametrize("some", [(0, 3, 7, 8, 10), (10,), ()], ids=lambda some: len(some))
@pytest.mark.parametrize("name", [*METHODS, "corrected"])
def test_neither_the_split_matters_nor_rows_without_an_advantage(model, batch, name, some,
                                                                 monkeypatch):
    """Gradients and what is logged are those of all rows at once. With a KL and an entropy bonus,
    which all rows learn from: test_layout.py"""
    batch, method = only(batch, some), METHODS.get(name, CORRECTED)
    left = lengths_of(batch)[[*some] or [0]] if method.skips_zero_advantage else lengths_of(batch)
    for weigh in method.passes:
        with monkeypatch.context() as patch:
            patch.setattr(policy, "rows_to_learn", lambda *_, **__: [*range(ROWS)])
            whole, told = gradient(model, batch, method, ROWS, patch, weigh)
        assert (whole.norm() > 1e-6) == bool(some) or name in (
            "p3o", "gspo", "luspo", "dro", "kl_cov")
        for size in (1, 3):
            found, metrics = gradient(model, batch, method, size, monkeypatch, weigh)
            assert (found - whole).norm() <= 1e-9 * whole.norm()
            assert metrics["learnt_tokens"] == left.sum()
            same_metrics(metrics, dict(told, learnt_tokens=left.sum()))


@pytest.mark.parametrize("own, options", [
    ({}, dict(kl_coef=0.1)), ({}, dict(entropy_coef=0.1)),
    (dict(objective=lambda t: (t.logprobs - t.sampler_logprobs)**2 - t.advantages * t.ratio), {}),
    (dict(select=lambda t: (t.entropy > t.mean(t.entropy)).to(t.entropy)), {}),
], ids=["kl", "entropy", "own objective", "own select"])
def test_where_all_rows_may_have_a_gradient_all_learn(model, batch, own, options, monkeypatch):
    method, some = replace(METHODS["grpo"], **own), (0, 3, 7) if own else ()
    found, metrics = gradient(model, only(batch, some), method, 3, monkeypatch, **options)
    assert found.norm() > 1e-6 and metrics["learnt_tokens"] == lengths_of(batch).sum()


def test_what_skips_zero_advantage():
    """Of the rows here; one added without an entry in BY_ADVANTAGE sees all completions."""
    own = json.loads((ROOT / "docs" / "methods.json").read_text())
    assert {name for name in own if not METHODS[name].skips_zero_advantage} == {
        name for name in own if METHODS[name].whole_step} | {"dro"}


@pytest.mark.parametrize("name", ["grpo", "acpo", "p3o"])
def test_what_is_logged_is_of_rows_with_an_advantage(model, batch, name, monkeypatch):
    """With every method, also with those that see all rows; shares are of all tokens."""
    rows = [0, 3, 7]
    some = only(batch, rows)
    _, told = gradient(model, some, METHODS[name], ROWS, monkeypatch)
    tokens = batch.tokens(*policy.compute_logprobs(model, batch))
    ratio = tokens.ratio[rows][batch.mask[rows]]
    wanted = dict(ess=ratio.mean() ** 2 / (ratio**2).mean(), ratio_mean=ratio.mean(),
                  entropy=batch.entropy[rows][batch.mask[rows]].mean(), ratio_max=ratio.max())
    same_metrics(told, wanted)
    if name == "grpo":
        clipped = torch.where(some.advantages > 0, tokens.ratio > 1.2, tokens.ratio < 0.8)
        clipped = clipped & batch.mask & (some.advantages != 0)
        assert told["clip_frac"] == clipped.sum() / batch.mask.sum() > 0


@pytest.mark.parametrize("layout, tokens_in_a_chunk", [
    ("padded", 1), ("padded", 10**6), ("shared", 7)])
def test_chunks_and_layouts_change_nothing(model, batch, layout, tokens_in_a_chunk):
    """Against plain autograd through whole logits, in float64. They differ by the order of sums: by
    9e-15 of a tensor's largest element at most, over three instruction sets, one thread and two."""
    weigh = torch.linspace(-1, 2, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape)

    def with_gradient(logprobs, entropy):
        model.zero_grad()
        (logprobs * weigh + entropy * weigh.flip(0)).mul(batch.mask).sum().backward()
        return [logprobs.detach(), entropy.detach(), *(p.grad.clone() for p in model.parameters())]

    def plain():
        rows = []
        for i in range(ROWS):
            p, c = int(batch.prompt_len[i]), int(batch.completion_len[i])
            logits = model.model(batch.ids[i : i + 1, : p + c]).logits[0, p - 1 : -1] / 0.8
            log_pi = logits.log_softmax(-1)
            pair = (log_pi.gather(-1, batch.ids[i, p : p + c, None])[:, 0],
                    -(log_pi.exp() * log_pi).sum(-1))
            rows.append([torch.nn.functional.pad(x, (0, batch.mask.shape[1] - c)) for x in pair])
        return map(torch.stack, zip(*rows))

    wanted = with_gradient(*plain())
    other = policy.Policy(model.model, 0.8, layout=layout, chunk=tokens_in_a_chunk * 101)
    found = with_gradient(*other(batch))
    model.use_layout("padded")
    apart = [(a - b).abs().max() / a.abs().max() for a, b in zip(wanted, found)]
    assert max(apart) < 1e-13 and wanted[0].abs().max() > 1
    assert not any(x[~batch.mask].any() for x in found[:2])


def test_a_head_with_a_bias_one_without_a_gradient_and_one_in_bfloat16_summed_in_float32():
    chunk = 5 * 30
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(n, generator=g, dtype=torch.float64, requires_grad=True)
        for n in ((9, 8), (30, 8), (30,)))
    ids = torch.randint(30, (9,), generator=g)
    for outputs in (slice(2), 0, 1):  # both, and each alone
        assert torch.autograd.gradcheck(
            lambda *x: forward.HeadLogprobs.apply(*x, ids, 0.7, False, chunk)[outputs],
            (hidden, weight, bias))
    frozen = weight.detach()
    forward.HeadLogprobs.apply(hidden, frozen, None, ids, 0.7, False, chunk)[0].sum().backward()
    assert hidden.grad.abs().sum() > 0 and frozen.grad is None
    # the float32 weight's gradient is as near to the truth over many chunks as over one
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(512, 16, generator=g), torch.randn(50, 16, generator=g)
    ids = torch.randint(50, (512,), generator=g)

    def gradient(chunk, hidden):
        w = weight.clone().requires_grad_()
        forward.HeadLogprobs.apply(hidden, w, None, ids, 1.0, False,
                                   chunk * 50)[0].sum().backward()
        return w.grad

    exact = gradient(512, hidden)
    one, many = ((gradient(chunk, hidden.bfloat16()) - exact).norm() / exact.norm()
                 for chunk in (512, 4))
    assert many < 1.5 * one < 0.02


@pytest.mark.slow
def test_memory_of_the_log_probabilities_is_a_chunks():
    """Peak memory beyond the head's gradient, against whole logits, for 1,024 tokens in chunks of
    220: an eighth of Qwen's vocabulary and of a CPU's chunk."""
    from bench.fit import Ledger
    chunk = forward.CHUNK // 8
    g, vocabulary = torch.Generator().manual_seed(0), 151936 // 8
    inputs = torch.randn(1024, 32, generator=g), torch.randn(vocabulary, 32, generator=g) / 32**0.5
    ids = torch.randint(vocabulary, (1024,), generator=g)
    weigh = torch.rand(1024, generator=g)

    def whole(hidden, weight):
        log_pi = torch.nn.functional.linear(hidden, weight).log_softmax(-1)
        return log_pi.gather(-1, ids[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)

    def measured(f):
        leaves, outputs = [x.clone().requires_grad_() for x in inputs], []

        def action():
            outputs.extend(f(*leaves))
            (outputs[0] * weigh + 0.1 * outputs[1] * weigh.flip(0)).sum().backward()
        with Ledger(None) as ledger:
            peak = ledger.peak_of(action)
        return peak - 4 * leaves[1].numel(), [*outputs, *(x.grad for x in leaves)]
    most, exact = measured(whole)
    peak, values = measured(lambda *given: forward.HeadLogprobs.apply(
        *given, None, ids, 1.0, False, chunk))
    assert max(((x - y).abs().max() / x.abs().max()).item()
               for x, y in zip(exact, values, strict=True)) < 1e-5
    assert 0 < peak < 0.4 * most


def test_a_batch_by_hand():
    long = Completion([2, 3, 0], [-1.0, -2.0, -3.0], True)
    batch = policy.make_batch([([7, 8], [Completion([1], [-0.5], False)]), ([9], [long])])
    assert batch.ids.tolist() == [[7, 8, 1, 0], [9, 2, 3, 0]]
    assert batch.prompt_len.tolist() == [2, 1] and batch.completion_len.tolist() == [1, 3]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.sampler_logprobs.tolist() == [[-0.5, 0, 0], [-1, -2, -3]]
    second = batch.to("cpu").rows([1])
    assert second.ids.tolist() == [[9, 2, 3, 0]] and second.advantages is None
    assert policy.make_batch([([7], [long, long]), ([8], [long])]).group.tolist() == [0, 0, 1]
    batch.set_advantages(torch.tensor([[1.0], [2.0]]))
    assert batch.advantages.tolist() == [[1, 1, 1], [2, 2, 2]]
    batch.old_logprobs = torch.tensor([[-1.0, 0, 0], [-1, -2, -3]])
    batch.teacher_logprobs = batch.old_logprobs + torch.tensor([[1.0, 0, 0], [0, -8, 0.5]])
    batch.set_advantages(torch.tensor([[1.0], [2.0]]))
    assert batch.advantages.tolist() == [[2, 1, 1], [2, -6, 2.5]]


@pytest.mark.parametrize("together", [1, 6])
def test_shares_of_a_rollout(together):
    """Every completion is in one step, beside those it belongs to, by seed and rollout alone."""
    def order(*seed_and_rollout):
        shares = policy.shuffled_shares(48, 4, *seed_and_rollout, together)
        assert [len(x) for x in shares] == [12] * 4
        return torch.cat(shares).tolist()

    rollouts = [(0, 0), (0, 1), (1, 0)]
    orders = [order(*rollout) for rollout in rollouts]
    pieces = [orders[0][i:i + together] for i in range(0, 48, together)]
    whole = [[*range(i, i + together)] for i in range(0, 48, together)]
    assert sorted(pieces) == whole != pieces and len(set(map(tuple, orders))) == 3
    assert orders == [order(*rollout) for rollout in rollouts]
    assert policy.shuffled_shares(9, 1, 0, 0)[0].equal(policy.shuffled_shares(9, 1, 0, 0, 1)[0])


def test_what_the_entropy_bonus_adds(model, batch, monkeypatch):
    """coef times the entropy, as the row aggregates it: over a pass's tokens, where it has one."""
    def told(name, **options):
        return gradient(model, batch, METHODS[name], 3, monkeypatch, **options)

    each = [h[: int(n)].tolist() for h, n in zip(batch.entropy, batch.completion_len)]
    wanted = {"grpo": sum(sum(h) / len(h) for h in each) / ROWS,
              "dr_grpo": sum(map(sum, each)) / ROWS / 9}
    for name, bonus in wanted.items():
        (_, plain), (_, metrics) = told(name), told(name, entropy_coef=0.1)
        assert metrics["entropy_loss"].item() == pytest.approx(-0.1 * bonus)
        assert "entropy_loss" not in plain and plain["loss"] == metrics["pg_loss"]
        assert metrics["loss"].item() == pytest.approx(plain["loss"].item() - 0.1 * bonus)
    low, high, both = (told("ar_lopti", entropy_coef=0.1, weigh=f)[1]["entropy_loss"].item()
                       for f in (*METHODS["ar_lopti"].passes, None))
    assert low + high == pytest.approx(both) and low < 0 and high < 0


@pytest.mark.parametrize("name, passes", [("grpo", 1), ("ar_lopti", 2)])
def test_each_pass_deals_out_each_row_once(batch, name, passes):
    dealt = [rows for rows, _ in policy.minibatches(batch, METHODS[name], 3, seed=0, rollout=1)]
    assert [sorted(torch.cat(dealt[k:k + 3]).tolist()) for k in range(0, len(dealt), 3)] == [
        [*range(ROWS)]] * passes


def test_gradients_are_added_to_those_that_are_there(model, batch, monkeypatch):
    once, _ = gradient(model, batch, METHODS["grpo"], 3, monkeypatch)
    policy.backward(model, batch, METHODS["grpo"], 9)
    assert torch.allclose(gradient_of(model), 2 * once, atol=1e-12)
    assert not any(x.requires_grad for x in policy.compute_logprobs(model, batch))


@pytest.mark.parametrize("name, size, passes", [
    ("grpo", ROWS, 1), ("grpo", 3, 4), ("acpo", ROWS, 1), ("acpo", 3, 8)])
def test_how_often_the_model_runs(model, batch, name, size, passes, monkeypatch):
    """Once a micro-batch, twice where a method that sees the whole step is cut; without a cache."""
    caches = []
    hook = model.model.base_model.register_forward_pre_hook(
        lambda _, args, options: caches.append(options["use_cache"]), with_kwargs=True)
    gradient(model, batch, METHODS[name], size, monkeypatch)
    hook.remove()
    assert caches == [False] * passes


def test_the_token_budget_follows_the_memory(small, monkeypatch):
    model = policy.Policy(AutoModelForCausalLM.from_pretrained(small(), dtype=torch.float32))
    probe = batch_of(*([5] * n for n in (9, 7, 5, 3)))

    def budget(gigabytes, longest=10, checkpointing=False):
        monkeypatch.setattr(policy.parallel, "usable_memory", lambda: gigabytes * 1e9)
        return loading.token_budget(model, probe, loading.Compute(
            longest=longest, activation_checkpointing=checkpointing))

    assert budget(0.98) < budget(1.0) < budget(1.0, checkpointing=True) <= 2**14 == budget(100)
    with pytest.raises(ValueError, match="leaves room for .* --activation_checkpointing"):
        budget(0.98, longest=20000)
    # what it takes for a token is what a token takes: activations kept for backward, measured on a
    # larger batch
    sizes, large = {}, batch_of(*[[5] * 20] * 60)

    def note(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        held = model(large)
    each = (sum(sizes.values()) - 4 * sum(p.numel() for p in model.parameters())) / (60 * 21)
    assert held and (0.7 * 0.02e9) / (budget(1.0) - budget(0.98)) == pytest.approx(each, rel=0.3)


SIZES = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=2, head_dim=16, bos_token_id=1,
             eos_token_id=1, pad_token_id=0)


def test_what_cannot_be_trained_as_asked_is_refused(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, eos_token_id=1,
                                     bos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    batch = batch_of(*UNEVEN)
    assert loading.load(tmp_path, [1], batch)(batch)[0].shape == (4, 4)
    with pytest.raises(ValueError, match="no linear layers"):
        loading.load(tmp_path, [1], batch, loading.Compute(budget=100, lora_rank=4))
    config = transformers.Gemma2Config(**SIZES, final_logit_softcapping=0.1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="changes its logits after the LM head"):
        loading.load(tmp_path, [1], batch)
    model.config.final_logit_softcapping = None
    model.save_pretrained(tmp_path)
    assert loading.load(tmp_path, [1], batch).model.generation_config.eos_token_id == [1]

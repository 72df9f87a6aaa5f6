"""policy.py: the gradient of an optimizer step does not depend on how it is cut up."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    LlamaConfig,
    PhiConfig,
    Qwen3MoeConfig,
)

from conftest import ROOT
from engine import kernels, loading, policy
from engine.sampler import Completion
from losses import METHODS
from ranks import EXACT_NORMS
from study import tiny

BIG = 10**9
ROWS = 11


@pytest.fixture(scope="module")
def model():
    recipe = dict(tiny.RECIPE, hidden=32, mlp=48, layers=2, heads=2, seed=3)
    with EXACT_NORMS:
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
    batch = policy.make_batch(
        [ids(p) for p, _ in lengths], [Completion(ids(c), [0.0] * c, False) for _, c in lengths]
    )
    logprobs, batch.entropy = policy.compute_logprobs(model, batch)
    noise = 0.3 * torch.randn(logprobs.shape, generator=g, dtype=torch.float64)
    batch.old_logprobs, batch.sampler_logprobs = logprobs - noise, logprobs - noise / 2
    batch.ref_logprobs = logprobs + noise.roll(1, 0)
    batch.advantages = torch.randn(ROWS, 1, generator=g, dtype=torch.float64).expand(
        batch.mask.shape
    )
    return batch


def gradient(model, batch, method, size, monkeypatch, weigh=None, **coefficients):
    batch = replace(batch, group=torch.arange(ROWS) % 4)  # four prompts, whose rows lie apart

    def parts(batch, *_):
        return [
            list(range(i, min(i + size, len(batch.ids)))) for i in range(0, len(batch.ids), size)
        ]

    monkeypatch.setattr(policy, "micro_batches", parts)
    model.zero_grad()
    if "prob_split" in method.flags:  # so that both passes have tokens
        method = method.bind(prob_split=batch.old_logprobs[batch.mask].exp().median().item())
    if weigh:
        tokens = batch.tokens(batch.old_logprobs, batch.entropy)
        batch = replace(batch, weight=method.call(weigh, tokens))
    metrics = policy.backward(model, batch, method, 9, **coefficients)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), metrics


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "coefficients",
    [{}, dict(kl_coef=0.1, correction="token_truncate", correction_high=1.5, entropy_coef=0.05)],
    ids=["plain", "all"],
)
def test_the_split_does_not_matter(model, batch, name, coefficients, monkeypatch):
    for weigh in METHODS[name].passes:
        whole, told = gradient(
            model,
            batch,
            METHODS[name],
            ROWS,
            monkeypatch,
            weigh,
            **coefficients,
        )
        assert whole.norm() > 1e-6
        for size in (1, 3, 8):
            cut, metrics = gradient(
                model,
                batch,
                METHODS[name],
                size,
                monkeypatch,
                weigh,
                **coefficients,
            )
            assert (cut - whole).norm() <= 1e-9 * whole.norm()
            for key, value in told.items():
                assert metrics[key].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12), key


def only(batch, rows):
    """The batch with an advantage in these rows alone."""
    learnt = torch.tensor([[row in rows] for row in range(ROWS)])
    return replace(batch, advantages=batch.advantages * learnt)


@pytest.mark.parametrize("some", [(0, 3, 7), (10,), ()], ids=["three rows", "one row", "none"])
@pytest.mark.parametrize("name", METHODS)
def test_rows_without_an_advantage_are_left_out(model, batch, name, some, monkeypatch):
    """Gradients and what is logged are those of all rows, however the step is cut."""
    batch, method = only(batch, some), METHODS[name]
    for weigh in method.passes:
        with monkeypatch.context() as patch:
            patch.setattr(policy, "rows_to_learn", lambda *_, **__: [*range(ROWS)])
            whole, told = gradient(model, batch, method, ROWS, patch, weigh)
        assert (whole.norm() > 1e-6) == bool(some) or name in ("p3o", "gspo", "luspo")
        for size in (1, 3, ROWS):
            found, metrics = gradient(model, batch, method, size, monkeypatch, weigh)
            assert (found - whole).norm() <= 1e-9 * whole.norm()
            lengths = batch.prompt_len + batch.completion_len
            left = lengths[[*some] or [0]] if method.needs_advantage else lengths
            assert metrics.pop("learnt_tokens") == left.sum()
            for key, value in metrics.items():
                assert value.item() == pytest.approx(told[key].item(), rel=1e-9, abs=1e-12,
                                                     nan_ok=True), key


@pytest.mark.parametrize("coefficients", [dict(kl_coef=0.1), dict(entropy_coef=0.1)])
def test_with_a_kl_or_an_entropy_bonus_all_rows_learn(model, batch, coefficients, monkeypatch):
    found, metrics = gradient(model, only(batch, ()), METHODS["grpo"], 3, monkeypatch,
                              **coefficients)
    assert found.norm() > 1e-6
    assert metrics["learnt_tokens"] == (batch.prompt_len + batch.completion_len).sum()


def near_the_sampler(tokens):
    """L = -A rho + (log pi - log pi_sampler)^2"""
    gap = tokens.logprobs - tokens.sampler_logprobs
    return -tokens.advantages * tokens.ratio + gap**2


def likelier_than_the_mean(tokens):
    """w = 1 where the entropy is above the step's mean: not marked as @whole_step"""
    return (tokens.entropy > tokens.mean(tokens.entropy)).to(tokens.entropy)


@pytest.mark.parametrize("own", [dict(objective=near_the_sampler),
                                 dict(select=likelier_than_the_mean)], ids=["objective", "select"])
def test_a_method_of_ones_own_sees_all_rows(model, batch, own, monkeypatch):
    method = replace(METHODS["grpo"], **own)
    _, metrics = gradient(model, only(batch, (2,)), method, 3, monkeypatch)
    assert metrics["learnt_tokens"] == (batch.prompt_len + batch.completion_len).sum()


def test_what_needs_an_advantage():
    """Of the rows here; one added without an entry in BY_ADVANTAGE sees all completions."""
    own = json.loads((ROOT / "docs" / "methods.json").read_text())
    assert {name for name in own if not METHODS[name].needs_advantage} == {
        name for name in own if METHODS[name].whole_step}


def test_what_is_logged_is_of_rows_with_an_advantage(model, batch, monkeypatch):
    """With every method, also with those that see all rows; shares are of all tokens."""
    some = only(batch, (0, 3, 7))
    for name in ("grpo", "acpo", "p3o"):
        _, told = gradient(model, some, METHODS[name], ROWS, monkeypatch)
        tokens = batch.tokens(*policy.compute_logprobs(model, batch))
        rows = torch.tensor([0, 3, 7])
        ratio = tokens.ratio[rows][batch.mask[rows]]
        assert told["ess"].item() == pytest.approx(
            (ratio.mean() ** 2 / (ratio**2).mean()).item(), rel=1e-9)
        assert told["ratio_max"] == ratio.max() and told["ratio_mean"].item() == pytest.approx(
            ratio.mean().item(), rel=1e-9)
        assert told["entropy"].item() == pytest.approx(
            batch.entropy[rows][batch.mask[rows]].mean().item(), rel=1e-9)
        if name == "grpo":
            clipped = torch.where(some.advantages > 0, tokens.ratio > 1.2, tokens.ratio < 0.8)
            clipped = clipped & batch.mask & (some.advantages != 0)
            assert told["clip_frac"] == clipped.sum() / batch.mask.sum() > 0


@pytest.mark.parametrize("correction", ["sequence_mask", "geometric_mask"])
def test_the_split_does_not_matter_to_a_correction_by_completion(model, batch, correction,
                                                                 monkeypatch):
    gap = 0.1 * batch.advantages * batch.mask  # the fixture is every test's
    batch = replace(batch, sampler_logprobs=batch.old_logprobs + gap)
    flags = dict(correction=correction, correction_low=0.9, correction_high=1.2)
    for name in ("grpo", "acpo"):
        whole, told = gradient(model, batch, METHODS[name], ROWS, monkeypatch, **flags)
        assert whole.norm() > 1e-6 and 0.1 < told["correction_dropped"] < 0.9
        for size in (1, 3, 8):
            cut, metrics = gradient(model, batch, METHODS[name], size, monkeypatch, **flags)
            assert (cut - whole).norm() <= 1e-9 * whole.norm()
            assert metrics["correction_dropped"].item() == told["correction_dropped"].item()


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
            wanted = (model.model(batch.ids[i : i + 1, : p + c]).logits[0] / 0.8).log_softmax(-1)
        tokens = batch.ids[i, p : p + c]
        assert torch.allclose(
            logprobs[i, :c], wanted[p - 1 : -1].gather(-1, tokens[:, None])[:, 0], atol=1e-10
        )
        assert torch.allclose(
            entropy[i, :c], -(wanted.exp() * wanted).sum(-1)[p - 1 : -1], atol=1e-10
        )
        assert not logprobs[i, c:].any() and not entropy[i, c:].any()


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("tokens_in_a_chunk", [1, 7, 10**6])
def test_chunks_and_layouts_change_nothing(model, batch, layout, tokens_in_a_chunk, monkeypatch):
    """Logprobs, entropies and the gradient of both against plain autograd through whole logits, in
    float64. They differ by the order of sums: by at most 9e-15 of the largest element of a tensor,
    over three instruction sets, one thread and two."""
    monkeypatch.setattr(kernels, "CHUNK", tokens_in_a_chunk * 101)
    weigh = torch.linspace(-1, 2, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape)

    def gradient(logprobs, entropy):
        model.zero_grad()
        (logprobs * weigh + entropy * weigh.flip(0)).mul(batch.mask).sum().backward()
        return [
            logprobs.detach() * batch.mask,
            entropy.detach() * batch.mask,
            *(p.grad.clone() for p in model.parameters()),
        ]

    def plain():
        rows = []
        for i in range(ROWS):
            p, c = int(batch.prompt_len[i]), int(batch.completion_len[i])
            log_pi = (
                model.model(batch.ids[i : i + 1, : p + c]).logits[0, p - 1 : -1] / 0.8
            ).log_softmax(-1)
            pair = (
                log_pi.gather(-1, batch.ids[i, p : p + c, None])[:, 0],
                -(log_pi.exp() * log_pi).sum(-1),
            )
            rows.append([torch.nn.functional.pad(x, (0, batch.mask.shape[1] - c)) for x in pair])
        return map(torch.stack, zip(*rows))

    wanted = gradient(*plain())
    other = policy.Policy(model.model, 0.8, layout=layout)
    found = gradient(*other(batch))
    model.use_layout("padded")
    apart = [(a - b).abs().max() / a.abs().max() for a, b in zip(wanted, found)]
    assert max(apart) < 1e-13 and wanted[0].abs().max() > 1


def test_a_head_with_a_bias_and_without_a_gradient(model, batch, monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 5 * 30)
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(n, generator=g, dtype=torch.float64, requires_grad=True)
        for n in ((9, 8), (30, 8), (30,))
    )
    ids = torch.randint(30, (9,), generator=g)
    assert torch.autograd.gradcheck(
        lambda *x: kernels.HeadLogprobs.apply(*x, ids, 0.7), (hidden, weight, bias)
    )
    for outputs in (0, 1):
        assert torch.autograd.gradcheck(
            lambda *x: kernels.HeadLogprobs.apply(*x, ids, 0.7)[outputs], (hidden, weight, bias)
        )
    frozen = weight.detach()
    kernels.HeadLogprobs.apply(hidden, frozen, None, ids, 0.7)[0].sum().backward()
    assert hidden.grad.abs().sum() > 0 and frozen.grad is None


def test_bfloat16_heads_sum_their_gradient_in_float32(monkeypatch):
    """Many chunks of a bfloat16 computation: the float32 weight's gradient is as near to the truth
    as that of one chunk."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, ids = (
        torch.randn(512, 16, generator=g),
        torch.randn(50, 16, generator=g),
        torch.randint(50, (512,), generator=g),
    )

    def gradient(chunk, autocast):
        monkeypatch.setattr(kernels, "CHUNK", chunk * 50)
        w = weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            kernels.HeadLogprobs.apply(hidden, w, None, ids, 1.0)[0].sum().backward()
        return w.grad

    exact = gradient(512, False)
    one, many = ((gradient(chunk, True) - exact).norm() / exact.norm() for chunk in (512, 4))
    assert many < 1.5 * one < 0.02


@pytest.mark.slow
def test_memory_of_the_log_probabilities_is_a_chunks():
    """Peak memory beyond the head's gradient, against log_softmax of whole logits, for 1,024 tokens
    in chunks of 220."""
    from experiment.fit import Ledger
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 32, generator=g), torch.randn(151936, 32, generator=g) / 32**0.5
    ids = torch.randint(151936, (1024,), generator=g)
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
    peak, values = measured(lambda *given: kernels.HeadLogprobs.apply(*given, None, ids, 1.0))
    assert max(((x - y).abs().max() / x.abs().max()).item()
               for x, y in zip(exact, values, strict=True)) < 1e-5
    assert 0 < peak < 0.4 * most


def test_ranks_get_as_many_micro_batches(batch):
    lengths = (batch.prompt_len + batch.completion_len).tolist()
    for budget in (1, 16, 30, 1000):
        for ranks in (1, 2, 3, 8, 16):
            parts = policy.micro_batches(batch, budget, "padded", ranks)
            assert sorted(sum(parts, [])) == list(range(ROWS)) and len(parts) % ranks == 0
            for p in parts:
                assert len(p) <= 1 or len(p) * max(lengths[r] for r in p) <= budget


@pytest.mark.parametrize("budget, layout, ranks, parts", [  # the rows are 9, 5, 8, 2, 2 and 7 long
    (18, "padded", 1, [[0, 2], [5, 1], [3, 4]]),   # 9 twice is 18; 7 thrice would be 21
    (26, "padded", 1, [[0, 2], [5, 1, 3], [4]]),   # 9 thrice, not 9 + 9 + 8: the longest counts
    (17, "padded", 1, [[0], [2, 5], [1, 3, 4]]),
    (14, "padded", 1, [[0], [2], [5, 1], [3, 4]]),
    (99, "padded", 1, [[0, 2, 5, 1, 3, 4]]),
    (99, "padded", 2, [[0, 2, 5], [1, 3, 4]]),
    (18, "padded", 2, [[0], [2], [5, 1], [3, 4]]),  # the first of the largest is halved
    (8, "padded", 1, [[0], [2], [5], [1], [3, 4]]),  # 9 is more than the budget, and alone
    (18, "padded", 4, [[0], [2], [5, 1], [3, 4]]),
])
def test_micro_batches_by_hand(budget, layout, ranks, parts):
    rows = policy.make_batch([[1]] * 6, [Completion([5] * n, [0.0] * n, False)
                                         for n in (8, 4, 7, 1, 1, 6)])
    assert policy.micro_batches(rows, budget, layout, ranks) == parts


def test_a_batch_by_hand():
    batch = policy.make_batch([[7, 8], [9]], [Completion([1], [-0.5], False),
                                              Completion([2, 3, 4], [-1.0, -2.0, -3.0], True)])
    assert batch.ids.tolist() == [[7, 8, 1, 0], [9, 2, 3, 4]]
    assert batch.prompt_len.tolist() == [2, 1] and batch.completion_len.tolist() == [1, 3]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.sampler_logprobs.tolist() == [[-0.5, 0, 0], [-1, -2, -3]]
    second = batch.to("cpu").rows([1])
    assert second.ids.tolist() == [[9, 2, 3, 4]] and second.advantages is None
    with pytest.raises(ValueError):
        policy.make_batch([[7], [8]], [Completion([1], [0.0], False)])


def test_shares_of_a_rollout():
    """Every completion is in one step; the order goes by seed and rollout, and by nothing else."""
    def shares(*seed_and_rollout):
        return [x.tolist() for x in policy.shuffled_shares(64, 4, *seed_and_rollout)]

    assert [len(x) for x in shares(0, 0)] == [16] * 4
    assert sorted(sum(shares(0, 0), [])) == list(range(64)) == sorted(sum(shares(1, 0), []))
    orders = [shares(*x) for x in ((0, 0), (0, 1), (1, 0))]
    assert orders == [shares(*x) for x in ((0, 0), (0, 1), (1, 0))]
    assert all(a != b for a, b in ((orders[0], orders[1]), (orders[0], orders[2]),
                                   (orders[1], orders[2])))
    assert all(sum(order, []) != list(range(64)) for order in orders)


@pytest.mark.parametrize("name", ["grpo", "acpo", "top_entropy"])
@pytest.mark.parametrize("ranks, budget, parts", [(2, 40, 4), (3, BIG, 3), (16, BIG, 16)])
def test_the_gradients_of_the_ranks_add_up(model, batch, name, ranks, budget, parts, monkeypatch):
    """One process plays every rank in turn. Of 16 ranks, five have nothing to do."""
    wanted, told = gradient(model, batch, METHODS[name], ROWS, monkeypatch, entropy_coef=0.05)
    monkeypatch.undo()
    outputs = torch.stack(policy.compute_logprobs(model, batch))
    monkeypatch.setattr(model, "budget", budget)
    assert len(policy.micro_batches(batch, budget, ranks=ranks)) == parts
    given = []

    def all_reduce(x):  # a rank gives its own rows, and 0 for the others'
        mine = (x != 0).any(2).any(0)
        assert torch.allclose(x[:, mine], outputs[:, mine], atol=1e-12)
        given.append(mine.int())
        return outputs.clone()

    monkeypatch.setattr(policy.parallel, "all_reduce", all_reduce)
    monkeypatch.setattr(policy.parallel, "world", lambda: ranks)
    total = 0
    for rank in range(ranks):
        monkeypatch.setattr(policy.parallel, "rank", lambda: rank)
        model.zero_grad()
        metrics = policy.backward(model, batch, METHODS[name], 9, entropy_coef=0.05)
        total = total + torch.cat([p.grad.flatten() for p in model.parameters()])
        for key, value in told.items():
            assert metrics[key].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12), key
    assert (total - wanted).norm() <= 1e-9 * wanted.norm()
    assert len(given) == ranks * (1 + METHODS[name].whole_step)
    assert sum(given).tolist() == [1 + METHODS[name].whole_step] * ROWS


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


def test_gradients_are_added_to_those_that_are_there(model, batch, monkeypatch):
    once, _ = gradient(model, batch, METHODS["grpo"], 3, monkeypatch)
    policy.backward(model, batch, METHODS["grpo"], 9)
    twice = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(twice, 2 * once, atol=1e-12)
    assert not any(x.requires_grad for x in policy.compute_logprobs(model, batch))


@pytest.mark.parametrize("name, size, passes", [
    ("grpo", ROWS, 1), ("grpo", 3, 4), ("acpo", ROWS, 1), ("acpo", 3, 8)])
def test_how_often_the_model_runs(model, batch, name, size, passes, monkeypatch):
    """Once for each micro-batch; twice where a method that looks at the whole step is cut."""
    runs = []
    hook = model.model.base_model.register_forward_pre_hook(lambda *_: runs.append(1))
    gradient(model, batch, METHODS[name], size, monkeypatch)
    hook.remove()
    assert len(runs) == passes


def test_what_the_model_is_called_with(model, batch, monkeypatch):
    """A cache would only cost memory."""
    calls = []
    hook = model.model.base_model.register_forward_pre_hook(
        lambda _, args, options: calls.append(options), with_kwargs=True)
    for name in ("padded", "shared"):
        model.use_layout(name)
        model(batch)
    hook.remove()
    model.use_layout("padded")
    lengths = (batch.prompt_len + batch.completion_len).tolist()
    padded, shared = calls
    assert padded["use_cache"] is shared["use_cache"] is False
    assert padded["input_ids"].shape == (ROWS, max(lengths))
    # each prompt is another, and the last token of a completion predicts nothing
    assert shared["input_ids"].shape == shared["position_ids"].shape == (1, sum(lengths) - ROWS)


def test_the_policys_defaults_and_bfloat16(model, batch):
    exact = policy.Policy(copy.deepcopy(model.model).float())
    assert (exact.temperature, exact.dtype, exact.budget, exact.layout) == (
        1, "float32", 2**14, "padded")
    rough = policy.Policy(exact.model, dtype="bfloat16")
    with torch.no_grad():
        a, b = exact(batch)[0].double(), rough(batch)[0].double()
        wanted = policy.Policy(model.model)(batch)[0]
    assert (a - wanted).abs().max() < 1e-3 < (b - wanted).abs().max() < 1
    # a batch of rows that are shorter than the widest of the batch they come from
    rows = [r for r in range(ROWS) if batch.completion_len[r] < batch.mask.shape[1]][:2]
    assert torch.allclose(model(batch.rows(rows))[0], model(batch)[0][rows], atol=1e-12)


def test_the_token_budget_follows_the_memory(small, monkeypatch):
    model = policy.Policy(AutoModelForCausalLM.from_pretrained(small(), dtype=torch.float32))
    probe = policy.make_batch([[1]] * 4, [Completion([5] * n, [0.0], False) for n in (9, 7, 5, 3)])

    def budget(gigabytes, longest=10, **options):
        monkeypatch.setattr(policy.parallel, "memory", lambda: gigabytes * 1e9)
        return loading.token_budget(
            model,
            probe,
            longest,
            **dict(dict(activation_checkpointing=False, offload=False), **options),
        )

    assert (
        budget(0.98)
        < budget(1.0)
        < budget(1.0, activation_checkpointing=True)
        <= 2**14
        == budget(100)
    )
    with pytest.raises(ValueError, match="leaves room for .* --activation_checkpointing"):
        budget(0.98, longest=20000)
    # what it takes for a token is what a token takes: activations kept for backward, measured on a
    # larger batch
    seen, hooks = {}, torch.autograd.graph.saved_tensors_hooks
    large = policy.make_batch([[1]] * 60, [Completion([5] * 20, [0.0], False)] * 60)
    with hooks(
        lambda x: (
            seen.__setitem__(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) or x
        ),
        lambda x: x,
    ):
        held = model(large)
    each = (sum(seen.values()) - 4 * sum(p.numel() for p in model.parameters())) / (60 * 21)
    assert held and (0.7 * 0.02e9) / (budget(1.0) - budget(0.98)) == pytest.approx(each, rel=0.3)


def test_score_restores_the_order_of_rows(model, batch):
    whole, _ = policy.compute_logprobs(model, batch)
    cut, _ = policy.compute_logprobs(policy.Policy(model.model, 0.8, budget=20), batch)
    assert torch.allclose(whole, cut, atol=1e-12)


def test_micro_batches_keep_to_the_budget(batch):
    lengths = (batch.prompt_len + batch.completion_len).tolist()
    for budget in (1, 16, 30, 1000):
        parts = policy.micro_batches(batch, budget)
        assert sorted(sum(parts, [])) == list(range(ROWS))
        assert all(len(p) == 1 or len(p) * max(lengths[r] for r in p) <= budget for p in parts)
    assert (
        len(policy.micro_batches(batch, 1000)) == 1 and len(policy.micro_batches(batch, 1)) == ROWS
    )


def test_the_end_of_sequence_token_is_trained(small, tokenizer):
    """Its logprob has a gradient: masks go by length and not by token, so eos = pad would do no
    harm."""
    model = policy.Policy(AutoModelForCausalLM.from_pretrained(small(), dtype=torch.float32), 0.8)
    eos = tokenizer.eos_token_id
    batch = policy.make_batch(
        [[10, 11]] * 2,
        [Completion([20, eos], [-1.0, -1.0], False), Completion([20, 21, 22], [-1.0] * 3, True)],
    )
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    batch.old_logprobs, batch.entropy = policy.compute_logprobs(model, batch)
    batch.advantages = torch.tensor([[1.0], [0.0]]).expand(2, 3)
    policy.backward(model, batch, METHODS["grpo"], 3)
    before = policy.compute_logprobs(model, batch)[0][0, 1]
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1e-2 * p.grad)
    assert policy.compute_logprobs(model, batch)[0][0, 1] > before


@pytest.mark.parametrize(
    "config, adapters",
    [
        (LlamaConfig(), True),
        (LlamaConfig(tie_word_embeddings=True), True),
        (Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), True),
        (PhiConfig(), True),
        (GPT2Config(n_embd=32, n_layer=2, n_head=2), False),
    ],
    ids=["llama", "tied", "moe", "phi with a head bias", "gpt2"],
)
def test_other_architectures_and_their_adapters_merged(config, adapters, tmp_path):
    """Log probabilities are the model's own; what parallel.weights gives the sampler is what the
    policy with LoRA computes."""
    config.update(
        dict(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
        if adapters
        else dict(vocab_size=100, eos_token_id=1, bos_token_id=1)
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    batch = policy.make_batch(
        [[1]] * 4,
        [Completion(ids, [0.0] * len(ids), False) for ids in ([5, 6, 7, 8], [5, 6], [5], [7])],
    )
    plain = loading.load(tmp_path, [1], batch, budget=100)
    assert plain(batch)[0].shape == (4, 4)
    if not adapters:
        with pytest.raises(ValueError, match="no linear layers"):
            loading.load(tmp_path, [1], batch, budget=100, lora_rank=4)
        return
    trained = loading.load(tmp_path, [1], batch, budget=100, lora_rank=4)
    with torch.no_grad():
        for p in trained.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape))
    assert (trained(batch)[0] - plain(batch)[0]).abs().max() > 1e-2
    plain.model.load_state_dict(dict(policy.parallel.weights(trained)))
    assert (trained(batch)[0] - plain(batch)[0]).abs().max() < 1e-4


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path):
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            final_logit_softcapping=0.1,
        )
    )
    model.save_pretrained(tmp_path)
    batch = policy.make_batch(
        [[1]] * 4, [Completion(ids, [0.0], False) for ids in ([5, 6, 7], [5, 6], [5], [7])]
    )
    with pytest.raises(ValueError, match="changes its logits after the LM head"):
        loading.load(tmp_path, [1], batch)
    model.config.final_logit_softcapping = None
    model.save_pretrained(tmp_path)
    assert loading.load(tmp_path, [1], batch).model.generation_config.eos_token_id == [1]

"""losses.py: values and gradients against the peers' own code and by hand, and invariances."""

import functools
import inspect
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import losses
from losses import CORRECTIONS, METHODS, Tokens, group_advantages, policy_loss, row, step_metrics

HERE = Path(__file__).parent
# the rows that come with the project; one of your own may be another in what is said of all of them
OURS = set(json.loads((HERE.parent / "docs" / "methods.json").read_text()))
PEERS = json.loads((HERE / "peers_losses.json").read_text())
PEER_ADVANTAGES = json.loads((HERE / "peers_advantages.json").read_text())


def outcome(method, tokens, *args, **options):
    """-> the loss, its gradient, what is logged"""
    loss = policy_loss(method, tokens, *args, **options)
    gradient, = torch.autograd.grad(loss, tokens.logprobs)
    return loss.detach(), gradient, step_metrics(method, tokens, *args, **options)


EVEN, HIGHER = dict(eps_low=0.2, eps_high=0.2), dict(eps_low=0.2, eps_high=0.28)
DUAL = dict(HIGHER, dual_clip=3.0)
MEAN, CONSTANT = row("grpo", aggregate="token_mean"), row("grpo", aggregate="constant")
# bounds within which random_tokens are not
BITING = dict(token_truncate_high=1.05, token_mask_low=0.95, token_mask_high=1.05,
              sequence_truncate_high=1.05, sequence_mask_high=1.05, geo_low=0.95, geo_high=1.05)


# the peer's configuration: our method, its flags, max_tokens where it is not 8; or the reason why
# no row of ours computes the same
CONFIGURATIONS = {
    "trl/grpo eps=.2 epsh=.28 maxlen=8": ("grpo", HIGHER),
    "trl/bnpo eps=.2 epsh=.28 maxlen=8": (MEAN, HIGHER),
    "trl/dr_grpo eps=.2 epsh=.28 maxlen=8": (CONSTANT, HIGHER),
    "trl/dapo eps=.2 epsh=.28 maxlen=8": ("dapo", {}),
    "trl/grpo two-sided delta=3": ("grpo", dict(dual_clip=3.0)),
    "trl/gspo (grpo,sequence) eps=.2": ("gspo", EVEN),
    "trl/gspo (grpo,sequence) 3e-4,4e-4": ("gspo", {}),
    "trl/cispo epsilon_high=0.2 (ABSOLUTE cap)": "a bound below 1 is refused here",
    "trl/cispo epsilon_high=1.28 (ABSOLUTE cap)": ("cispo", dict(ratio_max=1.28)),
    "trl/cispo epsilon_high=5.0 (ABSOLUTE cap)": ("cispo", {}),
    "trl/sapo tau 1.0/1.05": ("sapo", {}),
    "trl/luspo sequence eps=.2": ("luspo", EVEN), "trl/vespo": ("vespo", {}),
    "trl/grpo beta=.04 k3 bias-corrected (default)": "TRL's k3 is times the ratio",
    "trl/grpo beta=.04 k3 plain": ("grpo", dict(kl_coef=0.04)),
    "verl/vanilla .2/.28 c=3 token-mean": ("dapo", dict(dual_clip=3.0)),
    "verl/vanilla .2/.28 c=3 seq-mean-token-mean": ("grpo", DUAL),
    # a sum over tokens is the constant aggregation with a constant of one
    "verl/vanilla .2/.28 c=3 seq-mean-token-sum": (CONSTANT, DUAL, 1),
    "verl/vanilla .2/.28 c=3 seq-mean-token-sum-norm": (CONSTANT, DUAL),
    "verl/vanilla .2/.28 c=inf token-mean": ("dapo", {}),
    "verl/vanilla .2/.28 c=inf seq-mean-token-mean": ("grpo", HIGHER),
    "verl/vanilla .2/.28 c=10 token-mean (DAPO recipe)": ("dapo", dict(dual_clip=10.0)),
    "verl/vanilla .2/.28 seq-mean-token-sum-norm scale=8 c=inf": (CONSTANT, HIGHER),
    "verl/gspo .2/.2": ("gspo", EVEN), "verl/gspo 3e-4/4e-4": ("gspo", {}),
    "verl/cispo low=0.2 high=0.2 (1-/1+)": "ours has no lower bound, as the papers",
    "verl/cispo low=1.0 high=0.28 (1-/1+)": ("cispo", dict(ratio_max=1.28)),
    "verl/cispo low=1.0 high=4.0 (1-/1+)": ("cispo", {}), "verl/sapo": ("sapo", {}),
    "verl/geo_mean (GMPO) .4/.4": ("gmpo", {}), "verl/dppo_tv .2/.2 c=20": ("dppo", {}),
    "verl/gpg token-mean": ("reinforce", {}),
    "acpo/acpo paper cfg seq-mean-token-mean": ("acpo", {}),
    "acpo/acpo paper cfg token-mean": (row("acpo", aggregate="token_mean"), {}),
    "acpo/dapo-baseline .2/.3 seq-mean-token-mean": ("dapo_acpo", {}),
    "acpo/cispo 1.0/.45 +PPO mask .2/.3 seq-mean-token-mean": ("cispo_acpo", {}),
    "feynrl/p3o sum/global tokens": ("p3o", {}),
    "feynrl/grpo .2/.2": (MEAN, {}),
    "feynrl/cispo .2/.2 (1-/1+)": "ours has no lower bound, as the papers",
    "feynrl/dapo .2/.28": ("dapo", {})}


def peers_tokens():
    t = {name: torch.tensor(values).double() for name, values in PEERS["inputs"].items()}
    return Tokens(t["logp"].requires_grad_(), t["old_logp"], t["advantages"][:, None].expand(6, 8),
                  t["mask"].bool(), torch.zeros(6, 8).double(), ref_logprobs=t["ref_logp"])


def random_tokens(seed=0):
    """Nine completions of up to seven tokens, of four prompts."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(9, 7, generator=g, dtype=torch.float64)
    new = old + 0.3 * torch.randn(9, 7, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, 8, (9, 1), generator=g)
    advantages = torch.randn(9, 1, generator=g, dtype=torch.float64).expand(9, 7)
    entropy = 2 * torch.rand(9, 7, generator=g, dtype=torch.float64)
    sampler = old + 0.4 * torch.randn(9, 7, generator=g, dtype=torch.float64)
    return Tokens(new.clamp(max=-1e-3).requires_grad_(), old, advantages, torch.arange(7) < lengths,
                  entropy, sampler, ref_logprobs=old + 0.2,
                  group=(torch.arange(9)[:, None] % 4).expand(9, 7))


def rows_of(tokens, rows):
    return replace(tokens, **{f: x[rows] for f, x in vars(tokens).items() if x is not None})


@pytest.mark.parametrize("name", [
    name for name in PEERS["results"] if not isinstance(CONFIGURATIONS[name], str)])
def test_same_loss_and_gradient_as_the_peer(name):
    method, flags, *max_tokens = CONFIGURATIONS[name]
    tokens, expected = peers_tokens(), PEERS["results"][name]
    loss, gradient, _ = outcome(method, tokens, *(max_tokens or [8]), **flags)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    assert gradient.flatten().tolist() == pytest.approx(sum(expected["grad"], []), abs=1e-5)


# the peer's name: our method, or FADE's alpha and delta. Others have another std, or no row here
ADVANTAGES = {
    "upstream verl grpo": "grpo", "formula slime (unbiased, 1e-6)": "grpo",
    "upstream verl grpo norm_by_std=False": "dr_grpo",
    "formula centred (Dr.GRPO, prime-rl, tinker)": "dr_grpo",
    "upstream verl rloo": "rloo", "formula max_rl (r-mu)/mu": "maxrl",
    "formula FADE alpha=1 delta=1 (== centred)": (1, 1),
    "formula FADE alpha=1.5 delta=.4": (1.5, 0.4), "formula FADE alpha=3 delta=.3": (3, 0.3)}


def fade_at(rewards, alpha, delta):
    """FADE's advantage at a given alpha and delta: its averages are set to what gives them"""
    state = dict(entropy=1.0, fade_entropy=1.0, fade_entropy_first=1.0,
                 fade_solve_rate=3 / (2 * alpha + 3))
    values = group_advantages("fade", rewards, state, fade_ema=0.0, entropy_target=2 - delta)
    assert (state["fade_alpha"], state["fade_delta"]) == pytest.approx((alpha, delta))
    return values


@pytest.mark.parametrize("group", PEER_ADVANTAGES["groups"])
def test_same_advantages_as_the_peers(group):
    rewards = torch.tensor([PEER_ADVANTAGES["groups"][group]], dtype=torch.float64)
    for name, ours in ADVANTAGES.items():
        values = (group_advantages(ours, rewards, {}) if isinstance(ours, str)
                  else fade_at(rewards, *ours))
        expected = PEER_ADVANTAGES["advantages"][group][name]
        assert values[0].tolist() == pytest.approx(expected, abs=1e-5), name


ONE_OF_FOUR = [1, 0, 0, 0]


@pytest.mark.parametrize("name, flags, rewards, expected", [
    ("reinforce", {}, ONE_OF_FOUR, [1, 0, 0, 0]),
    ("asym", dict(delta=2.0), ONE_OF_FOUR, [0.75, -0.125, -0.125, -0.125]),
    ("power", dict(alpha=2.0), ONE_OF_FOUR, [0.5625, -0.1875, -0.1875, -0.1875]),
    ("passk", dict(k=1), ONE_OF_FOUR, [3**0.5] + 3 * [-(3**-0.5)]),
    # R = 1 - C(3,2)/C(4,2) = 1/2, s = 1/2; success 1; failure (1/2 - C(2,1)/C(3,1)) / s = -1/3
    ("passk", dict(k=2), ONE_OF_FOUR, [1, -1 / 3, -1 / 3, -1 / 3]),
    # R = 3/4, s = sqrt(3)/4; success 1/4 / s; failure (1/4 - C(2,2)/C(3,2)) / s
    ("passk", dict(k=3), ONE_OF_FOUR, [3**-0.5] + 3 * [-(3**-1.5)]),
    ("passk", dict(k=4), ONE_OF_FOUR, [0, 0, 0, 0]),  # always solved: s = 0
    # groups of two, negative rewards, rewards above 1, equal ones
    ("grpo", {}, [1, 0], [0.5**0.5, -(0.5**0.5)]), ("rloo", {}, [1, 0], [1, -1]),
    ("maxrl", {}, [1, 0], [1, -1]), ("maxrl", {}, [-1, 0], [0, 0]), ("maxrl", {}, [-1, 1], [0, 0]),
    ("power", {}, [2, 2.5], [0, 0]), ("asym", {}, [3, 1], [1, -0.5]),
    ("dr_grpo", {}, [0.7] * 10, [0] * 10), ("grpo", {}, [0.7] * 10, [0] * 10)])
def test_advantages_by_hand(name, flags, rewards, expected):
    given = torch.tensor([rewards, [0] * len(rewards)], dtype=torch.float32)
    before = given.clone()
    values = group_advantages(name, given, {}, **flags)
    assert values[0].tolist() == pytest.approx(expected, abs=1e-5) and not values[1].any()
    assert values.dtype == torch.float32 and torch.equal(given, before)


@pytest.mark.parametrize("alpha, delta", [(1, 1), (1.5, 0.4), (2, 1), (3, 0.3)])
@pytest.mark.parametrize("solved", [1, 4, 8, 15])
def test_fade_mass_identities(alpha, delta, solved):
    """On binary rewards mass_pos = p q^alpha and mass_neg = mass_pos / delta."""
    rewards, p = (torch.arange(16) < solved).double()[None], solved / 16
    mass = p * (1 - p) ** alpha
    advantages = fade_at(rewards, alpha, delta)
    assert losses.gradient_mass(advantages) == pytest.approx((mass, mass / delta))


def test_fade_controllers_over_forty_rollouts_and_at_the_ends():
    state, p, h = {}, 0.5, None
    for t in range(40):
        solved, entropy = 0.1 + 0.02 * t, 1.2 * 0.96**t
        rewards = torch.full((4, 8), solved, dtype=torch.float64)
        state["entropy"] = entropy
        group_advantages("fade", rewards, state, fade_ema=0.2)
        p = 0.8 * p + 0.2 * solved
        h = entropy if h is None else 0.8 * h + 0.2 * entropy
        assert state["fade_alpha"] == pytest.approx(min(3, max(1, 3 * (1 - p) / (2 * p))))
        assert state["fade_delta"] == pytest.approx(min(1, max(0.3, 1 + h - 0.6)))
    assert state["fade_alpha"] < 1.5 and state["fade_delta"] < 0.9  # both have moved
    assert all(isinstance(v, float) for v in state.values())  # as checkpoints want it
    for reward, alpha in (0.0, 3.0), (1.0, 1.0), (-1.0, 3.0):
        state = dict(entropy=1.0)
        values = group_advantages("fade", torch.full((2, 4), reward), state, fade_ema=1.0)
        assert state["fade_alpha"] == alpha and values.abs().max() == 0


@pytest.mark.parametrize("name", sorted(OURS - {"reinforce", "rft", "opd"}))
def test_group_of_one_is_refused_where_a_spread_is_needed(name):
    flags = dict(k=1) if name == "passk" else {}
    with pytest.raises(ValueError, match="group_size"):
        group_advantages(name, torch.ones(3, 1), dict(entropy=1.0), **flags)


# a row, one of its flags, values that are refused, values at the edge that are taken
@pytest.mark.parametrize("name, flag, bad, good", [
    ("asym", "delta", [-1.0, 0.0], [0.01]), ("power", "alpha", [0.99], [1.0]),
    ("passk", "k", [0, 5], [1, 4]), ("fade", "alpha_max", [0.99], [1.0]),
    ("fade", "delta_min", [-0.5, 0.0, 1.01], [0.01, 1.0]),
    ("fade", "fade_ema", [-0.01, 1.01], [0.0, 1.0]),
    ("top_entropy", "entropy_share", [-0.5, 0.0, 1.01], [0.01, 1.0]),
    ("bottom_entropy", "entropy_share", [0.0, 1.01], [0.01, 1.0]),
    ("ar_lopti", "prob_alpha", [-0.01, 1.01], [0.0, 1.0]),
    ("ar_lopti", "prob_split", [-0.5, 0.0, 1.0, 1.5], [0.01, 0.99]),
    ("grpo", "dual_clip", [0.5, 1.0], [0, 1.01]), ("acpo", "dual_clip", [0.5, 1.0], [0.0, 1.01]),
    ("cispo", "ratio_max", [0.2, 0.99], [1.0]), ("cispo_acpo", "ratio_max", [0.45, 0.99], [1.0]),
    ("sapo", "tau_pos", [-1.0, 0.0], [0.01]), ("sapo", "tau_neg", [-1.0, 0.0], [0.01]),
    ("acpo", "bins", [-1, 0], [1, 2]), ("dppo", "binary_kl", [-0.1, 0.0], [1e-9])], ids=str)
def test_hyperparameters_out_of_range_are_named(name, flag, bad, good):
    def use(value):
        if flag in inspect.signature(METHODS[name].advantage).parameters:
            rewards = torch.tensor([[1.0, 0, 0, 0]])
            return group_advantages(name, rewards, dict(entropy=1.0), **{flag: value})
        method, tokens = METHODS[name].bind(**{flag: value}), random_tokens()
        return torch.stack([policy_loss(method, replace(tokens, weight=method.call(f, tokens)), 7)
                            for f in method.passes])

    for value in bad:
        with pytest.raises(ValueError, match=f"--{flag}.* not .*{re.escape(str(value))}"):
            use(value)
    assert all(use(value).isfinite().all() for value in good)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
def test_junk_in_padding_changes_nothing(name, correction):
    """And nothing is written into the tokens."""
    extra = dict(kl_coef=0.1 * bool(correction))
    if correction:  # beside the row's own select, with bounds that bite
        name = row(name, select=f"own,{correction.__name__}").bind(
            **{flag: BITING[flag] for flag in losses.keyword_only(correction)})
    junk = dict(logprobs=math.nan, old_logprobs=50.0, advantages=math.nan, entropy=math.inf,
                sampler_logprobs=-math.inf, ref_logprobs=1e9)
    clean, dirty = random_tokens(), random_tokens()
    for field, value in junk.items():
        setattr(dirty, field, torch.where(dirty.mask, getattr(dirty, field).detach(), value))
    before = {field: getattr(dirty, field).clone() for field in (*junk, "mask")}
    dirty.logprobs.requires_grad_()
    results = []
    for tokens in (clean, dirty):
        loss, gradient, metrics = outcome(name, tokens, 7, **extra)
        results.append([loss.item(), gradient.tolist(), {k: v.item() for k, v in metrics.items()}])
    assert results[0] == results[1]
    assert all(v.dim() == 0 and not v.requires_grad for v in metrics.values())
    for field, value in before.items():
        assert torch.equal(getattr(dirty, field).nan_to_num(7), value.nan_to_num(7))


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.like_reinforce])
def test_on_policy_gradient_is_that_of_reinforce(name):
    tokens, method = random_tokens(), METHODS[name]
    tokens.old_logprobs = tokens.sampler_logprobs = tokens.logprobs.detach().clone()
    _, gradient, metrics = outcome(name, tokens, 7)
    plain = replace(METHODS["reinforce"], select=method.select, aggregate=method.aggregate)
    _, wanted, _ = outcome(plain, tokens, 7)
    assert gradient.flatten().tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-12)
    assert metrics["clip_frac"] == 0 and metrics["ess"].item() == pytest.approx(1)


FIVE = dict(  # one completion: the probabilities of its tokens, and what else is known of them
    pi=[0.1, 0.1, 0.5, 0.9, 1.0], advantages=[1, 1, -1, -1, 1], entropy=[0.1, 0.2, 0.3, 0.4, 0.5],
    pi_old=[0.1, 0.05, 0.4, 0.9, 0.8])  # ratios 1, 2, 1.25, 1, 1.25


def tokens_of(pi, pi_old, advantages):
    """Tokens by their probabilities, lists [B, T], without padding."""
    pi, pi_old, advantages = (torch.tensor(x, dtype=torch.float64)
                              for x in (pi, pi_old, advantages))
    return Tokens(pi.log().requires_grad_(), pi_old.log(), advantages.expand_as(pi),
                  torch.ones_like(pi).bool(), torch.zeros_like(pi))


def five_tokens(**others):
    """FIVE, and a sixth place of padding."""
    x = {k: torch.tensor([v + [0.5]], dtype=torch.float64) for k, v in {**FIVE, **others}.items()}
    extra = {k: v.log() for k, v in x.items() if k in ("sampler_logprobs", "ref_logprobs")}
    return Tokens(x["pi"].log().requires_grad_(), x["pi_old"].log(), x["advantages"],
                  torch.tensor([[True] * 5 + [False]]), x["entropy"], **extra)


def test_what_is_logged_by_hand():
    """The reference has pi / 2, the sampler pi_old / 3 twice (weight 2, capped) and 2 pi_old."""
    tokens = five_tokens(ref_logprobs=[p / 2 for p in FIVE["pi"]], sampler_logprobs=[
        p * c for p, c in zip(FIVE["pi_old"], [1 / 3, 1 / 3, 2, 2, 2])])
    # -min(rho A, clip(rho) A): -1, -1.2, 1.25, 1, -1.2; times the weights -4.4 + 0.525
    log2, log125, k3 = math.log(2), math.log(1.25), 0.5 - 1 + math.log(2)
    expected = dict(
        pg_loss=-3.875 / 5, loss=-3.875 / 5 + 0.1 * k3, kl_loss=0.1 * k3, kl_ref=k3, kl_ref_k1=log2,
        weight_mean=5.5 / 5, approx_kl=(1 - log2 + 2 * (0.25 - log125)) / 5,
        approx_kl_k1=-(log2 + 2 * log125) / 5, ratio_mean=1.3, ratio_min=1, ratio_max=2,
        ess=6.5**2 / (5 * 9.125), entropy=0.3, clip_frac=0.4, clip_high_frac=0.4, clip_low_frac=0,
        token_truncate_bounded=0.4)
    for i, (std, share) in enumerate([(0.5, 0.4), (0, 0), (0, 0.2), (0, 0), (0.125, 0.4)]):
        expected[f"ratio_std/bin{i}"], expected[f"bin_frac/bin{i}"] = std, share
    metrics = step_metrics(row("grpo", select="token_truncate"), tokens, 6, kl_coef=0.1)
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(expected, abs=1e-7)
    # ratios are of completions with A other than 0, failures too
    three = tokens_of([[0.5]] * 3, [[0.25], [0.4], [0.1]], [[1], [-1], [0]])
    three = step_metrics("grpo", three, 6)
    assert [three[f"ratio_{x}"].item() for x in ("min", "mean", "max")] == pytest.approx(
        [1.25, 1.625, 2])
    # a number of an objective keeps its name
    mine = replace(METHODS["rloo"], objective=lambda t: (-t.advantages * t.ratio, dict(ess=7.0)))
    assert step_metrics(mine, random_tokens(), 7)["ess"] == 7


@pytest.mark.parametrize("name", ["acpo", "dapo_acpo", "grpo"])
def test_a_dual_clip_of_0_is_none(name):
    tokens = random_tokens()
    tokens = replace(tokens, old_logprobs=tokens.old_logprobs - 2)  # ratios around 7
    none, zero, three = (policy_loss(name, tokens, 7, dual_clip=c) for c in (None, 0.0, 3.0))
    assert none == zero > three


@pytest.mark.parametrize("name, flags, weights", [
    # FIVE's ratios are 1, 2, 1.25, 1, 1.25, the advantages + + - - +
    ("cispo", dict(ratio_max=1.5), [1, 1.5, 1.25, 1, 1.25]),
    ("cispo", dict(drop_low=0.2, drop_high=0.3), [1, 0, 1.25, 1, 1.25]),
    ("cispo", dict(drop_low=0.2, drop_high=0.2, ratio_max=1.1), [1, 0, 1.1, 1, 0]),
    ("cispo", dict(drop_low=0.0, drop_high=9.0), [1, 2, 1.25, 1, 1.25]),
    ("cispo_acpo", dict(drop_high=9.0), [1, 1.45, 1.25, 1, 1.25]),
    ("falling", dict(drop_low=0.2, drop_high=0.3), [0.5, 1, 0, 0.5 / 0.6, 0.5 / 0.7])])
def test_dropped_tokens_of_cispo_by_hand(name, flags, weights):
    """L = -w A log pi, w the bounded ratio, 0 where PPO would clip. falling: ratios below 1."""
    pi, tokens = FIVE["pi"], five_tokens()
    if name == "falling":
        name, pi = "cispo", [0.1, 0.1, 0.5, 0.5, 0.5]
        tokens = five_tokens(pi=pi, pi_old=[0.2, 0.1, 1.0, 0.6, 0.7])
    loss, gradient, metrics = outcome(row(name, aggregate="token_mean"), tokens, 6, **flags)
    wanted = [-w * a for w, a in zip(weights, FIVE["advantages"])]
    assert (5 * gradient[0]).tolist() == pytest.approx(wanted + [0])
    assert 5 * loss.item() == pytest.approx(sum(x * math.log(p) for x, p in zip(wanted, pi)))
    assert metrics["clip_frac"].item() == pytest.approx(weights.count(0) / 5)


@pytest.mark.parametrize("cap", [True, False])
@pytest.mark.parametrize("kl", [True, False])
def test_p3os_two_parts_by_hand(cap, kl):
    """Ratios of 1/2 and 3/2: ess = 1 / 1.25 = 0.8. d(log rho + 1 / rho - 1) = 1 - 1 / rho."""
    tokens = tokens_of([[0.2, 0.6]], [[0.4, 0.4]], [[2, -1]])
    loss, gradient, metrics = outcome("p3o", tokens, 2, ess_cap=cap, ess_kl=kl)
    weight = [0.5, 0.8 if cap else 1.5]
    slope = [-weight[0] * 2 + 0.2 * kl * (1 - 2), weight[1] + 0.2 * kl * (1 - 1 / 1.5)]
    assert (2 * gradient[0]).tolist() == pytest.approx(slope)
    k3 = [math.log(0.5) + 2 - 1, math.log(1.5) + 1 / 1.5 - 1]
    value = -weight[0] * 2 * math.log(0.2) + weight[1] * math.log(0.6) + 0.2 * kl * sum(k3)
    assert 2 * loss.item() == pytest.approx(value)
    assert metrics["ess"].item() == pytest.approx(0.8)
    assert metrics["capped_frac"].item() == (0.5 if cap else 0)


AT = five_tokens().old_logprobs.exp()[0, 2].item()  # 0.4 as it is rounded: low has the border


@pytest.mark.parametrize("name, token_filter, flags, weights", [
    ("reinforce", "every_token", {}, [1, 1, 1, 1, 1]),
    ("ar_lopti", "every_token", dict(prob_alpha=0.4), [0.64, 0.62, 0.76, 0.96, 0.92]),
    ("ar_lopti", "low_probability", dict(prob_alpha=0.0, prob_split=AT), [1, 1, 1, 0, 0]),
    ("ar_lopti", "high_probability", dict(prob_alpha=0.0, prob_split=AT), [0, 0, 0, 1, 1]),
    ("top_entropy", "every_token", dict(entropy_share=0.4), [0, 0, 0, 1, 1]),
    ("top_entropy", "every_token", dict(entropy_share=0.41), [0, 0, 1, 1, 1]),
    ("bottom_entropy", "every_token", dict(entropy_share=0.2), [1, 0, 0, 0, 0])])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_weights_by_hand(name, token_filter, flags, weights, kl_coef):
    """The gradient of sum w (-A log pi) is -A w, over 5 tokens. The KL goes by the pass alone."""
    tokens = five_tokens(ref_logprobs=[p / 2 for p in FIVE["pi"]])
    method = replace(METHODS[name], objective=METHODS["reinforce"].objective, preset={})
    only = {f.__name__: f for f in (losses.every_token, *method.passes)}[token_filter]
    method = method.bind(**flags)
    tokens.weight = method.call(only, tokens)
    _, gradient, metrics = outcome(method, tokens, 6, kl_coef=kl_coef)
    kl = [kl_coef * 0.5 * (w > 0 or token_filter == "every_token") for w in weights]  # 1 - 1 / 2
    wanted = [(-a * w + k) / 5 for a, w, k in zip(FIVE["advantages"], weights, kl)]
    assert gradient[0].tolist() == pytest.approx(wanted + [0])
    assert metrics["weight_mean"].item() == pytest.approx(sum(weights) / 5)
    k3, counted = 0.5 - 1 + math.log(2), sum(k > 0 for k in kl)
    assert metrics.get("kl_loss", torch.zeros(())).item() == pytest.approx(
        kl_coef * k3 * counted / 5)


@pytest.mark.parametrize("entropy, chosen", [
    ([2, 2, 1, 1, 1], (2, 3)),
    # tokens of one context; float32 rounds their entropy differently in each micro-batch
    ([2, 2 - 3e-7, 1, 1 + 3e-7, 1.001], (2, 2))])
def test_entropies_that_are_equal_but_for_rounding_are_chosen_together(entropy, chosen):
    for name, count in zip(("top_entropy", "bottom_entropy"), chosen):
        metrics = step_metrics(name, five_tokens(entropy=entropy), 6, entropy_share=0.2)
        assert metrics["weight_mean"].item() == pytest.approx(count / 5)


def test_far_ratios_and_p3os_divergence_are_bounded():
    """log rho and the KL's log pi / pi_ref count to 20 either way; beyond there is no gradient."""
    for apart in 19, 21, -19, -21:
        tokens = tokens_of([[math.exp(-25 + apart / 2)]], [[math.exp(-25 - apart / 2)]], [[0]])
        tokens.ref_logprobs, bounded = tokens.old_logprobs, max(-20, min(20, apart))
        assert tokens.ratio.item() == pytest.approx(math.exp(bounded))
        loss, gradient, metrics = outcome("grpo", tokens, 1, kl_coef=1.0)
        k3 = math.exp(-bounded) - 1 + bounded
        assert loss.item() == pytest.approx(k3) and metrics["kl_ref"].item() == pytest.approx(k3)
        assert gradient.item() == pytest.approx(0 if abs(apart) > 20 else 1 - math.exp(-apart))
    pi, pi_old = [[math.exp(-5), math.exp(-16)]], [[math.exp(-20), math.exp(-1)]]
    tokens = tokens_of(pi, pi_old, [[0]])  # log rho = 15 and -15: the ess is 1/2
    wanted = ((10 + math.exp(-10) - 1) + (-10 + math.exp(10) - 1)) / 2 / 2
    assert policy_loss("p3o", tokens, 2).item() == pytest.approx(wanted)


ONE = tokens_of([[0.5]], [[0.5]], [[1]])


@pytest.mark.parametrize("call, says", [
    (lambda: policy_loss("cispo", ONE, 1, ratio_max=0.2), "an offset of 0.2 is --ratio_max 1.2"),
    (lambda: policy_loss("cispo", ONE, 1, drop_low=0.2), "--drop_low and --drop_high go together"),
    (lambda: policy_loss("grpo", ONE, 1, clip_alpha=3.0), "clip_alpha.*eps_low"),
    (lambda: policy_loss("grpo", ONE, 1, kl_coef=0.1), "kl_coef needs Tokens with ref_logprobs"),
    (lambda: policy_loss(row("grpo", select="sequence_mask"), ONE, 1),
     "a correction needs Tokens with sampler_logprobs"),
    (lambda: group_advantages("grpo", torch.ones(2, 2), {}, alpha=3.0), "alpha"),
    *((lambda cell=cell: losses.Method(cell, losses.ppo_clip, losses.token_mean),
       "made of functions: .*zscore.* is none")
      for cell in ("zscore", functools.partial(losses.zscore))),
    *((lambda none=none: replace(METHODS["grpo"], **{none: ()}), "one or more of each")
      for none in ("select", "passes")),
    *((lambda low=low, high=high: policy_loss(
        row("grpo", select="geometric_mask"), corrected_tokens(), 3, geo_low=low, geo_high=high),
       "--geo_low must be from 0 to 1 and --geo_high 1 or")
      for low, high in ((-0.1, 2.0), (1.5, 3.0), (0.9, 0.8), (0.9, math.nan), (0.9, math.inf))),
    (lambda: group_advantages("passk", torch.tensor([[1.0, 0.5, 0, 0]]), {}), "0 or 1")])
def test_what_does_not_go_together_is_named(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()


def test_acpos_ranges_and_shares_of_clipped_and_capped_ratios_by_hand():
    # e = 0.2 + 3 std: the stds are 1/2 in the first bin and 1/8 in the last, and 0 elsewhere
    metrics = step_metrics("acpo", five_tokens(), 6)
    assert [metrics[f"clip_range/bin{i}"].item() for i in range(5)] == pytest.approx(
        [0.2 + 3 / 2, 0.2, 0.2, 0.2, 0.2 + 3 / 8])
    metrics = step_metrics("acpo", five_tokens(), 6, clip_alpha=100.0, bins=2)
    assert metrics["clip_range/bin0"] == 3 and "clip_range/bin2" not in metrics
    tokens = five_tokens(pi=[0.3, 0.3, 0.1, 0.1, 0.4], pi_old=[0.2] * 5,
                         advantages=[1, -1, 1, -1, 0])
    metrics = step_metrics("grpo", tokens, 6)
    assert (metrics["clip_high_frac"], metrics["clip_low_frac"], metrics["clip_frac"]) == (
        0.2, 0.2, 0.4)
    metrics = step_metrics("cispo", tokens, 6, ratio_max=1.2)
    assert metrics["clip_frac"] == 0 and metrics["capped_frac"] == 0.4
    for name, flags, capped in (("cispo", dict(ratio_max=1.0), 0.6),
                                ("cispo", dict(ratio_max=2.5), 0), ("p3o", {}, 1)):
        metrics = step_metrics(name, five_tokens(), 6, **flags)  # ess is 0.926, below every ratio
        assert metrics["capped_frac"].item() == pytest.approx(capped), (name, flags)


# r = pi_old / pi_sampler of three completions, none at a bound, where rounding would choose sides.
# R is 3 x 0.6 x 1.8 = 3.24, 0.4 and 10.8, the geometric means are 1.48, 0.4 and 3.29
RATIOS = [[3, 0.6, 1.8], [0.4], [6, 1.8]]


def corrected_tokens(ratios=RATIOS):
    """On-policy but for the sampler, with junk in the padding; the advantages are 1, -1, 2."""
    mask = torch.tensor([[i < len(row) for i in range(3)] for row in ratios])
    r = torch.tensor([[*row, 7.0, 7.0, 7.0][:3] for row in ratios]).double()
    old = torch.full((len(ratios), 3), 0.1).double().log()
    advantages = torch.tensor([[1.0], [-1.0], [2.0]]).double()[:len(ratios)].expand(-1, 3)
    return Tokens(old.clone().requires_grad_(), old, advantages, mask, torch.zeros_like(old),
                  sampler_logprobs=old - r.log())


@pytest.mark.parametrize("name, bounds, weights", [
    ("token_truncate", {}, [[2, 0.6, 1.8], [0.4], [2, 1.8]]),
    ("token_truncate", dict(high=1.0), [[1, 0.6, 1], [0.4], [1, 1]]),
    ("token_mask", {}, [[3, 0.6, 1.8], [0], [0, 1.8]]),
    ("token_mask", dict(low=0.7, high=2.5), [[0, 0, 1.8], [0], [0, 1.8]]),
    ("token_mask", dict(low=0.0, high=9.0), [[3, 0.6, 1.8], [0.4], [6, 1.8]]),
    ("sequence_truncate", {}, [[2, 2, 2], [0.4], [2, 2]]),
    ("sequence_truncate", dict(high=5.0), [[3.24, 3.24, 3.24], [0.4], [5, 5]]),
    ("sequence_mask", {}, [[0, 0, 0], [0.4], [0, 0]]),
    ("sequence_mask", dict(high=15.0), [[3.24, 3.24, 3.24], [0.4], [10.8, 10.8]]),
    ("geometric_mask", {}, [[0, 0, 0], [0], [0, 0]]),
    ("geometric_mask", dict(low=0.3, high=2.0), [[1, 1, 1], [1], [0, 0]]),
    ("geometric_mask", dict(low=0.6, high=3.9), [[1, 1, 1], [0], [1, 1]])])
def test_corrections_by_hand(name, bounds, weights):
    """The loss is -mean(w A) of the 6 tokens and its gradient -w A / 6: what is dropped still
    counts in the denominator. Logged are the mean of w, and the share of tokens outside."""
    tokens, prefix = corrected_tokens(), "geo" if name == "geometric_mask" else name
    flags = {f"{prefix}_{side}": x for side, x in bounds.items()}
    loss, gradient, metrics = outcome(row("dapo", select=name), tokens, 3, **flags)
    wanted = [[-w * a / 6 for w in row_] for row_, a in zip(weights, (1, -1, 2))]
    assert gradient[tokens.mask].tolist() == pytest.approx(sum(wanted, []))
    assert not gradient[~tokens.mask].any()
    assert loss.item() == pytest.approx(sum(sum(wanted, [])))
    flat, free = sum(weights, []), [3.24, 3.24, 3.24, 0.4, 10.8, 10.8]
    if name.endswith("mask"):
        outside, kind = flat.count(0), "dropped"
    else:
        free = sum(RATIOS, []) if name == "token_truncate" else free
        outside, kind = sum(w != x for w, x in zip(flat, free)), "bounded"
    assert metrics["weight_mean"].item() == pytest.approx(sum(flat) / 6)
    assert metrics[f"{prefix}_{kind}"].item() == pytest.approx(outside / 6)


@pytest.mark.parametrize("name, far, cancelling", [
    ("token_mask", 3 / 4, 1), ("sequence_mask", 1 / 2, 0), ("geometric_mask", 3 / 4, 0)])
def test_corrections_of_a_far_sampler_are_finite(name, far, cancelling):
    """Ratios beyond e^20 and e^-20 count as these, and so do products; e^-20 is above 0."""
    method, logged = row("dapo", select=name), f"{name.replace('metric_mask', '')}_dropped"
    tokens = corrected_tokens([[math.exp(60)] * 2, [1.0], [math.exp(-60)]])
    loss, _, metrics = outcome(method, tokens, 3)
    assert loss.isfinite() and metrics[logged].item() == pytest.approx(far)
    loss = policy_loss(row("dapo", select="sequence_truncate"), tokens, 3,
                       sequence_truncate_high=1e300)
    assert loss.item() == pytest.approx((-2 * math.exp(20) + 1 - 2 * math.exp(-20)) / 4)
    tokens = corrected_tokens([[math.exp(60), math.exp(-60)]])
    assert step_metrics(method, tokens, 3)[logged] == cancelling


def test_vespo_by_hand_and_zero_where_it_is_far_off_policy():
    """W is 1.5 where A = 2 and 0.6 where A = -1; phi = W^k e^(lambda (1 - W))."""
    tokens = tokens_of([[0.3, 0.4], [0.3, 0.4]], [[0.2, 0.4], [0.5, 0.4]], [[2], [-1]])
    loss, gradient, _ = outcome("vespo", tokens, 2, k_pos=1.0, lambda_pos=2.0, k_neg=3.0,
                                lambda_neg=4.0)
    wanted = [-2 * 1.5 * math.exp(2 * (1 - 1.5)), 0.6**3 * math.exp(4 * (1 - 0.6))]
    assert (4 * gradient).tolist() == [pytest.approx([w, w]) for w in wanted]
    assert 4 * loss.item() == pytest.approx(sum(wanted) * (math.log(0.3) + math.log(0.4)))
    tokens = tokens_of([[0.3, 0.4]] * 3, [[1e-40, 1.0], [1.0, 1e-40], [1.0, 1.0]], [[2], [-1], [0]])
    loss, _, metrics = outcome("vespo", tokens, 2)
    assert loss == 0 and metrics["clip_frac"].item() == pytest.approx(4 / 6)


@pytest.mark.parametrize("delta, mask", [
    (-1.0, [1, 0, 1, 1, 0, 1]), (0.0, [1, 1, 1, 1, 0, 1]), (0.5, [1, 1, 1, 1, 1, 1])])
def test_opsm_is_the_peers_mask(delta, mask):
    """TRL's get_off_policy_mask, computed with its own code at the inputs of the fixture."""
    tokens = peers_tokens().masked()
    weight = METHODS["opsm"].select(tokens, opsm_delta=delta)
    wanted = torch.tensor(mask).double()[:, None].expand(6, 8)
    assert torch.equal(weight[tokens.mask], wanted[tokens.mask])


@pytest.mark.parametrize("name", METHODS)
def test_completions_without_a_token_do_not_count(name):
    """--mask_truncated leaves rows with an empty mask: they must not be in the denominators."""
    tokens = random_tokens()
    empty = replace(tokens, mask=tokens.mask & (torch.arange(9) != 4)[:, None])
    short = rows_of(tokens, [i for i in range(9) if i != 4])
    wanted = policy_loss(name, short, 7).item()
    assert policy_loss(name, empty, 7).item() == pytest.approx(wanted, abs=1e-12)


def test_rows_of_two_frameworks_equal_a_plain_reference():
    tokens = random_tokens()
    real = list(zip(*(x[tokens.mask].tolist() for x in (
        tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.group))))
    of_prompt, right = Counter(group for *_, group in real), sum(a > 0 for _, _, a, _ in real)
    rft = [-a * (a > 0) / right for _, _, a, _ in real]
    scale_rl = [-math.exp(x - y) * a / 4 / of_prompt[group] for x, y, a, group in real]

    def kept(x, y, a, low, high, kl):
        p, q = math.exp(y), math.exp(x)
        divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        return not ((q - p > high if a > 0 else p - q > low) or (q - p) * a > 0 and divergence > kl)

    def dppo(*bounds):
        return [-kept(x, y, a, *bounds) * math.exp(x - y) * a / len(real) for x, y, a, _ in real]
    for name, flags, wanted in [
            ("rft", {}, rft), ("scale_rl", {}, scale_rl), ("dppo", {}, dppo(0.2, 0.2, math.inf)),
            ("dppo", dict(binary_kl=0.05), dppo(9, 9, 0.05)),  # as the peers: the KL alone
            ("dppo", dict(binary_kl=0.05, tv_low=1.0, tv_high=1.0), dppo(9, 9, 0.05)),
            ("dppo", dict(binary_kl=0.4, tv_low=0.1), dppo(0.1, 0.2, 0.4))]:
        loss, gradient, _ = outcome(name, tokens, 7, **flags)
        assert gradient[tokens.mask].tolist() == pytest.approx(wanted, abs=1e-12), (name, flags)
        assert loss.item() == pytest.approx(sum(w * x for w, (x, *_) in zip(wanted, real)))
    assert 0 < dppo(9, 9, 0.05).count(0) < len(real)


def test_advantages_over_the_rollout_equal_a_plain_reference():
    rewards = [[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1], [0.5, -1, 0, 2]]
    centred = [r - sum(group) / 4 for group in rewards for r in group]
    spread = math.sqrt(sum(a * a for a in centred) / 15)
    for name in ("reinforce_pp", "scale_rl"):
        values = group_advantages(name, torch.tensor(rewards, dtype=torch.float64), {})
        assert values.flatten().tolist() == pytest.approx([a / (spread + 1e-6) for a in centred])
        assert not group_advantages(name, torch.ones(3, 4), {}).any()


def test_prompt_mean_of_part_of_a_group():
    """The mean over the prompts of the step, each over those of its tokens that are there."""
    tokens = rows_of(random_tokens(), [0, 4, 8, 3, 6])  # prompts 0, 0, 0, 3, 2
    tokens.mask = tokens.mask & (torch.arange(5) != 3)[:, None]  # prompt 3 has no token left
    loss = policy_loss(row("reinforce", aggregate="prompt_mean"), tokens, 7, kl_coef=0.0)
    each = -(tokens.advantages * tokens.logprobs)
    first, last = each[:3][tokens.mask[:3]].mean(), each[4][tokens.mask[4]].mean()
    assert loss.item() == pytest.approx(((first + last) / 2).item(), abs=1e-12)


def test_half_precision_is_float32_whose_bin_spread_near_one_is_not_rounding_error():
    tokens = random_tokens()
    half = {name: x.detach().bfloat16() for name, x in vars(tokens).items()
            if name not in ("mask", "group") and x is not None}
    assert policy_loss("acpo", replace(tokens, **half), 7).dtype == torch.float32
    # ratios within 1e-4 of 1 in float32: sum(rho^2)/n - mean^2 would be zero or negative
    log_ratio = 1e-4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    old = torch.full((64, 64), -2.0)
    tokens = Tokens(old + log_ratio, old, torch.ones(64, 64), torch.ones(64, 64).bool(), old)
    metrics = step_metrics("grpo", tokens, 64)
    exact = (tokens.logprobs.double() - old.double()).exp().std(correction=0).item()
    assert metrics["ratio_std/bin0"].item() == pytest.approx(exact, rel=1e-2)


def test_a_card_says_what_the_row_computes(monkeypatch):
    for name, method in METHODS.items():
        assert losses.card(name).startswith(name + " = ") and method.source, name
        assert all(f"{flag}=" in losses.card(name) for flag in method.flags), name

    def twice(tokens, *, slope=2.0, bend=None):
        """L = -2 A

        bend is not used."""

    def odd(tokens):
        """w = 1 for odd tokens"""

    method = replace(METHODS["dr_grpo"], objective=twice, passes=(odd, losses.every_token),
                     source="here")
    monkeypatch.setitem(METHODS, "mine", method.bind(slope=3.0))
    assert losses.card("mine").split("\n") == [
        "mine = centred | every_token | twice(slope=3.0, bend=None) | constant | odd",
        "  advantage  A = r - rbar", "  select     w = 1", "  objective  L = -2 A",
        "             bend is not used.", "  aggregate  sum / (completions x max_tokens)",
        "  pass       w = 1 for odd tokens", "  source     here"]
    monkeypatch.setitem(METHODS, "mine", replace(method, source=""))
    assert "source     none given" in losses.card("mine")


def test_rows_are_put_together_from_cells():
    assert row("grpo") == METHODS["grpo"] and row("grpo", select=None) == METHODS["grpo"]
    # the row's own values are those of its own cells
    assert row("dapo", objective="gspo").flags == METHODS["gspo"].flags
    assert row("dapo", objective="ppo_clip") == METHODS["dapo"]
    assert [axis for axis in losses.AXES if "token_mask" in losses.cells(axis)] == ["select"]
    mixed = row("fade", objective="p3o", aggregate="token_mean")
    assert (mixed.advantage, mixed.objective, mixed.aggregate) == (
        METHODS["fade"].advantage, METHODS["p3o"].objective, losses.token_mean)


PPO = dict(eps_low=0.2, eps_high=0.2, dual_clip=None)
DEFAULTS = {  # every row's flags: a default that changes is a decision, and is made here, too
    **dict.fromkeys(["reinforce", "rft"], {}),
    **dict.fromkeys(["reinforce_pp", "rloo", "grpo", "dr_grpo", "maxrl"], PPO),
    **dict.fromkeys(["scale_rl", "cispo"], dict(ratio_max=5.0, drop_low=None, drop_high=None)),
    "gspo": dict(eps_low=0.0003, eps_high=0.0004), "gmpo": dict(eps_low=0.4, eps_high=0.4),
    "luspo": dict(eps_low=0.002, eps_high=0.0025), "sapo": dict(tau_pos=1.0, tau_neg=1.05),
    "dppo": dict(tv_low=0.2, tv_high=0.2, binary_kl=None, ratio_max=20.0),
    "vespo": dict(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0),
    "opsm": dict(PPO, opsm_delta=0.5), "dapo": dict(PPO, eps_high=0.28),
    "dapo_acpo": dict(eps_low=0.2, eps_high=0.3, dual_clip=3.0),
    "cispo_acpo": dict(ratio_max=1.45, drop_low=0.2, drop_high=0.3),
    "acpo": dict(clip_base=0.2, clip_alpha=3.0, clip_max=3.0, bins=5, dual_clip=3.0),
    "p3o": dict(ess_cap=True, ess_kl=True),
    "fade": dict(PPO, alpha_max=3.0, delta_min=0.3, entropy_target=None, fade_ema=0.02),
    "asym": dict(PPO, delta=2.0), "power": dict(PPO, alpha=2.0), "passk": dict(PPO, k=4),
    "ar_lopti": dict(PPO, prob_alpha=0.3, eps_high=0.24, prob_split=0.5),
    "top_entropy": dict(PPO, entropy_share=0.2, eps_high=0.28),
    "bottom_entropy": dict(PPO, entropy_share=0.8, eps_high=0.28),
    "dro": dict(dro_beta=0.05), "opd": PPO,
    "clip_cov": dict(cov_share=2e-4, cov_low=1.0, cov_high=5.0, eps_low=0.2, eps_high=0.2),
    "kl_cov": dict(cov_share=2e-4, cov_kl=1.0)}


def test_no_default_changes_unnoticed():
    assert {name: method.flags for name, method in METHODS.items() if name in DEFAULTS} == DEFAULTS
    assert set(DEFAULTS) == OURS
    for name in DEFAULTS:
        assert re.fullmatch(r"arXiv \d{4}\.\d{5}|Williams 1992", METHODS[name].source), name
    sampler = {name for name in DEFAULTS if METHODS[name].old_logprobs == "sampler"}
    assert sampler == {"p3o", "opsm"}
    assert {name for name in DEFAULTS if METHODS[name].whole_step} == {
        "rft", "acpo", "p3o", "top_entropy", "bottom_entropy", "clip_cov", "kl_cov"}
    assert {f.__name__: tuple(losses.keyword_only(f).values()) for f in CORRECTIONS} == {
        "token_truncate": (2,), "token_mask": (0.5, 5), "sequence_truncate": (2,),
        "sequence_mask": (3,), "geometric_mask": (0.999, 1.001)}

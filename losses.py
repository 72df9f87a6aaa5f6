"""The losses. A method is one row of METHODS, made of four axes that "loss type" elsewhere mixes up:

    advantage   what a completion is worth, from the rewards of its group          [P, G] -> [P, G]
    select      how much each token counts                                         -> [B, T], >= 0
    objective   the loss of each token, from its probability ratio and advantage   -> [B, T]
    aggregate   one number from many tokens                                        [B, T] -> scalar

A new method is one function and one row: its keyword-only arguments are its flags in train.py, with the
defaults that stand beside the formula. `python losses.py` prints the cards, `python losses.py fade` one of them.

Notation: pi, pi_old the probabilities of the sampled token now and when the ratio's reference was taken,
rho = pi / pi_old, A the advantage, r the reward, rbar its mean over the group, sg stop-gradient.
Pure torch: no model, no flags, nothing distributed, no writes into arguments.
"""

import inspect
import math
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

BINS = 5  # equal-width bins of the token probability for the logged statistics (ACPO's number)


@dataclass
class Tokens:
    """The completion tokens of one optimizer step (or a slice of it): each [B, T], padding where mask is False."""

    logprobs: torch.Tensor        # log pi, the only field with a gradient
    old_logprobs: torch.Tensor    # log pi_old, of the policy that the ratio is taken against
    advantages: torch.Tensor      # the completion's, repeated over its tokens
    mask: torch.Tensor            # bool
    entropy: torch.Tensor         # nats, of the current policy, no gradient
    sampler_logprobs: torch.Tensor | None = None  # as the sampler computed them, for --tis_cap
    ref_logprobs: torch.Tensor | None = None      # of the reference model, for --kl_coef

    @property
    def log_ratio(self):
        return (self.logprobs - self.old_logprobs).clamp(-20, 20)  # no gradient beyond; e^20 is far from overflow in a sum

    @property
    def ratio(self):
        return self.log_ratio.exp()

    @property
    def probs(self):
        return self.logprobs.detach().exp()

    def mean(self, x):
        """Mean over the completion tokens of x [B, T]."""
        return (x * self.mask).sum() / self.mask.sum()

    def without_junk(self):
        """A copy with 0 in every padded place, so that nothing there can matter, and float32 or better."""
        def clean(x):
            return torch.where(self.mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)
        return replace(self, **{f.name: clean(x) for f in fields(self)
                                if f.name != "mask" and (x := getattr(self, f.name)) is not None})


# what the denominators are made of, always those of the whole optimizer step over all ranks
StepSize = namedtuple("StepSize", "completions tokens max_tokens")


def step_size(mask, max_tokens):
    """Completions with at least one token that counts, and those tokens, in mask [B, T]."""
    return StepSize(int(mask.any(1).sum()), int(mask.sum()), max_tokens)


def whole_step(f):
    """Marks a function whose value at one token depends on the others of the optimizer step (a batch statistic).

    train.py then shows it the whole step at once, however small the micro-batches are."""
    f.whole_step = True
    return f


# ---------------------------------------------------------------------------- axis 1: advantage
# (rewards [P, G], state) -> [P, G]. `state` is a plain dict of numbers that outlives the rollout.


def centred(rewards, state):
    """A = r - rbar"""
    if rewards.shape[1] < 2:
        raise ValueError("a group of one completion has no spread: --group_size must be 2 or more")
    return rewards - rewards.mean(1, keepdim=True)


def raw(rewards, state):
    """A = r"""
    return rewards.clone()


def zscore(rewards, state):
    """A = (r - rbar) / (std + 1e-6), std unbiased"""
    return centred(rewards, state) / (rewards.std(1, keepdim=True) + 1e-6)


def leave_one_out(rewards, state):
    """A = (r - rbar) G / (G - 1): the baseline is the mean of the others"""
    return centred(rewards, state) * (rewards.shape[1] / (rewards.shape[1] - 1))


def weigh_failures(centred, delta):
    """Divides what is below the group's mean by delta: above 1 favours successes, below 1 failures."""
    return torch.where(centred < 0, centred / delta, centred)


def focus(rewards, exponent):
    """(1 - rbar)^(exponent - 1) [P, 1]: the larger the exponent, the more hard problems weigh."""
    return (1 - rewards.mean(1, keepdim=True)).clamp(min=0) ** (exponent - 1)


def asym(rewards, state, *, delta=2.0):
    """A = r - rbar, divided by delta where r < rbar"""
    if delta <= 0:
        raise ValueError(f"--delta must be above 0, not {delta}")
    return weigh_failures(centred(rewards, state), delta)


def power(rewards, state, *, alpha=2.0):
    """A = (1 - rbar)^(alpha - 1) (r - rbar)"""
    if alpha < 1:
        raise ValueError(f"--alpha must be 1 or more, not {alpha}")
    return focus(rewards, alpha) * centred(rewards, state)


def fade(rewards, state, *, alpha_max=3.0, delta_min=0.3, entropy_target=None, fade_ema=0.02):
    """A = (1 - rbar)^(alpha - 1) (r - rbar), divided by delta where r < rbar
    alpha = clip(3 (1 - p) / (2 p), 1, alpha_max), p a moving average of the reward, from 0.5
    delta = clip(1 + H - H*, delta_min, 1), H a moving average of the entropy in nats, from the first one, H0

    entropy_target is H* in nats; None: half of H0 (an absolute number does not carry over between models).
    fade_ema is the weight of the NEW value. The paper writes p <- b p + (1 - b) rbar with b = 0.02, which
    would forget 98% of the past at every rollout; its number is kept and read the other way round.
    Both averages take the new rollout in before they are used. state["entropy"] must hold its mean entropy."""
    if not 0 <= fade_ema <= 1:
        raise ValueError(f"--fade_ema is the weight of the new value, from 0 to 1, not {fade_ema}")
    if not (alpha_max >= 1 and 0 < delta_min <= 1):
        raise ValueError(f"--alpha_max must be 1 or more and --delta_min in (0, 1], not {alpha_max} and {delta_min}")
    entropy = state["entropy"]
    first = state.setdefault("fade_entropy_first", entropy)
    p = state["fade_solve_rate"] = (1 - fade_ema) * state.get("fade_solve_rate", 0.5) + fade_ema * float(rewards.mean())
    h = state["fade_entropy"] = (1 - fade_ema) * state.get("fade_entropy", first) + fade_ema * entropy
    target = first / 2 if entropy_target is None else entropy_target
    # multiplied out, so that p = 0 (or, with shaped rewards, below) gives alpha_max instead of a division by 0
    alpha = alpha_max if 3 * (1 - p) >= 2 * p * alpha_max else max(1.0, 3 * (1 - p) / (2 * p))
    delta = min(1.0, max(delta_min, 1 + h - target))
    state.update(fade_alpha=alpha, fade_delta=delta)
    return focus(rewards, alpha) * weigh_failures(centred(rewards, state), delta)


def maxrl(rewards, state):
    """A = (r - rbar) / rbar, 0 where rbar <= 0"""
    mean = rewards.mean(1, keepdim=True)
    return torch.where(mean > 0, centred(rewards, state) / mean, 0.0)


def passk(rewards, state, *, k=4):
    """R = 1 - C(F, k) / C(G, k) with F failures of G, s = sqrt(R (1 - R)); 0 where s = 0, else
    A = (1 - R) / s of a success, (1 - R - C(F - 1, k - 1) / C(G - 1, k - 1)) / s of a failure"""
    size = rewards.shape[1]
    if not (1 <= k <= size and size > 1):
        raise ValueError(f"--k must be from 1 to --group_size, which must be 2 or more, not {k} of {size}")
    if not torch.isin(rewards, rewards.new_tensor([0.0, 1.0])).all():
        raise ValueError("passk counts successes: its rewards must be 0 or 1 (no --overlong_penalty)")
    failures = (rewards == 0).sum(1, keepdim=True)
    choices = range(size + 1)
    unsolved = rewards.new_tensor([math.comb(f, k) / math.comb(size, k) for f in choices])[failures]  # 1 - R, [P, 1]
    others = rewards.new_tensor([math.comb(max(f - 1, 0), k - 1) / math.comb(size - 1, k - 1) for f in choices])[failures]
    spread = (unsolved * (1 - unsolved)).sqrt()
    return torch.where(spread > 0, (unsolved - others * (rewards == 0)) / spread, 0.0)


def gradient_mass(advantages):
    """-> mass_pos, mass_neg: the mean over groups of sum |A+| / G and sum |A-| / G (FADE's m_S and m_F)."""
    return advantages.clamp(min=0).mean().item(), (-advantages).clamp(min=0).mean().item()


# ---------------------------------------------------------------------------- axis 2: select
# tokens -> weight [B, T]. A token of weight 0 still counts in the denominators.


def every_token(tokens):
    """w = 1"""
    return torch.ones_like(tokens.entropy)


def entropy_rank(tokens, share, largest):
    """1 for the `share` of the step's tokens with the largest (smallest) entropy, ties included."""
    if not 0 < share <= 1:
        raise ValueError(f"--entropy_share must be above 0 and at most 1, not {share}")
    ranked = tokens.entropy[tokens.mask].sort(descending=largest).values
    last = ranked[math.ceil(share * len(ranked)) - 1]
    return (tokens.entropy >= last if largest else tokens.entropy <= last).to(tokens.entropy)


@whole_step
def top_entropy(tokens, *, entropy_share=0.2):
    """w = 1 for the share of the step's tokens with the highest entropy, else 0"""
    return entropy_rank(tokens, entropy_share, largest=True)


@whole_step
def bottom_entropy(tokens, *, entropy_share=0.8):
    """w = 1 for the share of the step's tokens with the lowest entropy, else 0"""
    return entropy_rank(tokens, entropy_share, largest=False)


def by_probability(tokens, *, prob_alpha=0.3):
    """w = prob_alpha pi_old + 1 - prob_alpha"""
    if not 0 <= prob_alpha <= 1:
        raise ValueError(f"--prob_alpha must be from 0 to 1, not {prob_alpha}")
    return prob_alpha * tokens.old_logprobs.exp() + 1 - prob_alpha


def low_probability(tokens, *, prob_split=0.5):
    """w = 1 where pi_old <= prob_split, else 0"""
    if not 0 < prob_split < 1:
        raise ValueError(f"--prob_split must be between 0 and 1, not {prob_split}")
    return (tokens.old_logprobs.exp() <= prob_split).to(tokens.entropy)


def high_probability(tokens, *, prob_split=0.5):
    """w = 1 where pi_old > prob_split, else 0"""
    return (tokens.old_logprobs.exp() > prob_split).to(tokens.entropy)


# ---------------------------------------------------------------------------- axis 3: objective
# tokens -> loss [B, T] to minimise, or (loss, {metric: number}).


def reinforce(tokens):
    """L = -A log pi"""
    return -tokens.advantages * tokens.logprobs


def clipped(ratio, advantages, low, high, dual_clip=None):
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 never above dual_clip |A| (None: no such bound)."""
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"--dual_clip bounds the ratio where A < 0: it must be above 1, not {dual_clip}")
    return torch.where(advantages < 0, torch.min(loss, -dual_clip * advantages), loss)


def ppo_clip(tokens, *, eps_low=0.2, eps_high=0.2, dual_clip=None):
    """L = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)
    with dual_clip = c: min(L, -c A) where A < 0"""
    return clipped(tokens.ratio, tokens.advantages, eps_low, eps_high, dual_clip)


def cispo(tokens, *, ratio_max=5.0):
    """L = -sg(min(rho, ratio_max)) A log pi

    ratio_max is the absolute bound on rho. Elsewhere it may be an offset from 1 (verl's, NeMo-RL's) or the
    bound (TRL's epsilon_high, whose inherited default of 0.2 scales every gradient by 0.2)."""
    if ratio_max < 1:
        raise ValueError(f"--ratio_max is an absolute bound on the ratio, 1 or more, not {ratio_max} "
                         f"(an offset of {ratio_max} is --ratio_max {1 + ratio_max:g})")
    return (-tokens.ratio.detach().clamp(max=ratio_max) * tokens.advantages * tokens.logprobs,
            dict(capped_frac=tokens.mean((tokens.ratio > ratio_max).float())))


def gspo(tokens, *, eps_low=3e-4, eps_high=4e-4):
    """L = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), s = exp(mean over the completion of log rho)

    In its token form, s_t = sg(s) pi / sg(pi): the same value and gradient, and a token can be left out."""
    lengths = tokens.mask.sum(1, keepdim=True).clamp(min=1)
    sequence = (tokens.log_ratio.sum(1, keepdim=True) / lengths).exp().detach()
    ratio = sequence * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return clipped(ratio, tokens.advantages, eps_low, eps_high)


def sapo(tokens, *, tau_pos=1.0, tau_neg=1.05):
    """L = -A (4 / tau) sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg"""
    if min(tau_pos, tau_neg) <= 0:
        raise ValueError(f"--tau_pos and --tau_neg must be above 0, not {tau_pos} and {tau_neg}")
    tau = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    return -tokens.advantages * 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))


def gmpo(tokens, *, eps_low=0.4, eps_high=0.4):
    """L = -A exp(mean over the completion of x), x = sign(A) min(sign(A) log rho, sign(A) clip(log rho, -eps_low, eps_high))"""
    sign = tokens.advantages.sign()
    x = sign * torch.min(sign * tokens.log_ratio, sign * tokens.log_ratio.clamp(-eps_low, eps_high))
    lengths = tokens.mask.sum(1, keepdim=True).clamp(min=1)
    mean = (x.sum(1, keepdim=True) / lengths).exp().detach()
    return -tokens.advantages * mean * (x - x.detach()).exp()


def dppo(tokens, *, tv_low=0.2, tv_high=0.2, ratio_max=20.0):
    """L = -sg(min(rho, ratio_max)) A log pi, 0 where A > 0 and pi - pi_old > tv_high
    or A < 0 and pi - pi_old < -tv_low (the sampled token's part of the total variation)"""
    moved = tokens.probs - tokens.old_logprobs.exp()
    gone = torch.where(tokens.advantages > 0, moved > tv_high, moved < -tv_low)
    return -tokens.ratio.detach().clamp(max=ratio_max) * tokens.advantages * tokens.logprobs * ~gone


def spread_by_bin(tokens, bins):
    """-> bin of each token [B, T] by its current probability, tokens per bin and std of rho per bin [bins]."""
    index = (tokens.probs * bins).nan_to_num().long().clamp(max=bins - 1)  # pi = 1 belongs to the last bin
    where, ratio = index[tokens.mask], tokens.ratio.detach()[tokens.mask]
    count, total = ratio.new_zeros(bins), ratio.new_zeros(bins)
    count.index_add_(0, where, torch.ones_like(ratio))
    mean = total.index_add(0, where, ratio) / count.clamp(min=1)
    # around the mean: sum(rho^2) / n - mean^2 in float32 is all rounding error while rho is near 1
    variance = total.index_add(0, where, (ratio - mean[where]) ** 2) / count.clamp(min=1)
    return index, count, variance.sqrt()


@whole_step
def acpo(tokens, *, clip_base=0.2, clip_alpha=3.0, clip_max=3.0, bins=5, dual_clip=None):
    """L = -min(rho A, clip(rho, 1 - e, 1 + e) A)
    e = clip_base + clip_alpha std(rho over the step's tokens in the same bin of pi), in [0, clip_max]"""
    if bins < 1:
        raise ValueError(f"--bins must be 1 or more, not {bins}")
    index, _, std = spread_by_bin(tokens, bins)
    e = (clip_base + clip_alpha * std).clamp(0, clip_max)
    loss = clipped(tokens.ratio, tokens.advantages, e[index], e[index], dual_clip)
    return loss, {f"clip_range/bin{i}": e[i] for i in range(bins)}


def effective_sample_size(tokens):
    """(sum rho)^2 / (n sum rho^2) over the completion tokens, in [1/n, 1], no gradient."""
    ratio = tokens.ratio.detach()
    return tokens.mean(ratio) ** 2 / tokens.mean(ratio ** 2)


@whole_step
def p3o(tokens):
    """L = -sg(min(rho, ess)) A log pi + (1 - ess) (log rho + 1 / rho - 1), ess the step's effective sample size"""
    ess = effective_sample_size(tokens)
    x = tokens.log_ratio.clamp(-10, 10)
    kl = x + (-x).exp() - 1
    loss = -tokens.ratio.detach().clamp(max=ess) * tokens.advantages * tokens.logprobs + (1 - ess) * kl
    return loss, dict(capped_frac=tokens.mean((tokens.ratio > ess).float()))


# ---------------------------------------------------------------------------- axis 4: aggregate
# (loss [B, T], mask [B, T], StepSize of the whole optimizer step) -> scalar


def seq_mean(loss, mask, size):
    """mean over completions of the mean over their tokens"""
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / size.completions


def token_mean(loss, mask, size):
    """sum / completion tokens of the optimizer step"""
    return (loss * mask).sum() / size.tokens


def constant(loss, mask, size):
    """sum / (completions x max_tokens)"""
    return (loss * mask).sum() / (size.completions * size.max_tokens)


# ---------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Method:
    """One row: a function per axis. `preset` are its own defaults for their keyword-only arguments."""

    advantage: Callable
    objective: Callable
    aggregate: Callable
    select: Callable = every_token
    preset: dict = field(default_factory=dict)
    passes: tuple = (every_token,)  # the rollout is gone through once for each, with its tokens only
    old_logprobs: str = "trainer"   # default of --old_logprobs: what the ratio is taken against
    source: str = ""
    peers: str = ""                 # the flags that compute the same elsewhere

    @property
    def functions(self):
        return (self.advantage, self.select, self.objective, self.aggregate, *self.passes)

    @property
    def flags(self):
        """{name: default} of the keyword-only arguments of the row's functions."""
        return {**{name: p.default for f in self.functions for name, p in keyword_only(f)}, **self.preset}

    @property
    def whole_step(self):
        """Does a token's loss depend on the other tokens of the optimizer step?"""
        return any(getattr(f, "whole_step", False) for f in self.functions)


def keyword_only(f):
    return [(name, p) for name, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY]


METHODS = {
    "reinforce": Method(raw, reinforce, token_mean, source="Williams 1992; without its baseline, GPG, arXiv 2504.02546",
                        peers="verl loss_mode=gpg with A = r"),
    "rloo": Method(leave_one_out, ppo_clip, token_mean, source="Ahmadian et al., arXiv 2402.14740, clipped for later steps",
                   peers="verl adv_estimator=rloo clip_ratio_c=inf"),
    "grpo": Method(zscore, ppo_clip, seq_mean, source="DeepSeekMath, arXiv 2402.03300, eq. 3; ACPO eq. 1",
                   peers="TRL loss_type=grpo; verl loss_agg_mode=seq-mean-token-mean clip_ratio_c=inf"),
    "dr_grpo": Method(centred, ppo_clip, constant, source="Understanding R1-Zero-like Training, arXiv 2503.20783",
                      peers="TRL loss_type=dr_grpo scale_rewards=none; verl norm_adv_by_std_in_grpo=False "
                            "loss_agg_mode=seq-mean-token-sum-norm loss_scale_factor=max_tokens; oat"),
    "dapo": Method(zscore, ppo_clip, token_mean, preset=dict(eps_high=0.28),
                   source="DAPO, arXiv 2503.14476, eq. 8; its recipe adds --dual_clip 10 --drop_uniform_groups "
                          "--overlong_penalty, ACPO's baseline of the name is --eps_high 0.3 --aggregate seq_mean",
                   peers="TRL loss_type=dapo epsilon_high=0.28; verl loss_agg_mode=token-mean clip_ratio_high=0.28"),
    "cispo": Method(zscore, cispo, token_mean,
                    source="MiniMax-M1, arXiv 2506.13585, eq. 4-5; bound of ScaleRL, arXiv 2510.13786 (ACPO's baseline of "
                           "the name: 1.45, and what PPO would clip is dropped as well)",
                    peers="TRL loss_type=cispo epsilon_high=5.0; verl loss_mode=cispo clip_ratio_low=1 clip_ratio_high=4"),
    "gspo": Method(zscore, gspo, seq_mean, source="Group Sequence Policy Optimization, arXiv 2507.18071",
                   peers="TRL importance_sampling_level=sequence loss_type=grpo; verl loss_mode=gspo"),
    "sapo": Method(zscore, sapo, seq_mean, source="Soft Adaptive Policy Optimization, arXiv 2511.20347",
                   peers="TRL loss_type=sapo; verl loss_mode=sapo"),
    "gmpo": Method(zscore, gmpo, seq_mean, source="Geometric-Mean Policy Optimization, arXiv 2507.20673",
                   peers="verl loss_mode=geo_mean clip_ratio=0.4"),
    "dppo": Method(zscore, dppo, token_mean, source="Rethinking the Trust Region in LLM RL, arXiv 2602.04879, binary TV",
                   peers="verl loss_mode=dppo_tv clip_ratio=0.2"),
    "acpo": Method(zscore, acpo, seq_mean, source="What are Key Factors for Updates in RL for LLM Reasoning?, "
                   "arXiv 2606.22570, sec. 4.1, eq. 8",
                   peers="the authors' verl fork, there with dual_clip 3 and the statistics of a micro-batch"),
    "p3o": Method(zscore, p3o, token_mean, old_logprobs="sampler",
                  source="Trust the Batch, On- or Off-Policy, arXiv 2605.12380, eq. 11-12",
                  peers="FeynRL's p3o, there with the ess of a micro-batch"),
    "fade": Method(fade, ppo_clip, constant, source="Don't Let Gains FADE, arXiv 2607.01490", peers="none known"),
    "asym": Method(asym, ppo_clip, constant, source="AsymGRPO in FADE, arXiv 2607.01490 (not that of arXiv 2604.04894)",
                   peers="none known"),
    "power": Method(power, ppo_clip, constant, source="Power in FADE, arXiv 2607.01490", peers="none known"),
    "maxrl": Method(maxrl, ppo_clip, constant, source="Maximum Likelihood RL, arXiv 2602.02710", peers="prime-rl max_rl"),
    "passk": Method(passk, ppo_clip, token_mean, source="Pass@k Training, arXiv 2508.10751, the analytic advantage",
                    peers="none known (verl's grpo_passk gives a value to the best of a group alone)"),
    "ar_lopti": Method(zscore, ppo_clip, token_mean, select=by_probability, passes=(low_probability, high_probability),
                       preset=dict(eps_high=0.24),
                       source="Do Not Let Low-Probability Tokens Over-Dominate, arXiv 2505.12929: reweighting, and two "
                              "passes over the rollout, the low-probability tokens first",
                       peers="the authors' verl fork: reweight_method=both_linear_normal reweight_k=0.3 seperate_prob=0.5"),
    "top_entropy": Method(zscore, ppo_clip, token_mean, select=top_entropy, preset=dict(eps_high=0.28),
                          source="Beyond the 80/20 Rule, arXiv 2506.01939, the quantile taken over the optimizer step",
                          peers="TRL top_entropy_quantile=0.2, there of the micro-batches held at once"),
    "bottom_entropy": Method(zscore, ppo_clip, token_mean, select=bottom_entropy, preset=dict(eps_high=0.28),
                             source="the control of arXiv 2506.01939", peers="the ACPO fork's, there a share per sequence"),
}

AXES = ("advantage", "select", "objective", "aggregate")


def cells(axis):
    """{name: function} of all that the rows have on an axis: what --advantage, --select, ... can name."""
    return {f.__name__: f for f in (getattr(m, axis) for m in METHODS.values())}


def row(name, **axes):
    """The Method of a name, with other cells where an axis names one (None does not)."""
    return replace(METHODS[name], **{axis: cells(axis)[cell] for axis, cell in axes.items() if cell})


def resolve(method, given):
    """-> the Method (given by name or itself) and its hyperparameters, `given` in place of its defaults.

    Raises TypeError where `given` holds what no function of the row takes."""
    method = METHODS[method] if isinstance(method, str) else method
    if unknown := set(given) - set(method.flags):
        raise TypeError(f"{', '.join(sorted(unknown))}: not used by this method (it has {', '.join(method.flags)})")
    return method, {**method.flags, **given}


def call(f, hp, *args):
    """f with those of the hyperparameters that it takes."""
    return f(*args, **{name: hp[name] for name, _ in keyword_only(f)})


def group_advantages(method, rewards, state, **hp):
    """The advantage of every completion.

    rewards [P, G]: P groups of G completions of one prompt. state: a plain dict of numbers, kept over the run, with
    the rollout's mean token entropy (nats) in state["entropy"]. Returns [P, G]. Raises ValueError for a
    hyperparameter out of range, or a group of one where a spread is needed."""
    method, hp = resolve(method, hp)
    # in float64: the rounding of 16 equal rewards of 0.7, over a standard deviation of 0 + 1e-6, would be an advantage
    advantages = call(method.advantage, hp, rewards.double(), state)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def policy_loss(method, tokens, max_tokens, *, size=None, only=every_token, tis_cap=0.0, kl_coef=0.0, **hp):
    """The loss of one optimizer step, and what to log of it.

    tokens: the whole step; or a slice of it and, as `size`, the step_size of the whole: then the losses of the slices
    add up to the step's (but a method with whole_step must see all of it), and there is nothing to log.
    only: one of the method's passes. tis_cap: truncated importance sampling, weights sg(min(pi_old / pi_sampler,
    tis_cap)); 0 is off. kl_coef: of the k3 estimate of KL(pi | pi_ref).
    Returns a scalar and a dict of detached scalars. Raises ValueError for a hyperparameter out of range."""
    method, hp = resolve(method, hp)
    tokens = tokens.without_junk()
    of_step = size or step_size(tokens.mask, max_tokens)
    objective, noted = objective_of(method, hp, tokens)
    of_pass = call(only, hp, tokens)
    weight = call(method.select, hp, tokens) * of_pass
    if tis_cap:
        weight = weight * (tokens.old_logprobs - tokens.sampler_logprobs).exp().clamp(max=tis_cap)
    loss = call(method.aggregate, hp, objective * weight, tokens.mask, of_step)
    metrics = dict(noted, pg_loss=loss, weight_mean=tokens.mean(weight))
    if kl_coef:
        x = (tokens.logprobs - tokens.ref_logprobs).clamp(-20, 20)
        k3 = (-x).exp() - 1 + x
        kl = kl_coef * call(method.aggregate, hp, k3 * of_pass, tokens.mask, of_step)
        metrics.update(kl_loss=kl, kl_ref=tokens.mean(k3), kl_ref_k1=tokens.mean(x))
        loss = loss + kl
    if size:
        return loss, {}
    metrics.update(measure(method, hp, tokens), loss=loss)
    return loss, {name: value.detach() for name, value in metrics.items()}


def objective_of(method, hp, tokens):
    """-> loss [B, T], {metric: number}, of objectives with and without something to tell."""
    told = call(method.objective, hp, tokens)
    return told if isinstance(told, tuple) else (told, {})


def measure(method, hp, tokens):
    """The step's ratios and clipping. A token is clipped when it has an advantage and the objective gives it no
    gradient, however it does that; shares are of all completion tokens."""
    leaf = replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_())
    with torch.enable_grad():
        gradient, = torch.autograd.grad(objective_of(method, hp, leaf)[0].sum(), leaf.logprobs)
    tokens = replace(tokens, logprobs=tokens.logprobs.detach())
    ratio, log_ratio, inside = tokens.ratio, tokens.log_ratio, tokens.ratio[tokens.mask]
    up, down = ((gradient == 0) & side for side in (tokens.advantages > 0, tokens.advantages < 0))
    _, count, std = spread_by_bin(tokens, BINS)
    return dict(
        clip_frac=tokens.mean((up | down).float()), clip_high_frac=tokens.mean(up.float()),
        clip_low_frac=tokens.mean(down.float()), approx_kl=tokens.mean(ratio - 1 - log_ratio),
        approx_kl_k1=tokens.mean(-log_ratio), ratio_mean=inside.mean(), ratio_min=inside.min(), ratio_max=inside.max(),
        ess=effective_sample_size(tokens), entropy=tokens.mean(tokens.entropy),
        **{f"ratio_std/bin{i}": std[i] for i in range(BINS)},
        **{f"bin_frac/bin{i}": count[i] / count.sum() for i in range(BINS)})


def describe(name, method, hp):
    """fade = fade(alpha_max=3.0, ...) | every_token | ppo_clip(eps_low=0.2, ...) | constant"""
    def cell(f):
        values = ", ".join(f"{k}={hp[k]}" for k, _ in keyword_only(f))
        return f.__name__ + (f"({values})" if values else "")
    passes = [cell(f) for f in method.passes if f is not every_token]
    return f"{name} = " + " | ".join([cell(getattr(method, axis)) for axis in AXES] + passes)


def card(name):
    """What a row computes, with which defaults, where that comes from and what computes the same elsewhere."""
    method = METHODS[name]
    entries = [(axis, inspect.getdoc(getattr(method, axis))) for axis in AXES]
    entries += [("pass", inspect.getdoc(f)) for f in method.passes if f is not every_token]
    entries += [("source", method.source), ("peers", method.peers)]
    return "\n".join([describe(name, method, method.flags)] + [
        f"  {label:<11}" + text.replace("\n\n", "\n").replace("\n", "\n" + " " * 13) for label, text in entries])


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(METHODS):
        sys.exit(f"losses.py: no such method: {', '.join(unknown)}; there are {', '.join(METHODS)}")
    print("\n\n".join(map(card, sys.argv[1:] or METHODS)))

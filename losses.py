"""The losses. A method is one row of METHODS. A row chooses on four axes, which "loss type"
elsewhere mixes up:

    advantage   how good a completion is, by the rewards of its group            [P, G] -> [P, G]
    select      the weight of each token                                         -> [B, T], >= 0
    objective   the loss of each token, from its ratio and its advantage         -> [B, T]
    aggregate   one number from many tokens                                      [B, T] -> scalar

A new method is one function and one row. The function's keyword-only arguments become flags of
train.py, with the defaults beside the formula. `python losses.py` prints a card for every method,
`python losses.py fade` prints one.

Notation: pi is the probability of the sampled token now, pi_old that of an earlier policy
(--old_logprobs says which), rho = pi / pi_old, A the advantage, r the reward, rbar its mean over
the group, sg stops the gradient. This file needs torch alone: it knows no model and no ranks, and
writes into no argument but an advantage's `state`.
"""

import functools
import inspect
import json
import math
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

TIED = 1e-5  # numbers that differ by less, relatively, are one but for float32's rounding
BINS = 5  # the logged statistics go by five equal bins of the token's probability, as ACPO's


@dataclass
class Tokens:
    """The tokens of B completions: of a rollout, of one optimizer step, or of a slice of it.

    Each field is [B, T]; where mask is False, a token is padding or left out (--mask_truncated)."""

    logprobs: torch.Tensor        # log pi, the only field whose gradient functions see
    old_logprobs: torch.Tensor    # log pi_old, of the policy that --old_logprobs names
    advantages: torch.Tensor      # the completion's, and of a token what a teacher adds
    mask: torch.Tensor            # bool
    entropy: torch.Tensor         # nats, of pi, detached; for the selects of passes, as scored
    sampler_logprobs: torch.Tensor | None = None  # of the sampler, for token_truncate, ...
    ref_logprobs: torch.Tensor | None = None      # of the reference model, for --kl_coef
    weight: torch.Tensor | None = None            # of a pass over the rollout, see Method.passes
    group: torch.Tensor | None = None             # int, of the prompt, for prompt_mean

    @property
    def log_ratio(self):
        # beyond the clamp there is no gradient; a sum of e^20 is far from overflow
        return (self.logprobs - self.old_logprobs).clamp(-20, 20)

    @property
    def ratio(self):
        return self.log_ratio.exp()

    @property
    def probs(self):
        return self.logprobs.detach().exp()

    def mean(self, x):
        """Mean over the completion tokens of x [B, T]; of bool the share."""
        return (x * self.mask).sum() / self.mask.sum()

    def sequence_mean(self, x):
        """Mean over the tokens of each completion of x [B, T]: [B, 1]."""
        return (x * self.mask).sum(1, keepdim=True) / self.mask.sum(1, keepdim=True).clamp(min=1)

    def masked(self):
        """A copy in float32 or better, 0 where mask is False, so that a NaN there cannot leak."""
        return replace(self, **{
            name: torch.where(self.mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)
            for name, x in vars(self).items() if x is not None and name not in ("mask", "group")})


def require(holds, sentence):
    if not holds:
        raise ValueError(sentence)


def whole_step(f):
    """Marks a function whose value at one token depends on other tokens of the optimizer step:
    engine.policy.backward shows it the whole step, however small the micro-batches are."""
    f.whole_step = True
    return f


# ---------------------------------------------------------------------------- axis 1: advantage
# (rewards [P, G], state) -> [P, G]. `state` is a plain dict of numbers that outlives the rollout.

def centred(rewards, state):
    """A = r - rbar"""
    require(rewards.shape[1] > 1,
            "a group of one completion has no spread: --group_size must be 2 or more")
    return rewards - rewards.mean(1, keepdim=True)


def raw(rewards, state):
    """A = r"""
    return rewards.clone()


def zscore(rewards, state):
    """A = (r - rbar) / (std + 1e-6), std unbiased"""
    return centred(rewards, state) / (rewards.std(1, keepdim=True) + 1e-6)


def rollout_zscore(rewards, state):
    """A = (r - rbar) / (s + 1e-6), s the unbiased std of r - rbar over the whole rollout

    A group weighs by its spread, where zscore gives all mixed groups one. s counts each completion
    once; verl counts it once per token."""
    advantages = centred(rewards, state)
    return advantages / (advantages.std() + 1e-6)


def none(rewards, state):
    """A = 0: --teacher alone"""
    return torch.zeros_like(rewards)


def leave_one_out(rewards, state):
    """A = (r - rbar) G / (G - 1): the baseline is the mean of the others"""
    return centred(rewards, state) * (rewards.shape[1] / (rewards.shape[1] - 1))


def weigh_failures(advantages, delta):
    """Divides negative advantages by delta: above 1 favours successes, below 1 failures."""
    return torch.where(advantages < 0, advantages / delta, advantages)


def focus(rewards, exponent):
    """(1 - rbar)^(exponent - 1) [P, 1]: the larger the exponent, the more hard problems weigh."""
    return (1 - rewards.mean(1, keepdim=True)).clamp(min=0) ** (exponent - 1)


def asym(rewards, state, *, delta=2.0):
    """A = r - rbar, divided by delta where r < rbar"""
    require(delta > 0, f"--delta must be above 0, not {delta}")
    return weigh_failures(centred(rewards, state), delta)


def power(rewards, state, *, alpha=2.0):
    """A = (1 - rbar)^(alpha - 1) (r - rbar)"""
    require(alpha >= 1, f"--alpha must be 1 or more, not {alpha}")
    return focus(rewards, alpha) * centred(rewards, state)


def fade(rewards, state, *, alpha_max=3.0, delta_min=0.3, entropy_target=None, fade_ema=0.02):
    """A = (1 - rbar)^(alpha - 1) (r - rbar), divided by delta where r < rbar
    alpha = clip(3 (1 - p) / (2 p), 1, alpha_max), p a moving average of the reward, from 0.5
    delta = clip(1 + H - H*, delta_min, 1), H a moving average of the entropy, from the first, H0

    entropy_target is H* in nats; None is half of H0, for an absolute number does not carry over
    between models. fade_ema is the weight of the NEW value; a summary of the paper has it as that
    of the old one, and would forget 98% of the past at every rollout. Both averages take the new
    rollout in before they are used. state["entropy"] holds its mean entropy in nats."""
    require(0 <= fade_ema <= 1,
            f"--fade_ema is the weight of the new value, from 0 to 1, not {fade_ema}")
    require(alpha_max >= 1, f"--alpha_max must be 1 or more, not {alpha_max}")
    require(0 < delta_min <= 1, f"--delta_min must be above 0 and at most 1, not {delta_min}")
    entropy = state["entropy"]
    first = state.setdefault("fade_entropy_first", entropy)
    p = (1 - fade_ema) * state.get("fade_solve_rate", 0.5) + fade_ema * float(rewards.mean())
    h = (1 - fade_ema) * state.get("fade_entropy", first) + fade_ema * entropy
    target = first / 2 if entropy_target is None else entropy_target
    # multiplied out: p = 0 (or less, with shaped rewards) gives alpha_max and no division by 0
    alpha = alpha_max if 3 * (1 - p) >= 2 * p * alpha_max else max(1.0, 3 * (1 - p) / (2 * p))
    delta = min(1.0, max(delta_min, 1 + h - target))
    state.update(fade_solve_rate=p, fade_entropy=h, fade_alpha=alpha, fade_delta=delta)
    return focus(rewards, alpha) * weigh_failures(centred(rewards, state), delta)


def maxrl(rewards, state):
    """A = (r - rbar) / rbar, 0 where rbar <= 0"""
    mean = rewards.mean(1, keepdim=True)
    return torch.where(mean > 0, centred(rewards, state) / mean, 0.0)


def passk(rewards, state, *, k=4):
    """R = 1 - C(F, k) / C(G, k) with F failures of G, s = sqrt(R (1 - R)); 0 where s = 0, else
    A = (1 - R) / s of a success, (1 - R - C(F - 1, k - 1) / C(G - 1, k - 1)) / s of a failure"""
    size = rewards.shape[1]
    require(1 <= k <= size > 1, "--k must be from 1 to --group_size, which must be 2 or more, "
            f"not {k} of {size}")
    require(torch.isin(rewards, rewards.new_tensor([0.0, 1.0])).all(),
            "passk counts successes: rewards (less --overlong_penalty) must be 0 or 1")
    failures = (rewards == 0).sum(1, keepdim=True)

    def all_fail(known):
        """The chance that k, drawn without replacement, all fail, where `known` of them do."""
        chances = [math.comb(max(f - known, 0), k - known) / math.comb(size - known, k - known)
                   for f in range(size + 1)]
        return rewards.new_tensor(chances)[failures]
    unsolved, others = all_fail(0), all_fail(1)  # 1 - R, and beside one failure, [P, 1] each
    spread = (unsolved * (1 - unsolved)).sqrt()
    return torch.where(spread > 0, (unsolved - others * (rewards == 0)) / spread, 0.0)


def gradient_mass(advantages):
    """-> mean over groups of sum |A+| / G and of sum |A-| / G: FADE's m_S and m_F."""
    return advantages.clamp(min=0).mean().item(), (-advantages).clamp(min=0).mean().item()


# ---------------------------------------------------------------------------- axis 2: select
# tokens -> weight [B, T], numbers or bool. A token of weight 0 still counts in the denominators.

def every_token(tokens):
    """w = 1"""
    return torch.ones_like(tokens.entropy)


def largest(x, among, tokens, flag, share, rounding=math.ceil):
    """True for the tokens of `among` [B, T] with the largest x: for a share of the step's tokens,
    the value of --flag, one at least if there are any. Equal contexts, as of a group's first
    tokens, have numbers equal but for rounding, as the micro-batch has it: they tie."""
    require(0 < share <= 1, f"--{flag} must be above 0 and at most 1, not {share}")
    count = max(1, rounding(share * int(tokens.mask.sum())))
    ranked = x[among].sort(descending=True).values[:count]
    least = ranked[-1] if len(ranked) else x.new_tensor(math.inf)
    return among & (x >= least - TIED * least.abs())


@whole_step
def top_entropy(tokens, *, entropy_share=0.2):
    """w = 1 for the share of the step's tokens with the highest entropy, else 0"""
    return largest(tokens.entropy, tokens.mask, tokens, "entropy_share", entropy_share)


@whole_step
def bottom_entropy(tokens, *, entropy_share=0.8):
    """w = 1 for the share of the step's tokens with the lowest entropy, else 0"""
    return largest(-tokens.entropy, tokens.mask, tokens, "entropy_share", entropy_share)


def by_probability(tokens, *, prob_alpha=0.3):
    """w = prob_alpha pi_old + 1 - prob_alpha"""
    require(0 <= prob_alpha <= 1, f"--prob_alpha must be from 0 to 1, not {prob_alpha}")
    return prob_alpha * tokens.old_logprobs.exp() + 1 - prob_alpha


def low_probability(tokens, *, prob_split=0.5):
    """w = 1 where pi_old <= prob_split, else 0"""
    require(0 < prob_split < 1, f"--prob_split must be between 0 and 1, not {prob_split}")
    return tokens.old_logprobs.exp() <= prob_split


def high_probability(tokens, *, prob_split=0.5):
    """w = 1 where pi_old > prob_split, else 0"""
    return ~low_probability(tokens, prob_split=prob_split)


@whole_step
def successes(tokens):
    """w = (the step's tokens / those with A > 0) where A > 0, else 0

    With token_mean that is the mean over the tokens with A > 0."""
    right = (tokens.advantages > 0).to(tokens.entropy)
    return right / tokens.mean(right).clamp(min=1e-12)


def opsm(tokens, *, opsm_delta=0.5):
    """w = 0 where A < 0 and the completion's mean of log(pi_old / pi) is above opsm_delta, else 1

    A failure that has become unlikely since is not pushed further. The paper gives no delta; TRL
    advises to start at 0.5, slime has 1e-4."""
    near = tokens.sequence_mean(-tokens.log_ratio.detach()) <= opsm_delta
    return (tokens.advantages >= 0) | near


# The sampler's probabilities are not quite the trainer's. These selects correct for it, with any
# method: u = pi_old / pi_sampler of a token, U its product over the completion.


def sampler_log_ratio(tokens):
    """log u"""
    require(tokens.sampler_logprobs is not None, "a correction needs Tokens with sampler_logprobs")
    return (tokens.old_logprobs - tokens.sampler_logprobs).clamp(-20, 20)


def sequence_log_ratio(tokens):
    """log U [B, 1]"""
    return sampler_log_ratio(tokens).sum(1, keepdim=True).clamp(-20, 20)


def within(tokens, log_ratio, name, low, high, drops):
    """-> the ratio [B, T], clipped to the bounds or 0 outside; the share of tokens outside."""
    require(0 <= low <= 1 <= high < math.inf, f"--{name}_low must be from 0 to 1 and --{name}_high "
            f"1 or more, not {low} and {high}")
    ratio = log_ratio.exp().expand_as(tokens.mask)
    outside = (ratio < low) | (ratio > high)
    weight = ratio.where(~outside, 0.0) if drops else ratio.clamp(low, high)
    return weight, {f"{name}_{'dropped' if drops else 'bounded'}": tokens.mean(outside)}


def token_truncate(tokens, *, token_truncate_high=2.0):
    """w = min(u, token_truncate_high); the default is verl's, TRL has 3"""
    return within(tokens, sampler_log_ratio(tokens), "token_truncate", 0.0, token_truncate_high,
                  drops=False)


def token_mask(tokens, *, token_mask_low=0.5, token_mask_high=5.0):
    """w = u where token_mask_low <= u <= token_mask_high, else 0: IcePop, with its defaults"""
    return within(tokens, sampler_log_ratio(tokens), "token_mask", token_mask_low, token_mask_high,
                  drops=True)


def sequence_truncate(tokens, *, sequence_truncate_high=2.0):
    """w = min(U, sequence_truncate_high); the default is verl's, TRL has 3"""
    return within(tokens, sequence_log_ratio(tokens), "sequence_truncate",
                  0.0, sequence_truncate_high, drops=False)


def sequence_mask(tokens, *, sequence_mask_high=3.0):
    """w = U where U <= sequence_mask_high, else 0: TRL's default"""
    return within(tokens, sequence_log_ratio(tokens), "sequence_mask", 0.0, sequence_mask_high,
                  drops=True)


def geometric_mask(tokens, *, geo_low=0.999, geo_high=1.001):
    """w = 1 where geo_low <= U^(1 / length) <= geo_high, else 0: verl's geo_rs; SkyRL: .99, 1.01"""
    mean = tokens.sequence_mean(sampler_log_ratio(tokens))
    kept, numbers = within(tokens, mean, "geo", geo_low, geo_high, drops=True)
    return kept > 0, numbers


CORRECTIONS = token_truncate, token_mask, sequence_truncate, sequence_mask, geometric_mask


# ---------------------------------------------------------------------------- axis 3: objective
# tokens -> loss [B, T] to minimise, or (loss, {metric: number}).

def reinforce(tokens):
    """L = -A log pi"""
    return -tokens.advantages * tokens.logprobs


def clipped(ratio, advantages, low, high, dual_clip=None):
    """-min(rho A, clip(rho, 1 - low, 1 + high) A); with a dual_clip, dual_clip |A| at most"""
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if not dual_clip:
        return loss
    require(dual_clip > 1, "--dual_clip bounds the ratio where A < 0: it must be above 1, or 0 for "
            f"none, not {dual_clip}")
    return torch.where(advantages < 0, torch.min(loss, -dual_clip * advantages), loss)


def ppo_clip(tokens, *, eps_low=0.2, eps_high=0.2, dual_clip=None):
    """L = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)
    with dual_clip = c: min(L, -c A) where A < 0; 0 is none"""
    return clipped(tokens.ratio, tokens.advantages, eps_low, eps_high, dual_clip)


def capped(tokens, bound):
    """-sg(min(rho, bound)) A log pi; the share of tokens with rho > bound and A other than 0"""
    loss = -tokens.ratio.detach().clamp(max=bound) * tokens.advantages * tokens.logprobs
    return loss, tokens.mean((tokens.ratio > bound) & (tokens.advantages != 0))


def cispo(tokens, *, ratio_max=5.0, drop_low=None, drop_high=None):
    """L = -sg(min(rho, ratio_max)) A log pi
    with drop_low, drop_high (both or neither): 0 for a token that PPO would clip, where A > 0 and
    rho > 1 + drop_high, or A < 0 and rho < 1 - drop_low, as ACPO's baseline of the name has it

    ratio_max bounds rho itself. In verl and NeMo-RL it is an offset from 1; in TRL it is
    epsilon_high, whose inherited default of 0.2 scales every gradient by 0.2."""
    require(ratio_max >= 1, f"--ratio_max bounds the ratio itself, at 1 or more, not {ratio_max} "
            f"(an offset of {ratio_max} is --ratio_max {1 + ratio_max:g})")
    require((drop_low is None) == (drop_high is None),
            "--drop_low and --drop_high go together: give both or neither")
    loss, capped_frac = capped(tokens, ratio_max)
    if drop_low is not None:
        up, down = tokens.ratio > 1 + drop_high, tokens.ratio < 1 - drop_low
        loss = loss * ~torch.where(tokens.advantages > 0, up, down)
    return loss, dict(capped_frac=capped_frac)


def gspo(tokens, *, eps_low=3e-4, eps_high=4e-4):
    """L = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)
    s = exp(mean over the completion of log rho)

    In its token form, s_t = sg(s) pi / sg(pi), with the same gradient, select can leave one out."""
    sequence = tokens.sequence_mean(tokens.log_ratio).exp().detach()
    ratio = sequence * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return clipped(ratio, tokens.advantages, eps_low, eps_high)


def sapo(tokens, *, tau_pos=1.0, tau_neg=1.05):
    """L = -A (4 / tau) sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg"""
    require(min(tau_pos, tau_neg) > 0,
            f"--tau_pos and --tau_neg must be above 0, not {tau_pos} and {tau_neg}")
    tau = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    return -tokens.advantages * 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))


def gmpo(tokens, *, eps_low=0.4, eps_high=0.4):
    """L = -A exp(mean over the completion of x)
    x = sign(A) min(sign(A) log rho, sign(A) clip(log rho, -eps_low, eps_high))"""
    sign = tokens.advantages.sign()
    x = sign * torch.min(sign * tokens.log_ratio, sign * tokens.log_ratio.clamp(-eps_low, eps_high))
    mean = tokens.sequence_mean(x).exp().detach()
    return -tokens.advantages * mean * (x - x.detach()).exp()


def dppo(tokens, *, tv_low=0.2, tv_high=0.2, binary_kl=None, ratio_max=20.0):
    """L = -sg(min(rho, ratio_max)) A log pi, 0 where A > 0 and pi - pi_old > tv_high
    or A < 0 and pi - pi_old < -tv_low (the sampled token's part of the total variation);
    with binary_kl = d also 0 where A (pi - pi_old) > 0 and, in nats,
    pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)) > d

    Up to d = 0.08 the KL, at least twice the square of the total variation, alone decides at the
    bounds of 0.2. SkyRL's d is 0.05."""
    old = tokens.old_logprobs.exp()
    moved = tokens.probs - old
    gone = torch.where(tokens.advantages > 0, moved > tv_high, moved < -tv_low)
    if binary_kl is not None:
        require(binary_kl > 0, f"--binary_kl must be above 0 nats, not {binary_kl}")
        others, old_others = (-x.expm1().clamp(max=-1e-8)
                              for x in (tokens.logprobs.detach(), tokens.old_logprobs))
        kl = old_others * (old_others / others).log() - old * tokens.log_ratio.detach()
        gone |= (tokens.advantages * moved > 0) & (kl > binary_kl)
    return capped(tokens, ratio_max)[0] * ~gone


def vespo(tokens, *, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0):
    """L = -sg(W^k exp(lambda (1 - W))) A log pi, W = product of rho over the completion
    k, lambda = k_pos, lambda_pos where A >= 0, else k_neg, lambda_neg"""
    log_w = tokens.log_ratio.detach().sum(1, keepdim=True).clamp(-20, 20)
    failed = tokens.advantages < 0
    k, decay = torch.where(failed, k_neg, k_pos), torch.where(failed, lambda_neg, lambda_pos)
    return -(k * log_w + decay * (1 - log_w.exp())).exp() * tokens.advantages * tokens.logprobs


def spread_by_bin(tokens, bins):
    """Bins tokens by their current probability.

    -> the bin of each token [B, T], tokens per bin [bins] and std of rho per bin [bins]."""
    index = (tokens.probs * bins).nan_to_num().long().clamp(max=bins - 1)  # pi = 1: the last bin

    def sums(x):
        x = torch.where(tokens.mask, x, 0)
        return x.new_zeros(bins).index_add(0, index.flatten(), x.flatten())
    ratio = tokens.ratio.detach()
    count = sums(torch.ones_like(ratio))
    mean = sums(ratio) / count.clamp(min=1)
    # around the mean: sum(rho^2) / n - mean^2 is all rounding in float32 while rho is near 1
    variance = sums((ratio - mean[index]) ** 2) / count.clamp(min=1)
    return index, count, variance.sqrt()


@whole_step
def acpo(tokens, *, clip_base=0.2, clip_alpha=3.0, clip_max=3.0, bins=5, dual_clip=None):
    """L = -min(rho A, clip(rho, 1 - e, 1 + e) A)
    e = clip_base + clip_alpha std(rho over the step's tokens in the bin of pi), in [0, clip_max]
    with dual_clip = c: min(L, -c A) where A < 0; 0 is none"""
    require(bins > 0, f"--bins must be 1 or more, not {bins}")
    index, _, std = spread_by_bin(tokens, bins)
    e = (clip_base + clip_alpha * std).clamp(0, clip_max)
    loss = clipped(tokens.ratio, tokens.advantages, e[index], e[index], dual_clip)
    return loss, {f"clip_range/bin{i}": e[i] for i in range(bins)}


def effective_sample_size(tokens):
    """(sum rho)^2 / (n sum rho^2) over the completion tokens, in [1/n, 1], no gradient."""
    ratio = tokens.ratio.detach()
    return tokens.mean(ratio) ** 2 / tokens.mean(ratio ** 2)


@whole_step
def p3o(tokens, *, ess_cap=True, ess_kl=True):
    """L = -sg(min(rho, ess)) A log pi + (1 - ess) (log rho + 1 / rho - 1)
    ess = the step's effective sample size, a share of its tokens

    Without ess_cap the first term has rho itself, without ess_kl there is no second term."""
    ess, x = effective_sample_size(tokens), tokens.log_ratio.clamp(-10, 10)
    loss, capped_frac = capped(tokens, ess if ess_cap else math.inf)
    penalty = (1 - ess) * (x + (-x).exp() - 1) * ess_kl
    return loss + penalty, dict(capped_frac=capped_frac, p3o_ess=ess)


def dro(tokens, *, dro_beta=0.05):
    """L = -A log pi + (dro_beta / 2) (log rho)^2; the default is Tinker's"""
    return reinforce(tokens) + dro_beta / 2 * tokens.log_ratio ** 2


def covariance(tokens):
    """(A - mean A) (log pi - mean log pi), the means over the step's tokens, no gradient."""
    log_pi = tokens.logprobs.detach()
    return (tokens.advantages - tokens.mean(tokens.advantages)) * (log_pi - tokens.mean(log_pi))


@whole_step
def clip_cov(tokens, *, cov_share=2e-4, cov_low=1.0, cov_high=5.0, eps_low=0.2, eps_high=0.2):
    """L = PPO's, 0 for the cov_share of the step's tokens with the largest covariance of A and
    log pi, of those that PPO does not clip and whose covariance is from cov_low to cov_high

    verl draws the tokens among those within the bounds at random."""
    loss, cov = clipped(tokens.ratio, tokens.advantages, eps_low, eps_high), covariance(tokens)
    free = tokens.mask & (loss == -tokens.ratio * tokens.advantages)
    eligible = free & (cov_low < cov) & (cov < cov_high)
    gone = largest(cov, eligible, tokens, "cov_share", cov_share, int)
    return loss * ~gone, dict(cov_frac=tokens.mean(gone))


@whole_step
def kl_cov(tokens, *, cov_share=2e-4, cov_kl=1.0):
    """L = -rho A, plus cov_kl |log rho| for the cov_share of the step's tokens with the largest
    covariance of A and log pi; 0 where |log rho| < 1e-5, because its sign is rounding there"""
    chosen = largest(covariance(tokens), tokens.mask, tokens, "cov_share", cov_share, int)
    away = tokens.log_ratio.abs()
    penalty = cov_kl * chosen * torch.where(away > TIED, away, 0.0)
    return penalty - tokens.ratio * tokens.advantages, dict(cov_frac=tokens.mean(chosen))


# ---------------------------------------------------------------------------- axis 4: aggregate
# (loss [B, T], mask [B, T], StepSize of the step) -> scalar; an argument group gets Tokens.group

# the denominators: of the whole optimizer step, over all ranks
StepSize = namedtuple("StepSize", "completions tokens max_tokens prompts")


def step_size(mask, max_tokens, group=None):
    """Counts the tokens in mask [B, T], the completions that have at least one of them, and, with
    group [B, T], the tokens of each prompt, a tensor by its number in group."""
    prompts = None if group is None else group[mask].bincount(minlength=int(group.max()) + 1)
    return StepSize(int(mask.any(1).sum()), int(mask.sum()), max_tokens, prompts)


def seq_mean(loss, mask, size):
    """mean over completions of the mean over their tokens"""
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / size.completions


def token_mean(loss, mask, size):
    """sum / completion tokens of the optimizer step"""
    return (loss * mask).sum() / size.tokens


def prompt_mean(loss, mask, size, group):
    """mean over prompts of the mean over the tokens of all their completions in the optimizer step

    A prompt that a rollout has twice counts as two, as Tokens.group has them."""
    return (loss * mask / size.prompts.clamp(min=1)[group]).sum() / size.prompts.count_nonzero()


def seq_sum(loss, mask, size):
    """mean over completions of the sum over their tokens"""
    return (loss * mask).sum() / size.completions


def constant(loss, mask, size):
    """sum / (completions x max_tokens)"""
    return (loss * mask).sum() / (size.completions * size.max_tokens)


# ---------------------------------------------------------------------------- the rows

# Functions of one completion that give it no gradient where its advantage is 0: a method of these
# alone skips such completions in the update. Any other function sees all completions
BY_ADVANTAGE = {reinforce, ppo_clip, cispo, gspo, sapo, gmpo, dppo, vespo,
                every_token, by_probability, low_probability, high_probability, opsm, *CORRECTIONS,
                seq_mean, token_mean, prompt_mean, seq_sum, constant}


@functools.cache
def keyword_only(f):
    """{name: default} of a function's keyword-only arguments: its hyperparameters."""
    parameters = inspect.signature(f).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@dataclass(frozen=True)
class Method:
    """One row: a function per axis. `preset`: hyperparameters, the row's own or `bind`'s."""

    advantage: Callable
    objective: Callable
    aggregate: Callable
    select: Callable | tuple = every_token  # of a tuple the weights multiply
    preset: dict = field(default_factory=dict)
    passes: tuple = (every_token,)  # each weighs the rollout's tokens, then come S steps
    old_logprobs: str = "trainer"   # default of --old_logprobs: the ratio's denominator
    like_reinforce: bool = True     # has its gradient at ratio 1 reinforce's sign? It is checked
    source: str = ""

    def __post_init__(self):
        require(self.selects and self.passes, "a row has a select and a pass, one or more of each")
        for f in self.functions:
            require(hasattr(f, "__name__"), f"a row is made of functions: {f!r} is none")

    @property
    def selects(self):
        return self.select if isinstance(self.select, tuple) else (self.select,)

    @property
    def parts(self):
        """-> (axis, its functions) of each axis, then of each pass but that of all tokens alike."""
        return [("advantage", [self.advantage]), ("select", self.selects),
                ("objective", [self.objective]), ("aggregate", [self.aggregate]),
                *(("pass", [f]) for f in self.passes if f is not every_token)]

    @property
    def functions(self):
        return [f for _, its in self.parts for f in its]

    @property
    def flags(self):
        """{name: value} of the hyperparameters that the row's functions take."""
        return {name: self.preset.get(name, default)
                for f in self.functions for name, default in keyword_only(f).items()}

    @property
    def whole_step(self):
        """Does a token's loss depend on the other tokens of the optimizer step?"""
        return any(getattr(f, "whole_step", False) for f in self.functions)

    @property
    def skips_zero_advantage(self):
        """Does every completion with advantage 0 have a gradient of 0?"""
        return {*self.functions} - {self.advantage} <= BY_ADVANTAGE

    def bind(self, **hyperparameters):
        """The same row with other values. Raises TypeError for a name that no function takes."""
        if unknown := set(hyperparameters) - set(self.flags):
            raise TypeError(f"{', '.join(sorted(unknown))}: not used by this method "
                            f"(it has {', '.join(self.flags)})")
        return replace(self, preset=self.preset | hyperparameters)

    def call(self, f, *args, **offered):
        """f(*args), with those of the row's hyperparameters and of `offered` that f takes."""
        takes, known = inspect.signature(f).parameters, self.flags | offered
        return f(*args, **{name: known[name] for name in takes if name in known})


# advantage, objective, aggregate; then select, where it is not every_token. docs/methods.json has
# the long form of each source, and the flags that compute the same elsewhere
METHODS = {
    "reinforce": Method(raw, reinforce, token_mean, source="Williams 1992"),
    "rft": Method(raw, reinforce, token_mean, successes, source="arXiv 2308.01825"),
    "rloo": Method(leave_one_out, ppo_clip, token_mean, source="arXiv 2402.14740"),
    "grpo": Method(zscore, ppo_clip, seq_mean, source="arXiv 2402.03300"),
    "reinforce_pp": Method(rollout_zscore, ppo_clip, token_mean, source="arXiv 2501.03262"),
    "dr_grpo": Method(centred, ppo_clip, constant, source="arXiv 2503.20783"),
    "dapo": Method(zscore, ppo_clip, token_mean, preset=dict(eps_high=0.28),
                   source="arXiv 2503.14476"),
    "cispo": Method(zscore, cispo, token_mean, source="arXiv 2506.13585"),
    "scale_rl": Method(rollout_zscore, cispo, prompt_mean, source="arXiv 2510.13786"),
    "gspo": Method(zscore, gspo, seq_mean, source="arXiv 2507.18071"),
    "luspo": Method(zscore, gspo, seq_sum, preset=dict(eps_low=2e-3, eps_high=2.5e-3),
                    source="arXiv 2602.05261"),
    "sapo": Method(zscore, sapo, seq_mean, source="arXiv 2511.20347"),
    "gmpo": Method(zscore, gmpo, seq_mean, source="arXiv 2507.20673"),
    "dppo": Method(zscore, dppo, token_mean, source="arXiv 2602.04879"),
    "vespo": Method(zscore, vespo, token_mean, source="arXiv 2602.10693"),
    "opsm": Method(zscore, ppo_clip, seq_mean, opsm, old_logprobs="sampler",
                   source="arXiv 2512.02556"),
    "dapo_acpo": Method(zscore, ppo_clip, seq_mean, preset=dict(eps_high=0.3, dual_clip=3.0),
                        source="arXiv 2606.22570"),
    "cispo_acpo": Method(zscore, cispo, seq_mean,
                         preset=dict(ratio_max=1.45, drop_low=0.2, drop_high=0.3),
                         source="arXiv 2606.22570"),
    "acpo": Method(zscore, acpo, seq_mean, preset=dict(dual_clip=3.0), source="arXiv 2606.22570"),
    "p3o": Method(zscore, p3o, token_mean, old_logprobs="sampler", source="arXiv 2605.12380"),
    "fade": Method(fade, ppo_clip, constant, source="arXiv 2607.01490"),
    "asym": Method(asym, ppo_clip, constant, source="arXiv 2607.01490"),
    "power": Method(power, ppo_clip, constant, source="arXiv 2607.01490"),
    "maxrl": Method(maxrl, ppo_clip, constant, source="arXiv 2602.02710"),
    "passk": Method(passk, ppo_clip, token_mean, source="arXiv 2508.10751"),
    "dro": Method(centred, dro, token_mean, source="arXiv 2405.19107"),
    "opd": Method(none, ppo_clip, token_mean, source="arXiv 2306.08543"),
    "ar_lopti": Method(zscore, ppo_clip, token_mean, by_probability, dict(eps_high=0.24),
                       passes=(low_probability, high_probability), source="arXiv 2505.12929"),
    "top_entropy": Method(zscore, ppo_clip, token_mean, top_entropy, dict(eps_high=0.28),
                          source="arXiv 2506.01939"),
    "bottom_entropy": Method(zscore, ppo_clip, token_mean, bottom_entropy, dict(eps_high=0.28),
                             source="arXiv 2506.01939"),
    "clip_cov": Method(zscore, clip_cov, token_mean, like_reinforce=False,
                       source="arXiv 2505.22617"),
    "kl_cov": Method(zscore, kl_cov, token_mean, source="arXiv 2505.22617"),
}

AXES = ("advantage", "select", "objective", "aggregate")


def cells(axis):
    """{name: function} of the rows' cells on an axis: the names of --advantage, --select, ..."""
    found = [f for method in METHODS.values() for f in dict(method.parts)[axis]]
    return {f.__name__: f for f in (*found, *CORRECTIONS * (axis == "select"))}


def row(name, select=None, **axes):
    """The Method of a name, with another cell where an axis names one (None does not), and without
    the row's own values for the cell that it had there. select: names with commas between, of which
    "own" is the row's. Raises ValueError for another name."""
    method, known = METHODS[name], cells("select")
    require({*method.preset} <= {*method.flags}, f"the preset of {name}, {method.preset}, has a "
            f"name that none of its functions takes; they take {', '.join(method.flags)}")
    names = [x.strip() for x in (select or "own").split(",")]
    require({*names} <= {"own", *known} and len({*names}) == len(names), f"--select {select}: it "
            f"takes names with commas between, each once, of own, {', '.join(known)}")
    chosen = tuple(f for x in names for f in (method.selects if x == "own" else [known[x]]))
    changed = replace(method, select=chosen if select else method.select,
                      **{axis: cells(axis)[cell] for axis, cell in axes.items() if cell})
    kept = {flag for f in {*changed.functions} & {*method.functions} for flag in keyword_only(f)}
    return replace(changed, preset={x: method.preset[x] for x in method.preset.keys() & kept})


def with_hyperparameters(method, hyperparameters):
    """A row, given by name or itself, with these hyperparameters in place of the row's."""
    method = METHODS[method] if isinstance(method, str) else method
    return method.bind(**hyperparameters)


# ---------------------------------------------------------------------------- the loss of a step

def group_advantages(method, rewards, state, **hp):
    """The advantage of every completion.

    rewards [P, G]: P groups of G completions of one prompt. state: a plain dict of numbers, kept
    over the run, with the rollout's mean token entropy (nats) in state["entropy"]. hp:
    hyperparameters in place of the row's. Returns [P, G]. Raises ValueError for a hyperparameter
    out of range, or a group of one where a spread is needed."""
    method = with_hyperparameters(method, hp)
    # in float64 equal rewards of 0.7 have a std of 0. In float32 a rounding error, divided by
    # 0 + 1e-6, would be an advantage
    advantages = method.call(method.advantage, rewards.double(), state)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def with_numbers(result):
    """-> a tensor [B, T], {metric: number}; a select or an objective may return it alone."""
    return result if isinstance(result, tuple) else (result, {})


def selected(method, tokens):
    """-> the product of the selects' weights [B, T], and the numbers that they log."""
    weight, numbers = 1.0, {}
    for f in method.selects:
        factor, of_select = with_numbers(method.call(f, tokens))
        weight, numbers = weight * factor, numbers | of_select
    return weight, numbers


def loss_terms(method, tokens, max_tokens, size=None, kl_coef=0.0, kl_unbiased=False,
               entropy_coef=0.0, **hp):
    """policy_loss's arguments -> the bound Method; the masked Tokens; {name: scalar}, whose
    sum is the loss; and {name: number} to log."""
    method, tokens = with_hyperparameters(method, hp), tokens.masked()
    entropy, tokens.entropy = tokens.entropy, tokens.entropy.detach()
    size = size or step_size(tokens.mask, max_tokens, tokens.group)
    token_loss, numbers = with_numbers(method.call(method.objective, tokens))
    weight, of_selects = selected(method, tokens)
    of_pass = 1 if tokens.weight is None else tokens.weight

    def aggregate(x):
        return method.call(method.aggregate, x * of_pass, tokens.mask, size, group=tokens.group)
    terms = dict(pg_loss=aggregate(token_loss * weight))
    numbers = {"weight_mean": tokens.mean(weight * of_pass), **of_selects, **numbers}
    if kl_coef:
        require(tokens.ref_logprobs is not None, "kl_coef needs Tokens with ref_logprobs")
        log_ratio = (tokens.logprobs - tokens.ref_logprobs).clamp(-20, 20)
        k3 = (-log_ratio).exp() - 1 + log_ratio
        terms["kl_loss"] = kl_coef * aggregate(k3 * (tokens.ratio if kl_unbiased else 1))
        numbers.update(kl_ref=tokens.mean(k3), kl_ref_k1=tokens.mean(log_ratio))
    if entropy_coef:
        terms["entropy_loss"] = -entropy_coef * aggregate(entropy)
    return method, tokens, terms, numbers


def policy_loss(method, tokens, max_tokens, *, size=None, **options):
    """The loss of one optimizer step, a scalar.

    tokens: the whole step; or a slice of it, with the step_size of the whole as `size`: the losses
    of all slices add up to the step's (a whole_step method must see all of it). Options: kl_coef
    weighs the k3 estimate of KL(pi | pi_ref), kl_unbiased multiplies it by rho; entropy_coef weighs
    tokens.entropy, whose gradient is of this term alone; and hyperparameters in place of the row's.
    Raises ValueError for a hyperparameter out of range."""
    _, _, terms, _ = loss_terms(method, tokens, max_tokens, size, **options)
    return sum(terms.values())


@torch.no_grad()
def step_metrics(method, tokens, max_tokens, **options):
    """-> {name: scalar without gradient} of one whole optimizer step: its loss and the terms of it,
    ratios, clipping, and the functions' own numbers. Options and errors: policy_loss."""
    method, tokens, terms, numbers = loss_terms(method, tokens, max_tokens, **options)
    metrics = {**terms, **measure(method, tokens), **numbers, "loss": sum(terms.values())}
    return {name: torch.as_tensor(x) for name, x in metrics.items()}


@torch.enable_grad()
def weight_on_logprob(method, tokens):
    """-d objective / d log pi [B, T]: rho A where PPO's clip lets it pass, else 0 (ACPO, eq. 2)"""
    leaf = replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_())
    token_loss, _ = with_numbers(method.call(method.objective, leaf))
    gradient, = torch.autograd.grad(token_loss.sum(), leaf.logprobs)
    return -gradient * tokens.mask


def measure(method, tokens):
    """The step's ratios and clipping. A token is clipped when its A is not 0 and the objective
    gives it no gradient, for whatever reason; shares are of all completion tokens. The other
    numbers are of the completions with A other than 0, for every method, since backward may leave
    out the rest; nan where there is none."""
    no_gradient = weight_on_logprob(method, tokens) == 0
    up, down = no_gradient & (tokens.advantages > 0), no_gradient & (tokens.advantages < 0)
    shares = dict(clip_frac=tokens.mean(up | down), clip_high_frac=tokens.mean(up),
                  clip_low_frac=tokens.mean(down))
    learnt = tokens.mask & (tokens.advantages != 0).any(1, keepdim=True)
    tokens = replace(tokens, mask=learnt)
    log_ratio, ratio = tokens.log_ratio, tokens.ratio
    least, most = ratio.where(learnt, math.inf).min(), ratio.where(learnt, -math.inf).max()
    or_nan = 0 / learnt.sum()  # 0; without a token nan, as a mean is
    _, count, std = spread_by_bin(tokens, BINS)
    return dict(
        shares, approx_kl=tokens.mean(ratio - 1 - log_ratio),  # policy/kl_old in the log
        approx_kl_k1=tokens.mean(-log_ratio),
        ratio_mean=tokens.mean(ratio), ratio_min=least + or_nan, ratio_max=most + or_nan,
        ess=effective_sample_size(tokens), entropy=tokens.mean(tokens.entropy),
        **{f"ratio_std/bin{i}": std[i] + or_nan for i in range(BINS)},
        **{f"bin_frac/bin{i}": count[i] / count.sum() for i in range(BINS)})


# ---------------------------------------------------------------------------- a row in words

def describe(name, method):
    """fade = fade(alpha_max=3.0, ...) | every_token | ppo_clip(eps_low=0.2, ...) | constant"""
    def cell(f):
        values = ", ".join(f"{k}={method.flags[k]}" for k in keyword_only(f))
        return f.__name__ + (f"({values})" if values else "")
    return f"{name} = " + " | ".join(" x ".join(map(cell, its)) for _, its in method.parts)


def card(name):
    """A row's formulas, values and source, and the flags of other frameworks that compute it."""
    method = METHODS[name]
    notes = json.loads((Path(__file__).parent / "docs" / "methods.json").read_text()).get(name, {})
    entries = [(kind, inspect.getdoc(f) or "") for kind, its in method.parts for f in its]
    entries += {"source": method.source or "none given", **notes}.items()
    lines = [f"  {label:<11}" + text.replace("\n\n", "\n").replace("\n", "\n" + " " * 13)
             for label, text in entries]
    return "\n".join([describe(name, method), *lines])


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(METHODS):
        print(f"losses.py: no such method: {', '.join(unknown)}; there are {', '.join(METHODS)}",
              file=sys.stderr)
        sys.exit(2)
    print("\n\n".join(map(card, sys.argv[1:] or METHODS)))

"""A row of METHODS, tried on a toy step before a model is loaded; ValueErrors name the function."""

import sys
from dataclasses import replace

import torch
from torch.nn.functional import pad

import losses
from losses import Tokens, require


def check(method, args):
    """Raises ValueError for a row that cannot learn from groups, rewards or a KL of these flags."""
    with torch.random.fork_rng(devices=[]):
        check_advantage(method, args.group_size, bool(args.overlong_penalty))
        check_step(method, *toy(args.kl_coef))


def named(f):
    return f"the function {f.__name__} of losses.py"


def toy(reference):
    """-> Tokens [8, 12] and their StepSize. Row 0 has ratio 1, row 3 no token, row 4 A = 0; the
    halves have other means, and prompts in common. reference: is there a reference model?"""
    rows = torch.arange(8)[:, None]
    draw, noise, entropy = torch.rand(3, 8, 12, generator=torch.Generator().manual_seed(0),
                                      dtype=torch.float64)
    logprobs, noise = -0.05 - (6 - rows * 0.7) * draw, rows * (noise - 0.5)
    tokens = Tokens(
        logprobs, logprobs - noise, advantages=(rows - 4.0).double().expand(8, 12),
        mask=torch.arange(12) < (5 * rows + 3) % 6 * 2, entropy=entropy + 0.2 * (3 * rows % 8),
        sampler_logprobs=logprobs - noise / 2, group=(rows % 4).expand(8, 12),
        ref_logprobs=logprobs - noise / 3 if reference else None).masked()
    return tokens, losses.step_size(tokens.mask, 1024, tokens.group)


MEASURED = {*"grad_norm lr overflow learnt_tokens kl_old kl_old_k1 kl_teacher kl_age".split(),
            *losses.step_metrics("grpo", toy(True)[0], 1024, kl_coef=1.0, entropy_coef=1.0)}


def call(method, f, shape, *inputs, **offered):
    """-> the tensor that a function returns. Raises ValueError, also where one of the numbers that
    it logs, an objective's or those of a `state`, is none."""
    where = named(f)
    def found():  # a write into a tensor counts its version up
        return [(id(x), x._version) for given in inputs
                for x in (vars(given).values() if isinstance(given, Tokens) else [given])
                if torch.is_tensor(x)]
    before = found()
    try:
        value = method.call(f, *inputs, **offered)
    except ValueError:  # a hyperparameter out of range
        raise
    except Exception as e:  # a user's function may raise anything
        order = "; a row has advantage, objective, aggregate, select; ref_logprobs take --kl_coef"
        raise ValueError(f"{where} raises {type(e).__name__}: {e}"
                         + order * isinstance(e, TypeError)) from None
    require(before == found(), f"{where} writes into its arguments, as clamp_, += and "
            "tokens.mask = ... do; clamp and a name of its own do not")
    numbered = isinstance(value, tuple) and f not in method.passes
    value, *numbers = value if numbered else (value, *(x for x in inputs if isinstance(x, dict)))
    require([*map(type, numbers)] in ([], [dict]),
            f"{where} returns a tuple that is not a tensor and its dict(NAME=number)")
    kind = list(value.shape) if torch.is_tensor(value) else f"a {type(value).__name__}"
    require(kind == list(shape),
            f"{where} returns {kind}, where a tensor of shape {list(shape)} belongs")
    require(value.isfinite().all(),
            f"{where} returns nan or infinity: it divides by 0 in a group of equal rewards, at "
            "ratio 1, at A = 0, in padding, where all fields are 0, or by a hyperparameter")
    kinds = bool, int, float, *[torch.Tensor] * (f is not method.advantage)  # numpy's are not saved
    for key, number in dict(*numbers).items():
        require(key not in ({"mass_pos", "mass_neg"} if f is method.advantage else MEASURED),
                f"{where} logs {key!r}, which is measured for every method: give another name")
        require(type(number) in kinds and torch.as_tensor(number).numel() == 1,
                f"{where} logs {key!r}, which is not one number: float(x) in state, and "
                "tokens.mean(x) from a select or an objective make one")
    return value


def gradient(method, tokens, size):
    """d loss / d log pi and the tokens' losses [2, B, T] of a step or of a part of it: these show
    where a clip has other bounds, also if no token crosses one. Raises ValueError."""
    tokens = replace(tokens, logprobs=tokens.logprobs.clone().requires_grad_())
    for f in (*method.selects, *method.passes):
        weight = call(method, f, tokens.mask.shape, tokens)
        require(not weight.requires_grad, f"{named(f)} returns a weight with a gradient: a select "
                "weighs tokens, and .detach() makes a weight without one")
        require(weight.min() >= 0, f"{named(f)} returns a weight below 0")
    token_loss = call(method, method.objective, tokens.mask.shape, tokens)
    require(token_loss.requires_grad,
            f"{named(method.objective)} has no gradient: it has to depend on tokens.logprobs, "
            "tokens.log_ratio or tokens.ratio (tokens.probs is without one)")
    one, other = (call(method, method.aggregate, (), token_loss.where(tokens.mask, padding),
                       tokens.mask, size, group=tokens.group) for padding in (0.0, 7.0))
    require(one == other, f"{named(method.aggregate)} depends on padding, which "
            "(loss * mask).sum() leaves out")
    loss = losses.policy_loss(method, tokens, size.max_tokens, size=size)
    found, = torch.autograd.grad(loss, tokens.logprobs)
    require(found.isfinite().all(), "its gradient is nan or infinity somewhere; torch.where does "
            "not stop one in the branch not taken, a clamp before it does")
    return torch.stack([found, token_loss.detach() * tokens.mask])


def check_step(method, tokens, size):
    """Tries a row on a step, on the step with more padding, on its halves, and at ratio 1."""
    def gradient_of(change):
        part = Tokens(**{name: change(x) for name, x in vars(tokens).items() if x is not None})
        return gradient(method, part, size)
    whole = gradient(method, tokens, size)
    draws = not torch.equal(whole, gradient(method, tokens, size))  # random numbers
    more = gradient(method, replace(tokens, entropy=tokens.entropy + 1), size)
    require(draws or torch.equal(more[1], whole[1]) or not torch.equal(more[0], whole[0]),
            f"{named(method.objective)} adds tokens.entropy, which has no gradient here: "
            "--entropy_coef is such a bonus")
    wide = gradient_of(lambda x: pad(x, (0, 3)))[..., :12]
    require(draws or torch.allclose(wide, whole, 1e-5), "its gradient depends on padding: means "
            "and sums have to leave it out, as tokens.mean(x) and (loss * mask).sum() do")
    if not method.whole_step:
        halves = gradient_of(lambda x: x[:4]), gradient_of(lambda x: x[4:])
        require(draws or torch.allclose(torch.cat(halves, 1), whole, 1e-5),
                "its gradient depends on how the optimizer step is cut into micro-batches: a "
                "function that looks at other completions has @whole_step above it, an aggregate, "
                "too, unless its denominators are those of size")
    require(not (method.skips_zero_advantage and whole[0, 4].any()),
            "its functions are in BY_ADVANTAGE, and it has a gradient where A = 0")
    tokens.old_logprobs = tokens.sampler_logprobs = tokens.logprobs
    pushed = gradient(method, tokens, size)[0] * tokens.advantages  # below 0 by the policy gradient
    require(draws or whole[0].any() or pushed.any(), "it has no gradient at any token")
    require(not method.like_reinforce or pushed.max() <= 0,
            f"at ratio 1 the gradient of {named(method.objective)} has the other sign than the "
            "policy gradient's on some token: is a minus missing, or a .detach() of the ratio "
            "before log pi? like_reinforce=False in the row says that this is meant")
    if not pushed.any():
        print("train.py: at ratio 1 the method has no gradient: it cannot learn from the first "
              "optimizer step of a rollout", file=sys.stderr)


def check_advantage(method, group_size, shaped):
    """Tries an advantage on mixed, all right and all wrong groups. shaped: rewards not 0 and 1."""
    rewards = (torch.arange(4 * group_size).view(4, -1) % 3 == 0).double()
    rewards[2:] = torch.tensor([[1.0], [0.0]])
    def advantages_of(rewards):
        return call(method, method.advantage, rewards.shape, rewards - 0.5 * shaped,
                    dict(entropy=1.0))
    advantages = advantages_of(rewards)
    draws = not torch.equal(advantages, advantages_of(rewards))
    for n in (1, 4):  # of the first group, then of all
        turned, expected = (torch.cat([x[:n].roll(1, 1), x[n:]]) for x in (rewards, advantages))
        require(draws or torch.allclose(advantages_of(turned), expected),
                f"{named(method.advantage)} depends on the order of a group's completions, as "
                "argsort does among equal rewards, and rewards.mean(0), which is of other prompts")
    gain = (advantages * (rewards - rewards.mean(1, True))).sum()
    require(gain >= 0 or not method.like_reinforce, f"{named(method.advantage)} gives successes "
            "less than failures; like_reinforce=False in the row says that this is meant")

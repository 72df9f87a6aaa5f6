"""A method tried on a toy batch before anything is loaded: mistakes in a row of one's own are one
sentence that names the function.
"""

import inspect
import zlib
from functools import partial

import torch

import losses
from experiment import failures
from losses import Tokens, keyword_only

refuse = partial(failures.refuse, "train.py")

# what train.py logs under adv/, where the numbers of a method's state go, too
OF_ADVANTAGES = {"mean", "max", "min", "mass_pos", "mass_neg", "token_mass_pos", "token_mass_neg"}


def check_row(name, method, common):
    """Refuses what is wrong in the functions of a row. common: the names of the flags that every
    method has."""
    defaults = {}
    for f in method.functions:
        where = f"{name}: the function {f.__name__} of losses.py"
        if not f.__doc__:
            refuse(f"{where} has no docstring; its first line should be the formula")
        for p in inspect.signature(f).parameters.values():
            if p.kind is not p.KEYWORD_ONLY and p.default is not p.empty:
                refuse(f"{where}: {p.name} has a default but is not keyword-only, so that it "
                       f"would be no flag; put * before it, as in {f.__name__}(..., *, "
                       f"{p.name}={p.default})")
        for flag, default in keyword_only(f).items():
            if default is inspect.Parameter.empty:
                refuse(f"{where}: {flag} has no default; a flag needs one, as in {flag}=1.0")
            if flag in common:
                refuse(f"{where}: --{flag} is a flag of train.py already; give {flag} another name")
            if defaults.setdefault(flag, default) != default:
                refuse(f"{where}: {flag} is {default} here, {defaults[flag]} in another function "
                       "of the row; one flag has one default")


def toy(group_size):
    """-> rewards [2, G], and Tokens of a few sequences, some of them padded."""
    rewards = (torch.arange(2 * group_size).view(2, -1) % 3 == 0).float()
    logprobs = torch.linspace(-2, -1, 2 * group_size).view(2, -1).requires_grad_()
    old, mask = logprobs.detach() - 0.1, torch.ones(2, group_size, dtype=torch.bool)
    mask[1, -1] = group_size == 1
    return rewards, Tokens(logprobs, old, logprobs.detach() + 1.5, mask, -logprobs.detach())


def check_method(name, method, group_size, max_tokens, shaped=False):
    """Calls each function of a row, and refuses what it cannot be used with.

    shaped: rewards are other than 0 and 1, as with --overlong_penalty."""
    def tried(f, *inputs):
        try:
            return method.call(f, *inputs)
        except ValueError as e:  # a hyperparameter out of range
            refuse(str(e))
        except Exception as e:  # there is no end to what a function of one's own may raise
            refuse(f"{name}: the function {f.__name__} of losses.py raises {type(e).__name__}: {e}")

    def has_shape(f, x, like, what):
        if not torch.is_tensor(x) or x.shape != like.shape:
            found = list(x.shape) if torch.is_tensor(x) else f"a {type(x).__name__}"
            refuse(f"{name}: the function {f.__name__} of losses.py returns {found}, where {what} "
                   f"of shape {list(like.shape)} belongs")

    rewards, tokens = toy(group_size)
    state = dict(entropy=1.0)
    advantages = tried(method.advantage, rewards.double() - 0.5 * shaped, state)
    has_shape(method.advantage, advantages, rewards, "an advantage of each completion, [P, G],")
    check_state(name, method.advantage, state)
    for f in (method.select, *method.passes):
        has_shape(f, tried(f, tokens), tokens.logprobs, "a weight of each token, [B, T],")
    result = tried(method.objective, tokens)
    loss, numbers = result if isinstance(result, tuple) else (result, {})
    has_shape(method.objective, loss, tokens.logprobs, "a loss of each token, [B, T],")
    if not loss.requires_grad:
        refuse(f"{name}: the loss of {method.objective.__name__} of losses.py has no gradient: it "
               "has to depend on tokens.logprobs, tokens.log_ratio or tokens.ratio (tokens.probs "
               "is without one)")
    check_numbers(name, method.objective, numbers, losses.measure(method, tokens))
    for token_filter in method.passes:
        tried(method.aggregate, loss * token_filter_weight(method, token_filter, tokens),
              tokens.mask, losses.step_size(tokens.mask, max_tokens))


def token_filter_weight(method, token_filter, tokens):
    return method.call(token_filter, tokens) * method.call(method.select, tokens)


def check_state(name, f, state):
    """state is saved and logged: plain numbers, under names of their own."""
    for key, value in state.items():
        if not isinstance(value, (int, float)):
            refuse(f"{f.__name__} puts a {type(value).__name__} into state[{key!r}]: state is "
                   "saved and logged, and holds plain numbers (float(x))")
        if key in OF_ADVANTAGES:
            refuse(f"{name}: {f.__name__} of losses.py puts a number into state[{key!r}], and "
                   f"adv/{key} is logged already; give it another name")


def check_numbers(name, f, numbers, measured):
    """What an objective logs: single numbers, under names of their own."""
    for key, value in numbers.items():
        if torch.as_tensor(value).numel() != 1:
            refuse(f"{name}: {f.__name__} of losses.py logs {key!r}, which is "
                   f"{list(torch.as_tensor(value).shape)} numbers; tokens.mean(x) makes one of "
                   "them")
        if key in {*measured, "pg_loss", "loss", "weight_mean", "grad_norm", "lr", "learnt_tokens"}:
            refuse(f"{name}: {f.__name__} of losses.py logs {key!r}, which is logged already; give "
                   "it another name")


def checksum(method):
    """Of the text of a row's functions; None where there is no text, as in a notebook."""
    try:
        text = "".join(inspect.getsource(f) for f in method.functions)
    except (OSError, TypeError):
        return None
    return zlib.crc32(text.encode())

"""Combinations of flags that cannot work, and faults in a row of METHODS: each is a sentence."""

import importlib.util
import inspect
import os
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

import data
import losses
from data import hub
from engine import parallel
from engine.sampler import has_vllm
from harness import failures
from losses import Tokens

refuse = partial(failures.refuse, "train.py")

GIVEN = "given"  # the origin of a flag of the command line
# flags that say something of another flag
NEEDS = dict(force="resume", lora_alpha="lora_rank", max_refills="drop_uniform_groups",
             correction_low="correction", correction_high="correction")


def check(args, method):
    if sentence := parallel.unusable_gpu():
        refuse(sentence)
    for name, other in NEEDS.items():
        if args.origin.get(name) == GIVEN and not getattr(args, other):
            refuse(f"--{name} is for --{other}, which is not given")
    with failures.refusing("train.py"):
        data.template_kwargs(args.template_kwargs, args.template)
        if args.correction:
            losses.correction_bounds(args.correction, args.correction_low, args.correction_high)
    if args.wandb and not importlib.util.find_spec("wandb"):
        refuse("--wandb: the package wandb is not installed (pip install wandb)")
    if args.wandb and parallel.rank() == 0:
        import wandb
        try:
            wandb.login()  # without a key it asks for one, or raises where nobody can answer
        except Exception as e:  # wandb's classes change with its versions
            refuse(f"--wandb: {hub.reason(e)}; WANDB_MODE=offline logs without an account")
    for wrong, sentence in combinations(args, method):
        if wrong:
            refuse(sentence)
    check_method(args.loss, method, args.group_size, shaped=bool(args.overlong_penalty))


def combinations(args, method):
    """-> (is it wrong?, the sentence) of combinations of flags."""
    ranks, vllm = parallel.world(), args.sampler == "vllm"
    problems, steps = args.problems_per_rollout, args.steps_per_rollout
    sequences, engines = problems * args.group_size, ranks // args.tp
    return [
        (args.offload and "RANK" not in os.environ,
         "--offload is FSDP's: start with torchrun --nproc_per_node 1 train.py ..."),
        (not vllm and (args.tp > 1 or args.max_num_seqs),
         "--tp and --max_num_seqs are for --sampler vllm"),
        (args.origin.get("gpu_memory_utilization") == GIVEN and not args.fit
         and not (vllm and torch.cuda.is_available()),
         "--gpu_memory_utilization is for --sampler vllm on a GPU"),
        (vllm and not has_vllm() and not args.fit,
         "--sampler vllm: vllm is not installed here; --sampler transformers needs nothing more"),
        (ranks % args.tp, f"--tp {args.tp} does not divide the number of ranks, {ranks}"),
        (engines > min(problems, args.eval_problems),
         "--problems_per_rollout and --eval_problems must be at least the number of engines, "
         f"{engines}"),
        (args.check and args.resume, "--check starts a run anew: it goes without --resume"),
        (args.data_dir and {args.data, args.eval_data or args.data} <= set(data.MADE),
         f"--data_dir: {args.data} is generated, not read"),
        (sequences % steps,
         f"{problems} problems x {args.group_size} completions = {sequences} sequences do not "
         f"divide into --steps_per_rollout {steps}"),
        (args.shuffle == "groups" and problems % steps,
         f"--shuffle groups: {problems} problems, a group each, do not divide into "
         f"--steps_per_rollout {steps}"),
        (args.overlong_penalty > args.max_tokens,
         f"--overlong_penalty must be at most --max_tokens, {args.max_tokens}"),
        (args.overlong_penalty and method.advantage is losses.maxrl,
         "maxrl divides by a group's mean reward, which --overlong_penalty can bring near 0"),
        (args.correction and args.old_logprobs == "sampler",
         f"--correction {args.correction} corrects for the sampler a second time: "
         "--old_logprobs sampler is already its own")]


# ---------------------------------------------------------------------------- a row of METHODS

def check_row(name, method, common):
    """Refuses a function whose arguments cannot be flags. common: the flags of every method."""
    defaults = {}
    for f in method.functions:
        where = f"{name}: the function {f.__name__} of losses.py"
        for p in inspect.signature(f).parameters.values():
            if (p.kind is p.KEYWORD_ONLY) != (p.default is not p.empty):
                refuse(f"{where}: {p.name} has to be keyword-only and have a default, as in "
                       f"{f.__name__}(..., *, {p.name}=1.0)")
        for flag, default in losses.keyword_only(f).items():
            if flag in common:
                refuse(f"{where}: --{flag} is a flag of train.py already; give another name")
            if defaults.setdefault(flag, default) != default:
                refuse(f"{where}: {flag} is {default} here, {defaults[flag]} in another function "
                       "of the row; one flag has one default")


IN_PADDING = 7.0  # a loss there, which an aggregate has to leave out


class Fault(Exception):
    """A fault of a function of a row: the end of a sentence that begins with its name."""


def toy():
    """-> Tokens [8, 6]. Row 0 has ratio 1, row 4 A = 0; the halves have other means, and prompts in
    common."""
    rows = torch.arange(8)[:, None]
    draw, noise, entropy = torch.rand(3, 8, 6, generator=torch.Generator().manual_seed(0),
                                      dtype=torch.float64)
    logprobs, noise = -0.05 - 3 * draw / (1 + rows), rows * (noise - 0.5)
    return Tokens(
        logprobs, logprobs - noise, advantages=(rows - 4.0).expand(8, 6),
        mask=torch.arange(6) <= 5 * rows % 6, entropy=entropy + 0.2 * rows,
        sampler_logprobs=logprobs - noise / 2, group=(rows % 4).expand(8, 6)).masked()


def call(method, f, shape, *inputs, **offered):
    """-> the tensor that a function returns, and the numbers that it logs."""
    tensors = [x for given in inputs for x in getattr(given, "__dict__", {0: given}).values()
               if torch.is_tensor(x)]
    versions = [x._version for x in tensors]  # a write into a tensor counts it up
    try:
        result = method.call(f, *inputs, **offered)
    except ValueError as e:  # a hyperparameter out of range
        refuse(str(e))
    except Exception as e:  # a user's function may raise anything
        raise Fault(f"raises {type(e).__name__}: {e}") from None
    if versions != [x._version for x in tensors]:
        raise Fault("writes into its arguments, as clamp_ and += do; clamp does not")
    value, numbers = result if isinstance(result, tuple) else (result, {})
    found = list(value.shape) if torch.is_tensor(value) else f"a {type(value).__name__}"
    if found != list(shape):
        raise Fault(f"returns {found}, where a tensor of shape {list(shape)} belongs")
    if not value.isfinite().all():
        raise Fault("returns nan or infinity: it divides by 0 in a group of equal rewards, at "
                    "ratio 1, at A = 0, or in padding, where all fields are 0")
    return value, numbers


def check_numbers(numbers, kinds):
    for key, number in numbers.items():
        if not isinstance(number, kinds) or torch.as_tensor(number).numel() != 1:
            raise Fault(f"logs {key!r}, which is not one number: float(x) in state, and "
                        "tokens.mean(x) from an objective make one")


def slope(method, f, total, leaf):
    """The gradient of a scalar, 0 where it has none. Raises Fault."""
    if total.requires_grad:
        gradient, = torch.autograd.grad(total, leaf)
        if gradient.isfinite().all():
            return gradient
        raise Fault("has a gradient of nan or infinity; torch.where does not stop one in the "
                    "branch not taken, a clamp before it does")
    if f is method.objective:
        raise Fault("has no gradient: it has to depend on tokens.logprobs, tokens.log_ratio or "
                    "tokens.ratio (tokens.probs is without one)")
    return torch.zeros_like(leaf)


def token_effect(method, f, tokens):
    """-> the values of a select or an objective and their gradients, [2, B, T], 0 in padding."""
    leaf = tokens.logprobs.clone().requires_grad_()
    value, numbers = call(method, f, tokens.mask.shape, replace(tokens, logprobs=leaf))
    check_numbers(numbers, (int, float, torch.Tensor))
    gradient = slope(method, f, (value * tokens.entropy).sum(), leaf)
    return torch.stack([value.detach() * tokens.mask, gradient])


def aggregate_effect(method, f, tokens, size):
    """-> the weight that an aggregate gives to each token's loss, [1, B, T]."""
    leaf = tokens.logprobs.where(tokens.mask, IN_PADDING).requires_grad_()
    total, _ = call(method, f, (), leaf, tokens.mask, size, group=tokens.group)
    return slope(method, f, total, leaf)[None]


def check_cell(method, f):
    """Tries a function on the step, on the step with more padding, and on its halves."""
    tokens = toy()
    size = losses.step_size(tokens.mask, 1024, tokens.group)

    def effect_of(change):
        part = Tokens(**{name: change(x) for name, x in vars(tokens).items() if x is not None})
        if f is method.aggregate:
            return aggregate_effect(method, f, part, size)
        return token_effect(method, f, part)
    before = torch.get_rng_state()
    whole = effect_of(lambda x: x)
    draws = not torch.equal(before, torch.get_rng_state())  # other numbers for another shape
    wide = effect_of(lambda x: pad(x, (0, 3)))[..., :6]
    if whole[-1][~tokens.mask].any() or not (draws or torch.allclose(wide, whole, 1e-5)):
        right = "(loss * mask).sum()" if f is method.aggregate else "tokens.mean(x)"
        raise Fault(f"depends on padding: means and sums have to leave it out, as {right} does")
    if not (method.whole_step or f in method.passes):
        halves = torch.cat([effect_of(lambda x: x[:4]), effect_of(lambda x: x[4:])], 1)
        if not torch.allclose(halves, whole, 1e-5):
            raise Fault("depends on how the optimizer step is cut into micro-batches: " + (
                "its denominators have to be those of size" if f is method.aggregate
                else "@whole_step above it shows it the whole step"))
    learns = whole[-1][tokens.advantages == 0].any()
    if learns and f is method.objective and f in losses.BY_ADVANTAGE:
        raise Fault("is in BY_ADVANTAGE and has a gradient where A = 0")


def check_advantage(method, group_size, shaped):
    """Tries an advantage on two mixed groups, one that is all right, and one that is all wrong."""
    rewards = (torch.arange(4 * group_size).view(4, -1) % 3 == 0).double()
    rewards[2:] = torch.tensor([[1.0], [0.0]])
    state = dict(entropy=1.0)
    advantages, _ = call(method, method.advantage, rewards.shape, rewards - 0.5 * shaped, state)
    if method.like_reinforce and (advantages * (rewards - rewards.mean(1, True))).sum() < 0:
        raise Fault("gives successes less than failures; like_reinforce=False in the row says that "
                    "this is meant")
    check_numbers(state, (int, float))


def check_method(name, method, group_size, shaped=False):
    """Tries each function of a row. shaped: rewards are other than 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        for f in dict.fromkeys(method.functions):
            try:
                if f is method.advantage:
                    check_advantage(method, group_size, shaped)
                else:
                    check_cell(method, f)
            except Fault as fault:
                refuse(f"{name}: the function {f.__name__} of losses.py {fault}")
        tokens = toy()
        tokens.logprobs.requires_grad_()
        tokens.old_logprobs = tokens.sampler_logprobs = tokens.logprobs.detach()
        gradient, = torch.autograd.grad(losses.policy_loss(method, tokens, 1024), tokens.logprobs)
    pushed = gradient * tokens.advantages  # by the policy gradient below 0 on either side
    if method.like_reinforce and max(pushed[:4].sum(), pushed[5:].sum()) > 0:
        refuse(f"{name}: at ratio 1 its gradient has the other sign than the policy gradient's: is "
               "a minus missing? like_reinforce=False in the row says that this is meant")

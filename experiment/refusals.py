"""Combinations of flags that cannot work, and faults in a row of METHODS: each is one sentence and
exit code 2, before a model loads."""

import importlib.util
import inspect
import os
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

import data
import losses
from engine import parallel
from engine.sampler import has_vllm
from experiment import failures
from losses import Tokens

refuse = partial(failures.refuse, "train.py")


def check(args, method):
    check_ranks(args)
    check_combinations(args, method)
    check_packages(args)
    check_method(args.loss, method, args.group_size, shaped=bool(args.overlong_penalty))


def check_ranks(args):
    ranks = parallel.world()
    if sentence := parallel.unusable_gpu():
        refuse(sentence)
    if args.offload and "RANK" not in os.environ:
        refuse("--offload is FSDP's: start with torchrun --nproc_per_node 1 train.py ...")
    if args.tp > 1 and args.sampler != "vllm":
        refuse(f"--tp {args.tp} is vLLM's: not for --sampler {args.sampler}")
    if ranks % args.tp:
        refuse(f"--tp {args.tp}: the number of ranks, {ranks}, must be a multiple of it")
    if (engines := ranks // args.tp) > min(args.problems_per_rollout, args.eval_problems):
        refuse(f"--problems_per_rollout {args.problems_per_rollout} and --eval_problems "
               f"{args.eval_problems} must be at least the number of engines, {engines}")
    if args.sampler == "vllm" and os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0" \
            and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 8:
        refuse("VLLM_BATCH_INVARIANT on a GPU of compute capability 8.x replaces torch's linear "
               "layers by vLLM's, which have no backward pass; --deterministic does not need it")


# flags that say something of another flag
NEEDS = dict(force="resume", lora_alpha="lora_rank", max_refills="drop_uniform_groups",
             correction_low="correction", correction_high="correction")


def check_combinations(args, method):
    sequences = args.problems_per_rollout * args.group_size
    for name, other in NEEDS.items():
        if args.origin.get(name) == "given" and not getattr(args, other):
            refuse(f"--{name} is for --{other}, which is not given")
    if args.check and args.resume:
        refuse("--check starts a run anew: it goes without --resume")
    if args.data_dir and {args.data, args.eval_data or args.data} <= set(data.MADE):
        refuse(f"--data_dir: {args.data} is generated, not read")
    if sequences % args.steps_per_rollout:
        refuse(f"{args.problems_per_rollout} problems x {args.group_size} completions = {sequences}"
               f" sequences do not divide into --steps_per_rollout {args.steps_per_rollout}")
    if args.shuffle == "groups" and args.problems_per_rollout % args.steps_per_rollout:
        refuse(f"--shuffle groups: {args.problems_per_rollout} problems, a group each, do not "
               f"divide into --steps_per_rollout {args.steps_per_rollout}")
    if args.overlong_penalty > args.max_tokens:
        refuse(f"--overlong_penalty {args.overlong_penalty} is longer than --max_tokens "
               f"{args.max_tokens}")
    if args.overlong_penalty and method.advantage is losses.maxrl:
        refuse("maxrl divides by a group's mean reward, which --overlong_penalty can bring near 0")
    if not args.correction:
        return
    if args.old_logprobs == "sampler":
        refuse(f"--correction {args.correction} corrects for the sampler a second time: "
               "--old_logprobs sampler is already its own")
    try:
        losses.correction_bounds(args.correction, args.correction_low, args.correction_high)
    except ValueError as e:
        refuse(str(e))


def check_packages(args):
    if args.max_num_seqs is not None and args.sampler != "vllm":
        refuse(f"--max_num_seqs {args.max_num_seqs} is for --sampler vllm")
    if args.sampler == "vllm" and not has_vllm() and not args.fit:
        refuse("--sampler vllm: vllm is not installed here; --sampler transformers needs nothing "
               "more")
    for package in ("wandb", "tensorboard"):
        if getattr(args, package) and not importlib.util.find_spec(package):
            refuse(f"--{package}: the package {package} is not installed (pip install {package})")


# ---------------------------------------------------------------------------- a row of METHODS

# logged for every method, beside losses.measure
LOGGED = {"mass_pos", "mass_neg", "pg_loss", "loss", "weight_mean", "grad_norm", "lr", "overflow",
          "learnt_tokens"}


def check_row(name, method, common):
    """Refuses a function whose arguments cannot be flags. common: the flags of every method."""
    defaults = {}
    for f in method.functions:
        where = f"{name}: the function {f.__name__} of losses.py"
        for p in inspect.signature(f).parameters.values():
            if p.default is p.empty and p.kind is p.KEYWORD_ONLY:
                refuse(f"{where}: {p.name} has no default; a flag needs one, as in {p.name}=1.0")
            if p.default is not p.empty and p.kind is not p.KEYWORD_ONLY:
                refuse(f"{where}: {p.name} has a default but is not keyword-only; put * before it, "
                       f"as in {f.__name__}(..., *, {p.name}={p.default})")
            if p.kind is p.KEYWORD_ONLY and defaults.setdefault(p.name, p.default) != p.default:
                refuse(f"{where}: {p.name} is {p.default} here, {defaults[p.name]} in another "
                       "function of the row; one flag has one default")
            if p.kind is p.KEYWORD_ONLY and p.name in common:
                refuse(f"{where}: --{p.name} is a flag of train.py already; give {p.name} another "
                       "name")


def toy(group_size):
    """-> rewards [4, G], of the last groups all right and all wrong; and Tokens [8, 6] of uneven
    lengths. Row 0 has ratio 1, row 4 has A = 0, and the two halves have other means and share their
    prompts."""
    rewards = (torch.arange(4 * group_size).view(4, -1) % 3 == 0).double()
    rewards[2:] = torch.tensor([[1.0], [0.0]])
    draw = partial(torch.rand, 8, 6, generator=torch.Generator().manual_seed(0),
                   dtype=torch.float64)
    rows, lengths = torch.arange(8)[:, None], torch.tensor([6, 1, 4, 2, 5, 3, 6, 2])[:, None]
    advantages = torch.tensor([1.5, -0.5, 1.0, -2.0, 0.0, 0.5, 2.0, -1.5]).double()[:, None]
    logprobs, noise = -0.05 - 3 * draw() / (1 + rows), rows * (draw() - 0.5)
    return rewards, Tokens(
        logprobs, logprobs - noise, advantages.expand(8, 6), torch.arange(6) < lengths,
        draw() + 0.2 * rows, sampler_logprobs=logprobs - noise / 2,
        group=(rows % 4).expand(8, 6)).without_junk()


class Trial:
    """A row of METHODS on a toy batch. A fault is one sentence that names the function."""

    def __init__(self, name, method, tokens):
        self.name, self.method, self.tokens, self.logged = name, method, tokens, {}

    def fault(self, f, text):
        refuse(f"{self.name}: the function {f.__name__} of losses.py {text}")

    def call(self, f, *inputs, shape, group=None):
        """-> the tensor that a function returns, and the numbers that it logs"""
        tensors = [x for given in inputs for x in getattr(given, "__dict__", {0: given}).values()
                   if torch.is_tensor(x)]
        versions = [x._version for x in tensors]  # a write into a tensor counts it up
        try:
            result = self.method.call(f, *inputs, group=group)
        except ValueError as e:  # a hyperparameter out of range
            refuse(str(e))
        except Exception as e:  # a user's function may raise anything
            self.fault(f, f"raises {type(e).__name__}: {e}")
        if versions != [x._version for x in tensors]:
            self.fault(f, "writes into its arguments, as clamp_ and += do; clamp does not")
        value, numbers = result if isinstance(result, tuple) else (result, {})
        if not torch.is_tensor(value) or value.shape != shape:
            found = list(value.shape) if torch.is_tensor(value) else f"a {type(value).__name__}"
            self.fault(f, f"returns {found}, where a tensor of shape {list(shape)} belongs")
        if not value.isfinite().all():
            self.fault(f, "returns nan or infinity: it divides by 0 in a group of equal rewards, "
                       "at ratio 1, at A = 0, or in padding, where all fields are 0")
        return value, numbers

    def effect(self, f, tokens):
        """-> the values of a select or an objective and their gradients, [2, B, T]; of an
        aggregate the weight of each token's loss, [1, B, T]. 0 in padding."""
        mask, aggregates = tokens.mask, f is self.method.aggregate
        leaf = tokens.logprobs.detach().where(mask, 7.0 * aggregates).requires_grad_()
        size = losses.step_size(self.tokens.mask, 1024, self.tokens.group)
        inputs = (leaf, mask, size) if aggregates else (replace(tokens, logprobs=leaf),)
        value, numbers = self.call(f, *inputs, group=tokens.group,
                                   shape=mask.shape[:0] if aggregates else mask.shape)
        gradient, weight = torch.zeros_like(leaf), 1.0 if aggregates else tokens.entropy * mask
        if value.requires_grad:
            gradient, = torch.autograd.grad((value * weight).sum(), leaf)
        elif f is self.method.objective:
            self.fault(f, "has no gradient: it has to depend on tokens.logprobs, tokens.log_ratio "
                       "or tokens.ratio (tokens.probs is without one)")
        if not gradient.isfinite().all():
            self.fault(f, "has a gradient of nan or infinity; torch.where does not stop one in the "
                       "branch not taken, a clamp before it does")
        self.logged[f] = numbers
        return torch.stack([gradient] if aggregates else [value.detach() * mask, gradient])

    def compare(self, f):
        """Tries a function on the step, on the step with more padding, and on its halves."""
        def effect_of(change):
            fields = {k: x if x is None else change(x) for k, x in vars(self.tokens).items()}
            return self.effect(f, Tokens(**fields))
        before, no_advantage = torch.get_rng_state(), self.tokens.advantages == 0
        whole, mask = self.effect(f, self.tokens), self.tokens.mask
        draws = not torch.equal(before, torch.get_rng_state())  # other numbers for another shape
        wide = effect_of(lambda x: pad(x, (0, 3)))[..., :6]
        if whole[-1][~mask].any() or not draws and not torch.allclose(wide, whole, 1e-5):
            self.fault(f, "depends on padding: means and sums have to leave it out, as "
                       "tokens.mean(x) does")
        if not (self.method.whole_step or f in self.method.passes):
            halves = torch.cat([effect_of(lambda x: x[:4]), effect_of(lambda x: x[4:])], 1)
            if not torch.allclose(halves, whole, 1e-5):
                self.fault(f, "depends on how the optimizer step is cut into micro-batches: " + (
                    "its denominators have to be those of size" if f is self.method.aggregate
                    else "@whole_step above it shows it the whole step"))
        if f is self.method.objective and f in losses.BY_ADVANTAGE and whole[1][no_advantage].any():
            self.fault(f, "is in BY_ADVANTAGE and has a gradient where A = 0")


def check_method(name, method, group_size, shaped=False):
    """Runs a method on a toy batch: whole, cut in two, with more padding. shaped: rewards are
    other than 0 and 1."""
    rewards, tokens = toy(group_size)
    trial, state = Trial(name, method, tokens), dict(entropy=1.0)
    trial.call(method.advantage, rewards - 0.5 * shaped, state, shape=rewards.shape)
    trial.logged[method.advantage] = state
    with torch.random.fork_rng(devices=[]):
        for f in dict.fromkeys(method.functions[1:]):
            trial.compare(f)
    taken = LOGGED | losses.measure(method, tokens).keys() - {"entropy"}
    for f in (method.advantage, method.objective):
        for key, value in trial.logged[f].items():
            if f is method.advantage and not isinstance(value, (int, float)):
                trial.fault(f, f"puts a {type(value).__name__} into state[{key!r}]: state is "
                            "saved, and holds plain numbers (float(x))")
            if torch.as_tensor(value).numel() != 1:
                trial.fault(f, f"logs {key!r}, of several numbers; tokens.mean(x) makes one of "
                            "them")
            if key in taken or key == "entropy" and f is method.objective:
                trial.fault(f, f"logs {key!r}, which is logged already; give it another name")

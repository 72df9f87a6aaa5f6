"""Combinations of flags that cannot work, and faults in a row of METHODS: each is one sentence and
exit code 2, before a model loads."""

import importlib.util
import inspect
import os
import zlib
from functools import partial

import torch

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


def check_combinations(args, method):
    sequences = args.problems_per_rollout * args.group_size
    if args.data_dir and {args.data, args.eval_data or args.data} <= set(data.MADE):
        refuse(f"--data_dir: {args.data} is generated, not read")
    if args.force and not args.resume or args.check and args.resume:
        refuse("--force overrules a refusal of --resume, and --check starts a run anew: --force "
               "goes with --resume, --check without")
    if args.origin.get("lora_alpha") == "given" and not args.lora_rank:
        refuse("--lora_alpha scales the adapters of --lora_rank, which is not given")
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
        for name in ("correction_low", "correction_high"):
            if getattr(args, name) is not None:
                refuse(f"--{name} is a bound of --correction, which is not given")
        return
    if args.old_logprobs == "sampler":
        refuse(f"--correction {args.correction} corrects for the sampler a second time: "
               "--old_logprobs sampler is already its own")
    if args.sampler_logprobs == "raw" and args.sampler_temperature != 1:
        refuse(f"--correction {args.correction} is by the probabilities that the sampler drew from,"
               " which --sampler_logprobs raw are at temperature 1 alone")
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
LOGGED = {"mean", "max", "min", "mass_pos", "mass_neg", "token_mass_pos", "token_mass_neg",
          "pg_loss", "loss", "weight_mean", "grad_norm", "lr", "overflow", "learnt_tokens"}


def check_row(name, method, common):
    """Refuses a function whose arguments cannot be flags. common: the flags of every method."""
    defaults = {}
    for f in method.functions:
        where = f"{name}: the function {f.__name__} of losses.py"
        if not f.__doc__:
            refuse(f"{where} has no docstring; its first line should be the formula")
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
    """-> rewards [2, G], and Tokens of two sequences, one of them padded."""
    rewards = (torch.arange(2 * group_size).view(2, -1) % 3 == 0).float()
    logprobs = torch.linspace(-2, -1, 2 * group_size).view(2, -1).requires_grad_()
    old, mask = logprobs.detach() - 0.1, torch.ones(2, group_size, dtype=torch.bool)
    mask[1, -1] = group_size == 1
    return rewards, Tokens(logprobs, old, logprobs.detach() + 1.5, mask, -logprobs.detach())


def check_method(name, method, group_size, shaped=False):
    """Runs a method on a toy batch; a fault is one sentence that names the function. shaped:
    rewards are other than 0 and 1."""
    def fault(f, text):
        refuse(f"{name}: the function {f.__name__} of losses.py {text}")

    def tried(f, *inputs, shape=None):
        try:
            result = method.call(f, *inputs)
        except ValueError as e:  # a hyperparameter out of range
            refuse(str(e))
        except Exception as e:  # a user's function may raise anything
            fault(f, f"raises {type(e).__name__}: {e}")
        value, numbers = result if isinstance(result, tuple) else (result, {})
        if shape and (not torch.is_tensor(value) or value.shape != shape):
            found = list(value.shape) if torch.is_tensor(value) else f"a {type(value).__name__}"
            fault(f, f"returns {found}, where a tensor of shape {list(shape)} belongs")
        return value, numbers

    rewards, tokens = toy(group_size)
    state = dict(entropy=1.0)
    tried(method.advantage, rewards.double() - 0.5 * shaped, state, shape=rewards.shape)
    for f in (method.select, *method.passes):
        tried(f, tokens, shape=tokens.mask.shape)
    loss, numbers = tried(method.objective, tokens, shape=tokens.mask.shape)
    if not loss.requires_grad:
        fault(method.objective, "has no gradient: it has to depend on tokens.logprobs, "
              "tokens.log_ratio or tokens.ratio (tokens.probs is without one)")
    tried(method.aggregate, loss, tokens.mask, losses.step_size(tokens.mask, 1024))
    taken = LOGGED | losses.measure(method, tokens).keys() - {"entropy"}
    for f, logged in ((method.advantage, state), (method.objective, numbers)):
        for key, value in logged.items():
            if f is method.advantage and not isinstance(value, (int, float)):
                fault(f, f"puts a {type(value).__name__} into state[{key!r}]: state is saved, and "
                      "holds plain numbers (float(x))")
            if torch.as_tensor(value).numel() != 1:
                fault(f, f"logs {key!r}, of several numbers; tokens.mean(x) makes one of them")
            if key in taken or key == "entropy" and f is method.objective:
                fault(f, f"logs {key!r}, which is logged already; give it another name")


def checksum(method):
    """Of the source of a row's functions; None where there is no source, as in a notebook."""
    try:
        return zlib.crc32("".join(inspect.getsource(f) for f in method.functions).encode())
    except (OSError, TypeError):
        return None

"""train.py's flags: what there is, what cannot work, and what a resumed run may change. Whatever is wrong with flags,
data or model is said here, in one sentence, with exit code 2.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import zlib
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

import checkpoint
import data
import losses
import parallel
import sandbox
from losses import METHODS, Tokens, group_advantages, policy_loss
from sampler import default_kind, eos_ids

# what is right for a model of a million parameters; the defaults below are for real ones
EMBEDDED = dict(rollouts=50, max_tokens=16, max_prompt_tokens=32, lr=5e-5, rank_every=10, tokens_per_micro_batch=4096)

# what a run may change when it is resumed: nothing here has a part in what is learnt
FREE = {"rollouts", "eval_every", "save_every", "save_rollouts", "keep", "rank_every", "wandb", "tensorboard", "tokens_per_micro_batch",
        "activation_checkpointing", "compile", "offload", "tp", "gpu_memory_utilization", "allow_unsafe_code", "data_dir"}
PRESENT = {"out", "resume", "force", "check"}  # of this start alone


def say(text):
    if parallel.rank() == 0:
        print(text, flush=True)


def refuse(message):
    """Bad flags, data or model: one sentence and exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once on each node
        print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # without the page of usage in front of it
        refuse(message)


def add_flags(parser):
    """The flags that every method has, each with its default and what it is."""
    def flag(name, default, help, **kw):
        parser.add_argument(f"--{name}", default=default, help=f"{help} ({default})",
                            **({"type": type(default)} if default is not None and "action" not in kw else {}), **kw)
    # method
    flag("loss", "grpo", "the method", choices=METHODS, metavar="NAME")
    for axis in losses.AXES:
        flag(axis, None, f"another {axis} than the method's", choices=losses.cells(axis), metavar="NAME")
    # problem
    flag("model", None, "Hugging Face folder or id; without it the embedded base, with settings of its own")
    flag("data", "countdown", f"the problems: {', '.join(data.names())}, or a file.jsonl of {{prompt, answer, reward}} rows")
    flag("data_dir", None, "folder of local JSONL files, with the Hub's field names, instead of the Hub")
    flag("eval_data", None, "the held-out problems; default the test split of --data")
    flag("template", None, "how a problem becomes a prompt; default by task and model, see data/README.md", choices=data.TEMPLATES)
    flag("allow_unsafe_code", False, "run sampled programs also where nothing isolates them", action="store_true")
    flag("seed", 0, "of problems, sampling and shuffling")
    # batch: P problems x G completions -> S optimizer steps
    flag("rollouts", 200, "rollouts in all")
    flag("problems_per_rollout", 64, "problems sampled for one rollout, P")
    flag("group_size", 16, "completions of each, G")
    flag("steps_per_rollout", 16, "optimizer steps on one rollout, S: 2 is near on-policy, 16 off-policy")
    # the model's side
    flag("tokens_per_micro_batch", None, "tokens that go through the model at once; default by the memory there is", type=int)
    flag("activation_checkpointing", False, "compute layers again in the backward pass instead of keeping them", action="store_true")
    flag("compile", False, "torch.compile of each layer", action="store_true")
    flag("offload", False, "keep weights, gradients and optimizer on the CPU; under torchrun", action="store_true")
    flag("lora_rank", 0, "train adapters of this rank on every linear layer, alpha twice that, instead of the weights; 0 is off")
    # sampling
    flag("sampler", default_kind(), "vllm or transformers", choices=("vllm", "transformers"))
    flag("max_tokens", 1024, "longest completion, in tokens")
    flag("max_prompt_tokens", 1024, "longest prompt, in tokens")
    flag("temperature", 1.0, "of the policy, in sampling and training alike")
    flag("sampler_temperature", None, "of the sampler alone, to be off-policy on purpose", type=float)
    flag("sampler_dtype", None, "float32 or bfloat16, where it is not --dtype", choices=("float32", "bfloat16"))
    flag("gpu_memory_utilization", 0.4, "share of the GPU's memory for vLLM")
    flag("tp", 1, "GPUs that one vLLM engine is spread over")
    flag("rollout_lag", 0, "train on what was sampled this many rollouts ago")
    # rewards
    flag("drop_uniform_groups", False, "sample anew for groups that are all right or all wrong", action="store_true")
    flag("max_refills", None, "times that --drop_uniform_groups refills a rollout at most; default 4", type=int)
    flag("mask_truncated", False, "leave completions that hit max_tokens out of the loss", action="store_true")
    flag("overlong_penalty", 0, "reward falls to -1 over the last so many tokens before max_tokens; 0 is off")
    # loss
    flag("old_logprobs", None, "the ratio's reference: trainer or sampler; default the method's",
         choices=("trainer", "sampler"))
    flag("tis_cap", 0.0, "weigh tokens by min(pi_trainer / pi_sampler, cap); 0 is off")
    flag("kl_coef", 0.0, "of the KL to the initial model; 0 loads no reference")
    flag("entropy_coef", 0.0, "of the entropy bonus")
    # optimizer: AdamW on float32 weights
    flag("lr", 1e-6, "learning rate")
    flag("warmup", 0, "optimizer steps of linear warm-up")
    flag("schedule", "constant", "constant or cosine, towards 0 at the end", choices=("constant", "cosine"))
    flag("weight_decay", 0.0, "AdamW's")
    flag("max_grad_norm", 1.0, "gradients are scaled down to this norm")
    flag("dtype", "bfloat16" if torch.cuda.is_available() else "float32", "of the trainer's computation",
         choices=("float32", "bfloat16"))
    # evaluation and log
    flag("eval_every", 10, "rollouts between evaluations on held-out problems; 0 is never")
    flag("eval_problems", 256, "held-out problems")
    flag("eval_samples", 16, "completions of each")
    flag("save_every", 20, "rollouts between checkpoints; 0 is only at the end")
    flag("keep", 2, "checkpoints kept, besides the best one")
    flag("save_rollouts", False, "keep every rollout as a file, for analyze.py replay", action="store_true")
    flag("resume", False, "continue the run in --out, with its flags, from its newest checkpoint; start it where there is none", action="store_true")
    flag("force", False, "resume with another method's flags all the same", action="store_true")
    flag("check", False, "try everything on a few completions, print a table, and stop", action="store_true")
    flag("rank_every", 0, "rollouts between looks at the rank of the LM head's change; 0 is never")
    flag("out", None, "the run's folder; default runs/<loss>-<steps>-<seed>")
    flag("wandb", None, "also log to this Weights & Biases project")
    flag("tensorboard", False, "also log for TensorBoard, in the run's folder", action="store_true")


def parse_args(argv=None, description=None):
    """-> args, method, hp. Everything that can be said before a model loads is checked here, with exit code 2."""
    parser = Parser(prog="train.py", allow_abbrev=False, description=description, add_help=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)

    add_flags(parser)

    # which run and which method, first: their flags join the others. What is given comes after what the run had
    argv = sys.argv[1:] if argv is None else argv
    saved = saved_flags(parser.parse_known_args(argv)[0])
    before = [part for name, value in saved.items() if value is not None and value is not False for part in (
        [f"--{name}"] if value is True else [f"--{name}={value}"])]
    common = {f"--{name}" for name in vars(parser.parse_known_args([])[0])}
    chosen, _ = parser.parse_known_args([flag for flag in before if flag.split("=")[0] in common] + argv)
    method = losses.row(chosen.loss, **{axis: getattr(chosen, axis) for axis in losses.AXES})
    for name, default in method.flags.items():
        parser.add_argument(f"--{name}", type=float if default is None else type(default), default=default,
                            help=f"of {chosen.loss} ({default})")
    parser.add_argument("-h", "--help", action="help", help="this page, for the method chosen")
    if chosen.model is None:
        parser.set_defaults(**EMBEDDED)
    own = {f"--{name}" for name in method.flags}
    argv = [flag for flag in before if flag.split("=")[0] in common | own] + argv
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        owners = [loss for loss, m in METHODS.items() if name[2:] in m.flags]
        refuse((f"{name} is a flag of {', '.join(owners)}; " if owners else f"{name}: there is no such flag; --help lists them; ")
               + f"{chosen.loss} has {', '.join('--' + f for f in method.flags) or 'none of its own'}")
    hp = {name: getattr(args, name) for name in method.flags}
    # what is not given follows from the rest; config.json keeps it as not given, for it to follow when a run is resumed
    args.given, args.saved = vars(args).copy(), saved
    args.old_logprobs = args.old_logprobs or method.old_logprobs
    if args.max_refills is not None and not args.drop_uniform_groups:
        refuse("--max_refills is for --drop_uniform_groups, which is not given")
    if args.max_refills is None:
        args.max_refills = 4 * args.drop_uniform_groups
    if args.sampler_temperature is None:
        args.sampler_temperature = args.temperature
    args.sampler_dtype = args.sampler_dtype or args.dtype
    validate(args, method, hp)
    return args, method, hp


def default_out(args):
    return Path(args.out or f"runs/{args.loss}-{args.steps_per_rollout}-{args.seed}")


def saved_flags(args):
    """The flags of the run that --resume is to continue; none where there is nothing to continue yet."""
    out = default_out(args)
    if not args.resume or not checkpoint.folders(out):
        return {}
    try:
        return dict(json.loads((out / "config.json").read_text())["flags"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        refuse(f"--resume: {out / 'config.json'} cannot be read, so nobody knows what the run was ({e}); --out of a new run leaves this one as it is")


def flags_of(args):
    """The flags as config.json keeps them: as given, but for what was found at start."""
    return {name: value for name, value in dict(args.given, model=args.model, tokens_per_micro_batch=args.tokens_per_micro_batch).items()
            if name not in PRESENT}


def compare(args):
    """Lists what is not as it was in the run to be resumed, and refuses what changes what is learnt, but for --force."""
    saved, now = args.saved, {name: value for name, value in args.given.items() if name not in PRESENT}
    changes = {name: f"--{name} was {saved.get(name)} and is now {value}" for name, value in now.items() if saved and value != saved.get(name)}
    changes.update({name: f"--{name} was {saved[name]} and is not a flag of this method" for name in set(saved) - set(now)})
    if "data_checksum" in changes:
        changes["data_checksum"] = f"the problems of --data {args.data} are not those that the run had"
    if fixed := [text for name, text in changes.items() if name in ("model", "lora_rank")]:
        refuse(f"{'; '.join(fixed)}: the checkpoint's weights are those of the run; train another with --model CHECKPOINT")
    free = FREE - {"rollouts"} if args.schedule == "cosine" else FREE
    if (method := [text for name, text in changes.items() if name not in free]) and not args.force:
        refuse(f"{'; '.join(method)}: that is another method or other data than the run's; --force continues all the same")
    for text in changes.values():
        say(f"resuming, but {text}")


def validate(args, method, hp):
    """Arithmetic, combinations, and the method itself on a toy batch: what cannot work is said now."""
    sequences = args.problems_per_rollout * args.group_size
    for name in ("rollouts", "problems_per_rollout", "group_size", "steps_per_rollout",
                 "max_tokens", "max_prompt_tokens", "eval_problems", "eval_samples", "keep", "tp"):
        if getattr(args, name) < 1:
            refuse(f"--{name} must be 1 or more, not {getattr(args, name)}")
    for name in ("lr", "temperature", "sampler_temperature", "max_grad_norm", "gpu_memory_utilization"):
        if not getattr(args, name) > 0:
            refuse(f"--{name} must be above 0, not {getattr(args, name)}")
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not 0 <= value < (2**63 if isinstance(value, int) else math.inf) and name != "entropy_coef":
            refuse(f"--{name} must be 0 or more, and finite, not {value}")
    if not math.isfinite(args.entropy_coef):
        refuse(f"--entropy_coef must be finite, not {args.entropy_coef}")
    if args.gpu_memory_utilization >= 1:
        refuse(f"--gpu_memory_utilization is a share of the GPU's memory, below 1, not {args.gpu_memory_utilization}")
    if args.tokens_per_micro_batch is not None and args.tokens_per_micro_batch < 1:
        refuse(f"--tokens_per_micro_batch must be 1 or more, not {args.tokens_per_micro_batch}")
    if args.offload and "RANK" not in os.environ:
        refuse("--offload is FSDP's: start with torchrun --nproc_per_node 1 train.py ...")
    if parallel.world() % args.tp or args.tp > 1 and args.sampler != "vllm":
        refuse(f"--tp {args.tp}: vLLM engines of {args.tp} GPUs need a number of ranks that is a multiple of it, not {parallel.world()}"
               if args.sampler == "vllm" else f"--tp {args.tp} is vLLM's: not for --sampler {args.sampler}")
    if (engines := parallel.world() // args.tp) > min(args.problems_per_rollout, args.eval_problems):
        refuse(f"--problems_per_rollout {args.problems_per_rollout} and --eval_problems {args.eval_problems} must be at least the number of engines, {engines}")
    if args.data_dir and {args.data, args.eval_data or args.data} <= set(data.countdown.FORMS):
        refuse(f"--data_dir: {args.data} is made, not read")
    if (args.force and not args.resume) or (args.check and args.resume):
        refuse("--force goes with --resume, and --check does not")
    if sequences % args.steps_per_rollout:
        refuse(f"{args.problems_per_rollout} problems x {args.group_size} completions = {sequences} sequences do "
                     f"not divide into --steps_per_rollout {args.steps_per_rollout}")
    if args.overlong_penalty > args.max_tokens:
        refuse(f"--overlong_penalty {args.overlong_penalty} is longer than --max_tokens {args.max_tokens}")
    if args.tis_cap and args.old_logprobs == "sampler":
        refuse("--tis_cap corrects for the sampler a second time: --old_logprobs sampler is already its own")
    if args.sampler == "vllm" and default_kind() != "vllm":
        refuse("--sampler vllm: vllm is not installed here; --sampler transformers needs nothing more")
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboard")):
        if getattr(args, name) and not importlib.util.find_spec(package):
            refuse(f"--{name}: the package {package} is not installed (pip install {package})")
    try:
        toy = torch.linspace(-2, -1, 2 * args.group_size).view(2, -1)
        rewards = (torch.arange(2 * args.group_size).view(2, -1) % 3 == 0).float() - 0.5 * bool(args.overlong_penalty)
        group_advantages(method, rewards, dict(entropy=1.0), **hp)
        for only in method.passes:
            policy_loss(method, Tokens(toy, toy, toy, toy < 0, -toy), args.max_tokens, only=only, **hp)
    except ValueError as e:
        refuse(str(e))
    if method.advantage is losses.maxrl and args.overlong_penalty:
        refuse("maxrl divides by a group's mean reward, which --overlong_penalty can bring near 0")
    if args.out and Path(args.out, "metrics.jsonl").exists() and not args.resume and not args.check:
        refuse(f"--out {args.out} already holds a run; --resume continues it, or give another folder")
    if args.model and Path(args.model).exists() and not Path(args.model, "config.json").exists():
        refuse(f"--model {args.model} is not a Hugging Face folder: it has no config.json")


def load_data(args):
    """-> the problems to learn from, the held-out ones, and the ids of those left out because their gold answer is no good."""
    left_out = []
    try:
        test_set = data.load(args.eval_data or args.data, "test", args.data_dir)[:args.eval_problems] if args.eval_every else []
        train_set = data.load(args.data, "train", args.data_dir, left_out)
    except data.DataError as e:
        refuse(str(e) + (": --eval_data NAME holds out another's, --eval_every 0 none" if "no test split" in str(e) else ""))
    if args.eval_every and len(test_set) < args.eval_problems:
        refuse(f"--eval_problems {args.eval_problems}: {args.eval_data or args.data} has {len(test_set)} held-out problems")
    try:
        sandbox.prepare([*test_set, *(train_set if isinstance(train_set, list) else ())], args.allow_unsafe_code)
    except PermissionError as e:
        refuse(str(e))
    learnt = {str(p["prompt"]) for p in train_set} if isinstance(train_set, list) else ()
    if both := sum(str(p["prompt"]) in learnt for p in test_set):
        say(f"{both} of the {len(test_set)} held-out problems are learnt from, too: their scores say little; --eval_data names others")
    rows = json.dumps([train_set if isinstance(train_set, list) else [], test_set], sort_keys=True, default=str)
    args.given["data_checksum"] = zlib.crc32(rows.encode())
    compare(args)
    return train_set, test_set, left_out


def load_tokenizer(args, train_set, test_set):
    """-> the tokenizer, the ids that end a completion, and the problems to learn from whose prompts are not too long: all
    that needs no weights. Refuses a model that cannot make prompts of them."""
    try:
        config = AutoConfig.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        eos = eos_ids(args.model, tokenizer)
        some = train_set if isinstance(train_set, list) else data.batch(train_set, 64, args.seed, 0)
        lengths, held_out = ([len(data.encode(tokenizer, p, args.template)) for p in problems] for problems in (some, test_set))
    except Exception as e:  # what can be wrong with a folder, or with a chat template, has no end
        refuse(f"--model {args.model} cannot be used: {(str(e) or type(e).__name__).splitlines()[0]}")
    if not eos:
        refuse(f"--model {args.model} names no end-of-sequence token, in its tokenizer or its configuration")
    if not min(lengths + held_out):
        refuse(f"--model {args.model}: its tokenizer makes nothing of a prompt; are its files complete?")
    short = [p for p, length in zip(some, lengths) if length <= args.max_prompt_tokens]
    if not short or max(held_out, default=0) > args.max_prompt_tokens or len(short) < len(some) and not isinstance(train_set, list):
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens}: a prompt of --data {args.data} has {max(lengths + held_out)} tokens")
    if len(short) < len(some):
        say(f"{args.data}: left out {len(some) - len(short)} of {len(some)} problems, their prompts are longer than --max_prompt_tokens {args.max_prompt_tokens}")
        train_set = short
    places = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if args.max_prompt_tokens + args.max_tokens > places:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens} and --max_tokens {args.max_tokens} are more than the model's {places} positions")
    return tokenizer, eos, train_set

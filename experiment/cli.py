"""train.py's command line: parsing, a resumed run's flags, and every error that can be said before
a model loads. Whatever is wrong with flags, data or model is one sentence and exit code 2.
"""

import argparse
import importlib.util
import inspect
import json
import math
import os
import sys
import textwrap
import zlib
from functools import partial
from pathlib import Path

import torch

import data
import losses
from data.recipe import settings_of
from engine import parallel
from engine.parallel import say
from engine.sampler import has_vllm
from experiment import failures, trackers, trial
from experiment.files import checkpoint_folders
from experiment.model import folder_fault, read_tokenizer
from graders import sandbox
from losses import METHODS

# what a run may change when it is resumed: nothing here has a part in what is learnt
FREE = {"rollouts", "eval_every", "eval_data", "eval_problems", "eval_samples", "eval_checksum",
        "save_every", "save_rollouts", "keep", "rank_every", "wandb", "trackio", "tensorboard",
        "tokens_per_micro_batch", "share_prompts", "activation_checkpointing", "compile", "offload",
        "tp", "max_num_seqs", "deterministic", "gpu_memory_utilization", "allow_unsafe_code",
        "data_dir"}
OF_THIS_START = {"out", "resume", "force", "check", "fit"}  # they are no part of what the run is
# what a model's recipe.json may set: how it is trained, not what on or by which method
OF_A_RECIPE = {"rollouts", "problems_per_rollout", "group_size", "steps_per_rollout", "max_tokens",
               "max_prompt_tokens", "tokens_per_micro_batch", "temperature", "template", "lr",
               "warmup", "schedule", "weight_decay", "max_grad_norm", "kl_coef", "lora_rank",
               "rank_every", "eval_every", "eval_problems", "eval_samples"}

refuse = partial(failures.refuse, "train.py")


# ---------------------------------------------------------------------------- parsing

class Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        """A flag's help, with the default that is in force."""
        silent = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        named = silent or "%(default)s" in action.help
        return action.help if named else f"{action.help} (%(default)s)"

    def _format_action_invocation(self, action):
        if isinstance(action, argparse.BooleanOptionalAction) and not action.default:
            return action.option_strings[0]  # --no-NAME would stand at every switch
        return super()._format_action_invocation(action)


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings):
        super().__init__(formatter_class=Help, allow_abbrev=False, add_help=False, **settings)
        self.options = {}  # {flag: its default, type and choices}

    def error(self, message):  # without the page of usage in front of it
        refuse(message)

    def flag(self, name, default, help, type=None, choices=None, group=None, **options):
        """One flag, typed as its default; a bool is a switch, --NAME and --no-NAME."""
        kind = type or (str if default is None else default.__class__)
        self.options[name] = dict(default=default, type=kind, choices=choices)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif choices:
            options["choices"] = choices
        else:
            options.update(type=kind, metavar={int: "N", float: "X", str: "NAME"}.get(kind))
        (group or self).add_argument(f"--{name}", default=default, help=help, **options)

    def take(self, settings):
        """Makes the settings of a model the defaults. Refuses what is no flag's value."""
        for name, value in settings.items():
            if name not in OF_A_RECIPE or not fits(value, self.options[name]):
                refuse(f"the model's recipe.json has {name} = {value!r}: it may set "
                       f"{', '.join(sorted(OF_A_RECIPE))}, to values that these flags take")
        others = [f"{name} {self.options[name]['default']}" for name in settings]
        if others:
            self.epilog = textwrap.fill(
                "Some defaults above are of the model's recipe.json, which the embedded base has, "
                f"too. For a model without one they are {', '.join(others)}.")
        self.set_defaults(**settings)

    def restore(self, saved):
        """Makes a resumed run's flags the defaults, as far as there are such flags yet. A flag
        that its config.json lacks was added later: its default has to be what the run did
        without it."""
        for name in self.options.keys() & saved.keys():
            if not fits(saved[name], self.options[name]):
                refuse(f"--resume: the run's config.json has {name} = {saved[name]!r}, which "
                       f"--{name} does not take")
            if saved[name] is not None:
                self.set_defaults(**{name: saved[name]})


def fits(value, option):
    """May a value from a file be a flag's? option: its default, type and choices."""
    if value is None:
        return option["default"] is None
    kinds = (int, float) if option["type"] is float else (option["type"],)
    return type(value) in kinds and value in (option["choices"] or [value])


def parse_args(argv, add_flags, description):
    """-> args, and the Method with its hyperparameters.

    add_flags: a function of Parser.flag that adds the flags of all methods; those of the chosen
    method follow from its row."""
    try:
        return parse(argv, add_flags, description)
    except OSError as e:  # a path that is too long, or that may not be looked at
        refuse(f"{str(e.filename)[:100]}: {e.strerror}")


def parse(argv, add_flags, description):
    parser = Parser(prog="train.py", usage="train.py [--loss NAME] [--FLAG VALUE ...]",
                    description=description)
    add_flags(parser.flag)
    argv = sys.argv[1:] if argv is None else argv
    saved = saved_flags(parser.parse_known_args(argv)[0])
    parser.restore(saved)
    # the method is chosen first: its flags join the others
    chosen = parser.parse_known_args(argv)[0]
    method = chosen_row(chosen)
    trial.check_row(chosen.loss, method, set(parser.options))
    parser.add_argument("-h", "--help", action="help", help="show this page, for --loss NAME")
    for f in method.functions:
        if names := [name for name in losses.keyword_only(f) if name not in parser.options]:
            formula = inspect.getdoc(f).split("\n\n")[0]
            group = parser.add_argument_group(f"flags of {chosen.loss}: {f.__name__}", formula)
        for name in names:
            value = method.flags[name]
            parser.flag(name, value, "default %(default)s", group=group,
                        type=float if value is None else None)
    try:
        settings = settings_of(chosen.model)
    except ValueError as e:
        refuse(str(e))
    parser.take(settings)
    if saved:
        parser.epilog = "The defaults above are the run's own."
    parser.restore(saved)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        if unknown[0].lower() in ("true", "false"):
            refuse(f"{unknown[0]}: a switch takes no value; --NAME switches it on, --no-NAME off")
        refuse_unknown(unknown[0].split("=")[0], chosen.loss, method)
    origin = origins(argv, saved, settings, chosen.model)
    if args.lora_rank and origin.get("lr") not in ("given", "as the run had it"):
        args.lr, origin["lr"] = 10 * args.lr, "ten times full training's, for --lora_rank"
    # what follows from other flags is set in `resolve`. config.json keeps it as it was given, so
    # that it follows anew when the run is resumed
    args.given = dict(vars(args), method_checksum=trial.checksum(method))
    # a run without a checkpoint starts again, and may do so with other flags
    args.saved = saved if checkpoint_folders(default_out(args)) else {}
    args.defaults = {name: options["default"] for name, options in parser.options.items()}
    args.origin = origin
    method = method.bind(**{name: getattr(args, name) for name in method.flags})
    resolve(args, method)
    return args, method


def origins(argv, saved, settings, model):
    """-> {flag: where its value comes from}, of those that have not train.py's default."""
    of_model = "the model's recipe.json" if model else "the embedded base's"
    given = {text.split("=")[0].removeprefix("--") for text in argv if text.startswith("--")}
    return {**dict.fromkeys(settings, of_model), **dict.fromkeys(saved, "as the run had it"),
            **dict.fromkeys(given, "given")}


def chosen_row(args):
    """The row of --loss, with the cells of --advantage, --select, --objective, --aggregate."""
    cells = {axis: getattr(args, axis) for axis in losses.AXES}
    for axis, name in cells.items():
        if name and name not in (there := losses.cells(axis)):
            refuse(f"--{axis} {name}: there is no such {axis}, there are {', '.join(there)}; a "
                   "function is one of them once a row of METHODS uses it")
    return losses.row(args.loss, **cells)


def refuse_unknown(name, loss, method):
    owners = [other for other, row in METHODS.items() if name[2:] in row.flags]
    problem = (f"{name} is a flag of {', '.join(owners)}" if owners
               else f"{name}: there is no such flag; --help lists them")
    own_flags = ", ".join(f"--{flag}" for flag in method.flags) or "none of its own"
    refuse(f"{problem}; {loss} has {own_flags}")


def resolve(args, method):
    """Sets what follows from other flags, and refuses what cannot work."""
    args.old_logprobs = args.old_logprobs or method.old_logprobs
    if args.max_refills is not None and not args.drop_uniform_groups:
        refuse("--max_refills is for --drop_uniform_groups, which is not given")
    if args.max_refills is None:
        args.max_refills = 4 * args.drop_uniform_groups
    if args.sampler_temperature is None:
        args.sampler_temperature = args.temperature
    args.sampler_dtype = args.sampler_dtype or args.dtype
    check_ranges(args)
    check_ranks(args)
    check_combinations(args)
    if method.advantage is losses.maxrl and args.overlong_penalty:
        refuse("maxrl divides by a group's mean reward, which --overlong_penalty can bring near 0")
    if method.advantage is losses.passk and args.data.startswith(data.gym.PREFIX):
        refuse(f"passk takes rewards of 0 and 1, and --data {args.data} also has those between")
    trial.check_method(args.loss, method, args.group_size, args.max_tokens,
                       shaped=bool(args.overlong_penalty))
    check_paths(args)


def default_out(args):
    return Path(args.out or f"runs/{args.loss}-{args.steps_per_rollout}-{args.seed}")


# ---------------------------------------------------------------------------- a resumed run

def saved_flags(args):
    """The flags of the run that --resume is to continue or, where it has no checkpoint yet, to
    start again; none where there is no such run."""
    out = default_out(args)
    if not args.resume:
        return {}
    try:
        flags = dict(json.loads((out / "config.json").read_text())["flags"])
        return flags if flags["loss"] else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        if not checkpoint_folders(out):
            return {}
        refuse(f"--resume: {out / 'config.json'} cannot be read, so nobody knows what the run was "
               f"({e}); --out of a new run leaves this one as it is")


def flags_of(args):
    """The flags as config.json keeps them: as given, but for what was found at the start."""
    flags = dict(args.given, tokens_per_micro_batch=args.tokens_per_micro_batch)
    return {name: value for name, value in flags.items() if name not in OF_THIS_START}


def compare(args):
    """Prints the flags that are not those of the run to be resumed. Refuses those that change
    training, unless --force is given."""
    if not (saved := args.saved):
        return
    now = {name: value for name, value in args.given.items() if name not in OF_THIS_START}
    before = {**args.defaults, **saved}  # a flag that config.json lacks has come since
    checksums = dict(train_checksum="the problems to learn from are not those that the run had",
                     eval_checksum="the problems to evaluate on are not those that the run had",
                     method_checksum=f"the functions of {args.loss} in losses.py are not those "
                     "that the run had")
    changes = {name: f"--{name} was {before[name]} and is now {value}"
               for name, value in now.items() if name in before and value != before[name]}
    changes.update({name: f"--{name} was {saved[name]} and is not a flag of this method"
                    for name in set(saved) - set(now) - set(checksums)})
    for name, sentence in checksums.items():
        if None in (now.get(name), before.get(name)):  # a run that did not evaluate has none
            changes.pop(name, None)
            args.given[name] = now.get(name) or before.get(name)
        elif name in changes:
            changes[name] = sentence
    fixed = [text for name, text in changes.items() if name in ("model", "lora_rank")]
    if fixed:
        refuse(f"{'; '.join(fixed)}: the checkpoint's weights are those of the run; train another "
               "with --model CHECKPOINT")
    free = FREE - {"rollouts"} if args.schedule == "cosine" else FREE
    learnt = [text for name, text in changes.items() if name not in free]
    if learnt and not args.force:
        refuse(f"{'; '.join(learnt)}: that is another method or other data than the run's; "
               "--force continues all the same")
    for text in changes.values():
        say(f"resuming, but {text}")


# ---------------------------------------------------------------------------- what cannot work

def check_ranges(args):
    for name in ("rollouts", "problems_per_rollout", "group_size", "steps_per_rollout",
                 "max_tokens", "max_prompt_tokens", "eval_problems", "eval_samples", "keep", "tp"):
        if getattr(args, name) < 1:
            refuse(f"--{name} must be 1 or more, not {getattr(args, name)}")
    for name in ("lr", "temperature", "sampler_temperature", "max_grad_norm",
                 "gpu_memory_utilization"):
        if not getattr(args, name) > 0:
            refuse(f"--{name} must be above 0, not {getattr(args, name)}")
    for name, value in vars(args).items():
        most = 2**63 if isinstance(value, int) else math.inf
        if isinstance(value, (int, float)) and name != "entropy_coef" and not 0 <= value < most:
            refuse(f"--{name} must be 0 or more, and finite, not {value}")
    if not math.isfinite(args.entropy_coef):
        refuse(f"--entropy_coef must be finite, not {args.entropy_coef}")
    if args.gpu_memory_utilization >= 1:
        refuse("--gpu_memory_utilization is a share of the GPU's memory, below 1, "
               f"not {args.gpu_memory_utilization}")
    if args.tokens_per_micro_batch is not None and args.tokens_per_micro_batch < 1:
        refuse(f"--tokens_per_micro_batch must be 1 or more, not {args.tokens_per_micro_batch}")


def check_ranks(args):
    ranks = parallel.world()
    if sentence := parallel.unusable_gpu():
        refuse(sentence)
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if here > gpus > 0:
        refuse(f"{here} processes on this node, and torch sees {gpus} GPUs: --nproc_per_node "
               f"{gpus}")
    if args.offload and "RANK" not in os.environ:
        refuse("--offload is FSDP's: start with torchrun --nproc_per_node 1 train.py ...")
    if args.tp > 1 and args.sampler != "vllm":
        refuse(f"--tp {args.tp} is vLLM's: not for --sampler {args.sampler}")
    if ranks % args.tp:
        refuse(f"--tp {args.tp}: vLLM engines of {args.tp} GPUs need a number of ranks that is a "
               f"multiple of it, not {ranks}")
    if (engines := ranks // args.tp) > min(args.problems_per_rollout, args.eval_problems):
        refuse(f"--problems_per_rollout {args.problems_per_rollout} and --eval_problems "
               f"{args.eval_problems} must be at least the number of engines, {engines}")


def check_combinations(args):
    sequences = args.problems_per_rollout * args.group_size
    if args.data_dir and all(map(is_made, (args.data, args.eval_data or args.data))):
        refuse(f"--data_dir: {args.data} is made, not read")
    if args.force and not args.resume:
        refuse("--force overrules what --resume refuses: give it together with --resume")
    if args.check and args.resume:
        refuse("--check tries a setting and keeps nothing: give it without --resume")
    if sequences > 2**24:
        refuse(f"{args.problems_per_rollout} problems x {args.group_size} completions are more "
               "than the 16 million sequences that a rollout may have")
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
    check_correction(args)
    if args.max_num_seqs is not None and (args.max_num_seqs < 1 or args.sampler != "vllm"):
        refuse(f"--max_num_seqs {args.max_num_seqs}: 1 or more, for --sampler vllm")
    if args.deterministic and torch.cuda.is_available() \
            and torch.cuda.get_device_capability() < (8, 0):
        refuse("--deterministic needs a GPU of compute capability 8.0 or more: vLLM's kernels that "
               "do not depend on the batch do")
    if args.sampler == "vllm" and not has_vllm() and not args.fit:
        refuse("--sampler vllm: vllm is not installed here; --sampler transformers needs nothing "
               "more")
    for package in ("wandb", "trackio", "tensorboard"):
        if getattr(args, package) and not importlib.util.find_spec(package):
            refuse(f"--{package}: the package {package} is not installed (pip install {package})")
    if args.trackio and (fault := trackers.trackio_fault(args.trackio)):
        refuse(f"--trackio {args.trackio}: {fault}")


def is_made(name):
    """Are the problems of --data NAME made here, and not read?"""
    return name in data.MADE or name.startswith(data.gym.PREFIX)


def check_correction(args):
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


def same_problems(args):
    """Says so where the run that made --model saw the problems that this one is going to see."""
    try:
        flags = json.loads((Path(args.model).parents[1] / "config.json").read_text())["flags"]
        same = all(flags[name] == getattr(args, name)
                   for name in ("data", "seed", "problems_per_rollout"))
    except (OSError, ValueError, LookupError, TypeError):
        return  # it is no checkpoint of a run
    if same:
        say(f"the run that made {args.model} had the same --data, --seed and "
            "--problems_per_rollout: its problems come again, in the same order; another --seed "
            "has others")


def check_paths(args):
    if (args.out and Path(args.out, "metrics.jsonl").exists()
            and not (args.resume or args.check or args.fit)):
        refuse(f"--out {args.out} already holds a run; --resume continues it, or give another "
               "folder")
    if args.model and (fault := folder_fault(args.model)):
        refuse(fault)


# ---------------------------------------------------------------------------- data and tokenizer

def load_data(args):
    """-> the problems to learn from, the held-out ones, and the ids of those left out because
    their gold answer cannot be graded."""
    left_out, test_set = [], []
    try:
        if args.eval_every:
            test_set = data.load(args.eval_data or args.data, "test", args.data_dir)
        train_set = data.load(args.data, "train", args.data_dir, left_out)
    except data.DataError as e:
        other = (": --eval_data NAME holds out another's, --eval_every 0 none"
                 if "no test split" in str(e) else "")
        refuse(f"{e}{other}")
    if test_set and "eval_problems" not in args.origin:  # as many as there are, at most the default
        args.eval_problems = min(args.eval_problems, len(test_set))
    test_set = test_set[:args.eval_problems]
    if args.eval_every and len(test_set) < args.eval_problems:
        refuse(f"--eval_problems {args.eval_problems}: {args.eval_data or args.data} has "
               f"{len(test_set)} held-out problems")
    rows = train_set if isinstance(train_set, list) else []  # the others are made one by one
    try:
        sandbox.prepare([*test_set, *rows], args.allow_unsafe_code)
    except PermissionError as e:
        refuse(str(e))
    learnt = {str(p["prompt"]) for p in rows}
    if both := sum(str(p["prompt"]) in learnt for p in test_set):
        own_file = args.data.endswith(".jsonl") and args.eval_data in (None, args.data)
        say((f"{args.data} has no held-out part: its first {len(test_set)} problems are evaluated, "
             "and learnt from, too" if own_file else
             f"{both} of the {len(test_set)} held-out problems are learnt from, too")
            + ". Their scores say little of others; --eval_data names other problems")
    args.given.update(train_checksum=checksum(rows),
                      eval_checksum=checksum(test_set) if test_set else None)
    compare(args)
    if args.model and not args.saved:
        same_problems(args)
    return train_set, test_set, left_out


def checksum(problems):
    return zlib.crc32(json.dumps(problems, sort_keys=True, default=str).encode())


def load_tokenizer(args, train_set, test_set):
    """-> the tokenizer, the ids that end a completion, and the problems to learn from whose
    prompts are not too long: all that needs no weights. Refuses a model that cannot make prompts
    of them."""
    rows = train_set if isinstance(train_set, list) else data.batch(train_set, 64, args.seed, 0)
    try:
        tokenizer, eos, positions, lengths = read_tokenizer(args.model, [*rows, *test_set],
                                                            args.template)
    except ValueError as e:
        refuse(str(e))
    lengths, held_out = lengths[:len(rows)], lengths[len(rows):]
    short = [p for p, n in zip(rows, lengths, strict=True) if n <= args.max_prompt_tokens]
    made_too_long = len(short) < len(rows) and not isinstance(train_set, list)
    if not short or max(held_out, default=0) > args.max_prompt_tokens or made_too_long:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens}: a prompt of --data {args.data} has "
               f"{max(lengths + held_out)} tokens")
    if len(short) < len(rows):
        say(f"{args.data}: left out {len(rows) - len(short)} of {len(rows)} problems, their prompts"
            f" are longer than --max_prompt_tokens {args.max_prompt_tokens}")
        train_set = short
    if args.max_prompt_tokens + args.max_tokens > positions:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens} and --max_tokens {args.max_tokens} "
               f"are more than the model's {positions} positions")
    if torch.cuda.is_available():
        from experiment import fit  # torch's internals: not before flags are right
        try:
            parameters = fit.parameters_of(args.model)
        except ValueError as e:
            refuse(f"--model {args.model} {e}")
        if sentence := fit.refusal(args, parameters, parallel.memory(), parallel.world(),
                                   parallel.sharded()):
            refuse(sentence)
    return tokenizer, eos, train_set

"""train.py's command line: its flags, and every error that can be said before a model loads. Wrong
flags, data or models are one sentence and exit code 2.
"""

import argparse
import importlib.util
import inspect
import json
import math
import os
import sys
import textwrap
from functools import partial
from pathlib import Path

import torch

import data
import losses
from data.recipe import BASE, settings_of
from engine import parallel
from engine.sampler import has_vllm
from experiment import failures, trackers
from experiment.files import checkpoint_folders, default_out, folder_fault
from experiment.method import check_method, check_row, method_checksum
from losses import METHODS, keyword_only

refuse = partial(failures.refuse, "train.py")

# flags that a resumed run may change: training does not depend on them
FREE = {"rollouts", "eval_every", "eval_data", "eval_problems", "eval_samples", "save_every",
        "save_rollouts", "keep", "rank_every", "wandb", "trackio", "tensorboard",
        "tokens_per_micro_batch", "share_prompts", "activation_checkpointing", "compile", "offload",
        "tp", "max_num_seqs", "deterministic", "gpu_memory_utilization", "allow_unsafe_code",
        "data_dir", "held-out problems"}
OF_THIS_START = {"out", "resume", "force", "check", "origin", "checksums"}  # not in config.json


# ---------------------------------------------------------------------------- parsing

class Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        """A flag's help, with the default that is in force."""
        silent = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        named = silent or "%(default)s" in action.help
        return action.help if named else f"{action.help} (%(default)s)"

    def _format_action_invocation(self, action):
        if isinstance(action, argparse.BooleanOptionalAction) and not action.default:
            return action.option_strings[0]  # --no-NAME is of use for switches that are on
        return super()._format_action_invocation(action)


class Parser(argparse.ArgumentParser):
    """A parser of flags that have a range each. program: the command, as errors name it."""

    def __init__(self, program, **settings):
        super().__init__(prog=program, formatter_class=Help, allow_abbrev=False, add_help=False,
                         **settings)
        self.rows, self.group = {}, self  # {flag: its default, type, choices and range}

    def error(self, message):  # without the page of usage in front of it
        failures.refuse(self.prog, message)

    def section(self, *title):
        self.group = self.add_argument_group(*title)

    def flag(self, name, default, help, type=None, choices=None, least=0, above=None, below=None,
             **options):
        """One flag, typed as its default; a bool is a switch, --NAME and --no-NAME. A number is
        `least` or more, or above `above`; and below `below`, if one is given."""
        kind = type or (str if default is None else default.__class__)
        self.rows[name] = dict(default=default, type=kind, choices=choices, least=least,
                               above=above, below=below)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif choices:
            options["choices"] = choices
        else:
            options.update(type=kind, metavar={int: "N", float: "X", str: "NAME"}.get(kind))
        self.group.add_argument(f"--{name}", default=default, help=help, **options)

    def take(self, values, source):
        """Makes values from a file the defaults, as far as there are such flags yet."""
        for name, value in values.items():
            if (row := self.rows.get(name)) is None or value is None:
                continue
            kinds = (int, float) if row["type"] is float else (row["type"],)
            if type(value) not in kinds or value not in (row["choices"] or [value]):
                self.error(f"{source} has {name} = {value!r}, which --{name} does not take")
            self.set_defaults(**{name: value})

    def check_ranges(self, args):
        for name, row in self.rows.items():
            value, least, above, below = getattr(args, name), *(
                row[bound] for bound in ("least", "above", "below"))
            if row["type"] not in (int, float) or value is None:
                continue
            most = below or (2**63 if row["type"] is int else math.inf)
            if not (value > above if above is not None else value >= least) or not value < most:
                low = f"above {above}" if above is not None else f"{least:g} or more"
                high = f" and below {below}" if below else ""
                self.error(f"--{name} must be {low}{high}, and finite, not {value}")


def parse_args(argv, add_flags, description):
    """-> args, and the Method with its hyperparameters. args.origin says where values come from
    that are not the flags' own defaults: {flag: words}.

    add_flags: a function of Parser.flag and Parser.section that adds the flags of all methods;
    those of the chosen method follow from its row."""
    try:
        return parse(sys.argv[1:] if argv is None else argv, add_flags, description)
    except OSError as e:  # a path that is too long, or that may not be looked at
        refuse(f"{str(e.filename)[:100]}: {e.strerror}")


def parse(argv, add_flags, description):
    parser = Parser("train.py", usage="train.py [--loss NAME] [--FLAG VALUE ...]",
                    description=description)
    add_flags(parser.flag, parser.section)
    saved = saved_config(parser.parse_known_args(argv)[0]).get("flags", {})
    of_run = "--resume: the run's config.json"
    parser.take(saved, of_run)
    chosen = parser.parse_known_args(argv)[0]  # its method and its model have flags and defaults
    method = chosen_row(chosen)
    check_row(chosen.loss, method, set(parser.rows))
    parser.add_argument("-h", "--help", action="help", help="show this page, for --loss NAME")
    for f in method.functions:
        if names := [name for name in keyword_only(f) if name not in parser.rows]:
            parser.section(f"{chosen.loss}: {f.__name__}", inspect.getdoc(f).split("\n\n")[0])
        for name in names:
            value = method.flags[name]
            parser.flag(name, value, "default %(default)s", type=float if value is None else None)
    try:
        settings = settings_of(chosen.model)
    except ValueError as e:
        refuse(str(e))
    recipe = "the model's recipe.json" if chosen.model else "the embedded base's"
    parser.take(settings, recipe)
    if others := [f"{name} {parser.rows[name]['default']}" for name in settings]:
        parser.epilog = textwrap.fill(
            "Some defaults above are of the model's recipe.json, which the embedded base has, "
            f"too. For a model without one they are {', '.join(others)}.")
    parser.take(saved, of_run)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse_unknown(unknown[0].split("=")[0], chosen.loss, method)
    given = {text.split("=")[0].removeprefix("--").removeprefix("no-") for text in argv
             if text.startswith("--")}
    args.origin = {**dict.fromkeys(settings, recipe), **dict.fromkeys(saved, "as the run had it"),
                   **dict.fromkeys(given, "given")}
    args.checksums = {"functions of the method": method_checksum(method)}
    parser.check_ranges(args)
    method = method.bind(**{name: getattr(args, name) for name in method.flags})
    follow(args, method)
    check_ranks(args)
    check_combinations(args, method)
    check_packages(args)
    check_method(args.loss, method, args.group_size, shaped=bool(args.overlong_penalty))
    if (args.out and Path(args.out, "metrics.jsonl").exists()
            and not args.resume and not args.check):
        refuse(f"--out {args.out} already holds a run; --resume continues it, or give another "
               "folder")
    if fault := folder_fault(args.model):
        refuse(fault)
    return args, method


def saved_config(args):
    """config.json of the run that --resume continues, or starts again where it has no checkpoint
    yet; {} where there is no such run."""
    path = default_out(args) / "config.json"
    if not args.resume:
        return {}
    try:
        config = json.loads(path.read_text())
        return config if config["flags"]["loss"] and dict(config["checksums"]) else {}
    except (OSError, ValueError, LookupError, TypeError) as e:
        if not checkpoint_folders(path.parent):
            return {}
        refuse(f"--resume: {path} cannot be read ({e}), and the run's flags are in it; another "
               "--out starts a new run")


def chosen_row(args):
    """The row of --loss, with the cells of --advantage, --select, --objective, --aggregate."""
    cells = {axis: getattr(args, axis) for axis in losses.AXES}
    for axis, name in cells.items():
        if name and name not in (there := losses.cells(axis)):
            refuse(f"--{axis} {name}: there is no such {axis}, there are {', '.join(there)}; a "
                   "function is one of them once a row of METHODS uses it")
    return losses.row(args.loss, **cells)


def refuse_unknown(name, loss, method):
    if name.lower() in ("true", "false"):
        refuse(f"{name}: a switch takes no value; --NAME switches it on, --no-NAME off")
    owners = [other for other, row in METHODS.items() if name[2:] in row.flags]
    problem = (f"{name} is a flag of {', '.join(owners)}" if owners
               else f"{name}: there is no such flag; --help lists them")
    own_flags = ", ".join(f"--{flag}" for flag in method.flags) or "none"
    refuse(f"{problem}; {loss} has {own_flags}")


FOLLOWS = "follows from other flags"  # an origin: config.json has null for it, and it follows anew


def follow(args, method):
    """Sets the flags that were not given and follow from others."""
    if args.max_refills is not None and not args.drop_uniform_groups:
        refuse("--max_refills is for --drop_uniform_groups, which is not given")
    values = dict(old_logprobs=method.old_logprobs, max_refills=4 * args.drop_uniform_groups,
                  sampler_temperature=args.temperature, sampler_dtype=args.dtype, model=BASE)
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
            args.origin[name] = FOLLOWS
    if args.lora_rank and args.origin.get("lr") not in ("given", "as the run had it"):
        args.lr *= 10
        args.origin["lr"] = "ten times full training's, for --lora_rank"


def flags_of(args):
    """The flags as config.json keeps them; those that follow from others are None."""
    return {name: None if args.origin.get(name) == FOLLOWS else value
            for name, value in vars(args).items() if name not in OF_THIS_START}


def compare(args):
    """Prints the flags of a resumed run that have changed; refuses those that change training,
    unless --force is given."""
    if not (config := checkpoint_folders(default_out(args)) and saved_config(args)):
        return  # without a checkpoint it starts again, perhaps with other flags
    saved, now = config["flags"], flags_of(args)
    changes = {name: f"--{name} was {saved.get(name)} and is now {now.get(name)}"
               for name in {**saved, **now} if saved.get(name) != now.get(name)}
    if fixed := [text for name, text in changes.items() if name in ("model", "lora_rank")]:
        refuse(f"{'; '.join(fixed)}: the checkpoint's weights are those of the run; train another "
               "with --model CHECKPOINT")
    for name, before in config["checksums"].items():
        args.checksums[name] = args.checksums[name] or before
        if before not in (args.checksums[name], None):
            changes[name] = f"the {name} are not those that the run had"
    free = FREE - {"rollouts"} if args.schedule == "cosine" else FREE
    learnt = [text for name, text in changes.items() if name not in free]
    if learnt and not args.force:
        refuse(f"{'; '.join(learnt)}: that is another method or other data than the run's; "
               "--force continues all the same")
    for text in changes.values():
        parallel.say(f"resuming, but {text}")


# ---------------------------------------------------------------------------- what cannot work

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
        refuse(f"--tp {args.tp}: the number of ranks, {ranks}, must be a multiple of it")
    if (engines := ranks // args.tp) > min(args.problems_per_rollout, args.eval_problems):
        refuse(f"--problems_per_rollout {args.problems_per_rollout} and --eval_problems "
               f"{args.eval_problems} must be at least the number of engines, {engines}")
    if args.deterministic and torch.cuda.is_available() \
            and torch.cuda.get_device_capability() < (8, 0):
        refuse("--deterministic needs a GPU of compute capability 8.0 or more: vLLM's kernels that "
               "do not depend on the batch do")


def check_combinations(args, method):
    sequences = args.problems_per_rollout * args.group_size
    if args.data_dir and {args.data, args.eval_data or args.data} <= set(data.MADE):
        refuse(f"--data_dir: {args.data} is generated, not read")
    if args.force and not args.resume:
        refuse("--force overrules a refusal of --resume: give it together with --resume")
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
    if args.sampler == "vllm" and not has_vllm():
        refuse("--sampler vllm: vllm is not installed here; --sampler transformers needs nothing "
               "more")
    for package in ("wandb", "trackio", "tensorboard"):
        if getattr(args, package) and not importlib.util.find_spec(package):
            refuse(f"--{package}: the package {package} is not installed (pip install {package})")
    if args.trackio and (fault := trackers.trackio_fault(args.trackio)):
        refuse(f"--trackio {args.trackio}: {fault}")

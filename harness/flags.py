"""train.py's command line. Wrong flags, data or models are one sentence and exit code 2."""

import argparse
import ast
import difflib
import inspect
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import data
import losses
from data.prompts import TEMPLATES, template_kwargs
from engine import parallel
from engine.sampler import default_kind, has_vllm
from harness import method_check
from harness.failures import refuse, refusing
from harness.files import CODE, checkpoint_folders, folder_fault
from losses import METHODS, keyword_only, require

# flags that a model's recipe.json may set: of training, not of the problems or the method
OF_A_RECIPE = (
    "rollouts problems_per_rollout group_size steps_per_rollout max_tokens max_prompt_tokens "
    "tokens_per_micro_batch temperature template template_kwargs stop lr warmup schedule "
    "weight_decay max_grad_norm kl_coef lora_rank eval_every eval_problems eval_samples").split()
# flags in a checkpoint's recipe.json, over its model's: eval.py asks as the run did
OF_A_CHECKPOINT = "template template_kwargs stop max_tokens max_prompt_tokens".split()
# unsaved, and no flag of a method, whose functions have arguments state and group
OF_THIS_START = set("out resume force check help origin roots earlier state group".split())
# where a value comes from that is not the flag's own default, or the model's recipe
GIVEN, SAVED, FOLLOWS = "given", "the run's config.json", "follows from other flags"
NEEDS = dict(force="resume", lora_alpha="lora_rank", kl_unbiased="kl_coef")  # flag: one to be given


# ---------------------------------------------------------------------------- parsing

def did_you_mean(name, names):
    near = difflib.get_close_matches(name.lower(), names, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """A parser of flags with ranges. program: the command, as errors name it."""

    def __init__(self, program, **settings):
        super().__init__(prog=program, allow_abbrev=False, add_help=False,
                         argument_default=argparse.SUPPRESS,  # `merge` has the defaults
                         formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.rows = {}  # {flag: default}
        self.source = ""  # of the values that are parsed; the command line has no name
        self.own = ""  # the flags of the method that is parsed for, in words
        self._negative_number_matcher = re.compile(r"-[\d.]+(?i:e[-+]?\d+)?$")  # -1e-3 is no flag

    def error(self, message):  # without the page of usage in front of it
        if message.startswith("unrecognized arguments: "):
            message = self.unknown(message.split()[2].split("=")[0]) + self.own
        refuse(self.source + message, self.prog)

    def unknown(self, name):
        """A sentence on a word that is no flag here, perhaps one of another method."""
        if name.lower() in ("true", "false"):
            return f"{name}: a switch takes no value; --NAME switches it on, --no-NAME off"
        others = {loss: row.flags for loss, row in METHODS.items() if self.own}
        if owners := [loss for loss, flags in others.items() if name.removeprefix("--") in flags]:
            return f"{name} is a flag of {', '.join(owners)}"
        names = [f"--{flag}" for flags in (self.rows, *others.values()) for flag in flags]
        return f"{name}: there is no such flag{did_you_mean(name, names)}; --help lists them"

    def _check_value(self, action, value):
        name, *_ = *action.option_strings, action.metavar
        if action.choices is not None and value not in action.choices:
            self.error(f"{name} {value!r} is none of {', '.join(action.choices)}"
                       f"{did_you_mean(value, action.choices)}")
        if value == "" and action.dest != "stop":
            self.error(f"{name} is empty: give it a value, or leave it out")
        if isinstance(value, (int, float)) and not action.least <= value < action.limit:
            self.error(
                f"{name} must be {action.least:g} or more and below {action.limit}, not {value}")

    def flag(self, name, default, help, type=None, least=0, below=None, **options):
        """A flag of the last group, typed as its default; a bool is a switch, --NAME and --no-NAME.
        A number is `least` or more and below `below`, or any where the default is below 0."""
        kind = type or (str if default is None else default.__class__)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif "choices" not in options:
            options.update(type=kind, metavar={int: "N", float: "X", str: "NAME"}.get(kind))
        action = self._action_groups[-1].add_argument(f"--{name}", help=help, **options)
        action.least = least if kind is str or default is None or default >= 0 else -math.inf
        action.limit = below or (2**63 if kind is int else math.inf)
        self.rows[name] = default

    def merge(self, given, *tiers):
        """given: the command line's values. tiers: (words, {flag: value}), each over those before
        it, and `given` over all; None is no value. -> args, with origin: {flag: words}"""
        args = argparse.Namespace(**self.rows, origin={})
        for words, values in tiers:
            self.source = f"{words}: "
            known = {name: x for name, x in values.items() if name in self.rows and x is not None}
            self.parse_args([
                (f"--{name}" if x else f"--no-{name}") if isinstance(x, bool)
                else f"--{name}={json.dumps(x) if isinstance(x, dict) else x}"
                for name, x in known.items()], args)
            args.origin.update(dict.fromkeys(known, words))
        self.source = ""
        vars(args).update(given)
        args.origin.update(dict.fromkeys(given, GIVEN))
        return args

    def show_help(self, args):
        """Prints the page of flags, with these values, and ends."""
        for action in self._actions:
            value = getattr(args, action.dest, None)
            if value is not None and value is not False:
                action.help = f"{action.help} ({value})".replace("%", "%%")
        self.print_help()
        self.exit()


# ---------------------------------------------------------------------------- the table

DTYPES = ("float32", "bfloat16", "float16")


def add_common_flags(flag):
    """The flags that train.py and eval.py share."""
    flag("data_dir", None, "folder of JSONL files with the Hub's fields, instead of the Hub")
    flag("template", None, "the prompt's form, see data/README.md", choices=TEMPLATES)
    flag("template_kwargs", None, "JSON for the chat template, as {\"enable_thinking\": false}")
    flag("stop", None, "a completion also ends after this text, such as </answer>; '' is none")
    flag("sampler", default_kind(), "the sampler's program", choices=("vllm", "transformers"))
    flag("dtype", parallel.default_dtype(), "dtype of the computation", choices=DTYPES)
    flag("head_dtype", None, "the LM head's logits, in trainer and sampler: float32, the default "
         "where --dtype has 16 bits, or model, as --dtype", choices=("float32", "model"))
    flag("allow_unsafe_code", False, "sampled programs run also without isolation")
    flag("seed", 0, "the seed of problems, sampling and shuffling")


def add_flags(flag, section):
    """The flags that every method has: name, default, meaning. A number is 0 or more unless its row
    says otherwise. A switch that is on is switched off by --no-NAME."""
    section("method")
    flag("loss", "grpo", "the method", choices=METHODS, metavar="NAME")
    for axis in losses.AXES:
        names, several = losses.cells(axis), axis == "select"  # of which losses.row refuses others
        flag(axis, None, f"another row's {axis}: {', '.join(names)}"
             + "; several with commas, own is the row's" * several,
             metavar="NAME", choices=None if several else names)
    section("model, problems and sampler")
    flag("model", None, "Hugging Face folder or id; default the embedded base, with its settings")
    flag("data", "countdown", f"the problems: {', '.join(data.NAMES)}, or a file.jsonl of "
         "{prompt, answer, verifier} rows")
    flag("eval_data", None, "the held-out problems; default the test split of --data")
    add_common_flags(flag)
    flag("deterministic", False, "the same bits each time, slower; see docs/scaling.md")
    section("batch: P problems x G completions -> S optimizer steps")
    flag("rollouts", 200, "rollouts in all", least=1)
    flag("problems_per_rollout", 64, "problems of a rollout, P", least=1, below=2**20)
    flag("group_size", 16, "completions of each, G", least=1, below=2**20)
    flag("steps_per_rollout", 16, "optimizer steps on one rollout, S", least=1)
    flag("shuffle", "completions", "what is dealt to the steps", choices=("completions", "groups"))
    section("sampling")
    flag("max_tokens", 1024, "longest completion, in tokens", least=1)
    flag("max_prompt_tokens", 1024, "longest prompt, in tokens", least=1)
    flag("temperature", 1.0, "temperature of the policy, in sampling and training", least=0.01)
    flag("sampler_temperature", None, "temperature of the sampler alone", type=float, least=0.01)
    flag("sampler_dtype", None, "the sampler's dtype; default --dtype. float8: e4m3 in linear "
         "layers, weights and inputs, and --dtype elsewhere", choices=(*DTYPES, "float8"))
    flag("gpu_memory_utilization", 0.4, "vLLM's share of the GPU's memory", least=0.01, below=1)
    flag("max_num_seqs", None, "sequences that vLLM samples at once", type=int, least=1)
    flag("tp", 1, "GPUs of one vLLM engine", least=1)
    flag("rollout_lag", 0, "rollouts between sampling and learning")
    section("rewards")
    flag("drop_uniform_groups", False, "replace groups whose rewards are all equal")
    flag("mask_truncated", False, "completions that hit max_tokens stay out of the loss")
    flag("overlong_penalty", 0, "takes up to 1 off the reward over the last N tokens; 0 is off")
    section("loss")
    flag("old_logprobs", None, "the ratio's denominator: of the weights that sampled, by trainer "
         "or sampler; proximal: of those before the update, which are others with --rollout_lag",
         choices=("trainer", "sampler", "proximal"))
    flag("kl_coef", 0.0, "weight of the KL to the initial model; 0 loads no reference")
    flag("kl_unbiased", False, "the KL's estimate times the ratio, whose gradient is the KL's")
    flag("teacher", None, "a model with the same tokenizer, whose log pi_teacher - log pi_old is "
         "added to each token's advantage")
    flag("entropy_coef", 0.0, "weight of the entropy bonus, of either sign", least=-10, below=10)
    section("optimizer: AdamW on float32 weights")
    flag("lr", 1e-6, "learning rate", least=1e-12)
    flag("warmup", 0, "optimizer steps of linear warm-up")
    flag("schedule", "constant", "cosine falls towards 0", choices=("constant", "cosine"))
    flag("weight_decay", 0.0, "weight decay of AdamW")
    flag("max_grad_norm", 1.0, "gradients are scaled down to this norm", least=1e-12)
    flag("lora_rank", 0, "rank of adapters, by default with ten times the learning rate; 0 is off")
    flag("lora_alpha", 32.0, "adapters are scaled by lora_alpha / lora_rank", least=1e-3)
    section("computation and memory")
    flag("tokens_per_micro_batch", None, "default by the free memory", type=int, least=1)
    flag("share_prompts", True, "a prompt goes through the model once for all its completions")
    flag("activation_checkpointing", False, "the backward pass computes layers again")
    flag("offload", False, "weights, gradients and optimizer stay on the CPU; under torchrun")
    section("evaluation, log, checkpoints")
    flag("eval_every", 10, "rollouts between evaluations on held-out problems; 0 is never")
    flag("eval_problems", 256, "held-out problems at most", least=1)
    flag("eval_samples", 16, "completions of each", least=1)
    flag("save_every", 20, "rollouts between checkpoints; 0 is only at the end")
    flag("keep", 2, "checkpoints kept", least=1)
    flag("save_rollouts", False, "every rollout is kept as a file, to analyse its updates")
    flag("out", None, "the run's folder; default runs/<loss, cells>-<steps>-<seed>, later with .2")
    flag("resume", False, "continue the run in --out from its newest checkpoint, with its flags")
    flag("force", False, "--resume also where training depends on what has changed")
    section("without training")
    flag("check", False, "try everything on a few completions, print a table, and stop")


# ---------------------------------------------------------------------------- the command line

class Settings(SimpleNamespace):
    """The flags of a run. They are resolved once: what is found later is the Run's."""

    def __setattr__(self, name, value):
        raise AttributeError(f"--{name} is resolved: it stays {getattr(self, name, None)}")


@refusing()
def parse_args(argv, description=None, rehearsal=False):
    """-> args, and the Method with its hyperparameters. args.origin is of `merge`, args.earlier of
    earlier_run, and args.roots names the functions of losses.py at which the method begins.
    rehearsal: vLLM may be absent, and the run's folder may hold a run."""
    parser = Parser("train.py", usage="train.py [--loss NAME] [--FLAG VALUE ...]",
                    description=description)
    add_flags(parser.flag, parser.add_argument_group)
    parser.add_argument("-h", "--help", action="store_true", help="show this page, for --loss NAME")
    # four merges: for the folder; for row and model, which bring flags; for what others follow; all
    given = vars(parser.parse_known_args(argv)[0])
    earlier = earlier_run(parser.merge(given, recipe_of(given.get("model"))))
    saved = {name: x for name, x in earlier.flags.items()  # "derived" ones follow others, anew
             if name not in {*earlier.derived, *OF_THIS_START, "allow_unsafe_code"}}
    chosen = parser.merge(given, (SAVED, saved))
    method = losses.row(chosen.loss, **{axis: getattr(chosen, axis) for axis in losses.AXES})
    if any(getattr(chosen, name) != saved.get(name) for name in ("loss", *losses.AXES)):
        saved = {name: x for name, x in saved.items() if name not in method.flags}  # another row's
    if chosen.eval_data != saved.get("eval_data"):
        saved.pop("eval_problems", None)  # as many as there were in the other data
    add_method_flags(parser, chosen.loss, method)
    given, tiers = vars(parser.parse_args(argv)), [  # the last wins
        (FOLLOWS, dict(old_logprobs=method.old_logprobs)), recipe_of(chosen.model), (SAVED, saved)]
    if "help" in given:
        parser.show_help(parser.merge({}, *tiers))
    known = parser.merge(given, *tiers)
    tiers[2:2] = [  # over the recipe's, under a saved lr
        (FOLLOWS, dict(sampler_temperature=known.temperature, sampler_dtype=known.dtype,
                       model=data.BASE,
                       head_dtype="model" if known.dtype == "float32" else "float32")),
        ("ten times full training's, for --lora_rank",
         dict(lr=10 * known.lr if known.lora_rank and not (
             {"lr", "lora_rank"} <= tiers[1][1].keys()) else None))]  # a recipe's lr of adapters
    args = parser.merge(given, *tiers)
    args.earlier = earlier
    check_data_dir(args, args.data, args.eval_data or args.data)
    require(saved or not args.resume or given.keys() - {"resume", "out", "force"},
            f"--resume: there is no run in {earlier.out}; with other flags it starts one")
    method = method.bind(**{name: getattr(args, name) for name in method.flags})
    check(args, method, rehearsal)
    roots = [f"METHODS[{args.loss!r}]", *(f.__name__ for f in method.functions), "Tokens",
             "policy_loss", "group_advantages"]
    return Settings(**vars(args), roots=roots), method


def flags_of(args):
    """The flags as config.json keeps them. The embedded base is None: its folder moves."""
    flags = {name: x for name, x in vars(args).items() if name not in OF_THIS_START}
    if args.origin.get("model") == FOLLOWS:
        flags["model"] = None
    return flags


def settings_of(model):
    """-> {flag: value} of recipe.json, {"settings": {flag: value}}, in a model's folder, where they
    are not those of real models; {} for an id of the Hub. model: None is the embedded base, whose
    file has its training's recipe, too. Raises ValueError for a file of another shape."""
    path = Path(model or data.BASE, "recipe.json")
    try:  # is_file raises OSError, too
        return dict(json.loads(path.read_text())["settings"]) if path.is_file() else {}
    except Exception as e:  # such a file may hold anything
        raise ValueError(f'{path} is not {{"settings": {{flag: value}}}}: {e!r}') from None


def recipe_of(model):
    """-> words for a model's recipe.json, and the settings that it has."""
    source = "the model's recipe.json" if model else "the embedded base's"
    settings = settings_of(model)
    for name in settings.keys() - OF_A_RECIPE:
        raise ValueError(
            f"{source} has {name} = {settings[name]!r}, and may set {', '.join(OF_A_RECIPE)}")
    return source, settings


def earlier_run(args):
    """-> out, the run's folder; and of the run there that --resume continues: flags, derived (names
    of those that follow others), history and checksums of config.json, by run.begin; trees of
    losses.py and rewards.py; and the last checkpoint. Without one, checkpoint is None, and the run
    starts again; without --resume, or a run, there are no flags. Raises ValueError."""
    cells = (getattr(args, axis) for axis in losses.AXES)  # that replace the row's
    name = "-".join([args.loss, *filter(None, cells)])
    out = Path(args.out or f"runs/{name}-{args.steps_per_rollout}-{args.seed}")
    path, (*_, checkpoint) = out / "config.json", (None, *checkpoint_folders(out))
    if not args.resume or not (path.exists() or checkpoint):
        return SimpleNamespace(out=out, flags={}, derived=[], checkpoint=None)
    try:
        require(path.is_file(), "it is no file")  # a pipe would never end
        config = json.loads(path.read_text())
        history = list(config["history"])
        return SimpleNamespace(
            out=out, history=history, checkpoint=checkpoint, flags=dict(config["flags"]),
            derived=list(config["derived"]), checksums=dict(history[-1]["checksums"]),
            code={x: ast.parse(path.with_name(x).read_text(), x) for x in CODE})
    except Exception as e:  # such files may hold anything
        raise ValueError(f"--resume: {path} cannot be read ({e}), and the run's flags are in it; "
                         "another --out starts a new run") from None


def add_method_flags(parser, name, method):
    """A row's keyword-only arguments are its flags. Raises ValueError for those that cannot."""
    common, defaults = {*parser.rows, *OF_THIS_START}, {}
    parser.own = f"; {name} has {', '.join(f'--{flag}' for flag in method.flags) or 'none'}"
    for f in method.functions:
        where, own = f"{name}: {method_check.named(f)}", keyword_only(f)
        for p in inspect.signature(f).parameters.values():
            plain = isinstance(p.default, (int, float, str, type(None), type))  # empty is a type
            require(plain and (p.kind is p.KEYWORD_ONLY) == (p.default is not p.empty),
                    f"{where}: {p.name} has to be keyword-only and have a default, a number, a "
                    f"text or None, as in {f.__name__}(..., *, {p.name}=1.0)")
        if own.keys() - parser.rows:
            parser.add_argument_group(f"{name}: {f.__name__}",
                                      (inspect.getdoc(f) or "").split("\n\n")[0])
        for flag, default in own.items():
            require(flag not in common,
                    f"{where}: --{flag} is a flag of train.py already; give another name")
            require(defaults.setdefault(flag, default) == default,
                    f"{where}: {flag} is {default} here, {defaults[flag]} in another function of "
                    "the row; one flag has one default")
            if flag not in parser.rows:
                parser.flag(flag, method.flags[flag], "",
                            type=float if default is None else type(default))


def check_data_dir(args, *names):
    """--data_dir is for the Hub's sets. names: of the sets."""
    require(not args.data_dir or {*names} & {*data.SETS},
            f"--data_dir is for {', '.join(data.SETS)}, and {names[0]} is none of them")


def check(args, method, rehearsal):
    """Raises ValueError, a sentence, for a method, flags or folders that cannot work."""
    template_kwargs(args.template_kwargs, args.template)
    with refusing(f"{args.loss}: "):
        method_check.check(method, args)
    fault = parallel.unusable_gpu() or folder_fault(args.model)
    ranks, vllm, steps = parallel.world(), args.sampler == "vllm", args.steps_per_rollout
    problems, G, engines = args.problems_per_rollout, args.group_size, ranks // args.tp
    dealt = problems if args.shuffle == "groups" else problems * G
    out, begins_anew = args.earlier.out, not (args.resume or args.check or rehearsal)
    defined = re.findall(r"(?m)^def (\w+)", CODE["losses.py"])
    twice = ", ".join({name for name in defined if defined.count(name) > 1})
    for wrong, sentence in [
        (twice, f"losses.py defines {twice} twice: every row that calls it gets the second one"),
        (fault, fault),
        (args.out and begins_anew and (out / "metrics.jsonl").exists(),
         f"--out {out} already holds a run, which --resume continues; give another"),
        *[(args.origin.get(name) == GIVEN and not getattr(args, other),
           f"--{name} is for --{other}, which is not given") for name, other in NEEDS.items()],
        (args.offload and "RANK" not in os.environ,
         "--offload is FSDP's: start with torchrun --nproc_per_node 1 train.py ..."),
        (not vllm and (args.tp > 1 or args.max_num_seqs
                       or args.origin.get("gpu_memory_utilization") == GIVEN),
         "--tp, --max_num_seqs and --gpu_memory_utilization are for --sampler vllm"),
        (vllm and args.sampler_dtype == "float8",
         "--sampler_dtype float8 is for --sampler transformers"),
        (vllm and not has_vllm() and not rehearsal,
         "--sampler vllm: vllm is not installed here; --sampler transformers needs nothing more"),
        (ranks % args.tp, f"--tp {args.tp} does not divide the number of ranks, {ranks}"),
        (engines > problems,
         f"--problems_per_rollout must be at least the number of engines, {engines}"),
        (args.check and args.resume, "--check starts a run anew: it goes without --resume"),
        (dealt % steps, f"{problems} problems x {G} completions: {dealt} {args.shuffle} do not "
         f"divide into --steps_per_rollout {steps}"),
        (args.overlong_penalty > args.max_tokens,
         f"--overlong_penalty must be at most --max_tokens, {args.max_tokens}"),
        (args.overlong_penalty and method.advantage is losses.maxrl,
         "maxrl divides by a group's mean reward, which --overlong_penalty can bring near 0"),
        (method.advantage is losses.none and not args.teacher,
         "the advantage none learns from a teacher alone: --teacher MODEL"),
        ({*losses.CORRECTIONS} & {*method.selects} and args.old_logprobs == "sampler",
         f"--select {args.select} corrects for the sampler a second time: --old_logprobs sampler "
         "is already its own")]:
        require(not wrong, sentence)


def with_origins(args, names):
    """Flags that have a value, as "lr 5e-05 (given), dtype float32 (default)"."""
    return ", ".join(f"{n} {f'{x:g}' if type(x) is float else x} ({args.origin.get(n, 'default')})"
                     for n in names.split() if (x := getattr(args, n)) is not None)

"""eval.py's command line: parsing, every refusal, and how the command ends. train.py's is cli.py.

Whatever is wrong with flags, data or model is one sentence and exit code 2. What fails on the way
is one sentence and exit code 1.
"""

import argparse
import math
import sys
from functools import partial

import data
from data.recipe import settings_of
from engine.parallel import default_dtype, unusable_gpu
from engine.sampler import default_kind, has_vllm
from experiment import failures
from experiment.files import folder_fault
from experiment.model import read_tokenizer
from experiment.stats import powers_of_two

# the flags of sampling. --completions samples nothing, so that they are refused beside it
SAMPLING = ("model", "samples", "temperature", "top_p", "max_tokens", "max_prompt_tokens",
            "template", "sampler", "dtype", "seed")
OF_MODEL = ("max_tokens", "max_prompt_tokens")  # a model's recipe.json may have them

refuse = partial(failures.refuse, "eval.py")


# ---------------------------------------------------------------------------- parsing

def add_flags(parser):
    def flag(name, help, **options):
        shown = "" if options.get("default") is None else " (%(default)s)"
        parser.add_argument(f"--{name}", help=help + shown, **options)

    flag("model", "Hugging Face folder or id; without it the embedded base")
    flag("benchmarks", f"the problems: {', '.join(data.names())}, or files.jsonl of "
         "{prompt, answer, reward} rows, with commas between", default="countdown",
         metavar="NAME,NAME")
    flag("data_dir", "a folder of local JSONL files, with the Hub's field names, instead of the "
         "Hub")
    flag("split", "the part of a data set; a file has one, which is both", default="test",
         choices=("train", "test"))
    flag("limit", "only the first so many problems of each benchmark; 0 is all of them", type=int,
         default=0)
    flag("samples", "completions of each problem, n", type=int, default=16)
    flag("k", "the k of pass@k, with commas between; default 1, 2, 4, ... up to the number of "
         "completions of a problem")
    flag("temperature", "temperature of the sampler; 0 is greedy", type=float, default=1.0)
    flag("top_p", "the sampler draws from the most probable tokens that have this share of the "
         "probability together; 1 keeps all", type=float, default=1.0)
    flag("max_tokens", "the longest completion, in tokens", type=int, default=8192)
    flag("max_prompt_tokens", "the longest prompt, in tokens", type=int, default=2048)
    flag("template", "how a problem becomes a prompt; default by task and model, see "
         "data/README.md", choices=data.TEMPLATES)
    flag("lcb_release", "LiveCodeBench's release_v1 ... release_v6, or v1 ... v6 for one file "
         "alone; default release_v6")
    flag("lcb_from", "LiveCodeBench's contests from this day on, such as 2024-08-01")
    flag("lcb_to", "LiveCodeBench's contests up to this day")
    flag("sampler", "the program that samples", default=default_kind(),
         choices=("vllm", "transformers"))
    flag("dtype", "precision of weights and computation", default=default_dtype(),
         choices=("float32", "bfloat16", "float16"))
    flag("seed", "seed of the sampler", type=int, default=0)
    flag("lenient", "mathematics: accept an answer that is not in a box, too", action="store_true")
    flag("completions", "grade this file instead of sampling: rows {benchmark, id, completion}",
         metavar="FILE")
    flag("allow_unsafe_code", "run programs also where nothing isolates them",
         action="store_true")
    flag("out", "the folder for the results", default="eval")


def parse(argv, description):
    """-> args. args.origin says where the values of OF_MODEL come from, in words."""
    parser = argparse.ArgumentParser(
        prog="eval.py", usage="eval.py [--model NAME] [--benchmarks NAME,NAME] [--FLAG VALUE ...]",
        description=description, allow_abbrev=False, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse  # without the page of usage in front of the sentence
    add_flags(parser)
    defaults = {name: parser.get_default(name) for name in SAMPLING}
    parser.set_defaults(**dict.fromkeys(SAMPLING))
    given = parser.parse_known_args(argv)[0]  # None where a flag of sampling was not given
    names = ",".join(names_of(given.benchmarks))
    settings = {} if given.completions else model_settings(given.model)
    parser.set_defaults(**{**defaults, **settings})
    parser.add_argument("-h", "--help", action="help",
                        help="show this page, with the defaults for --model")
    args = parser.parse_args(argv)
    args.benchmarks = names
    check_texts(args)
    check_flags(args)
    args.k = parse_ks(args)
    if args.completions:
        without_model(args, given)
    else:
        check_model(args)
    owner = "the model" if args.model else "the embedded base"
    args.origin = {name: "given" if getattr(given, name) is not None
                   else f"{owner}'s recipe.json" if name in settings else "the default"
                   for name in OF_MODEL}
    return args


def parse_ks(args):
    """The k of pass@k; None where they depend on the number of completions in a file."""
    if not args.k:
        return None if args.completions else powers_of_two(args.samples)
    try:
        ks = sorted({int(k) for k in args.k.split(",")})
    except ValueError:
        refuse(f"--k {args.k}: whole numbers with commas between")
    if min(ks) < 1:
        refuse(f"--k {args.k}: every k is 1 or more")
    if not args.completions and max(ks) > args.samples:
        refuse(f"--k {args.k}: pass@k needs k samples of each problem, and --samples is "
               f"{args.samples}")
    return ks


def names_of(benchmarks):
    """The names in --benchmarks, each of them once."""
    return list(dict.fromkeys(name.strip() for name in benchmarks.split(",")))


def model_settings(model):
    """-> {flag: value} of OF_MODEL, as far as the model has a recipe.json with them; without a
    model of the embedded base."""
    try:
        settings = settings_of(model)
    except ValueError as e:
        refuse(f"--model {model}: {e}")
    settings = {name: settings[name] for name in OF_MODEL if name in settings}
    for name, value in settings.items():
        if type(value) is not int or value < 1:
            refuse(f"--model {model}: its recipe.json has {name} = {value!r}, which must be a "
                   "whole number of 1 or more")
    return settings


def without_model(args, given):
    """Refuses the flags of sampling beside --completions, and sets them to None, so that eval.json
    does not say what nobody knows of the file."""
    for name in SAMPLING:
        if getattr(given, name) is not None:
            refuse(f"--{name} is for sampling, and --completions grades what a file holds: give "
                   "one of the two")
        setattr(args, name, None)


# ---------------------------------------------------------------------------- what cannot work

def check_texts(args):
    """Refuses what is empty, which would be taken for a flag that was not given, and names that the
    results could not be written with."""
    for name, value in vars(args).items():
        if value == "":
            refuse(f"--{name} is empty: give it a value, or leave it out")
        try:
            str(value).encode()
        except UnicodeEncodeError:
            refuse(f"--{name} {value!r} is not UTF-8: give the file a name that is")


def check_flags(args):
    least = dict(samples=1, max_prompt_tokens=1, max_tokens=1, limit=0, seed=0)
    for name, bound in least.items():
        if not bound <= (value := getattr(args, name)) < 2**63:
            refuse(f"--{name} must be {bound} or more, and below 2**63, not {value}")
    if not 0 < args.top_p <= 1:
        refuse(f"--top_p must be above 0 and at most 1, not {args.top_p}")
    # nan compares as false; logits divided by less overflow, or are greedy under another name
    if args.temperature != 0 and not 1e-3 <= args.temperature < math.inf:
        refuse("--temperature must be 0, which is greedy, or 0.001 or more, and finite, not "
               f"{args.temperature}")
    livecodebench = "livecodebench" in args.benchmarks.split(",")
    if args.lcb_release and (args.data_dir or not livecodebench):
        refuse("--lcb_release is for livecodebench from the Hub alone")
    for name in ("lcb_from", "lcb_to"):
        if getattr(args, name) and not livecodebench:
            refuse(f"--{name} is for livecodebench alone")


def check_model(args):
    """Refuses a sampler that is not there, and a folder that is no model, above all a run's."""
    if args.sampler == "vllm" and not has_vllm():
        refuse("--sampler vllm: vllm is not installed here; --sampler transformers needs nothing "
               "more")
    if sentence := unusable_gpu():
        refuse(sentence)
    if args.model is None:
        return
    if fault := folder_fault(args.model):
        refuse(fault)


def load_tokenizer(args, sets):
    """-> the tokenizer and the ids that end a completion: all that needs no weights.

    Refuses a model that cannot make prompts of the problems in sets, {benchmark: problems}."""
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()  # of loading: the bar of the problems is enough
    problems = [(name, problem) for name, rows in sets.items() for problem in rows]
    try:
        tokenizer, eos, positions, lengths = read_tokenizer(
            args.model, [problem for _, problem in problems], args.template)
    except ValueError as e:
        refuse(str(e))
    longest, (name, problem) = max(zip(lengths, problems, strict=True), key=lambda pair: pair[0])
    if longest > args.max_prompt_tokens:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens} ({args.origin['max_prompt_tokens']})"
               f": the prompt of {name}'s problem {problem['id']} has {longest} tokens")
    if args.max_prompt_tokens + args.max_tokens > positions:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens} and --max_tokens {args.max_tokens} "
               f"are more than the model's {positions} positions")
    return tokenizer, eos


def in_force(args):
    """What the sampling is about to do, in one line."""
    return (f"model {args.model}, sampler {args.sampler}, dtype {args.dtype}, "
            f"max_tokens {args.max_tokens} ({args.origin['max_tokens']}), "
            f"temperature {args.temperature:g}")


# ---------------------------------------------------------------------------- the end

def run(main):
    """Calls main. Where it fails on the way, or is interrupted, one sentence says so."""
    try:
        main()
    except (failures.RunFailed, FloatingPointError) as e:
        print(f"eval.py: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("eval.py: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)

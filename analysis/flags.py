"""The command line of python -m analysis: its commands, their flags and help, and what is refused
before anything is read. torch, transformers and matplotlib are imported by none of it."""

import argparse
from functools import partial
from pathlib import Path

from experiment import failures

refuse = partial(failures.refuse, "analysis")

# the command, then what it does in the help
OF_RUNS = dict(
    curves="It draws held-out scores, reward, entropy, clipping and KL over the rollouts.",
    table="It makes a line for each method, of what its runs had at their end, with 95% bootstrap "
          "intervals over the seeds.",
    passk="It draws pass@k before and after training, where pass@k is the chance that at least "
          "one of k completions of a problem is right.",
    fade="It draws FADE's gradient masses and controllers, entropy, and how close the LM head's "
         "change is to rank one.",
    p3o="It draws effective sample size, capped tokens and KL over the optimizer steps of a "
        "rollout.",
    keep="It writes the numbers of the runs into one small file, which the other commands read in "
         "place of the folders.")
OF_ROLLOUT = dict(
    steps="It takes the optimizer steps of a kept rollout again, and measures ratios, gradient "
          "sizes and clipping after each.",
    replay="It takes the gradient of every method on one rollout, and compares them.",
    tokens="It writes a page for the browser that shows every token of the rollout: its "
           "probability, ratio, clipping and gradient after each optimizer step, by one or several "
           "methods.")
COMMANDS = {**OF_RUNS, **OF_ROLLOUT}
# the file that a command writes where --out names none
FILES = {**{name: f"{name}.png" for name in COMMANDS}, "table": "table.md", "keep": "runs.jsonl",
         "tokens": "tokens.html"}


def positive(kind, text):
    """A flag's text as a number above 0."""
    value = kind(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def of_kind(kind, name):
    """-> the reader of a flag's text; argparse takes its __name__ into its error messages."""
    reader = partial(positive, kind)
    reader.__name__ = name
    return reader


NUMBER, COUNT = of_kind(float, "number"), of_kind(int, "whole number")


def add_out(parser, command, place, also=""):
    parser.add_argument("--out", metavar="FILE",
                        help=f"It names the file to write{also} (default: {FILES[command]} "
                             f"{place}).")


def add_run_flags(parser, command):
    parser.add_argument("paths", nargs="+", metavar="run",
                        help="It is a run's folder, a folder of runs, or a file that keep wrote.")
    parser.add_argument("--only", metavar="NAMES",
                        help="It chooses runs by their names, with commas between and * for "
                             "anything (default: all).")
    add_out(parser, command, "in the folder that the runs lie in; of one run or file, its name "
                             "stands in front")


def add_rollout_flags(parser, command):
    parser.add_argument("paths", nargs=1, metavar="rollout",
                        help="It is a file that train.py --save_rollouts kept, such as "
                             "runs/kept/rollouts/rollout_000001.pt.")
    parser.add_argument("--model",
                        help="It names the Hugging Face model that the steps are taken with; for "
                             "a later rollout than the first, give the checkpoint before it "
                             "(default: the model that the run began with).")
    if command != "replay":
        parser.add_argument("--lr", type=NUMBER, help="It is the learning rate of the steps "
                                                      "(default: the run's).")
    if command in ("steps", "tokens"):
        parser.add_argument("--steps", type=COUNT,
                            help="It says how many optimizer steps are taken (default: the run's "
                                 "--steps_per_rollout).")
    if command == "replay":
        parser.add_argument("--methods", metavar="NAMES",
                            help="It names methods, with commas between (default: all).")
    if command == "tokens":
        parser.add_argument("--methods", metavar="NAMES",
                            help="It names the methods whose steps are taken, each from the same "
                                 "start, with commas between (default: the run's).")
        parser.add_argument("--problems", type=COUNT,
                            help="It says how many of the rollout's problems the page shows, from "
                                 "the first (default: all).")
    add_out(parser, command, "beside the rollout, whose name stands in front",
            "" if command == "tokens" else "; the numbers go into a .json beside it")


def make_parser(description=None):
    """description: of `python -m analysis --help`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m analysis", description=description,
                                     allow_abbrev=False, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command",
                                     title="commands")
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text.replace("%", "%%"), description=text,
                                  allow_abbrev=False)
        if name in OF_RUNS:
            add_run_flags(sub, name)
        else:
            add_rollout_flags(sub, name)
    return parser


def parse(argv, description):
    """-> the arguments. Ends with a usage error where they do not go with the command."""
    parser = make_parser(description)
    args, unused = parser.parse_known_args(argv)
    if unused:
        refuse(f"{args.command} does not take {' '.join(unused)}; `python -m analysis "
               f"{args.command} --help` lists what it takes")
    if getattr(args, "methods", None):
        from losses import METHODS
        if unknown := [name for name in args.methods.split(",") if name not in METHODS]:
            refuse(f"--methods: no such method: {', '.join(unknown)}; "
                   f"there are {', '.join(METHODS)}")
    if getattr(args, "out", None) is not None:
        check_out(Path(args.out), args.command)
    return args


def check_out(out, command):
    """Refuses an --out that could not be written: the figure may be minutes away."""
    if out.is_dir():
        refuse(f"--out {out} is a folder: it takes a file, such as {out / FILES[command]}")
    if not out.parent.is_dir():
        refuse(f"--out {out}: there is no folder {out.parent}")
    if FILES[command].endswith(".png"):
        from matplotlib.backend_bases import FigureCanvasBase
        kinds = FigureCanvasBase.get_supported_filetypes()
        if out.suffix[1:].lower() not in kinds:
            refuse(f"--out {out}: the name of a figure ends in .png, .pdf, .svg or another of "
                   "matplotlib's kinds")


def beside(paths, command):
    """The file that a command writes without --out: in the folder that the first of the paths lies
    in. Of one path alone, its name stands in front, so that no run's own figure is written over."""
    first = Path(paths[0])
    if first.name in ("", ".."):
        first = first.resolve()
    name = FILES[command]
    if len(paths) == 1:
        name = f"{first.stem if first.is_file() else first.name}-{name}"
    return first.parent / name

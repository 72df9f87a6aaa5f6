"""One update taken apart: a rollout that train.py kept, and its optimizer steps taken again. And
what training made of a model: pass@k before and after.

    python train.py --loss grpo --rollouts 1 --save_rollouts --eval_every 0 --out runs/kept
    R=runs/kept/rollouts/rollout_000001.pt
    python -m anatomy steps $R           ratios, gradient sizes and clipping after each step
    python -m anatomy subsets $R         which tokens make the gradient
    python -m anatomy page $R --methods "grpo, grpo --eps_low 0.05 --eps_high 0.05"
                                         a page for the browser: probability, ratio, clipping and
                                         gradient of each token after each step
    python -m anatomy passk runs/*       pass@k, the chance that one of k completions is right,
                                         before and after training

A command ends with the names of the files that it wrote. The numbers of the figures of steps and
subsets are in a .json beside them.
"""

import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as train.py, before torch is imported
from analysis.__main__ import grouped, output, read_command, read_runs
from harness.failures import refusing
from harness.files import numbers, write
from harness.flags import Parser

# command: the file that it writes without --out, and its own flags
COMMANDS = dict(steps=["steps.png", "model", "lr", "steps"], subsets=["subsets.png", "model"],
                page=["tokens.html", "model", "lr", "steps", "methods", "problems"],
                passk=["passk.png"])


def make_parser():
    parser = Parser("anatomy", usage="python -m anatomy COMMAND PATH ... [--FLAG VALUE ...]",
                    description=__doc__)
    parser.add_argument("command", metavar="COMMAND", help=", ".join(COMMANDS), choices=COMMANDS)
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path,
                        help="a file of train.py --save_rollouts; passk: folders of runs, as "
                        "runs/*")
    parser.flag("model", None, "the Hugging Face model that the steps are taken with (default: the "
                "run's; for a later rollout than the first, the run's checkpoint before it)")
    parser.flag("lr", None, "page, steps: learning rate (default: the run's)", type=float,
                least=1e-12)
    parser.flag("steps", None, "page, steps: optimizer steps (default: the run's)", type=int,
                least=1)
    parser.flag("methods", None, "page: methods of losses.py, with commas between and their flags "
                "behind them (default: the run's)")
    parser.flag("problems", None, "page: problems on it (default: all)", type=int, least=1)
    parser.flag("out", None, "file to write (default: beside the rollout or the run)", type=Path)
    parser.add_argument("-h", "--help", action="help", help="show this page")
    return parser


def checkpoint_before(path):
    """-> the checkpoint that sampled a later rollout than the first, in its run's folder. None, for
    the model that the run began with, if it is the first, or, said as a warning, that is gone."""
    number = re.fullmatch(r"rollout_(\d{6})", path.stem)
    number = int(number[1]) - 1 if number else 0
    checkpoint = path.parent.parent / "checkpoints" / f"rollout_{number:06d}"
    if number and checkpoint.is_dir():
        return str(checkpoint)
    if number:
        print(f"anatomy: WARNING  there is no {checkpoint}, which sampled {path.name}: the run's "
              "first model takes its place; --model names another", file=sys.stderr)


def write_figure(command, path, out, model, **options):
    """Writes the figure, and the numbers into a .json beside it, and prints the table."""
    from anatomy import steps, subsets
    from anatomy.rollout import open_rollout
    measure, table, draw = dict(
        steps=(steps.steps, steps.steps_table, steps.draw_steps),
        subsets=(subsets.compare_subsets, subsets.subsets_table, subsets.draw_subsets))[command]
    kept, beside = open_rollout(path, model), out.with_suffix(".json")
    result = dict(rollout=kept.rollout, method=kept.flags["loss"],
                  lr=options.get("lr") or kept.flags["lr"], **measure(kept, **options))
    write(beside, json.dumps(numbers(result), indent=1))
    draw(result, out)
    print(f"{table(result)}\nwritten: {out}, {beside}")


def write_passk(parser, paths, out):
    from anatomy import passk
    groups = grouped(read_runs(parser, paths))
    results = passk.pass_at_k(groups)
    if results.keys().isdisjoint(groups):
        parser.error("passk: no run was evaluated after training, as by train.py --eval_every 10")
    passk.draw_passk(results, out)
    print(f"written: {out}")


def main(argv=None):
    parser = make_parser()
    args = read_command(parser, COMMANDS, argv)
    if args.command == "passk":
        return write_passk(parser, args.paths, output(parser, "passk.png", args))
    path, *others = args.paths
    if others or not path.is_file():
        parser.error(f"{args.command} takes one file that train.py --save_rollouts kept, such as "
                     f"runs/kept/rollouts/rollout_000001.pt, not {', '.join(map(str, args.paths))}")
    name, *own = COMMANDS[args.command]
    out, options = output(parser, name, args), {flag: getattr(args, flag) for flag in own}
    options["model"] = args.model or checkpoint_before(path)
    with refusing(f"{path}: ", "anatomy"):  # a sentence on the file, the model or the steps
        if args.command == "page":
            from anatomy.tokens import make_page
            write(out, make_page(path, **options))
            print(f"written: {out}")
        else:
            write_figure(args.command, path, out, **options)


if __name__ == "__main__":
    main()

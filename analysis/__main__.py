"""Tables and figures of runs, and the anatomy of their updates.

    python -m analysis curves runs/*     held-out scores, reward, entropy, clipping and KL, or
                                         with --metric NAME any number of metrics.jsonl
    python -m analysis table runs/*      a line for each method, with intervals over seeds
    python -m analysis passk runs/*      pass@k, the chance that one of k completions is right,
                                         before and after training
    python -m analysis fade runs/*       FADE's gradient masses and controllers, entropy, and how
                                         close the LM head's change is to rank one
    python -m analysis p3o runs/*        effective sample size, capped and clipped tokens, KL over
                                         the optimizer steps of a rollout

    python train.py --loss grpo --rollouts 1 --save_rollouts --eval_every 0 --out runs/kept
    R=runs/kept/rollouts/rollout_000001.pt
    python -m analysis steps $R          ratios, gradient sizes and clipping after each step
    python -m analysis replay $R         the gradients of all methods on one rollout
    python -m analysis tokens $R --methods "grpo, grpo --eps_low 0.05 --eps_high 0.05"
                                         a page for the browser: probability, ratio, clipping and
                                         gradient of each token after each step

A command ends with the names of the files that it wrote; `python -m analysis COMMAND --help` has
its flags. Runs whose flags differ in nothing but the seed are one line.
"""

# torch, transformers and matplotlib are imported where a command needs them: --help is to be quick
import argparse
import difflib
import json
import sys
from functools import partial
from pathlib import Path

from experiment import failures

refuse = partial(failures.refuse, "analysis")
# command: the file to write without --out, and the flags of a command that takes a rollout
COMMANDS = dict(
    curves=["curves.png", "metric"], table=["table.md"], passk=["passk.png"], fade=["fade.png"],
    p3o=["p3o.png"], steps=["steps.png", "model", "lr", "steps"],
    replay=["replay.json", "model", "methods"],
    tokens=["tokens.html", "model", "lr", "steps", "methods", "problems"])


def positive(text, kind=float):
    if not 0 < kind(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return kind(text)


def count(text):
    return positive(text, int)


def method_names(text):
    from analysis.rollout import bound
    names = [" ".join(part.split()) for part in text.split(",")]
    try:
        for name in names:
            bound(None, name)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return names


FLAGS = dict(
    model=dict(help="Hugging Face model that the steps are taken with; for a later rollout than "
                    "the first, the checkpoint before it (default: the run's)"),
    lr=dict(type=positive, help="learning rate of the steps (default: the run's)"),
    steps=dict(type=count, help="number of optimizer steps (default: the run's)"),
    methods=dict(type=method_names,
                 help="methods of losses.py, with commas between and their flags behind them, as "
                      "'grpo, grpo --eps_low 0.05' (default: of replay all, of tokens the run's)"),
    metric=dict(help="the number of metrics.jsonl to draw, as policy/ess or time/rollout"),
    problems=dict(type=count, help="number of the rollout's problems on the page (default: all)"),
    out=dict(type=Path, help="file to write; the numbers of steps and replay go into a .json "
                             "(default: beside the run or rollout)"))


def make_parser():
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, *flags) in COMMANDS.items():
        sub = commands.add_parser(name, allow_abbrev=False)
        if "model" in flags:
            sub.add_argument("rollout", type=Path, help="a file of train.py --save_rollouts")
        else:
            sub.add_argument("runs", nargs="+", type=Path, help="folders of runs, as runs/*")
        for flag in (*flags, "out"):
            sub.add_argument(f"--{flag}", **FLAGS[flag])
    return parser


def output(out, paths, name):
    """-> the file to write: --out, or one of that name in the folder that the first path lies in.
    The name of a path that is alone is put in front: no run's own figure is written over."""
    if out is None:
        first = paths[0].resolve()
        return first.with_name(f"{first.stem}-{name}" if len(paths) == 1 else name)
    if out.is_dir() or not out.parent.is_dir():  # the figure may be minutes away
        refuse(f"--out {out} is no file in a folder that is there; it may be {name}")
    return out


def of_runs(command, paths, out, metric=None):
    from analysis import figures, runs
    found = []
    for path in paths:
        if (path / "metrics.jsonl").exists():  # a shell's runs/* has figures and tables, too
            try:
                found.append(runs.read(path))
            except ValueError as e:
                refuse(f"{path}: a file of the run is damaged: {e}")
    if not found:
        refuse(f"{', '.join(map(str, paths))}: no run's folder is among these; train.py --out "
               "names one")
    groups = runs.grouped(run for run, in found)
    if sum(map(len, groups.values())) < len(found):
        print("analysis: runs are given twice: a seed of a setting counts once, by its longest run",
              file=sys.stderr)
    if metric:
        names = {name for run, in found for record in run["records"] for name, x in record.items()
                 if isinstance(x, (int, float))}
        if metric not in names:
            near = difflib.get_close_matches(metric, names, 3) or sorted(names)
            refuse(f"--metric {metric}: no such number was logged, but {', '.join(near)}")
        figures.curves(groups, out, panels={metric: metric})
    elif command == "table":
        out.write_text(runs.table(groups))
        print(f"{out.read_text()}\n{runs.NOTES}")
    elif command == "passk":
        results = runs.pass_at_k(groups)
        if results.keys().isdisjoint(groups):
            refuse("passk: no run was evaluated after training, as by train.py --eval_every 10")
        figures.passk(results, out)
    else:
        figures.curves(groups, out, command)
    print(f"written: {out}")


def of_rollout(command, path, out, model, **options):
    from analysis import anatomy, figures
    from analysis.rollout import open_rollout
    kept = open_rollout(path, model)
    result = getattr(anatomy, command)(kept, **options)
    write(dict(rollout=kept.rollout, method=kept.flags["loss"],
               lr=options.get("lr") or kept.flags["lr"], **result), out,
          getattr(anatomy, f"{command}_table"), getattr(figures, command, None))


def write(result, out, as_table, draw=None):
    """Writes the numbers into a .json, the figure beside it, and prints the table."""
    from experiment.log import numbers
    files = [Path(out).with_suffix(".json")]
    files[0].write_text(json.dumps(numbers(result), indent=1))
    if draw:
        draw(result, out)
        files.insert(0, out)
    print(f"{as_table(result)}\nwritten: {', '.join(map(str, files))}")


def main(argv=None):
    options = vars(make_parser().parse_args(argv))
    command, out, runs, path = (options.pop(name, None)
                                for name in ("command", "out", "runs", "rollout"))
    name = f"{options['metric']}.png".replace("/", "-") if options.get("metric") else None
    out = output(out, runs or [path], name or COMMANDS[command][0])
    if runs:
        return of_runs(command, runs, out, **options)
    if not path.is_file():
        refuse(f"{path} is no file; train.py --save_rollouts keeps rollouts, such as "
               "runs/kept/rollouts/rollout_000001.pt")
    try:
        if command == "tokens":
            from analysis import tokens
            out.write_text(tokens.make_page(path, **options), encoding="utf-8")
            print(f"written: {out}")
        else:
            of_rollout(command, path, out, **options)
    except ValueError as e:  # a sentence on the file, the model or the steps
        refuse(f"{path}: {e}")


if __name__ == "__main__":
    main()

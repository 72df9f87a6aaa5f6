"""Tables and figures of runs, and a page of the tokens of an update.

    python -m analysis curves runs/*     held-out scores, reward, entropy, clipping and KL, or
                                         with --metric NAME any number of metrics.jsonl
    python -m analysis table runs/*      a line for each method, with intervals over seeds
    python -m analysis passk runs/*      pass@k, the chance that one of k completions is right,
                                         before and after training
    python -m analysis fade runs/*       FADE's gradient masses and controllers, entropy, reward
    python -m analysis p3o runs/*        effective sample size, capped and clipped tokens, KL over
                                         the optimizer steps of a rollout

    python train.py --loss grpo --rollouts 1 --save_rollouts --eval_every 0 --out runs/kept
    R=runs/kept/rollouts/rollout_000001.pt
    python -m analysis tokens $R --methods "grpo, grpo --eps_low 0.05 --eps_high 0.05"
                                         a page for the browser: probability, ratio, clipping and
                                         gradient of each token after each step

A command ends with the names of the files that it wrote. Runs whose flags differ in nothing but the
seed are one line.
"""

from functools import partial
from pathlib import Path

from harness import failures
from harness.flags import Parser, did_you_mean

refuse, refusing = (partial(f, "analysis") for f in (failures.refuse, failures.refusing))
# command: the file that it writes without --out, and its own flags
COMMANDS = dict(
    curves=["curves.png", "metric"], table=["table.md"], passk=["passk.png"], fade=["fade.png"],
    p3o=["p3o.png"], tokens=["tokens.html", "model", "lr", "steps", "methods", "problems"])


def make_parser():
    parser = Parser("analysis", usage="python -m analysis COMMAND PATH ... [--FLAG VALUE ...]",
                    description=__doc__)
    parser.add_argument("command", metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path,
                        help="folders of runs, as runs/*, or a file of train.py --save_rollouts")
    parser.flag("metric", None, "curves: the number of metrics.jsonl to draw, as time/rollout")
    parser.flag("model", None, "tokens: the Hugging Face model that the steps are taken with; for "
                "a later rollout than the first, the checkpoint before it (default: the run's)")
    parser.flag("lr", None, "tokens: learning rate (default: the run's)", type=float, least=1e-12)
    parser.flag("steps", None, "tokens: optimizer steps (default: the run's)", type=int, least=1)
    parser.flag("methods", None, "tokens: methods of losses.py, with commas between and their "
                "flags behind them (default: the run's)")
    parser.flag("problems", None, "tokens: problems on the page (default: all)", type=int, least=1)
    parser.flag("out", None, "file to write (default: beside the run or rollout)", type=Path)
    parser.add_argument("-h", "--help", action="help", help="show this page")
    return parser


def output(args):
    """-> the file to write: --out, or one in the folder that the first path lies in. The name of a
    path that is alone is put in front: no run's own figure is written over."""
    name = f"{args.metric}.png".replace("/", "-") if args.metric else COMMANDS[args.command][0]
    if args.out is None:
        first = args.paths[0].resolve()
        alone = f"{first.name.removesuffix('.pt')}-{name}"
        return first.with_name(alone if len(args.paths) == 1 else name)
    known = not name.endswith("png") or args.out.suffix in (".png", ".pdf", ".svg")
    if args.out.is_dir() or not args.out.parent.is_dir() or not known:
        refuse(f"--out {args.out} is no file in a folder that is there, of a figure .png, .pdf or "
               f".svg; it may be {name}")  # now: the figure may be minutes away
    return args.out


def of_runs(command, paths, out, metric=None):
    from analysis import figures, runs
    found = []
    for path in paths:
        if (path / "metrics.jsonl").exists():  # a shell's runs/* has figures and tables, too
            with refusing(f"{path}: a file of the run is damaged: "):
                found += runs.read(path)
    if not found:
        refuse(f"{', '.join(map(str, paths))}: no run's folder is among these; train.py --out "
               "names one")
    groups = runs.grouped(found)
    logged = {name for run in found for record in run["records"] for name, x in record.items()
              if isinstance(x, (int, float))}
    if metric and metric not in logged:
        refuse(f"--metric {metric}: no such number was logged{did_you_mean(metric, logged)}")
    if command == "table":
        out.write_text(runs.table(groups))
        print(f"{out.read_text()}\n{runs.NOTES}")
    elif command == "passk":
        results = runs.pass_at_k(groups)
        if results.keys().isdisjoint(groups):
            refuse("passk: no run was evaluated after training, as by train.py --eval_every 10")
        figures.passk(results, out)
    else:
        figures.curves(groups, out, command, metric)


def of_rollout(paths, out, **options):
    path, *others = paths
    if others or not path.is_file():
        refuse("tokens takes one file that train.py --save_rollouts kept, such as "
               f"runs/kept/rollouts/rollout_000001.pt, not {', '.join(map(str, paths))}")
    from analysis import tokens
    with refusing(f"{path}: "):  # a sentence on the file, the model or the steps
        out.write_text(tokens.make_page(path, **options), encoding="utf-8")


def main(argv=None):
    parser = make_parser()
    args = parser.merge(vars(parser.parse_args(argv)))
    if args.command not in COMMANDS:
        refuse(f"{args.command} is none of {', '.join(COMMANDS)}")
    own = COMMANDS[args.command][1:]
    for name in args.origin.keys() & parser.rows.keys() - {*own, "out"}:
        refuse(f"--{name} is no flag of {args.command}")
    out, options = output(args), {name: getattr(args, name) for name in own}
    if args.command == "tokens":
        of_rollout(args.paths, out, **options)
    else:
        of_runs(args.command, args.paths, out, **options)
    print(f"written: {out}")


if __name__ == "__main__":
    main()

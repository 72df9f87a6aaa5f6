"""Tables, figures and the anatomy of updates, from the folders of runs and from kept rollouts.

    python -m analysis curves runs/*     a few numbers over the rollouts
    python -m analysis table runs/*      a line for each method, with intervals over seeds
    python -m analysis passk runs/*      pass@k before and after
    python -m analysis fade runs/*       gradient masses, controllers, entropy, rank of the head's
                                         change
    python -m analysis p3o runs/*        effective sample size, capped tokens, KL within a rollout
    python -m analysis keep runs/* --out results.jsonl
                                         the runs' numbers in one small file, which all of these
                                         read too

    python train.py --loss grpo --rollouts 1 --save_rollouts --eval_every 0 --out runs/kept
    R=runs/kept/rollouts/rollout_000001.pt
    python -m analysis steps $R          ratios, gradient sizes and clipping, step by step
    python -m analysis subsets $R        which tokens make the gradient, and its direction
    python -m analysis entropy $R        predicted against measured change of entropy
    python -m analysis replay $R         the gradients of all methods on one rollout

    python -m analysis theory            ACPO's Proposition 1 against a Monte Carlo
    python -m analysis results           RESULTS.md and its figures, from the numbers in results/

A rollout can be looked at with any Hugging Face model: --model, by default the one that its run
began with; for a later rollout that should be the checkpoint before it. Runs whose flags differ in
nothing but the seed are one line.
"""

# torch, transformers and matplotlib are imported where a command needs them: --help is to be quick
import argparse
import fnmatch
import json
import pickle
import sys
from pathlib import Path

# the options that each command takes besides paths and --out
OF_RUNS = dict.fromkeys(("curves", "table", "passk", "fade", "p3o", "keep"), ("only",))
OF_ROLLOUT = dict(steps=("model", "lr", "steps"), subsets=("model", "lr", "steps", "layers", "k"),
                  entropy=("model", "lr"), replay=("model", "methods"))
OPTIONS = {**OF_RUNS, **OF_ROLLOUT, "theory": (), "results": ("measure",)}


def fail(message):
    sys.exit(f"analysis: {message}")


# ---------------------------------------------------------------------------- commands on runs


def read_runs(paths, only):
    """The runs of all paths, those with a name like one of `only`; ends with a message if there
    are none."""
    from analysis.runs import find_runs, is_run, read
    run_paths = find_runs(paths)
    if missing := [p for p in run_paths if not is_run(p)]:
        fail(f"{missing[0]} holds no run: it has no metrics.jsonl and config.json")
    try:
        runs = [run for path in run_paths for run in read(path)]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        fail(f"a file of the runs cannot be read: {type(e).__name__}: {e}")
    if only:
        runs = [run for run in runs
                if any(fnmatch.fnmatch(run["name"], pattern) for pattern in only.split(","))]
    if not runs:
        fail(f"no run in {' '.join(paths)}" + (f" is named like {only}" if only else ""))
    return runs


def analyze_runs(command, paths, only=None, out=None):
    from analysis import figures
    from analysis.runs import grouped, keep, table
    from analysis.theory import masses
    runs = read_runs(paths, only)
    groups = grouped(runs)
    out = out or dict(table="table.md", keep="runs.jsonl").get(command, f"{command}.png")
    if command == "table":
        text = table(runs)
        Path(out).write_text(text)
        print(text, end="")
    elif command == "keep":
        keep(runs, out)
    elif command == "curves":
        figures.curves(groups, out)
    elif command == "passk":
        draw_pass_at_k(groups, out)
    elif command == "fade":
        figures.fade(groups, masses(), out)
    elif command == "p3o":
        figures.p3o(groups, out)
    print(out)


def draw_pass_at_k(groups, out):
    from analysis import figures
    from analysis.runs import pass_at_k
    results = pass_at_k(groups)
    has_base = len(results) > len(groups)
    if not all(results.values()) or not has_base:
        fail("passk needs runs that were evaluated at their beginning and end (--eval_every), "
             "with some k in common")
    seeds = figures.seeds_of(groups).split(",")[0]
    figures.passk(results, out, f"{seeds}, band: 95% bootstrap interval")


# ---------------------------------------------------------------------------- commands on a rollout


def analyze_rollout(command, path, out=None, model=None, methods=None, lr=None, steps=None,
                    layers=None, k=None):
    from analysis import anatomy, figures
    from analysis.rollout import open_rollout
    from losses import METHODS
    try:
        kept = open_rollout(path, model)
        if command == "steps":
            result = anatomy.steps(kept, steps, lr)
            draw, as_table = figures.steps, anatomy.steps_table
        elif command == "subsets":
            result = anatomy.compare_subsets(kept, layers or 8, k, steps, lr)
            draw, as_table = figures.subsets, anatomy.subsets_table
        elif command == "entropy":
            result = anatomy.entropy_changes(kept, lr)
            draw, as_table = figures.entropy, anatomy.entropy_table
        elif command == "replay":
            result = anatomy.replay(kept, methods.split(",") if methods else METHODS)
            draw, as_table = figures.replay, anatomy.replay_table
    except (OSError, EOFError, ValueError, LookupError, TypeError, pickle.UnpicklingError,
            RuntimeError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        fail(f"{path} or the model cannot be used: {reason}")
    about = dict(rollout=kept.rollout, method=kept.flags["loss"], lr=lr or kept.flags["lr"])
    write({**about, **result}, out or f"{command}.png", draw, as_table)


def write(result, out, draw, as_table):
    """Writes the figure, and the numbers into a .json beside it, and prints the table."""
    from experiment.log import numbers
    out = Path(out)
    numbers_file = out.with_suffix(".json")
    numbers_file.write_text(json.dumps(numbers(result), indent=1))
    draw(result, out)
    print(as_table(result))
    print(f"{out} and {numbers_file}")


def analyze_theory(out=None):
    from analysis import figures
    from analysis.theory import proposition_1, proposition_1_table
    write(proposition_1(), out or "theory.png", figures.theory, proposition_1_table)


# ---------------------------------------------------------------------------- the command line


def make_parser():
    parser = argparse.ArgumentParser(
        prog="analysis", usage="python -m analysis command [path ...] [options]",
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=OPTIONS)
    parser.add_argument("paths", nargs="*", metavar="path",
                        help="folders of runs, or files of keep; for the anatomy, one rollout's "
                             "file")
    parser.add_argument("--out", help="the file to write; a rollout's numbers go into a .json "
                                      "beside it")
    parser.add_argument("--only", help="runs: names with commas between, * for anything")
    parser.add_argument("--model", help="rollout: the model to begin with")
    parser.add_argument("--methods", help="replay: names with commas between; default all")
    parser.add_argument("--lr", type=float,
                        help="steps, subsets, entropy: another learning rate than the run's")
    parser.add_argument("--steps", type=int,
                        help="steps: optimizer steps on the rollout; subsets: those before the "
                             "gradients are taken (default half)")
    parser.add_argument("--layers", type=int, help="subsets: transformer blocks looked at, evenly "
                                                   "over the depth (8)")
    parser.add_argument("--k", type=int, help="subsets: dimension of the subspaces; default 128, "
                                              "or an eighth of a smaller matrix")
    parser.add_argument("--measure", action="store_true", default=None,
                        help="results: first the anatomy of five rollouts again, which takes "
                             "minutes")
    return parser


def check(parser, args, options):
    """Ends with a usage error where paths and options do not go with the command."""
    command = args.command
    if unused := [f"--{name}" for name in options if name not in OPTIONS[command]]:
        parser.error(f"{', '.join(unused)}: not used by {command}")
    if command == "results" and args.out:
        parser.error("--out: not used by results")
    if low := [f"--{name}" for name in ("lr", "layers", "k", "steps") if options.get(name, 1) <= 0
               and (name, command) != ("steps", "subsets")]:  # subsets: before any step
        parser.error(f"{', '.join(low)} must be above 0")
    if command in OF_RUNS and not args.paths:
        parser.error(f"{command} takes runs")
    if command in OF_ROLLOUT and len(args.paths) != 1:
        parser.error(f"{command} takes the file of one rollout")
    if command in ("theory", "results") and args.paths:
        parser.error(f"{command} takes no path")
    if args.methods:
        from losses import METHODS
        if unknown := set(args.methods.split(",")) - set(METHODS):
            parser.error(f"--methods: no such method: {', '.join(unknown)}; "
                         f"there are {', '.join(METHODS)}")


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    options = {name: value for name, value in vars(args).items()
               if value is not None and name not in ("command", "paths", "out")}
    check(parser, args, options)
    if args.command == "results":
        from analysis.results import write_results
        write_results(args.measure)
    elif args.command == "theory":
        analyze_theory(args.out)
    elif args.command in OF_ROLLOUT:
        analyze_rollout(args.command, args.paths[0], args.out, **options)
    else:
        analyze_runs(args.command, args.paths, args.only, args.out)


if __name__ == "__main__":
    main()

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
    python -m analysis replay $R         the gradients of all methods on one rollout
    python -m analysis tokens $R --methods grpo,acpo
                                         a page for the browser: every token, step by step

Every command says which files it wrote, and `python -m analysis COMMAND --help` its flags. Runs
whose flags differ in nothing but the seed are one line.
"""

# torch, transformers and matplotlib are imported where a command needs them: --help is to be quick
import fnmatch
import json
import sys
from pathlib import Path

from analysis.flags import OF_RUNS, beside, parse, refuse

SHOWN = 3  # so many runs a sentence names


def note(message):
    print(f"analysis: {message}", file=sys.stderr)


def wrote(*files):
    """Every command's last line."""
    print(f"written: {', '.join(map(str, files))}")


def some(texts):
    """The first few, and how many more there are."""
    texts = list(map(str, texts))
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


# ---------------------------------------------------------------------------- commands on runs


def read_runs(paths, only):
    """The runs of the paths, each seed once, those with a name like one of `only`; refuses paths
    that hold none."""
    from analysis.runs import distinct, is_run, read
    for path in paths:
        if not path.exists():
            refuse(f"{path}: there is no such folder or file; train.py writes a run's folder, "
                   "which its --out names")
    there = [path for path in paths if is_run(path)] or paths[:1]
    if there[0].is_dir() and not is_run(there[0]):
        refuse(f"{there[0]} holds no run: it has no metrics.jsonl and config.json")
    if others := [path for path in paths if path not in there]:  # a shell's runs/* names all
        note(f"left out, for they hold no run: {some(map(str, others))}")
    try:
        runs = [run for path in there for run in read(path)]
    except (OSError, ValueError) as e:
        refuse(str(e))
    if only:
        runs = [run for run in runs
                if any(fnmatch.fnmatch(run["name"], pattern) for pattern in only.split(","))]
    if not runs:
        refuse(f"no run in {' '.join(map(str, paths))}"
               + (f" is named like {only}" if only else ""))
    runs, left_out = distinct(runs)
    if left_out:
        twice = some(f"{run['name']}, seed {run['seed']} ({used['path']} is used, {run['path']} "
                     "is not)" for used, run in left_out)
        note("runs of one setting and one seed count once, the longest of them, or of equally "
             f"long ones the last folder given: {twice}")
    return runs


def analyze_runs(command, paths, only=None, out=None):
    from analysis import figures
    from analysis.masses import masses
    from analysis.runs import find_runs, grouped, keep, table, table_notes
    paths = find_runs(paths) or list(map(Path, paths))
    runs = read_runs(paths, only)
    groups, out = grouped(runs), out or beside(paths, command)
    try:
        if command == "table":
            text = table(runs)
            Path(out).write_text(text)
            print(f"{text}\n{table_notes(runs)}")
        elif command == "keep":
            keep(runs, out)
        elif command == "curves":
            figures.curves(groups, out)
        elif command == "passk":
            draw_pass_at_k(runs, out)
        elif command == "fade":
            figures.fade(groups, masses(), out)
        elif command == "p3o":
            figures.p3o(groups, out)
    except OSError as e:
        refuse(f"{out} cannot be written: {e.strerror}; --out names another file")
    wrote(out)


def draw_pass_at_k(runs, out):
    from analysis import figures
    from analysis.runs import evaluations, grouped, is_evaluated, pass_at_k
    evaluated = [run for run in runs if is_evaluated(run)]
    makes = "train.py --eval_every N evaluates before training and after every N rollouts"
    if not evaluated:
        refuse(f"passk: none of {some(run['path'] for run in runs)} was evaluated after training; "
               f"{makes}")
    if len(evaluated) < len(runs):
        missing = some(run["path"] for run in runs if not is_evaluated(run))
        note(f"passk leaves out {missing}: not evaluated after training; {makes}")
    if not any(evaluations(run)[0]["rollout"] == 0 for run in evaluated):
        note(f"the figure has no base: no run was evaluated before training; {makes}")
    groups = grouped(evaluated)
    figures.passk(pass_at_k(groups), out, figures.passk_caption(groups))


# ---------------------------------------------------------------------------- commands on a rollout


def rollout_file(path):
    """Refuses a path that is no file, with the rollouts that there are."""
    if not path.exists():
        refuse(f"{path}: there is no such file; train.py --save_rollouts keeps rollouts, in its "
               "folder's rollouts/")
    if path.is_dir():
        kept = sorted(path.glob("**/rollout_*.pt"))
        refuse(f"{path} is a folder, not the file of a rollout: " + (
            f"it holds {some(kept)}" if kept else
            "it holds none; train.py --save_rollouts keeps them"))


def analyze_rollout(command, path, out=None, model=None, methods=None, lr=None, steps=None):
    rollout_file(Path(path))
    from analysis import anatomy, figures
    from analysis.rollout import open_rollout
    from losses import METHODS
    try:
        kept = open_rollout(path, model)
    except ValueError as e:
        refuse(f"{path}: {e}")
    try:
        if command == "steps":
            result = anatomy.steps(kept, steps, lr)
            draw, as_table = figures.steps, anatomy.steps_table
        elif command == "replay":
            result = anatomy.replay(kept, methods.split(",") if methods else METHODS)
            draw, as_table = figures.replay, anatomy.replay_table
    except ValueError as e:
        refuse(f"{path}: {e}")
    about = dict(rollout=kept.rollout, method=kept.flags["loss"], lr=lr or kept.flags["lr"])
    write({**about, **result}, out or beside([path], command), draw, as_table)


def analyze_tokens(path, out=None, model=None, methods=None, lr=None, steps=None, problems=None):
    rollout_file(Path(path))
    from analysis import tokens
    from analysis.rollout import open_rollout
    out = Path(out or beside([path], "tokens"))
    try:
        if saved := tokens.saved(path):  # before a model loads
            flags, prompt = saved
            tokenizer, eos = tokens.read_tokenizer(model or flags["model"], prompt)
        kept = open_rollout(path, model)
        names = methods.split(",") if methods else [flags["loss"]]
        page, remark = tokens.page_of(kept, path, tokenizer, eos, names, steps, lr, problems)
    except ValueError as e:
        refuse(f"{path}: {e}")
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as e:
        refuse(f"{out} cannot be written: {e.strerror}; --out names another file")
    if remark:
        note(remark)
    if len(page) > 50e6:
        note(f"the page has {len(page) / 1e6:.0f} MB; --problems N shows fewer problems")
    wrote(out)


def write(result, out, draw, as_table):
    """Writes the figure, and the numbers into a .json beside it, and prints the table."""
    from experiment.log import numbers
    out = Path(out)
    numbers_file = out.with_suffix(".json")
    try:
        numbers_file.write_text(json.dumps(numbers(result), indent=1))
        draw(result, out)
    except OSError as e:
        refuse(f"{out} or {numbers_file} cannot be written: {e.strerror}; --out names other files")
    print(as_table(result))
    wrote(out, numbers_file)


def main(argv=None):
    args = parse(argv, __doc__)
    if args.command in OF_RUNS:
        analyze_runs(args.command, args.paths, args.only, args.out)
    else:
        path, = args.paths
        options = {name: value for name, value in vars(args).items()
                   if name not in ("command", "paths")}
        if args.command == "tokens":
            analyze_tokens(path, **options)
        else:
            analyze_rollout(args.command, path, **options)


if __name__ == "__main__":
    main()

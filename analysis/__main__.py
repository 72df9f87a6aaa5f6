"""Tables and figures of runs.

    python -m analysis curves runs/*     held-out scores, reward, entropy, clipping and KL, or
                                         with --metric NAME any number of metrics.jsonl
    python -m analysis table runs/*      a line for each method, with intervals over seeds
    python -m analysis fade runs/*       FADE's gradient masses and controllers, entropy, reward
    python -m analysis p3o runs/*        effective sample size, capped and clipped tokens, KL over
                                         the optimizer steps of a rollout

A command ends with the names of the files that it wrote. Runs whose flags differ in nothing but the
seed are one line.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean, median, stdev

from harness.failures import refusing
from harness.flags import Parser, did_you_mean
from harness.stats import half_width, markdown_table

# command: the file that it writes without --out, and its own flags
COMMANDS = dict(curves=["curves.png", "metric"], table=["table.md"], fade=["fade.png"],
                p3o=["p3o.png"])

PANELS = dict(  # command: {metric: label of its panel}
    fade={"adv/mass_pos": "mass on successes, $m_S$", "adv/mass_neg": "mass on failures, $m_F$",
          "policy/entropy": "entropy (nats)", "adv/fade_alpha": "FADE's alpha",
          "adv/fade_delta": "FADE's delta", "reward/mean": "reward"},
    p3o={"policy/ess": "effective sample size", "clip/capped_frac": "share of tokens capped",
         "clip/frac": "share of tokens clipped", "policy/ratio_max": "largest ratio",
         "policy/kl_old": "KL to the rollout's policy (nats)", "policy/entropy": "entropy (nats)"})

OF_A_RUN = dict.fromkeys(("seed", "out", "tokens_per_micro_batch"))  # the last: of the memory
# column: metric, and its number of a run from the values over the rollouts
COLUMNS = {"mean@n": ("mean@n", list.pop), "pass@n": ("pass@n", list.pop),
           "entropy": ("policy/entropy", list.pop), "clipped": ("clip/frac", fmean),
           "s/rollout": ("time/rollout", median)}
# the console has it under the table
NOTES = """\
mean@n: share of right completions of the held-out problems. pass@n: share of the problems of which
at least one in n completions is right. Both are of the last evaluation, and compare only where
"held out", the problems x n, is the same. entropy: of the last rollout, in nats per token. clipped:
mean share of tokens that the clip took the gradient from. s/rollout: median of the seconds.
In brackets: Student's 95% interval of the mean over the seeds; of one seed there is none, and
another seed may order the lines otherwise.
Look at mean@n and pass@n together: where the first rises and the second falls, training has made
the model surer, not more able.
"""


def make_parser():
    parser = Parser("analysis", usage="python -m analysis COMMAND PATH ... [--FLAG VALUE ...]",
                    description=__doc__)
    parser.add_argument("command", metavar="COMMAND", help=", ".join(COMMANDS), choices=COMMANDS)
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path,
                        help="folders of runs, as runs/*")
    parser.flag("metric", None, "curves: the number of metrics.jsonl to draw, as time/rollout")
    parser.flag("out", None, "file to write (default: beside the run)", type=Path)
    parser.add_argument("-h", "--help", action="help", help="show this page")
    return parser


def read_command(parser, commands, argv):
    """-> args; a flag of another command is refused."""
    args = parser.merge(vars(parser.parse_args(argv)))
    for name in args.origin.keys() & parser.rows.keys() - {*commands[args.command], "out"}:
        parser.error(f"--{name} is no flag of {args.command}")
    return args


def output(parser, name, args):
    """-> the file to write: --out, or one of this name in the folder that the first path lies in.
    The name of a path that is alone is put in front: no run's own figure is written over."""
    if args.out is None:
        first = args.paths[0].resolve()
        alone = f"{first.name.removesuffix('.pt')}-{name}"
        return first.with_name(alone if len(args.paths) == 1 else name)
    known = not name.endswith("png") or args.out.suffix in (".png", ".pdf", ".svg")
    if args.out.is_dir() or not args.out.parent.is_dir() or not known:
        parser.error(f"--out {args.out} is no file in a folder that is there, of a figure .png, "
                     f".pdf or .svg; it may be {name}")  # now: the figure may be minutes away
    return args.out


def read_runs(parser, paths):
    """The runs of those paths that are a run's folder."""
    from harness.curves import read
    found = []
    for path in paths:
        if not path.exists():
            parser.error(f"there is no {path}")
        if (path / "metrics.jsonl").exists():  # a shell's runs/* has figures and tables, too
            with refusing(f"{path}: a file of the run is damaged: ", parser.prog):
                found.append(read(path))
    if not found:
        parser.error(f"{', '.join(map(str, paths))}: no run's folder is among these; train.py "
                     "--out names one")
    return found


def grouped(runs):
    """{label: [run]}: runs whose flags differ in no more than OF_A_RUN; a second run of a seed, as
    after a change of the code, is of a second group. A second label gets a number."""
    by_flags, times, groups = defaultdict(list), Counter(), {}
    for run in runs:
        flags = json.dumps(run["flags"] | OF_A_RUN)
        by_flags[flags, times[flags, run["seed"]]].append(run)
        times[flags, run["seed"]] += 1
    for members in by_flags.values():
        label = members[0]["name"]
        groups[label if label not in groups else f"{label} ({len(groups) + 1})"] = members
    return groups


def interval(values):
    """Student's 95% interval of the mean over seeds, two or more."""
    mean, half = fmean(values), half_width(len(values), stdev(values) / len(values) ** 0.5)
    return mean - half, mean + half


def values(run, name):
    """A metric's values over the rollouts; the base's score before training is none of them."""
    return [r[name] for r in run["records"] if r["rollout"] and r.get(name) is not None]


def cell(found):
    """0.512 (0.496 to 0.528): the mean over seeds and its interval; "-" without a value."""
    if not found:
        return "-"
    ends = " ({:.3f} to {:.3f})".format(*interval(found)) if len(found) > 1 else ""
    return f"{fmean(found):.3f}{ends}"


def table(groups):
    """A line for each group of runs: numbers at the end, means over seeds with 95% intervals."""
    rows = []
    for label, members in groups.items():
        flags = members[0]["flags"]
        done = [max((record["rollout"] for record in run["records"]), default=0) for run in members]
        held_out = f"{Path(flags['eval_data'] or flags['data']).name}, " \
                   f"{flags['eval_problems']} x {flags['eval_samples']}"
        rows.append([label, flags["loss"], flags["steps_per_rollout"],
                     "-".join(map(str, sorted({min(done), max(done)}))), len(members),
                     held_out if flags["eval_every"] else "-",
                     *(cell([of(x) for run in members if (x := values(run, name))])
                       for name, of in COLUMNS.values())])
    head = ("run", "method", "steps", "rollouts", "seeds", "held out", *COLUMNS)
    return markdown_table(head, rows) + "\n"


def main(argv=None):
    parser = make_parser()
    args = read_command(parser, COMMANDS, argv)
    command, metric = args.command, args.metric
    name = f"{metric}.png".replace("/", "-") if metric else COMMANDS[command][0]
    out, found = output(parser, name, args), read_runs(parser, args.paths)
    from harness import curves
    groups = grouped(found)
    logged = {name for run in found for record in run["records"] for name, x in record.items()
              if isinstance(x, (int, float))}
    if metric and metric not in logged:
        parser.error(f"--metric {metric}: no such number was logged{did_you_mean(metric, logged)}")
    if command == "table":
        out.write_text(table(groups))
        print(f"{out.read_text()}\n{NOTES}")
    else:
        panels = {metric: metric} if metric else PANELS.get(command, curves.PANELS)
        curves.draw_curves(groups, out, panels, *("steps", "step") * (command == "p3o"))
    print(f"written: {out}")


if __name__ == "__main__":
    main()

"""What stands behind RESULTS.md.

    python -m study results            RESULTS.md and its figures, from study/results/
    python -m study measure            takes eight rollouts apart anew, in minutes
    python -m study measure_gemma      the same of Gemma 3 270M, in half an hour
    python -m study steps ROLLOUT      ratios, gradient sizes and clipping of a rollout that
                                       train.py --save_rollouts kept, after each optimizer step
    python -m study subsets ROLLOUT    which tokens make its gradient
    python -m study rank RUN           how close the LM head's change is to rank one, by checkpoint

The runs themselves: python -m study.runs. The second task: python -m study.worked.
"""

import argparse
import json
from pathlib import Path


def of_rollout(command, rollout, out):
    """Writes the figure, and the numbers into a .json beside it, and prints the table."""
    from analysis.rollout import open_rollout
    from harness.files import numbers
    from study import anatomy, mechanism, steps
    measure, table, draw = dict(
        steps=(steps.steps, steps.steps_table, steps.draw_steps),
        subsets=(anatomy.compare_subsets, anatomy.subsets_table, mechanism.draw_subsets))[command]
    kept = open_rollout(rollout)
    result = dict(rollout=kept.rollout, method=kept.flags["loss"], lr=kept.flags["lr"],
                  **measure(kept))
    figure = out or rollout.with_name(f"{rollout.stem}-{command}.png")
    figure.with_suffix(".json").write_text(json.dumps(numbers(result), indent=1))
    draw(result, figure)
    print(f"{table(result)}\nwritten: {figure}, {figure.with_suffix('.json')}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=(
        "results", "measure", "measure_gemma", "steps", "subsets", "rank"))
    parser.add_argument("path", nargs="?", type=Path,
                        help="a file of train.py --save_rollouts; of rank a run's folder")
    parser.add_argument("--out", type=Path,
                        help="of a rollout: its figure; the numbers go into a .json beside it")
    args = parser.parse_args(argv)
    if (args.command in ("results", "measure", "measure_gemma")) != (args.path is None):
        parser.error(f"{args.command} takes {'no path' if args.path else 'one path'}")
    if args.command.startswith("measure"):
        from study import anatomy
        getattr(anatomy, args.command)()
    elif args.command == "results":
        from study.page import write_results
        print(f"written: {', '.join(map(str, write_results()))}")
    elif args.command == "rank":
        from study.anatomy import head_ranks
        for rollout, share in head_ranks(args.path).items():
            print(f"rollout {rollout}: {share:.3f}")
    else:
        try:
            of_rollout(args.command, args.path, args.out)
        except ValueError as e:
            parser.error(f"{args.path}: {e}")


if __name__ == "__main__":
    main()

"""What stands behind RESULTS.md.

    python -m study results            RESULTS.md and its figures, from study/results/
    python -m study measure            takes eight rollouts apart anew, in minutes
    python -m study subsets ROLLOUT    which tokens make the gradient of a kept rollout

The runs themselves: python -m study.runs. The second task: python -m study.worked.
"""

import argparse
from pathlib import Path


def write_subsets(rollout, out):
    from analysis.__main__ import write
    from analysis.rollout import open_rollout
    from study.anatomy import compare_subsets, subsets_table
    from study.mechanism import draw_subsets
    kept = open_rollout(rollout)
    result = dict(rollout=kept.rollout, method=kept.flags["loss"], **compare_subsets(kept))
    write(result, out or rollout.with_name(f"{rollout.stem}-subsets.png"), subsets_table,
          draw_subsets)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("results", "measure", "subsets"))
    parser.add_argument("rollout", nargs="?", type=Path, help="a file of train.py --save_rollouts")
    parser.add_argument("--out", help="subsets: its figure; the numbers go into a .json beside it")
    args = parser.parse_args(argv)
    if (args.command == "subsets") != (args.rollout is not None):
        parser.error("subsets takes one rollout, the other commands none")
    if args.command == "measure":
        from study.anatomy import measure
        measure()
    elif args.command == "results":
        from study.page import write_results
        print(f"written: {', '.join(map(str, write_results()))}")
    else:
        try:
            write_subsets(args.rollout, args.out)
        except ValueError as e:
            parser.error(f"{args.rollout}: {e}")


if __name__ == "__main__":
    main()

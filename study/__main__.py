"""What stands behind RESULTS.md.

    python -m study results            RESULTS.md and its figures, from study/results/
    python -m study measure            takes eight rollouts apart anew, in minutes
    python -m study measure_gemma      the same of Gemma 3 270M, in half an hour
    python -m study rank RUN           how close the LM head's change is to rank one, by checkpoint

The runs themselves: python -m study.runs. The second task: python -m study.worked. Any kept rollout
is taken apart by python -m anatomy.
"""

import argparse
from pathlib import Path


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("results", "measure", "measure_gemma", "rank"))
    parser.add_argument("path", nargs="?", type=Path, help="of rank: a run's folder")
    args = parser.parse_args(argv)
    if (args.command == "rank") != (args.path is not None):
        parser.error(f"{args.command} takes {'no path' if args.path else 'one path'}")
    from study import page, updates
    if args.command == "results":
        print(f"written: {', '.join(map(str, page.write_results()))}")
    elif args.command == "rank":
        for rollout, share in updates.head_ranks(args.path).items():
            print(f"rollout {rollout}: {share:.3f}")
    else:
        getattr(updates, args.command)()


if __name__ == "__main__":
    main()

"""What stands behind RESULTS.md.

    python -m study results            RESULTS.md and its figures, from study/results/
    python -m study measure            takes eight rollouts apart anew, in minutes
    python -m study measure_gemma      the same of Gemma 3 270M, in half an hour

The runs themselves: python -m study.runs. The second task: python -m study.worked. Any kept rollout
is taken apart by python -m anatomy.
"""

import argparse


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("results", "measure", "measure_gemma"))
    args = parser.parse_args(argv)
    from study import page, updates
    if args.command == "results":
        print(f"written: {', '.join(map(str, page.write_results()))}")
    else:
        getattr(updates, args.command)()


if __name__ == "__main__":
    main()

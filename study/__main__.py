"""What stands behind RESULTS.md.

    python -m study results             RESULTS.md and its figures, from study/results/
    python -m study results --measure   takes eight rollouts apart first, which takes minutes
    python -m study theory              ACPO's Proposition 1, Remark 1 and Lemma 1 against
                                        simulations of their own assumptions
    python -m study subsets ROLLOUT     which tokens make the gradient of a kept rollout
    python -m study entropy ROLLOUT     predicted against measured change of entropy

The runs themselves: python -m study.train_grid, python -m study.sanity. The second task:
python -m study.worked.
"""

import argparse
from pathlib import Path


def analyze(command, rollout, out):
    from analysis.__main__ import write
    from analysis.rollout import open_rollout
    from study import anatomy, figures, theory
    if command == "theory":
        def draw(result, out):
            figures.theory(result["proposition_1"], out, result["remark_1"])
        return write(theory.everything(), out or "theory.png", theory.everything_table, draw)
    kept = open_rollout(rollout)
    measured, draw, as_table = dict(
        subsets=(anatomy.compare_subsets, figures.subsets, anatomy.subsets_table),
        entropy=(anatomy.entropy_changes, figures.entropy, anatomy.entropy_table))[command]
    about = dict(rollout=kept.rollout, method=kept.flags["loss"], lr=kept.flags["lr"])
    path = Path(rollout)
    write({**about, **measured(kept)}, out or path.with_name(f"{path.stem}-{command}.png"),
          as_table, draw)


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__,
                                     formatter_class=raw)
    parser.add_argument("command", choices=("results", "theory", "subsets", "entropy"))
    parser.add_argument("rollout", nargs="?", help="a file of train.py --save_rollouts")
    parser.add_argument("--measure", action="store_true", help="results: measure updates anew")
    parser.add_argument("--out", help="the figure to write; its numbers go into a .json beside it")
    args = parser.parse_args(argv)
    if (args.command in ("subsets", "entropy")) != (args.rollout is not None):
        parser.error("subsets and entropy take one rollout, the other commands none")
    if args.command != "results":
        analyze(args.command, args.rollout, args.out)
        return
    from study.results import write_results
    try:
        print(f"written: {', '.join(map(str, write_results(args.measure)))}")
    except ValueError as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()

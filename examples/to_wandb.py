"""Sends the numbers of a run to Weights & Biases until the run has ended, or is interrupted.

    pip install wandb
    python examples/to_wandb.py runs/fade-16-0 --project rlvr
"""

import argparse
import json
import time
from pathlib import Path


def records(folder):
    """The records of a run's metrics.jsonl, also those that are added, until its figure is there.
    """
    sent, ended = 0, False
    while not ended:
        ended = (folder / "curves.png").exists()
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]  # the last may be cut
        yield from map(json.loads, lines[sent:])
        sent = len(lines)
        time.sleep(0 if ended else 10)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a run of train.py")
    parser.add_argument("--project", required=True)
    args = parser.parse_args()
    flags = json.loads((args.folder / "config.json").read_text())["flags"]
    import wandb
    with wandb.init(project=args.project, name=args.folder.name, config=flags) as run:
        for record in records(args.folder):
            run.log({name: x for name, x in record.items() if isinstance(x, (int, float))},
                    step=record["rollout"])


if __name__ == "__main__":
    main()

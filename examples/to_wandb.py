"""Sends the numbers of a run to Weights & Biases, until its last rollout or Ctrl-C.

    pip install wandb
    python examples/to_wandb.py runs/fade-16-0 --project rlvr
"""

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path


def flags_of(folder):
    return json.loads((folder / "config.json").read_text())["flags"]


def records(folder):
    """The records of a run's metrics.jsonl, also those that are added."""
    sent = last = 0
    while True:
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]  # the last may be cut
        for record in map(json.loads, lines[sent:]):
            yield record
            last = record["rollout"]
        if last >= flags_of(folder)["rollouts"]:
            return
        sent = len(lines)
        time.sleep(10)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a run of train.py")
    parser.add_argument("--project", required=True)
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        parser.error(f"{args.folder} is no run's folder: it has no config.json")
    try:
        import wandb
    except ImportError:
        parser.error("pip install wandb, first")
    with (wandb.init(project=args.project, name=args.folder.name, config=flags_of(args.folder))
          as run, suppress(KeyboardInterrupt)):
        for record in records(args.folder):
            run.log({name: x for name, x in record.items() if isinstance(x, (int, float))},
                    step=record["rollout"])


if __name__ == "__main__":
    main()

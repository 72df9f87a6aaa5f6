"""README.md of a checkpoint, the Hub's model card: a function of a run's flags and logs, without
times and paths of the machine, so that a resumed run writes the same card."""

import json
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import losses
from data.sets import SETS


def text(args, method, out, rollout):
    """-> the card of the checkpoint after `rollout`. It names the last part of a path alone."""
    config = json.loads((out / "config.json").read_text())
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    base = Path(args.model).name if Path(args.model).exists() else args.model
    held_out, hub = args.eval_data or args.data, {name: spec.hub for name, spec in SETS.items()}
    label, mean = Path(held_out).name, f"eval/{held_out}/mean@{args.eval_samples}"
    last = next((record for record in reversed(records) if mean in record), {"rollout": "none"})
    numbers = {key.rpartition("/")[2]: last[key] for key in last if key.startswith("eval/")}
    result = EvalResult("text-generation", hub.get(held_out, label), label, "pass@1",
                        last.get(mean), metric_name=f"mean@{args.eval_samples}")
    front = ModelCardData(
        base_model=None if Path(args.model).exists() else base, datasets=hub.get(args.data),
        eval_results=[result] if last["rollout"] == rollout else None, library_name="transformers",
        tags=["reinforcement-learning", "rlvr", "nanorlvr", args.loss], model_name=base)
    flags = [f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else
             f"--{flag} {base if flag == 'model' else Path(str(value)).name}" for flag, value in
             config["flags"].items() if value is not None and not flag.endswith("checksum")]
    return str(ModelCard(
        f"---\n{front}\n---\n\n# {base} after {rollout} rollouts of {args.loss}\n\n```\n"
        f"{losses.describe(args.loss, method)}\npython train.py {' '.join(flags)}\n```\n\n"
        f"Evaluation of {label} after rollout {last['rollout']}: {numbers}\n\n"
        f"Commit {config['git']}, {config['versions']}"))

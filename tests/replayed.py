"""train.py with the rollouts of another run, as --save_rollouts kept them, in place of its own samples.

    python tests/replayed.py RUN/rollouts --out DIR --resume
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train  # noqa: E402
from policy import Batch  # noqa: E402

if __name__ == "__main__":
    folder, own = Path(sys.argv[1]), train.collect

    def collect(policy, reference, sampler, tokenizer, train_set, args, rollout, times):
        batch, rewards, metrics, samples = own(policy, reference, sampler, tokenizer, train_set, args, rollout, times)
        saved = torch.load(folder / f"rollout_{rollout + 1:06d}.pt", weights_only=False)
        metrics["policy/entropy"] = saved["state"]["entropy"]
        return Batch(**saved["batch"]), saved["rewards"], metrics, samples
    train.collect = collect
    train.main(sys.argv[2:])

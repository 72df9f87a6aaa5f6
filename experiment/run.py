"""What keeps a run: its folder, its state, its signals, its log and its checkpoints. train.py's
loop owns the algorithm and asks this for the rest.
"""

import json
import os
import signal
import sys
import time
import uuid
from collections import Counter, deque
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

import losses
from engine import parallel
from engine.loading import head_of
from engine.parallel import say
from engine.policy import Batch
from engine.sampler import seed_of
from experiment import card, checkpoint, log
from experiment.cli import default_out, flags_of, refuse
from experiment.failures import NotFinite, RunFailed
from experiment.files import lock, write


def newest_checkpoint(args):
    """The checkpoint that --resume continues from, None where there is none."""
    if not args.resume:
        return None
    return parallel.on_rank0(partial(checkpoint.newest, default_out(args)))


def claim_folder(args, resumed_at=None):
    """-> the run's folder, which belongs to this process from here on.

    A new run gets one that no other has. A resumed one has its logs set back to rollout
    `resumed_at`; None is its start."""
    out, number = default_out(args), 1
    name = out.name
    while True:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock(out)
            if args.resume:
                checkpoint.rewind(out, resumed_at)
            else:
                (out / "metrics.jsonl").open("x").close()
            return out
        except FileExistsError:
            problem = "already holds a run; --resume continues it, or give another folder"
        except BlockingIOError:
            problem = "is another process's at this moment"
        except OSError as e:
            refuse(f"--out {out} cannot be written: {e.strerror}")
        if args.out or args.resume:
            refuse(f"--out {out} {problem}")
        number += 1
        out = out.with_name(f"{name}.{number}")


class Run:
    """`with Run(...) as run:` owns the run's folder for as long as the block lasts.

    resumed_from: the checkpoint's folder whose weights the policy has; optimizer and schedule get
    its moments and place. pending: what was sampled and not yet learnt from. state: the method's
    own numbers (FADE's averages)."""

    def __init__(self, args, method, policy, optimizer, schedule, scaler, tokenizer,
                 resumed_from=None):
        self.args, self.method, self.policy, self.tokenizer = args, method, policy, tokenizer
        self.optimizer, self.schedule, self.scaler = optimizer, schedule, scaler
        self.resumed_from = resumed_from
        saved = checkpoint.restore(resumed_from, policy, optimizer) if resumed_from else {}
        self.rollout, self.best = saved.get("rollout", 0), saved.get("best")
        self.sampled, self.state = saved.get("sampled", 0), saved.get("state", {})
        # optimizer steps, generated tokens, seconds and floating-point operations so far
        self.totals = Counter(saved.get("totals", {}))
        device = parallel.device()
        self.pending = deque((Batch(**batch).to(device), rewards.to(device), *rest)
                             for batch, rewards, *rest in saved.get("pending", []))
        if resumed_from:
            self.continue_schedule(saved["optimizer_steps"])
            scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())
            changed = {name for name, value in args.saved.items() if value != args.given.get(name)}
            if changed & {"loss", "advantage"}:
                self.state = {}  # another method's averages
            if changed & {"eval_data", "eval_problems", "eval_samples", "eval_checksum"}:
                self.best = None  # by other problems
        # signals that this rank got, and those of all ranks, on which they end together
        self.asked, self.stopping = [], []
        self.warned = False
        self.times, self.began = Counter(), time.perf_counter()
        self.head = log.HeadChange(
            policy, head_of(args.model) if args.rank_every and parallel.rank() == 0 else None)

    def continue_schedule(self, steps):
        """Learning rate and weight decay follow the flags: --force may have changed them."""
        self.schedule.last_epoch = steps
        factor = self.schedule.lr_lambdas[0](steps)
        for group in self.optimizer.param_groups:
            group.update(lr=self.args.lr * factor, initial_lr=self.args.lr,
                         weight_decay=self.args.weight_decay)

    # ------------------------------------------------------------------------ begin and end

    def __enter__(self):
        resumed_at = self.rollout if self.resumed_from else None
        self.out = parallel.on_rank0(partial(claim_folder, self.args, resumed_at))
        parallel.on_rank0(self.write_config)
        say(banner(self.args, self.method, self.policy, self.out, self.rollout))
        on_first = parallel.rank() == 0
        self.log_files = log.Log(self.out, self.args) if on_first else None
        self.bar = tqdm(total=self.args.rollouts, initial=self.rollout, unit="rollout",
                        dynamic_ncols=True, leave=False,
                        disable=None if on_first else True)  # None: where there is a terminal
        return self

    def write_config(self):
        """config.json: flags, method, versions, commit, and the same of what this continues."""
        path = self.out / "config.json"
        config = dict(
            flags=flags_of(self.args), method=losses.describe(self.args.loss, self.method),
            hyperparameters=self.method.flags, command=sys.argv, versions=log.versions(),
            git=log.commit(), id=uuid.uuid4().hex, before=[])  # the id is Weights & Biases'
        if self.resumed_from:
            last = json.loads(path.read_text())
            before = [*last.pop("before"), dict(last, until_rollout=self.rollout)]
            config.update(id=last["id"], before=before)
        write(path, json.dumps(config, indent=1))

    def __exit__(self, kind, error, _):
        if isinstance(error, NotFinite):
            path = self.out / "failed_batch.pt"
            # all ranks wait: one that ends first would end the one that writes
            parallel.on_rank0(partial(torch.save, asdict(error.minibatch), path))
            raise RunFailed(f"rollout {self.rollout}, {error}; its batch is in {path}") from None
        if error:
            return
        self.bar.close()
        if self.stopping:
            say(f"stopped by a signal; train.py --out {self.out} --resume continues")
            return
        if parallel.rank() == 0:
            from analysis import figures, runs
            figures.curves(runs.grouped(runs.read(self.out)), self.out / "curves.png")
        say(f"done: {self.out / 'curves.png'}, {self.out / 'metrics.jsonl'}, "
            f"{self.out / 'checkpoints'}")

    # ------------------------------------------------------------------------ the loop's questions

    def rollouts(self):
        """Yields the rollouts' numbers. After a signal, the one in progress is the last."""
        handlers = {number: signal.signal(number, self.note_signal)
                    for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.rollout < self.args.rollouts and not self.stopping:
                self.rollout += 1
                self.times, self.began = Counter(), time.perf_counter()
                # a method that draws numbers can be resumed, too
                torch.manual_seed(seed_of("rollout", self.args.seed, self.rollout))
                yield self.rollout
                self.bar.update()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def note_signal(self, number, _):
        if self.asked:
            raise KeyboardInterrupt
        self.asked.append(number)
        # not print: it may be what was interrupted
        os.write(2, b"\ntrain.py: saving and stopping after this rollout; "
                    b"once more stops at once\n")

    def to_sample(self):
        """Yields the numbers of the rollouts to sample now, --rollout_lag ahead of the learning."""
        while self.sampled < min(self.rollout + self.args.rollout_lag, self.args.rollouts):
            yield self.sampled
            self.sampled += 1

    def due(self, every):
        """Is it time for something that is done every so many rollouts, and after the last one?"""
        return bool(every) and (self.rollout % every == 0 or self.rollout == self.args.rollouts)

    def timed(self, phase):
        return log.timed(self.times, phase)

    # ------------------------------------------------------------------------ what is kept

    def keep_rollout(self, batch, rewards):
        """--save_rollouts: the rollout as a file, before its advantages are taken."""
        if self.args.save_rollouts and parallel.rank() == 0:
            checkpoint.save_rollout(self.out, self.rollout, batch=asdict(batch), rewards=rewards,
                                    state=dict(self.state), hp=self.method.flags,
                                    flags=dict(flags_of(self.args), model=self.args.model))

    def log_evaluation(self, scores):
        """The record of the model before training."""
        self.write(dict(rollout=self.rollout, **scores,
                        **{"time/rollout": time.perf_counter() - self.began}))

    def log(self, batch, advantages, steps, metrics, samples):
        """The record of a rollout: advantages [P, G], steps the metrics of each optimizer step,
        metrics what is known already, samples some completions."""
        args, passes = self.args, len(self.method.passes)
        record = {**metrics, **log.advantages(advantages, batch), **log.optimizer_steps(steps)}
        record.update({f"adv/{k}": v for k, v in self.state.items() if k != "entropy"})
        record["policy/entropy"] = metrics["policy/entropy"]  # of the rollout, not of its steps
        overflows = sum(step["optim/overflow"] for step in record["steps"])
        record["optim/overflows"] = overflows  # steps not taken, in float16
        # all of their groups were uniform: AdamW's moments alone moved the weights
        record["optim/no_gradient"] = sum(step["optim/grad_norm"] == 0 for step in record["steps"])
        record["optim/skipped"] = args.steps_per_rollout * passes - len(steps)
        every = args.rank_every
        record.update(self.head.metrics(with_rank=every and self.rollout % every == 0))
        seconds, tokens = time.perf_counter() - self.began, metrics["len/sum"]
        # floating-point operations of a token: 2 a parameter forward, and 4 backward. A prompt
        # counts with each of its completions, so that runs that share it are on the same axis
        scored = int((batch.prompt_len + batch.completion_len).sum()) * (1 + bool(args.kl_coef))
        learnt = int(sum(step["optim/learnt_tokens"] for step in record["steps"]))
        flops = 2 * sum(p.numel() for p in self.policy.parameters()) * (scored + 3 * learnt)
        self.totals.update(step=len(steps), tokens=tokens, seconds=seconds, flops=flops)
        perf = {"perf/tokens_per_s": tokens / seconds,
                "perf/mem_peak_gb": parallel.peak_memory() / 1e9}
        record = dict(rollout=self.rollout, **self.totals, **record, **self.times, **perf)
        self.write(dict(record, **{"time/rollout": seconds}), samples)
        if advantages.abs().max() < 1e-6 and not self.warned and parallel.rank() == 0:
            self.warned = True
            self.bar.write(log.nothing_to_learn(samples[0], record))
        if metrics["grader/error"] == metrics["groups/sampled"] * args.group_size:
            raise RunFailed(f"rollout {self.rollout}: every call of a verifier failed; the errors "
                            "stand above, and rewards.py is the place to look at")

    def write(self, record, samples=()):
        if self.log_files:
            self.log_files.write(record, samples)
            self.bar.write(log.line(record))

    def save(self, metrics):
        """A checkpoint, where one is due: every --save_every rollouts, at the end, on a signal."""
        args = self.args
        # all ranks decide here, and only here: a signal that comes later is for the next rollout
        last = self.rollout == args.rollouts
        self.stopping = [] if last else sum(parallel.gather(self.asked), [])
        if not (self.stopping or last or self.due(args.save_every)):
            return
        score = metrics.get(f"eval/{args.eval_data or args.data}/mean@{args.eval_samples}")
        if score is not None and (self.best is None or score > self.best["score"]):
            self.best = dict(rollout=self.rollout, score=score)
        checkpoint.save(
            self.out, self.rollout, self.policy, self.tokenizer, self.optimizer, args.keep,
            self.best, Path(args.model, "recipe.json"), self.card_text(), sampled=self.sampled,
            state=self.state, optimizer_steps=self.schedule.last_epoch, totals=dict(self.totals),
            scaler=self.scaler.state_dict(),
            pending=[(asdict(batch), *rest) for batch, *rest in self.pending])

    def card_text(self):
        if parallel.rank() == 0:
            return card.text(self.args, self.method, self.tokenizer, self.out, self.rollout)


def banner(args, method, policy, out, rollout):
    """What is about to run, in words."""
    sequences = args.problems_per_rollout * args.group_size
    ranks, passes = parallel.world(), len(method.passes)
    return (
        f"model    {args.model}\n"
        f"settings {settings_line(args)}\n"
        f"sampler  {sampler_line(args)}\n"
        f"method   {losses.describe(args.loss, method)}\n"
        f"rollout  {args.problems_per_rollout} problems x {args.group_size} completions = "
        f"{sequences} sequences -> {args.steps_per_rollout * passes} optimizer steps of "
        f"{sequences // args.steps_per_rollout}{', whole groups' * (args.shuffle == 'groups')}\n"
        f"passes   of at most {policy.budget} tokens, {policy.layout}, on {ranks} "
        f"rank{'s' * (ranks > 1)}\n"
        f"folder   {out or 'none: --check keeps nothing'}"
        f"{f', from rollout {rollout}' if args.resume else ''}\n"
        f"{busy_machine()}"
        "The loss says little about progress: watch reward, mixed groups and the held-out mean@n.")


def settings_line(args):
    """The settings that differ between models, and where their values come from."""
    return ", ".join(f"{name} {getattr(args, name)} ({args.origin.get(name, 'default')})"
                     for name in ("lr", "max_tokens", "rollouts", "dtype"))


def sampler_line(args):
    by_default = "sampler" not in args.origin and not torch.cuda.is_available()
    return args.sampler + ", the default on a CPU; --sampler vllm samples as on a GPU" * by_default


def busy_machine():
    """A line for the banner where other processes use the cores that torch's threads count on."""
    if torch.cuda.is_available() or "OMP_NUM_THREADS" in os.environ:
        return ""
    busy = psutil.cpu_percent(interval=0.3)  # this process sleeps meanwhile
    if busy < 40:
        return ""
    return (f"machine  its cores are {busy:.0f}% busy with other processes: with OMP_NUM_THREADS=1 "
            "in front, this command may be several times faster\n")

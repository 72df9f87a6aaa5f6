"""A run's folder, state, signals, log and checkpoints. The algorithm is train.py's."""

import json
import os
import signal
import sys
import time
import uuid
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import losses
from engine import parallel
from engine.completion import seed_of
from engine.loading import head_of
from engine.parallel import say
from engine.policy import Batch
from experiment import card, checkpoint, log
from experiment.failures import NotFinite, RunFailed, room_for
from experiment.files import default_out, lock, write
from experiment.flags import flags_of, refuse


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
        except (FileExistsError, BlockingIOError):
            if args.out or args.resume:  # of which flags.py saw that it holds no run
                refuse(f"--out {out} is another process's")
        except OSError as e:
            refuse(f"--out {out} cannot be written: {e.strerror}")
        number += 1
        out = out.with_name(f"{name}.{number}")


class Run:
    """`with Run(...) as run:` owns the run's folder until the block ends.

    trainer: train.Trainer, whose weights are those of `resumed`, a checkpoint.Resumed, if there is
    one; its optimizer and schedule get their state here. rollout: number of the present one.
    pending: sampled rollouts, not yet learnt from. state: the method's numbers (FADE's averages).
    stopping: signals, of all ranks, that end the run after this rollout."""

    def __init__(self, args, method, trainer, tokenizer, resumed=None):
        self.args, self.method, self.trainer, self.tokenizer = args, method, trainer, tokenizer
        self.rollout, self.sampled, self.best, self.state, pending = 0, 0, None, {}, []
        # optimizer steps, generated tokens, seconds and floating-point operations until now
        self.totals, self.resumed = Counter(), resumed
        if resumed:
            saved = resumed.state
            checkpoint.restore(trainer, saved)
            self.rollout, self.sampled, pending = (
                saved[name] for name in ("rollout", "sampled", "pending"))
            self.totals.update(saved["totals"])
            if self.has_kept("loss", "advantage"):  # another method's averages mean nothing
                self.state = saved["state"]
            if self.has_kept("eval_data", "eval_problems", "eval_samples"):
                self.best = saved["best"]
        device = parallel.device()
        self.pending = deque((Batch(**batch).to(device), rewards.to(device), *rest)
                             for batch, rewards, *rest in pending)
        self.signals, self.stopping, self.warned = [], [], []
        self.times, self.began = Counter(), time.perf_counter()
        self.head = log.HeadChange(trainer.policy, head_of(args.model)
                                   if args.rank_every and parallel.rank() == 0 else None)

    def has_kept(self, *names):
        """Have these flags the values that the resumed run had?"""
        now = flags_of(self.args)
        return all(now[name] == self.resumed.flags.get(name) for name in names)

    # ------------------------------------------------------------------------ begin and end

    def __enter__(self):
        resumed_at = self.rollout if self.resumed else None
        self.out = parallel.on_rank0(partial(claim_folder, self.args, resumed_at))
        parallel.on_rank0(self.write_config)
        say(banner(self.args, self.method, self.trainer.policy, self.out, self.rollout))
        on_first = parallel.rank() == 0
        self.log_files = log.Log(self.out, self.args) if on_first else None
        self.bar = tqdm(total=self.args.rollouts, initial=self.rollout, unit="rollout",
                        dynamic_ncols=True, leave=False,
                        disable=None if on_first else True)  # None: shown on a terminal
        return self

    def write_config(self):
        """config.json: flags, method, versions, commit, and the same of the run until a resume."""
        path = self.out / "config.json"
        config = dict(
            flags=flags_of(self.args), method=losses.describe(self.args.loss, self.method),
            hyperparameters=self.method.flags, checksums=self.args.checksums, command=sys.argv,
            versions=log.versions(), git=log.commit(), id=uuid.uuid4().hex, before=[])
        if self.resumed:  # the id is that of Weights & Biases, too
            last = json.loads(path.read_text())
            before = [*last.pop("before", []), dict(last, until_rollout=self.rollout)]
            config.update(id=last.get("id", config["id"]), before=before)
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
        say(f"done: {self.out / 'curves.png'}, {self.out / 'metrics.jsonl'}, "
            f"{self.out / 'checkpoints'}")

    # ------------------------------------------------------------------------ the loop's questions

    def rollouts(self):
        """Goes through the numbers of the rollouts; after a signal, the present one is the last."""
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
        if self.signals:
            raise KeyboardInterrupt
        self.signals.append(number)
        # not print, which the signal may have interrupted
        os.write(2, b"\ntrain.py: saving and stopping after this rollout; "
                    b"once more stops at once\n")

    def to_sample(self):
        """Goes through the numbers of the rollouts to sample now, up to --rollout_lag ahead."""
        while self.sampled < min(self.rollout + self.args.rollout_lag, self.args.rollouts):
            yield self.sampled
            self.sampled += 1

    def due(self, every):
        """Is it the turn of an action of every `every` rollouts and of the last one?"""
        return bool(every) and (self.rollout % every == 0 or self.rollout == self.args.rollouts)

    @contextmanager
    def timed(self, phase):
        with log.timed(self.times, phase), room_for(phase):
            yield

    # ------------------------------------------------------------------- records and checkpoints

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
        metrics the entries until now, samples some completions."""
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
        flops = 2 * sum(p.numel() for p in self.trainer.policy.parameters()) * (scored + 3 * learnt)
        self.totals.update(step=len(steps), tokens=tokens, seconds=seconds, flops=flops)
        perf = {"perf/tokens_per_s": tokens / seconds,
                "perf/mem_peak_gb": parallel.peak_memory() / 1e9}
        record = dict(rollout=self.rollout, **self.totals, **record, **self.times, **perf)
        self.write(dict(record, **{"time/rollout": seconds}), samples)
        for warning, holds in ((log.nothing_to_learn, advantages.abs().max() < 1e-6),
                               (log.cut_off, record["len/truncated_frac"] > 0.5)):
            if holds and warning not in self.warned and parallel.rank() == 0:
                self.warned.append(warning)
                self.bar.write(warning(samples[0], record))
        if metrics["grader/error"] == metrics["groups/sampled"] * args.group_size:
            raise RunFailed(f"rollout {self.rollout}: every call of a verifier failed; the errors "
                            "are printed above; the verifiers are in rewards.py")

    def write(self, record, samples=()):
        if self.log_files:
            self.log_files.write(record, samples)
            self.bar.write(log.line(record))

    def save(self, metrics):
        """A checkpoint, where one is due: every --save_every rollouts, at the end, on a signal."""
        args = self.args
        # all ranks decide here, and only here: a signal that comes later is for the next rollout
        last = self.rollout == args.rollouts
        self.stopping = [] if last else sum(parallel.gather(self.signals), [])
        if not (self.stopping or last or self.due(args.save_every)):
            return
        score = metrics.get(f"eval/{args.eval_data or args.data}/mean@{args.eval_samples}")
        if score is not None and (self.best is None or score > self.best["score"]):
            self.best = dict(rollout=self.rollout, score=score)
        checkpoint.save(
            self.out, self.rollout, self.trainer, self.tokenizer, args.keep, self.best,
            Path(args.model, "recipe.json"),
            card.text(args, self.method, self.out, self.rollout) if parallel.rank() == 0 else None,
            sampled=self.sampled, state=self.state, totals=dict(self.totals),
            pending=[(asdict(batch), *rest) for batch, *rest in self.pending])


def banner(args, method, policy, out, rollout):
    """The settings in force, a line each."""
    sequences, steps = args.problems_per_rollout * args.group_size, args.steps_per_rollout
    values = ", ".join(f"{name} {getattr(args, name)} ({args.origin.get(name, 'default')})"
                       for name in ("lr", "max_tokens", "rollouts", "dtype"))
    lines = dict(
        model=args.model, settings=values, sampler=args.sampler,
        method=losses.describe(args.loss, method),
        rollout=f"{args.problems_per_rollout} problems x {args.group_size} completions = "
                f"{sequences} sequences -> {steps * len(method.passes)} optimizer steps of "
                f"{sequences // steps}{', whole groups' * (args.shuffle == 'groups')}",
        passes=f"of at most {policy.budget} tokens, {policy.layout}, on {parallel.world()} rank"
               f"{'s' * (parallel.world() > 1)}",
        folder=f"{out or 'none: --check keeps nothing'}"
               f"{f', from rollout {rollout}' if args.resume else ''}")
    return "\n".join(f"{name:<9}{value}" for name, value in lines.items()) + (
        "\nThe loss says little about progress; reward, mixed groups and held-out mean@n do.")

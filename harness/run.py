"""A run's folder, state, signals, log and checkpoints. The algorithm is train.py's."""

import json
import os
import signal
import sys
from collections import Counter
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import count
from time import perf_counter

import torch

import losses
from engine import parallel
from engine.parallel import say, seed_of
from engine.trainer import NotFinite
from harness import checkpoint, log
from harness.failures import RunFailed, refuse, room_for
from harness.files import CODE, append, lock, write, writing
from harness.flags import FOLLOWS, flags_of, with_origins


def claim_folder(args):
    """-> the run's folder, this process's alone from here on. A new run gets a new one."""
    first = args.earlier.out
    for number in count(1):
        out = first.with_name(f"{first.name}.{number}") if number > 1 else first
        try:
            if not args.resume:  # before the lock, so that a folder with a run stays free
                out.mkdir(parents=True, exist_ok=True)
                (out / "metrics.jsonl").touch(exist_ok=False)
            lock(out)
            return out
        except (FileExistsError, BlockingIOError):
            if args.out or args.resume:  # of which flags.check saw that it holds no run
                refuse(f"--out {out} is a file, or another train.py is at work there")
        except OSError as e:
            refuse(f"--out {out} cannot be written: {e.strerror or e}")


def begin(run, checksums):
    """-> the folder of a Run, with the logs until now, its code and config.json. Its history has
    each command, with its commit and checksums, and the rollout after which it holds."""
    args, out = run.args, claim_folder(run.args)
    if args.resume:
        checkpoint.rewind(out, run.rollout)
    for name, text in CODE.items():
        write(out / name, text)
    before = args.earlier.history if run.rollout else []
    now = dict(after=run.rollout, command=sys.argv, git=log.commit(), checksums=checksums)
    config = dict(flags=run.flags,  # those derived: anew, when the run is resumed
                  derived=[name for name, words in args.origin.items() if words == FOLLOWS],
                  method=losses.describe(args.loss, run.trainer.method),
                  versions=log.versions(), history=[*before, now])
    write(out / "config.json", json.dumps(config, indent=1))
    return out


class Run(AbstractContextManager):
    """`with Run(...) as run:` owns the run's folder until the block ends.

    checksums: of start.load_data. restored: of checkpoint.restore. flags: args, with budget and
    eval_problems as found, for --resume. rollout: number of the present one. pending: sampled
    rollouts, not yet learnt from. state: the method's numbers (FADE's averages). totals: optimizer
    steps, with overflows, generated tokens and seconds until now. sampled_tokens: since it began.
    first: the record of the first rollout. stopping: all ranks' signals, which end it."""

    def __init__(self, args, trainer, tokenizer, checksums, eval_problems, restored):
        self.args, self.trainer, self.tokenizer = args, trainer, tokenizer
        vars(self).update(
            restored or dict(rollout=0, state={}, totals=Counter(), pending=[], first=None))
        self.flags = dict(flags_of(args), tokens_per_micro_batch=trainer.policy.budget,
                          eval_problems=eval_problems or args.eval_problems)
        self.signals, self.stopping, self.warned = [], [], set()
        self.times, self.began = Counter(), perf_counter()
        self.out = parallel.on_rank0(begin, self, checksums)
        say(banner(args, trainer, self.out, self.rollout))

    def save(self):
        """A checkpoint, where one is due: every --save_every rollouts, at the end, on a signal."""
        # all ranks decide here, and only here: a signal that comes later is for the next rollout
        last = self.rollout == self.args.rollouts
        self.stopping = [] if last else sum(parallel.gather(self.signals), [])
        if self.stopping or last or self.due(self.args.save_every):
            with room_for("saving"):
                checkpoint.save(self)

    def __exit__(self, kind, error, _):
        if isinstance(error, NotFinite):
            path = self.out / "failed_batch.pt"
            # all ranks wait: one that ends first would end the one that writes
            parallel.on_rank0(torch.save, asdict(error.minibatch), path)
            raise RunFailed(f"rollout {self.rollout}, {error}; its batch is in {path}") from None
        if isinstance(error, OSError):
            raise RunFailed(f"{error}; --resume continues from the last checkpoint") from None
        if not error:
            say(f"stopped by a signal; train.py --out {self.out} --resume continues"
                if self.stopping else f"done: curves.png, logs and checkpoints are in {self.out}")

    def rollouts(self):
        """Goes through the rollouts; after a signal, the present one is the last."""
        handlers = {number: signal.signal(number, self.note_signal)
                    for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.rollout < self.args.rollouts and not self.stopping:
                self.rollout += 1
                self.times, self.began, self.sampled_tokens = Counter(), perf_counter(), 0
                # a method that draws numbers can be resumed, too
                torch.manual_seed(seed_of("rollout", self.args.seed, self.rollout))
                yield
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
        """The numbers of the rollouts to sample now, up to --rollout_lag ahead."""
        return range(self.rollout + len(self.pending),
                     min(self.rollout + self.args.rollout_lag, self.args.rollouts) + 1)

    def due(self, every):
        """Is it the turn of an action of every `every` rollouts and of the last one?"""
        return every and (self.rollout % every == 0 or self.rollout == self.args.rollouts)

    @contextmanager
    def timed(self, phase):
        """Adds the seconds of the block to the record's time/<phase>; a full GPU is RunFailed."""
        began = perf_counter()
        with room_for(phase):
            yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times[f"time/{phase}"] += perf_counter() - began

    def keep_rollout(self, batch, rewards, shaped_rewards):
        """--save_rollouts: the rollout as a file, before its advantages are taken."""
        if self.args.save_rollouts and parallel.rank() == 0:
            path = self.out / "rollouts" / f"rollout_{self.rollout:06d}.pt"
            with writing(path) as aside:
                path.parent.mkdir(exist_ok=True)
                torch.save(dict(
                    batch=asdict(batch), rewards=rewards, shaped_rewards=shaped_rewards,
                    state=self.state, hp=self.trainer.method.flags, rollout=self.rollout,
                    flags=dict(self.flags, model=self.args.model)), aside)

    def log(self, batch, advantages, steps, metrics, samples):
        """The record of a rollout: advantages [P, G], steps the metrics of each optimizer step,
        metrics train.py's entries (log.outcome, score, evaluate), samples some completions. Raises
        RunFailed where a verifier failed on a third of the completions."""
        seconds = perf_counter() - self.began
        self.totals.update(step=len(steps), tokens=metrics["len/sum"], seconds=seconds)  # adds
        mass_pos, mass_neg = losses.gradient_mass(advantages)
        record = self.write({
            **self.totals, **log.optimizer_steps(steps),
            **metrics,  # its policy/entropy, the rollout's, replaces the optimizer steps' mean
            "adv/mass_pos": mass_pos, "adv/mass_neg": mass_neg,
            **{f"adv/{name}": x for name, x in self.state.items() if name != "entropy"},
            "perf/tokens_per_s": self.sampled_tokens / seconds,
            "perf/mem_peak_gb": parallel.peak_memory() / 1e9}, samples)
        self.first = self.first or record
        failed = metrics["grader/error"] + metrics["grader/timeout"]
        if 3 * failed >= (of := metrics["groups/sampled"] * self.args.group_size):
            raise RunFailed(f"rollout {self.rollout}: {failed} of {of} calls of a verifier failed; "
                            "the errors and timeouts are printed above")
        for kind, text in log.warnings(record, self.first, batch.advantages, self.args).items():
            if kind not in self.warned:  # once, and again where the run is resumed
                say(f"WARNING  rollout {self.rollout}: {text}")
                self.warned.add(kind)

    def draw(self):
        """The figure of the run, curves.png in its folder."""
        from harness import curves  # imports more than a run needs before
        run = curves.read(self.out)
        curves.draw_curves({run["name"]: [run]}, self.out / "curves.png")

    def write(self, entries, samples=()):
        """Adds a record to the logs. -> the entries with the rollout's number and seconds."""
        record = {"rollout": self.rollout, **entries, **self.times,
                  "time/rollout": perf_counter() - self.began}
        if parallel.rank() == 0:
            append(self.out / "metrics.jsonl", [record])
            append(self.out / "samples.jsonl",
                   [dict(rollout=self.rollout, **sample) for sample in samples])
            say(log.line(record))
        return record


def banner(args, trainer, out, rollout):
    """The settings in force, a line each."""
    method, policy = trainer.method, trainer.policy
    sequences, steps = args.problems_per_rollout * args.group_size, args.steps_per_rollout
    return f"""\
model    {args.model}
settings {with_origins(args, "lr max_tokens rollouts dtype template stop")}
sampler  {args.sampler}
method   {losses.describe(args.loss, method)}
rollout  {args.problems_per_rollout} problems x {args.group_size} completions = {sequences} \
sequences -> {steps * len(method.passes)} optimizer steps of {sequences // steps}\
{', whole groups' * (args.shuffle == 'groups')}
forward  of at most {policy.budget} tokens, {policy.layout}; ranks: {parallel.world()}
folder   {out or 'none: --check keeps nothing'}{f', from rollout {rollout}' * args.resume}
The loss says little about progress; reward, mixed groups and held-out mean@n do."""

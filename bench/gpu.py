"""Does it work on a GPU, how fast, and how exact? At most nine minutes on one GPU, without vLLM and
without network.

    python bench/gpu.py                          on an NVIDIA GPU
    python bench/gpu.py --rehearse               every part on a CPU, with tiny shapes
    python bench/gpu.py --parts rollout,lora     some of the parts

A part is a process with a time limit, and a list of cases; the first parts are those that users
need first. A case that fails, a part that is out of memory or of time, stops no other. A case fails
where a figure is not below its limit, and where one fails the exit code is 1. gpu.json (--out) has
figures and errors, gpu.md the table; both are written after every part. To report the result, open
an issue with the two files: also, and above all, where parts failed.

Models have random weights: speed, memory and rounding are those of the shape, log probabilities are
nobody's. Their sizes follow the card's memory (SIZES). Trainer and sampler are loaded as a run with
the same flags loads them.
"""

import argparse
import gc
import inspect
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train as training
from data.recipe import BASE
from engine import layout, loading, parallel
from engine.completion import Completion
from engine.policy import backward, compute_logprobs, make_batch, minibatches
from experiment import checkpoint
from experiment.model import load_sampler, load_trainer

EOS = 1
GAPS = {"bfloat16": 0.02, "float16": 0.005, "float32": 1e-4}  # nats, mean over tokens: the limits


def shape(layers, hidden, heads, groups, mlp, vocabulary, tied):
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
                num_key_value_heads=groups, intermediate_size=mlp, vocab_size=vocabulary,
                tie_word_embeddings=tied)


SHAPES = {  # Qwen2.5's, and one that is cut to four layers
    "0.5B": shape(24, 896, 14, 2, 4864, 151936, True),
    "1.5B": shape(28, 1536, 12, 2, 8960, 151936, True),
    "3B": shape(36, 2048, 16, 2, 11008, 151936, True),
    "7B": shape(28, 3584, 28, 4, 18944, 152064, False),
    "cut": shape(4, 1536, 12, 2, 8960, 151936, True),
    "tiny": shape(2, 64, 2, 1, 128, 500, True),
}
# dense operations per second in 16 bits, by what the device's name contains; the first that fits
PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
         "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "T4": 65e12,
         "RTX 4090": 165e12, "RTX 3090": 71e12}


class Size(NamedTuple):
    """What a card of `gb` GB or more is tried with."""

    gb: int
    model: str
    problems: int  # of a rollout
    each: int      # completions of a problem
    steps: int     # optimizer steps
    prompt: int    # tokens
    tokens: int    # of a completion
    lora: str      # the model that gets adapters


SIZES = [Size(70, "1.5B", 64, 16, 16, 128, 1024, "7B"),
         Size(36, "1.5B", 32, 16, 16, 128, 1024, "3B"),
         Size(0, "0.5B", 16, 16, 16, 128, 1024, "1.5B")]
TINY = Size(0, "tiny", 4, 4, 2, 8, 16, "tiny")


class NotHere(Exception):
    """A case that this machine cannot answer."""


class Beyond(Exception):
    """A figure that is not below its limit."""

    def __init__(self, reason, figures):
        super().__init__(reason)
        self.figures = figures


def held(figures, **limits):
    """-> the figures with their limits. Raises Beyond where one is not below its limit."""
    figures = dict(figures, limits=limits)
    if beyond := [name for name, limit in limits.items() if not figures[name] < limit]:
        raise Beyond(f"not below the limit: {', '.join(beyond)}", figures)
    return figures


def on_gpu():
    return torch.cuda.is_available()


def sizes():
    if not on_gpu():
        return TINY
    return next(size for size in SIZES if parallel.memory() >= size.gb * 1e9)


def free_memory():
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def used():
    """GB of the card that are not free, whoever has them; on a CPU, of this process at its peak."""
    if not on_gpu():
        return parallel.peak_memory() / 1e9
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def watched(f):
    """Calls f -> its seconds, the GPU's work included, and the card's GB in use at the peak."""
    free_memory()
    if on_gpu():
        torch.cuda.synchronize()
        parallel.watch_memory()
    began = time.perf_counter()
    f()
    if on_gpu():
        torch.cuda.synchronize()
    return dict(s=time.perf_counter() - began, peak_gb=parallel.peak_memory() / 1e9)


# ---------------------------------------------------------------------------- models and batches

def random_model(folder, _=None):
    """The model of a folder's config.json, with random weights that bfloat16 can hold, in float32,
    where loading.build has it. The last norm is doubled: log probabilities spread."""
    torch.manual_seed(0)
    with torch.device(parallel.device()):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder),
                                                 dtype=torch.float32)
    with torch.no_grad():
        model.base_model.norm.weight.mul_(2)
        for p in model.parameters():
            p.copy_(p.bfloat16())
    model.generation_config.eos_token_id = EOS
    return model.to("cpu" if parallel.sharded() else parallel.device()).eval()


class Run:
    """The parts of a run of train.py with these flags. name: of SHAPES; weights: the folder has
    them, for a sampler; more: of the model's configuration."""

    def __init__(self, name, *flags, weights=False, **more):
        allow_groups()
        self.size, self.sampler = sizes(), None
        given = SHAPES[name if on_gpu() else "tiny"]
        self.folder = tempfile.mkdtemp(dir=os.environ.get("PART_FOLDER"))
        Qwen2Config(**{**given, **more}, max_position_embeddings=32768, bos_token_id=None,
                    eos_token_id=EOS, pad_token_id=None,
                    architectures=["Qwen2ForCausalLM"]).save_pretrained(self.folder)
        if weights:
            random_model(self.folder).bfloat16().save_pretrained(self.folder)
            free_memory()
        # so small a learning rate leaves the weights as they are, and gradients can be compared
        self.flags = dict(
            problems_per_rollout=self.size.problems, group_size=self.size.each,
            steps_per_rollout=self.size.steps, max_prompt_tokens=self.size.prompt,
            max_tokens=self.size.tokens, shuffle="groups", eval_every=0, lr=1e-12,
            model=self.folder)
        self.argv = [f"--{flag}={value}" for flag, value in self.flags.items()] + [*flags]
        self.args, self.method = training.parse_args(self.argv)

    def start_trainer(self, resumed=None):
        self.tokenizer, problem = AutoTokenizer.from_pretrained(BASE), dict(
            prompt="1 2 3 4" * 9, answer="1", reward="math")
        with mock.patch.object(loading, "build", loading.build if resumed else random_model):
            self.trainer = load_trainer(self.args, self.method, self.tokenizer, [EOS], problem,
                                        resumed)
        self.policy = self.trainer.policy
        return dict(parameters=sum(p.numel() for p in self.policy.parameters()),
                    dtype=self.policy.dtype, layout=self.policy.layout,
                    tokens_at_once=self.policy.budget, used_gb=used())

    def start_sampler(self):
        self.sampler = load_sampler(self.args, [EOS])
        return dict(used_gb=used())

    def sample(self, problems, tokens, seed=1):
        """-> a Batch of `each` completions of up to `tokens` tokens for each problem. Keys and
        values that the engine has of prompts are forgotten first, as by a sync."""
        prompts = [random_ids(self.size.prompt, self.args.seed + i) for i in range(problems)]
        if self.args.sampler == "vllm":
            self.sampler.engine.reset_prefix_cache()
        groups = self.sampler.sample(prompts, self.size.each, seed=seed, temperature=1.0,
                                     max_tokens=tokens)
        rows = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
        return make_batch(*zip(*rows, strict=True), parallel.device())

    def update(self, batch):
        """One optimizer step -> the gradient's norm."""
        return training.update(self.trainer, batch, self.method, self.args)["grad_norm"].item()

    def gradient(self, batch):
        """-> the gradient's tensors of one optimizer step, in float64 on the CPU."""
        backward(self.policy, batch, self.method, self.args.max_tokens)
        tensors = [parallel.full(p.grad).double().cpu() for p in self.policy.parameters()
                   if p.grad is not None]
        self.policy.zero_grad(set_to_none=True)
        return tensors

    def change(self, factor):
        with torch.no_grad():
            for p in self.policy.parameters():
                p.mul_(factor)

    def hand_over(self):
        self.sampler.wake()
        self.sampler.load_weights(parallel.weights(self.policy))


def random_ids(n, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(5, 32000 if on_gpu() else 500, (n,), generator=g).tolist()


def make_rows(lengths, prompt, group=1):
    """A Batch of random completions of `lengths` tokens; `group` rows share a prompt."""
    rows = [(random_ids(prompt, i // group), random_ids(n, 1000 + i))
            for i, n in enumerate(lengths)]
    batch = make_batch([p for p, _ in rows], [Completion(c, [-10.0] * len(c), False)
                                              for _, c in rows], parallel.device())
    batch.old_logprobs = batch.entropy = batch.sampler_logprobs
    signs = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0))
    batch.advantages = signs.to(parallel.device()).expand(batch.mask.shape)
    return batch


def uneven_lengths(n):
    """n log-normal lengths, sigma 0.5, up to the longest completion."""
    longest, g = sizes().tokens, torch.Generator().manual_seed(1)
    lengths = 0.4 * longest * (0.5 * torch.randn(n, generator=g)).exp()
    return lengths.long().clamp(1, longest).tolist()


def scored(run, batch):
    """The batch with the policy's own log probabilities as the ratios' denominator."""
    batch.old_logprobs, batch.entropy = compute_logprobs(run.policy, batch)
    return batch


def off(run, batch, reference):
    """How far the policy's log probabilities are from others, in nats."""
    gaps = (compute_logprobs(run.policy, batch)[0] - reference)[batch.mask].abs()
    return dict(mean=gaps.mean().item(), largest=gaps.max().item())


def gap(run, batch):
    """Between sampler and trainer."""
    return held(off(run, batch, batch.sampler_logprobs), mean=GAPS[run.args.dtype])


def tokens_of(batch, name):
    """Tokens that go through the model, without padding; a shared prompt once."""
    prompts = batch.prompt_len.sum()
    if name == "shared":
        prompts = sum(batch.prompt_len[batch.group == g][0] for g in batch.group.unique())
    return int(prompts + batch.completion_len.sum())


def allow_groups():
    """torch 2.11's varlen_attn has no enable_gqa: there it gets keys and values repeated."""
    from torch.nn.attention import varlen
    own = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(own).parameters:
        return

    def call(q, k, v, *lengths, enable_gqa=False, **options):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return own(q, k, v, *lengths, **options)
    varlen.varlen_attn = call


# ---------------------------------------------------------------------------- machine

def versions():
    found = dict(python=platform.python_version(), cuda=torch.version.cuda, cores=os.cpu_count())
    for name in ("torch", "transformers", "peft", "triton", "vllm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                          capture_output=True)
    return dict(found, commit=done.stdout.strip())


def card():
    if not on_gpu():
        raise NotHere("there is no GPU")
    properties = torch.cuda.get_device_properties(0)
    return dict(name=properties.name, total_gb=properties.total_memory / 1e9, used_gb=used(),
                capability=f"{properties.major}.{properties.minor}")


def product():
    """Operations per second of a product of square matrices in the run's 16 bits."""
    dtype = getattr(torch, parallel.default_dtype())
    a = torch.randn(8192 if on_gpu() else 128, 8192 if on_gpu() else 128,
                    device=parallel.device(), dtype=dtype)
    a @ a
    seconds = watched(lambda: [a @ a for _ in range(10)])["s"] / 10
    return 2 * len(a)**3 / seconds


def peak_rate():
    name = torch.cuda.get_device_name() if on_gpu() else ""
    return next((rate for part, rate in PEAKS.items() if part in name), None) or product()


def machine():
    yield "versions", versions
    yield "card", card
    yield "product of matrices", lambda: dict(tflops=product() / 1e12, peak=peak_rate() / 1e12)


# ---------------------------------------------------------------------------- a whole rollout

def rollout(sampler="transformers", *flags):
    """A rollout by phase. Completions that are scored and learnt from are random tokens of full
    length, so that their figures do not depend on the sampler's."""
    size, run = sizes(), Run(sizes().model, f"--sampler={sampler}", *flags, weights=True)
    sampled_tokens = size.tokens if sampler == "vllm" else size.tokens // 8
    completions, s = size.problems * size.each, SimpleNamespace(peaks={})
    yield "start: trainer", run.start_trainer
    before = used()
    fit = start_fit(run)
    try:
        yield "start: sampler", run.start_sampler
        if not run.sampler:
            return

        def sample(problems, tokens):
            timed = watched(lambda: setattr(s, "batch", run.sample(problems, tokens)))
            return dict(timed, tokens_per_s=int(s.batch.completion_len.sum()) / timed["s"])
        yield f"sample: {completions} x {sampled_tokens}", partial(
            sample, size.problems, sampled_tokens)

        def sleep():
            return dict(watched(run.sampler.sleep), keeps_gb=used() - before)
        yield "sleep", sleep
        yield "gap between sampler and trainer", lambda: gap(
            run, s.batch.rows(torch.arange(min(64, completions))))
        rows = make_rows([size.tokens] * completions, size.prompt, size.each)

        def through(phase, f, operations):
            timed = watched(f)
            s.peaks[phase] = timed["peak_gb"]
            rate = tokens_of(rows, run.policy.layout) / timed["s"]
            mfu = operations * sum(p.numel() for p in run.policy.parameters()) * rate / peak_rate()
            return dict(timed, tokens_per_s=rate, mfu=mfu)
        yield f"score: {completions} x {size.tokens}", partial(
            through, "scoring", partial(scored, run, rows), 2)

        def learn():
            for _, minibatch in minibatches(rows, run.method, size.steps, 0, 0, size.each):
                run.update(minibatch)
        yield f"update: {size.steps} steps", partial(through, "update", learn, 6)

        def sync():
            timed = watched(run.hand_over)
            s.peaks["sync"] = timed["peak_gb"]
            return timed
        yield "wake and sync", sync
        yield "gap after a sync of other weights", partial(gap_of_others, run)
        if sampler == "vllm":
            for sequences in (256, 512):
                yield f"sample: {sequences} x 256", partial(sample, sequences // size.each, 256)
        yield "peaks, and --fit's", lambda: beside_fit(fit, s.peaks)
    finally:
        fit.kill()
        if run.sampler:
            run.sampler.close()


def gap_of_others(run):
    """Other weights while the sampler is asleep: seen before the sync, gone after it."""
    batch = run.sample(2, run.size.tokens // 8)
    run.sampler.sleep()
    run.change(-0.9)
    stale = off(run, batch, batch.sampler_logprobs)["mean"]
    run.hand_over()
    batch = run.sample(2, run.size.tokens // 8)
    run.sampler.sleep()
    figures = dict(gap(run, batch), before_sync=stale)
    run.hand_over()
    if stale < GAPS[run.args.dtype]:
        raise Beyond("other weights are not seen", figures)
    return figures


def start_fit(run):
    """train.py --fit of the same run, beside everything else."""
    memory = parallel.memory() / 1e9 if on_gpu() else 80
    command = [sys.executable, "train.py", f"--fit={memory:.1f}", *run.argv,
               f"--dtype={run.args.dtype}", f"--sampler={run.args.sampler}",
               f"--tokens_per_micro_batch={run.policy.budget}"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))


def beside_fit(fit, peaks):
    """peaks [GB of the card]: must be below what --fit says and the 0.05 that it leaves free."""
    text = fit.communicate()[0]
    rows = dict(re.findall(r"^(scoring|update|sync) .*?([\d.]+)(?:  too much)?$", text, re.M))
    if not rows:
        raise RuntimeError(f"--fit printed no table: {text[-2000:]}")
    figures = {f"{name}_{side}": gb for name in peaks for side, gb in (
        ("measured", peaks[name]), ("fit", float(rows[name])))}
    room = 0.05 * parallel.memory() / 1e9
    return held(figures, **{f"{name}_measured": figures[f"{name}_fit"] + room for name in peaks}
                if on_gpu() else {})


# ---------------------------------------------------------------------------- updates

def speed(run, batch, name, s, done=6):
    """A whole update, the second of two. mfu: of `done` operations a parameter and token, over the
    device's peak: 8 with checkpointing, 4 where weights are frozen. norm_off: relative to the
    first case's norm."""
    run.policy.use_layout(name)
    norm = run.update(batch)
    s.norm = getattr(s, "norm", norm)
    timed = watched(lambda: run.update(batch))
    tokens = tokens_of(batch, name)
    each = sum(p.numel() for p in run.policy.parameters()) * tokens / timed["s"] / peak_rate()
    return held(dict(timed, tokens_per_s=tokens / timed["s"], mfu=done * each, grad_norm=norm,
                     norm_off=abs(norm / s.norm - 1)), norm_off=0.02)


def updates():
    """Uneven completions, eight of each prompt."""
    for name in dict.fromkeys((sizes().model, "0.5B")):
        s, batch = SimpleNamespace(), make_rows(uneven_lengths(48), sizes().prompt, 8)
        for more in ((), ("--activation_checkpointing",)):
            run = Run(name, *more)
            yield f"{name}: start{' '.join(('', *more))}", run.start_trainer
            for how in layout.LAYOUTS[::-1]:
                yield f"{name}: {' '.join((how, *more))}", partial(
                    speed, run, batch, how, s, 8 if more else 6)
            del run
            free_memory()


def lora():
    """The largest model that the card holds with adapters."""
    run, s = Run(sizes().lora, "--lora_rank=16"), SimpleNamespace()
    yield f"{sizes().lora}: start", run.start_trainer
    batch = make_rows(uneven_lengths(24), sizes().prompt, 8)
    for how in layout.LAYOUTS[::-1]:
        yield f"{sizes().lora}: {how}", partial(speed, run, batch, how, s, 4)


# ---------------------------------------------------------------------------- memory

def budget_use(run, name):
    """A backward pass of as many tokens as go through at once. use: the share of the memory that
    weights, gradients and moments leave."""
    run.policy.use_layout(name)
    longest = run.size.prompt + run.size.tokens
    n = max(1, min(run.policy.budget, 2**17 if on_gpu() else 256) // longest)
    batch = make_rows([run.size.tokens] * n, run.size.prompt)
    timed = watched(lambda: backward(run.policy, batch, run.method, run.args.max_tokens))
    run.policy.zero_grad(set_to_none=True)
    state = loading.state_bytes(run.policy, False)
    use = (timed["peak_gb"] * 1e9 - state) / (parallel.memory() - state)
    return held(dict(timed, tokens=n * longest, state_gb=state / 1e9, use=use), use=1)


def long_rows(run, name):
    """As many tokens in one long row as in eight short ones: attention's memory must not grow with
    the square of the length."""
    run.policy.use_layout(name)
    long = 8192 if on_gpu() else 64
    peaks = []
    for n in (8, 1):
        batch = make_rows([long // n - 4] * n, 4)
        run.policy.budget = 2 * long
        before = used()
        peaks.append(watched(partial(backward, run.policy, batch, run.method, long))["peak_gb"]
                     - before)
        run.policy.zero_grad(set_to_none=True)
    figures = dict(short_rows_gb=peaks[0], long_row_gb=peaks[1])
    return held(dict(figures, ratio=peaks[1] / peaks[0]), ratio=1.5) if on_gpu() else figures


def memory():
    run = Run(sizes().model)
    yield "tokens at once", run.start_trainer
    yield "AdamW's moments", lambda: dict(grad_norm=run.update(make_rows([8], 8)))
    for name in layout.LAYOUTS:
        yield f"all of these, {name}", partial(budget_use, run, name)
    for dtype in dict.fromkeys((parallel.default_dtype(), "float32")):
        run = None
        free_memory()
        run = Run("cut", f"--dtype={dtype}", "--tokens_per_micro_batch=16384")
        run.start_trainer()
        for name in layout.LAYOUTS:
            yield f"a long row in {dtype}, {name}", partial(long_rows, run, name)


# ---------------------------------------------------------------------------- rounding

def error_norm(tensors, exact):
    return math.sqrt(sum((a - b).square().sum().item() for a, b in zip(tensors, exact, strict=True))
                     / sum(b.square().sum().item() for b in exact))


def rounding(run, batch, exact, s, dtype, name):
    """Errors of log probabilities [nats] and of the gradient [relative], against float32 padded;
    times_padded: the larger of the two over those of `padded` in the same dtype."""
    run.policy.dtype = dtype
    run.policy.use_layout(name)
    figures = off(run, batch, exact[0])
    figures["gradient"] = error_norm(run.gradient(batch), exact[1])
    if dtype == "float32":
        return held(figures, mean=GAPS[dtype], gradient=1e-4)
    if name == "padded":
        s.padded = figures
    times = max(figures[x] / max(s.padded[x], 1e-9) for x in ("mean", "gradient"))
    return held(dict(figures, times_padded=times), mean=GAPS[dtype], times_padded=2)


def precision():
    """Layouts and dtypes on one model, and on one whose attention has a window."""
    dtypes = ("float16", "float32") if parallel.default_dtype() == "float16" else GAPS
    for name, more in (("0.5B", {}), ("cut, a window of 50", dict(
            use_sliding_window=True, sliding_window=50, max_window_layers=0))):
        run, s = Run(name.split(",")[0], "--dtype=float32", **more), SimpleNamespace()
        run.start_trainer()
        batch = scored(run, make_rows([1, 2, 33, 128, 500, 900, 1000, 64] if on_gpu() else
                                      [1, 2, 16, 60], 3, 2))
        run.policy.use_layout("padded")
        exact = compute_logprobs(run.policy, batch)[0], run.gradient(batch)
        for dtype in dtypes:
            for how in layout.LAYOUTS:
                yield f"{name}: {dtype}, {how}", partial(
                    rounding, run, batch, exact, s, dtype, how)
        del run, exact
        free_memory()


# ---------------------------------------------------------------------------- one rank of FSDP2

@contextmanager
def one_rank():
    """A process group of one rank, which torchrun --nproc_per_node 1 has, too."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    given = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_SOCKET_IFNAME="lo")
    with mock.patch.dict(os.environ, given):
        parallel.start()
        try:
            yield
        finally:
            parallel.stop()


def sharded(batch, exact, norm, *flags):
    """An update of shards, against one without: in float32 the gradient, in 16 bits its norm."""
    run = Run("cut", *flags)
    run.start_trainer()
    figures = off(run, batch, exact[0])
    figures["gradient"] = error_norm(run.gradient(batch), exact[1])
    figures["norm_off"] = abs(run.update(batch) / norm - 1)
    figures.update(watched(lambda: run.update(batch)))
    seconds = watched(lambda: deque(parallel.weights(run.policy), maxlen=0))["s"]
    figures["gather_gb_per_s"] = sum(4e-9 * p.numel() for p in run.policy.parameters()) / seconds
    limits = dict(gradient=1e-4) if run.args.dtype == "float32" else dict(norm_off=0.02)
    return held(figures, mean=GAPS[run.args.dtype], **limits)


def overflow(batch):
    """float16: two good steps, then one that overflows. It must not move the weights."""
    run = Run("cut", "--dtype=float16", "--lr=1e-4")
    run.start_trainer()
    norms = [run.update(batch) for _ in range(2)]
    before = [parallel.full(p).clone() for p in run.policy.parameters()]
    run.trainer.scaler.update(2.0**60)
    norm = run.update(batch)
    moved = sum(not torch.equal(parallel.full(p), x)
                for p, x in zip(run.policy.parameters(), before, strict=True))
    return held(dict(grad_norms=norms, moved=moved, finite=math.isfinite(norm),
                     scale=run.trainer.scaler.get_scale() / 2.0**60), moved=1, finite=1, scale=0.6)


def state_of(run):
    """-> weights and moments, whole."""
    states = run.trainer.optimizer.state
    return [parallel.full(x).clone() for p in run.policy.parameters()
            for x in (p.detach(), states[p]["exp_avg"], states[p]["exp_avg_sq"])]


def round_trip(batch, *flags):
    """A checkpoint and back: weights, moments and the next gradient's norm must be the same."""
    first, second = (Run("cut", "--dtype=float32", "--lr=1e-4", *flags) for _ in range(2))
    first.start_trainer()
    first.update(batch)
    out = Path(first.folder, "run")
    timed = watched(lambda: checkpoint.save(
        out, 1, first.trainer, first.tokenizer, 1, None, Path("none"), "", sampled=0, state={},
        totals={}, pending=[]))
    folder = out / "checkpoints" / "rollout_000001"
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=False, mmap=True)
    second.start_trainer(checkpoint.Resumed({}, folder, state))
    checkpoint.restore(second.trainer, state)
    differ = sum(not torch.equal(a, b)
                 for a, b in zip(state_of(first), state_of(second), strict=True))
    norm_off = abs(first.update(batch) / second.update(batch) - 1)
    return held(dict(save_s=timed["s"], differ=differ, norm_off=norm_off), differ=1, norm_off=1e-5)


def world():
    batch, plain = make_rows(uneven_lengths(16), sizes().prompt, 2), Run("cut", "--dtype=float32")
    plain.start_trainer()
    plain.policy.use_layout("padded")
    scored(plain, batch)
    exact = batch.old_logprobs, plain.gradient(batch)
    plain = Run("cut")
    plain.start_trainer()
    norm = plain.update(batch)
    del plain
    with one_rank():
        for flags in (["--dtype=float32"], [], ["--activation_checkpointing"], ["--offload"]):
            yield f"update: {' '.join(flags) or 'defaults'}", partial(
                sharded, batch, exact, norm, *flags)
        yield "an overflow of float16", partial(overflow, batch)
        yield "a checkpoint and back", partial(round_trip, batch)
        yield "a checkpoint and back, --offload", partial(round_trip, batch, "--offload")


# ---------------------------------------------------------------------------- the same twice

def twice(run, batch, name, limit, s):
    """Two gradients of the same weights. slower: than without --deterministic."""
    run.policy.use_layout(name)
    first, second = run.gradient(batch), run.gradient(batch)
    differ = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    seconds = watched(lambda: run.gradient(batch))["s"]
    s.seconds.setdefault(name, seconds)
    return held(dict(tensors=len(first), differ=differ, s=seconds,
                     slower=seconds / s.seconds[name]), **limit)


def repeat():
    run, s = Run("cut"), SimpleNamespace(seconds={})
    run.start_trainer()
    batch = make_rows(uneven_lengths(32), sizes().prompt, 2)
    for flag, limit in (("", {}), (" --deterministic", dict(differ=1))):
        if flag:
            parallel.start(deterministic=True)
        for name in layout.LAYOUTS:
            yield name + flag, partial(twice, run, batch, name, limit, s)
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------------- train.py itself

def train(*flags):
    """train.py on the embedded base in a process of its own -> its text. Raises RuntimeError."""
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' / '.join(last_lines(done.stdout, 4))}")
    return done.stdout


def check(sampler):
    rows = re.findall(r"^ ok +(.*)", train("--check", f"--sampler={sampler}"), re.M)
    return dict(rows=len(rows), gap=next(r for r in rows if r.startswith("log probabilities")))


def whole_run(sampler):
    """Four rollouts of fade, two evaluations, a checkpoint."""
    few = [] if on_gpu() else ["--problems_per_rollout=8", "--eval_problems=8"]
    with tempfile.TemporaryDirectory() as folder:
        train("--loss=fade", "--rollouts=4", "--eval_every=4", f"--sampler={sampler}",
              f"--out={folder}/run", *few)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    names = ("time/rollout", "time/sample", "time/logp", "time/update", "time/sync",
             "sampler/logp_absdiff_mean", "reward/mean")
    gap = last["sampler/logp_absdiff_mean"]
    return held({**{name: last[name] for name in names}, "gap": gap},
                gap=GAPS[parallel.default_dtype()])


def whole(sampler="transformers"):
    yield "train.py --check, embedded base", partial(check, sampler)
    yield "train.py, embedded base", partial(whole_run, sampler)


# ---------------------------------------------------------------------------- the parts

class Part(NamedTuple):
    cases: object   # -> an iterator over (name, function -> figures)
    seconds: float  # its limit on a GPU


PARTS = {
    "machine": Part(machine, 25),
    "rollout": Part(rollout, 165),
    "updates": Part(updates, 95),
    "lora": Part(lora, 45),
    "memory": Part(memory, 45),
    "precision": Part(precision, 40),
    "world": Part(world, 50),
    "repeat": Part(repeat, 25),
    "train": Part(whole, 45),
}


def last_lines(text, n=20):
    return [line for line in text.splitlines() if line.strip()][-n:]


def attempt(measure):
    """One case -> its status, figures, and the last lines of an error."""
    try:
        figures = measure()
        return dict(status="ok", limits=figures.pop("limits", {}), figures=figures)
    except NotHere as e:
        return dict(status="skipped", reason=str(e))
    except Beyond as e:
        return dict(status="failed", reason=str(e), limits=e.figures.pop("limits", {}),
                    figures=e.figures)
    except Exception as e:  # whatever it is, the other cases go on
        reason = (str(e) or type(e).__name__).splitlines()[0]
        return dict(status="failed", reason=f"{type(e).__name__}: {reason}"[:300],
                    error=last_lines(traceback.format_exc()))


def run_cases(parts, name, path):
    """A part, in its process: a line of JSON for each case, as soon as it is known."""
    with open(path, "a") as file:
        for case, measure in parts[name].cases():
            print(f"{name}: {case}", flush=True)
            began = time.perf_counter()
            result = attempt(measure)
            del measure  # it may hold a model
            free_memory()
            line = dict(part=name, case=case, **result, seconds=time.perf_counter() - began)
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()


def run_parts(script, names, limit, rehearse=False):
    """-> the records of the parts' cases, in one process; one more where that failed or took
    too long. PART_FOLDER is for models: nothing of it is left when the process is killed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path, log = Path(folder, "cases"), Path(folder, "log")
        path.touch()
        env = dict(os.environ, PART_FOLDER=folder, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1",
                   TOKENIZERS_PARALLELISM="false", VLLM_HOST_IP="127.0.0.1",
                   VLLM_NO_USAGE_STATS="1", GLOO_SOCKET_IFNAME="lo")
        if rehearse:
            env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, script, "--part", str(path), *names],
                                       stdout=file, stderr=subprocess.STDOUT, env=env,
                                       process_group=0)
            try:
                code = process.wait(limit)
                problem = f"its process ended with code {code}" if code else None
            except subprocess.TimeoutExpired:
                problem = f"stopped after {limit:.0f} s"
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)  # and what it started
                except ProcessLookupError:
                    pass
                process.wait()
        records = [json.loads(line) for line in path.read_text().splitlines()]
        lines = last_lines(log.read_text(errors="replace"), 30)
    if problem or not records:
        records.append(dict(part=records[-1]["part"] if records else names[0],
                            case="the part itself", status="failed", error=lines, seconds=0,
                            reason=f"{problem or 'no case'}; {lines[-1][:200] if lines else ''}"))
    return records


# ---------------------------------------------------------------------------- the results

def shown(value):
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    return str(value)


def row(record):
    """A line of the table."""
    figures = ", ".join(f"{k} {shown(v)}" for k, v in record.get("figures", {}).items())
    limits = ", ".join(f"{k} < {shown(v)}" for k, v in record.get("limits", {}).items())
    result = ": ".join(filter(None, (record["status"], record.get("reason"))))
    cells = (record["part"], record["case"], figures, limits, result)
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


HEAD = "| part | case | figures | limits | result |\n|---|---|---|---|---|"


def write(path, result):
    for name, text in ((path, json.dumps(result, indent=1)),
                       (path.with_suffix(".md"), "\n".join([HEAD, *map(row, result["cases"])]))):
        name.with_suffix(".unfinished").write_text(text + "\n")
        name.with_suffix(".unfinished").replace(name)


def main(script, doc, parts, out):
    """-> the exit code: 1 where a case failed."""
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--parts", default=",".join(parts), help="some of %(default)s")
    parser.add_argument("--out", type=Path, default=Path(out), help="figures; the table is beside "
                        "it, as .md")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        for name in args.part[1:]:
            run_cases(parts, name, args.part[0])
        return 0
    names = args.parts.split(",")
    if unknown := set(names) - set(parts):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    if not (args.rehearse or on_gpu()):
        parser.error("there is no GPU here that torch can use; --rehearse tries the parts on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = dict(started=time.strftime("%Y-%m-%d %H:%M:%S"), rehearsal=args.rehearse, cases=[])
    print(HEAD, flush=True)
    for together in ([names] if args.rehearse else [[name] for name in names]):
        limit = 3600 if args.rehearse else parts[together[0]].seconds
        records = run_parts(script, together, limit, args.rehearse)
        result["cases"] += records
        write(args.out, result)
        print("\n".join(map(row, records)), flush=True)
    failed = sum(case["status"] == "failed" for case in result["cases"])
    print(f"\n{len(result['cases'])} cases, {failed} failed; to report it, open an issue with "
          f"{args.out} and {args.out.with_suffix('.md')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, PARTS, "gpu.json"))

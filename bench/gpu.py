"""Does it work on a GPU, how fast, and how exact? At most nine minutes on one GPU, without vLLM and
without network.

    python bench/gpu.py                          on an NVIDIA GPU
    python bench/gpu.py --rehearse               every part on a CPU, with tiny shapes
    python bench/gpu.py --parts rollout lora     some of the parts

A part is a process with a time limit, and a list of cases; the parts that users need most come
first. A case fails where a figure is not below its limit; that, or a part without memory or time,
stops no other, and the exit code is 1. gpu.json (--out) has figures and errors, gpu.md the table;
both are written after every part. Open an issue with the two, above all where cases failed.

Models have random weights, and sizes that follow the card's memory (SIZES). Trainer and sampler are
loaded as a run with the same flags loads them.
"""

import argparse
import gc
import inspect
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque, namedtuple
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
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
from harness import checkpoint
from harness.files import write
from harness.model import load_sampler, load_trainer

EOS = 1
GAPS = {"bfloat16": 0.02, "float16": 0.005, "float32": 1e-4}  # nats, mean over tokens: the limits

FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "vocab_size", "tie_word_embeddings")
SHAPES = {  # Qwen2.5's, and one that is cut to four layers
    "0.5B": (24, 896, 14, 2, 4864, 151936, True),
    "1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "3B": (36, 2048, 16, 2, 11008, 151936, True),
    "7B": (28, 3584, 28, 4, 18944, 152064, False),
    "cut": (4, 1536, 12, 2, 8960, 151936, True),
    "tiny": (2, 64, 2, 1, 128, 500, True),
}
# dense operations per second in 16 bits, by what the device's name contains; the first that fits
PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
         "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "T4": 65e12,
         "RTX 4090": 165e12, "RTX 3090": 71e12}

# what a card of `gb` GB or more is tried with: problems of a rollout, completions of each,
# optimizer steps, tokens of prompts and completions, and the model that gets adapters
Size = namedtuple("Size", "gb model problems each steps prompt tokens lora")
SIZES = [Size(70, "1.5B", 64, 16, 16, 128, 1024, "7B"),
         Size(36, "1.5B", 32, 16, 16, 128, 1024, "3B"),
         Size(0, "0.5B", 16, 16, 16, 128, 1024, "1.5B")]
TINY = Size(0, "0.5B", 4, 4, 2, 8, 16, "0.5B")  # all of its shapes are "tiny"


class Beyond(Exception):
    """(reason, figures): one is not below its limit."""


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
    where loading.build has it."""
    torch.manual_seed(0)
    with torch.device(parallel.device()):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder),
                                                 dtype=torch.float32)
    with torch.no_grad():
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
        given = dict(zip(FIELDS, SHAPES[name if on_gpu() else "tiny"], strict=True))
        self.folder = tempfile.mkdtemp(dir=os.environ.get("PART_FOLDER"))
        Qwen2Config(**{**given, **more}, max_position_embeddings=32768, bos_token_id=None,
                    eos_token_id=EOS, pad_token_id=None,
                    architectures=["Qwen2ForCausalLM"]).save_pretrained(self.folder)
        if weights:
            random_model(self.folder).bfloat16().save_pretrained(self.folder)
            free_memory()
        # so small a learning rate leaves the weights as they are, and gradients can be compared
        self.argv = [f"--{flag}={value}" for flag, value in dict(
            model=self.folder, problems_per_rollout=self.size.problems, group_size=self.size.each,
            steps_per_rollout=self.size.steps, max_prompt_tokens=self.size.prompt, lr=1e-12,
            max_tokens=self.size.tokens, shuffle="groups", eval_every=0).items()] + [*flags]
        self.args, self.method = training.parse_args(self.argv)

    def start_trainer(self, resumed=None):
        self.tokenizer, problem = AutoTokenizer.from_pretrained(BASE), dict(
            prompt="1 2 3 4" * 9, answer="1", verifier="math")
        began = time.perf_counter()
        with mock.patch.object(loading, "build", loading.build if resumed else random_model):
            self.trainer = load_trainer(self.args, self.method, self.tokenizer, [EOS], problem,
                                        resumed)
        self.policy = self.trainer.policy
        self.parameters = sum(p.numel() for p in self.policy.parameters())
        return dict(s=time.perf_counter() - began, parameters=self.parameters, used_gb=used(),
                    dtype=self.policy.dtype, layout=self.policy.layout,
                    tokens_at_once=self.policy.budget)

    def start_sampler(self):
        began = time.perf_counter()
        self.sampler = load_sampler(self.args, [EOS])
        figures = dict(s=time.perf_counter() - began, used_gb=used())
        if self.args.sampler == "vllm":
            config = self.sampler.engine.llm_engine.vllm_config
            figures.update(
                graphs=str(config.compilation_config.cudagraph_mode),
                largest_graph=config.compilation_config.max_cudagraph_capture_size or 0,
                max_num_seqs=config.scheduler_config.max_num_seqs,
                cache_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size)
        return figures

    def sample(self, problems, tokens, seed=1):
        """-> a Batch of `each` completions of up to `tokens` tokens for each problem. Keys and
        values that the engine has of prompts are forgotten first, as by a sync."""
        prompts = [random_ids(self.size.prompt, i) for i in range(problems)]
        if self.args.sampler == "vllm":
            self.sampler.engine.reset_prefix_cache()
        groups = self.sampler.sample(prompts, self.size.each, seed=seed, temperature=1.0,
                                     max_tokens=tokens)
        return make_batch([*zip(prompts, groups, strict=True)], parallel.device())

    def sampling(self, problems, tokens):
        """-> the figures of that; self.sampled has the Batch."""
        timed = watched(lambda: setattr(self, "sampled", self.sample(problems, tokens)))
        return dict(timed, tokens_per_s=int(self.sampled.completion_len.sum()) / timed["s"])

    def update(self, batch):
        """One optimizer step -> the gradient's norm."""
        return self.trainer.step(batch)["grad_norm"].item()

    def gradient(self, batch):
        """-> the gradient's tensors of one optimizer step, in float64 on the CPU."""
        backward(self.policy, batch, self.method, self.args.max_tokens)
        tensors = [parallel.full(p.grad).double().cpu() for p in self.policy.parameters()
                   if p.grad is not None]
        self.policy.zero_grad(set_to_none=True)
        return tensors

    def hand_over(self):
        self.sampler.wake()
        self.sampler.load_weights(self.trainer.weights())


def random_ids(n, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(5, 32000 if on_gpu() else 500, (n,), generator=g).tolist()


def make_rows(lengths, prompt, group=1):
    """A Batch of random completions of `lengths` tokens; `group` rows share a prompt."""
    rows = [Completion(random_ids(n, 1000 + i), [-10.0] * n, False)
            for i, n in enumerate(lengths)]
    batch = make_batch([(random_ids(prompt, i), rows[i * group:(i + 1) * group])
                        for i in range(-(-len(rows) // group))], parallel.device())
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


def gap_after(run, action=lambda run: None):
    """-> the gap of sampler and trainer in fresh completions, scored while the sampler sleeps."""
    action(run)
    batch = run.sample(2, run.size.tokens // 4)
    run.sampler.sleep()
    figures = off(run, batch, batch.sampler_logprobs)
    run.hand_over()
    return held(figures, mean=GAPS[run.args.dtype])


def gap_of_others(run):
    """Other weights while the sampler is asleep: seen before the sync, gone after it."""
    batch = run.sample(2, run.size.tokens // 4)
    run.sampler.sleep()
    with torch.no_grad():
        for p in run.policy.parameters():
            p.mul_(-0.9)
    stale = off(run, batch, batch.sampler_logprobs)["mean"]
    run.hand_over()
    return held(dict(gap_after(run), before_sync=stale, seen=GAPS[run.args.dtype] / stale),
                mean=GAPS[run.args.dtype], seen=1)


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


def versions():
    installed = {d.name: d.version for d in metadata.distributions()}
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                          capture_output=True)
    found = dict(commit=done.stdout.strip(), **{name: installed.get(name) for name in (
        "torch", "transformers", "vllm")})
    return dict(found, name=torch.cuda.get_device_name(), gb=parallel.memory() / 1e9,
                used_gb=used(), capability="{}.{}".format(*torch.cuda.get_device_capability()),
                cuda=torch.version.cuda) if on_gpu() else found


def product():
    """Operations per second of a product of square matrices in the run's 16 bits."""
    n = 8192 if on_gpu() else 128
    a = torch.randn(n, n, device=parallel.device(), dtype=getattr(torch, parallel.default_dtype()))
    a @ a
    return 20 * n**3 / watched(lambda: [a @ a for _ in range(10)])["s"]


def peak_rate():
    name = torch.cuda.get_device_name() if on_gpu() else ""
    return next((rate for part, rate in PEAKS.items() if part in name), None) or product()


def machine():
    yield "versions", versions
    yield "product of matrices", lambda: dict(tflops=product() / 1e12, peak=peak_rate() / 1e12)


# ---------------------------------------------------------------------------- a whole rollout

def rollout(sampler="transformers"):
    """A rollout by phase. The completions that are scored and learnt from are random tokens of full
    length, whatever the sampler has sampled."""
    size, run, peaks = sizes(), Run(sizes().model, f"--sampler={sampler}", weights=True), {}
    completions, tokens = size.problems * size.each, size.tokens // (1 if sampler == "vllm" else 8)
    yield "start: trainer", run.start_trainer
    before, fit = used(), start_fit(run)
    yield "start: sampler", run.start_sampler
    if not run.sampler:
        return
    yield f"sample: {completions} x {tokens}", partial(run.sampling, size.problems, tokens)
    yield "sleep", lambda: dict(watched(run.sampler.sleep), keeps_gb=used() - before)
    rows = make_rows([size.tokens] * completions, size.prompt, size.each)

    def phase(name, f, operations=0):
        timed = watched(f)
        peaks[name] = timed["peak_gb"]
        rate = tokens_of(rows, run.policy.layout) / timed["s"]
        return dict(timed, tokens_per_s=rate, mfu=operations * run.parameters * rate / peak_rate()
                    ) if operations else timed

    def learn():
        for _, minibatch in minibatches(rows, run.method, size.steps, 0, 0, size.each):
            run.update(minibatch)
    yield f"score: {completions} x {size.tokens}", partial(
        phase, "scoring", partial(scored, run, rows), 2)
    yield f"update: {size.steps} steps", partial(phase, "update", learn, 6)
    yield "wake and sync", partial(phase, "sync", run.hand_over)
    yield "gap", partial(gap_after, run)
    yield "gap after a sync of other weights", partial(gap_of_others, run)
    for sequences in (256, 512, 1024) if sampler == "vllm" else ():
        yield f"sample: {sequences} x 256", partial(run.sampling, sequences // size.each,
                                                    256 if on_gpu() else 8)
    yield "peaks, and --fit's", lambda: beside_fit(fit, peaks)
    run.sampler.close()


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

def speed(run, batch, name, s, done):
    """A whole update, the second of two. mfu: of `done` operations a parameter and token, over the
    device's peak. norm_off: relative to the first case's norm."""
    if "norm" not in s:
        scored(run, batch)
    run.policy.use_layout(name)
    norm = run.update(batch)
    timed = watched(lambda: run.update(batch))
    rate = tokens_of(batch, name) / timed["s"]
    return held(dict(timed, tokens_per_s=rate, mfu=done * run.parameters * rate / peak_rate(),
                     grad_norm=norm, norm_off=abs(norm / s.setdefault("norm", norm) - 1)),
                norm_off=0.02)


def speeds(name, *variants):
    """Uneven completions, eight of each prompt. variants: flags, and operations that are done."""
    s, batch = {}, make_rows(uneven_lengths(48), sizes().prompt, 8)
    for flags, done in variants:
        run, label = Run(name, *flags), " ".join((name, *flags))
        yield f"{label}: start", run.start_trainer
        for how in layout.LAYOUTS[::-1]:
            yield f"{label}: {how}", partial(speed, run, batch, how, s, done)
        del run
        free_memory()


def updates():
    for name in dict.fromkeys((sizes().model, "0.5B")):
        yield from speeds(name, ((), 6), (["--activation_checkpointing"], 8))


def lora():
    yield from speeds(sizes().lora, (["--lora_rank=16"], 4))


# ---------------------------------------------------------------------------- memory, rounding

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


def error_norm(tensors, exact):
    return math.sqrt(sum((a - b).square().sum().item() for a, b in zip(tensors, exact, strict=True))
                     / sum(b.square().sum().item() for b in exact))


def rounding(run, batch, exact, padded, dtype, name):
    """Errors of log probabilities [nats] and of the gradient [relative], against float32 padded;
    times_padded: the larger of the two over those of `padded` in the same dtype."""
    run.policy.dtype = dtype
    run.policy.use_layout(name)
    figures = off(run, batch, exact[0])
    figures["gradient"] = error_norm(run.gradient(batch), exact[1])
    if dtype == "float32":
        return held(figures, mean=GAPS[dtype], gradient=1e-4)
    if name == "padded":
        padded.update(figures)
    times = max(figures[x] / padded[x] for x in ("mean", "gradient"))
    return held(dict(figures, times_padded=times), mean=GAPS[dtype], times_padded=2)


def precision():
    """Layouts and dtypes on one model, and on one whose attention has a window."""
    dtypes = ("float16", "float32") if parallel.default_dtype() == "float16" else GAPS
    for name, more in (("0.5B", {}), ("cut, a window of 50", dict(
            use_sliding_window=True, sliding_window=50, max_window_layers=0))):
        run, padded = Run(name.split(",")[0], "--dtype=float32", **more), {}
        run.start_trainer()
        batch = scored(run, make_rows([1, 2, 33, 128, 500, 900, 1000, 64] if on_gpu() else
                                      [1, 2, 16, 60], 3, 2))
        run.policy.use_layout("padded")
        exact = compute_logprobs(run.policy, batch)[0], run.gradient(batch)
        for dtype in dtypes:
            for how in layout.LAYOUTS:
                yield f"{name}: {dtype}, {how}", partial(
                    rounding, run, batch, exact, padded, dtype, how)


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
    figures["gather_gb_per_s"] = 4e-9 * run.parameters / seconds
    limits = dict(gradient=1e-4) if run.args.dtype == "float32" else dict(norm_off=0.02)
    return held(figures, mean=GAPS[run.args.dtype], **limits)


def round_trip(batch, *flags):
    """A checkpoint and back: weights, moments and the next gradient's norm must be the same."""
    first, second = (Run("cut", "--dtype=float32", "--lr=1e-4", *flags) for _ in range(2))
    first.start_trainer()
    first.update(batch)
    timed = watched(lambda: checkpoint.save(
        Path(first.folder), first.trainer, first.tokenizer, Path("none"), 1, rollout=1, best=None))
    folder = Path(first.folder, "checkpoints", "rollout_000001")
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=False, mmap=True)
    second.start_trainer(checkpoint.Resumed(folder, state))
    kept, restored = ([parallel.full(x) for p in run.policy.parameters()
                       for x in (p, *map(run.trainer.optimizer.state[p].get, (
                           "exp_avg", "exp_avg_sq")))] for run in (first, second))
    differ = sum(not torch.equal(a, b) for a, b in zip(kept, restored, strict=True))
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
        yield "a checkpoint and back", partial(round_trip, batch)
        yield "a checkpoint and back, --offload", partial(round_trip, batch, "--offload")


def twice(run, batch, name, s, **limit):
    """Two gradients of the same weights. slower: than the layout's first case."""
    run.policy.use_layout(name)
    first, second = run.gradient(batch), run.gradient(batch)
    differ = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    seconds = watched(lambda: run.gradient(batch))["s"]
    slower = seconds / s.setdefault(name, seconds)
    return held(dict(tensors=len(first), differ=differ, s=seconds, slower=slower), **limit)


def repeat():
    run, batch, s = Run("cut"), make_rows(uneven_lengths(32), sizes().prompt, 2), {}
    run.start_trainer()
    for name in layout.LAYOUTS:
        yield name, partial(twice, run, batch, name, s)
    parallel.start(deterministic=True)
    for name in layout.LAYOUTS:
        yield f"{name} --deterministic", partial(twice, run, batch, name, s, differ=1)
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
        last = json.loads(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
    names = ("time/rollout", "time/sample", "time/logp", "time/update", "time/sync", "reward/mean")
    return held(dict({name: last[name] for name in names}, gap=last["sampler/logp_absdiff_mean"]),
                gap=GAPS[parallel.default_dtype()])


def whole(sampler="transformers"):
    if sampler != "vllm":  # the other parts have its checks
        yield "train.py --check, embedded base", partial(check, sampler)
    yield "train.py, embedded base", partial(whole_run, sampler)


# ---------------------------------------------------------------------------- the parts

PARTS = {  # name: its limit on a GPU in seconds, -> an iterator over (case, function -> figures)
    "machine": (20, machine), "rollout": (170, rollout), "updates": (95, updates),
    "lora": (45, lora), "memory": (45, memory), "precision": (40, precision), "world": (50, world),
    "repeat": (25, repeat), "train": (45, whole)}


def last_lines(text, n=20):
    return [line for line in text.splitlines() if line.strip()][-n:]


def attempt(measure):
    """One case -> its status, figures and limits, or the last lines of an error."""
    result = dict(status="ok")
    try:
        figures = measure()
    except Beyond as e:
        reason, figures = e.args
        result = dict(status="failed", reason=reason)
    except Exception as e:  # whatever it is, the other cases go on
        reason = f"{type(e).__name__}: {e}".splitlines()[0][:300]
        return dict(status="failed", reason=reason, error=last_lines(traceback.format_exc()))
    return dict(result, limits=figures.pop("limits", {}), figures=figures)


def run_cases(parts, name, path):
    """A part, in its process: a line of JSON for each case, as soon as it is known."""
    with open(path, "a") as file:
        for case, measure in parts[name][1]():
            print(f"{name}: {case}", flush=True)
            file.write(json.dumps(dict(part=name, case=case, **attempt(measure))) + "\n")
            file.flush()
            del measure  # it may hold a model
            free_memory()


def stop(process):
    """Ends a process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_parts(script, names, limit, rehearse=False):
    """-> the records of the parts' cases, in one process; one more where that failed or took
    too long. PART_FOLDER is for models: nothing of it is left when the process is killed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path, log, problem = Path(folder, "cases"), Path(folder, "log"), None
        path.touch()
        env = dict(os.environ, PART_FOLDER=folder, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1",
                   TOKENIZERS_PARALLELISM="false", VLLM_HOST_IP="127.0.0.1",
                   VLLM_NO_USAGE_STATS="1", GLOO_SOCKET_IFNAME="lo")
        if rehearse:
            env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, script, "--part", str(path), *names],
                                       stdout=file, stderr=file, env=env, process_group=0)
            try:
                if code := process.wait(limit):
                    problem = f"its process ended with code {code}"
            except subprocess.TimeoutExpired:
                problem = f"stopped after {limit:.0f} s"
            finally:
                stop(process)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        lines = last_lines(log.read_text(errors="replace"), 30)
    if problem:
        records.append(dict(part=records[-1]["part"] if records else names[0],
                            case="the part itself", status="failed", error=lines,
                            reason=f"{problem}; {''.join(lines[-1:])[:200]}"))
    return records


def shown(value):
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def row(record):
    """A line of the table."""
    figures = ", ".join(f"{k} {shown(v)}" for k, v in record.get("figures", {}).items())
    limits = ", ".join(f"{k} < {shown(v)}" for k, v in record.get("limits", {}).items())
    result = ": ".join(filter(None, (record["status"], record.get("reason"))))
    cells = (record["part"], record["case"], figures, limits, result)
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


HEAD = "| part | case | figures | limits | result |\n|---|---|---|---|---|"


def main(script, doc, parts, out):
    """-> the exit code: 1 where a case failed."""
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts], help="some of them")
    parser.add_argument("--out", type=Path, default=Path(out), help="figures; the table is beside "
                        "it, as .md")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        for name in args.part[1:]:
            run_cases(parts, name, args.part[0])
        return 0
    if not (args.rehearse or on_gpu()):
        parser.error("there is no GPU here that torch can use; --rehearse tries the parts on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    table, cases = args.out.with_suffix(".md"), []
    print(HEAD, flush=True)
    for together in [args.parts] if args.rehearse else [[name] for name in args.parts]:
        limit = 3600 if args.rehearse else parts[together[0]][0]
        records = run_parts(script, together, limit, args.rehearse)
        print("\n".join(map(row, records)), flush=True)
        cases += records
        write(args.out, json.dumps(cases, indent=1) + "\n")
        write(table, "\n".join([HEAD, *map(row, cases), ""]))
    failed = sum(case["status"] == "failed" for case in cases)
    print(f"\n{len(cases)} cases, {failed} failed; to report it, open an issue with {args.out} and "
          f"{table}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, PARTS, "gpu.json"))

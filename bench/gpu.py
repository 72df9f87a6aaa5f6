"""Does it work on a GPU, how fast, and how exact? At most nine minutes, no vLLM, no network.

    python bench/gpu.py                           on an NVIDIA GPU
    python bench/gpu.py --rehearse                every part on a CPU, with tiny shapes
    python bench/gpu.py --parts rollout updates   some of the parts

A part is a process with a time limit, and a list of cases. A case fails where it raises or a figure
is not below its limit; that, or a part without memory or time, stops no other part, and the exit
code is 1. Each case is a row of the printed table and a line of gpu.jsonl (--out).

Models have random weights, sizes by the card's memory (SIZES), and are loaded as a run loads them.
"""

import argparse
import contextlib
import gc
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import namedtuple
from functools import partial
from importlib import metadata
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config

# for --deterministic, and read at the first product of a process
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train as training
from data import BASE
from engine import loading, parallel
from engine.policy import Completion, backward, compute_logprobs, make_batch, minibatches
from harness.start import load_sampler, load_trainer

EOS, LAYOUTS = 1, ("padded", "shared")
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
# what a card of `gb` GB or more is tried with: problems of a rollout, completions of each,
# optimizer steps, tokens of prompts and completions, and the model that gets adapters
Size = namedtuple("Size", "gb model problems each steps prompt tokens lora")
SIZES = [Size(70, "1.5B", 64, 16, 16, 128, 1024, "7B"),
         Size(36, "1.5B", 32, 16, 16, 128, 1024, "3B"),
         Size(0, "0.5B", 16, 16, 16, 128, 1024, "1.5B")]
TINY = Size(0, "0.5B", 4, 4, 2, 8, 16, "0.5B")  # all of its shapes are "tiny"


def on_gpu():
    return torch.cuda.is_available()


def sizes():
    return next(s for s in SIZES if parallel.memory() >= s.gb * 1e9) if on_gpu() else TINY


def free_memory():
    gc.collect()
    torch.cuda.empty_cache()


def used():
    """GB of the card that are not free, whoever has them; on a CPU, of this process at its peak."""
    free, total = torch.cuda.mem_get_info() if on_gpu() else (0, parallel.peak_memory())
    return (total - free) / 1e9


def watched(f, *given):
    """Calls f -> its seconds, the GPU's work included, and the card's GB in use at the peak."""
    free_memory()
    if on_gpu():
        torch.cuda.synchronize()
        parallel.watch_memory()
    began = time.perf_counter()
    f(*given)
    if on_gpu():
        torch.cuda.synchronize()
    return dict(s=time.perf_counter() - began, peak_gb=parallel.peak_memory() / 1e9)


def machine():
    installed = {d.name: d.version for d in metadata.distributions()}
    commit = subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty")
    yield "versions", lambda: dict(
        {name: installed.get(name) for name in ("torch", "transformers", "vllm")}, commit=commit,
        cuda=torch.version.cuda, used_gb=used(),
        device=str(torch.cuda.get_device_properties(0)) if on_gpu() else "CPU")


def train():
    """The embedded base, tried and trained by train.py."""
    few = [] if on_gpu() else ["--problems_per_rollout=8", "--eval_problems=8"]
    command = [sys.executable, "train.py", "--sampler=transformers", "--rollouts=2", *few]
    for flag in "--check", f"--out={tempfile.mkdtemp()}/run":
        yield flag[:7], partial(subprocess.check_call, [*command, flag], cwd=ROOT)


# ---------------------------------------------------------------------------- models and batches

def allow_groups():
    """torch 2.11's varlen_attn has no enable_gqa: there it gets keys and values repeated."""
    from torch.nn.attention import varlen
    own = varlen.varlen_attn

    def call(q, k, v, *lengths, enable_gqa=False, **options):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return own(q, k, v, *lengths, **options)
    if "enable_gqa" not in inspect.signature(own).parameters:
        varlen.varlen_attn = call


def random_model(folder, _=None):
    """In place of loading.build: the model of a folder's config.json, with random weights that
    bfloat16 can hold, in float32."""
    torch.manual_seed(0)
    with torch.device(parallel.device()):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder),
                                                 dtype=torch.bfloat16).float()
    model.generation_config.eos_token_id = EOS
    return model.to("cpu" if parallel.sharded() else parallel.device()).eval()


class Run:
    """The parts of a run of train.py with these flags. name: of SHAPES; weights: the folder has
    them, for a sampler; more: of the model's configuration."""

    def __init__(self, name, *flags, weights=False, **more):
        allow_groups()
        self.size, self.sampler, self.temporary = sizes(), None, tempfile.TemporaryDirectory()
        folder = self.temporary.name
        shape = zip(FIELDS, SHAPES[name if on_gpu() else "tiny"], strict=True)
        Qwen2Config(**dict(shape), **more, max_position_embeddings=32768, bos_token_id=None,
                    eos_token_id=EOS, pad_token_id=None,
                    architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
        if weights:
            random_model(folder).bfloat16().save_pretrained(folder)
        # so small a learning rate leaves the weights as they are, and gradients can be compared
        self.argv = [f"--{flag}={value}" for flag, value in dict(
            model=folder, problems_per_rollout=self.size.problems, group_size=self.size.each,
            steps_per_rollout=self.size.steps, max_prompt_tokens=self.size.prompt, lr=1e-12,
            max_tokens=self.size.tokens, shuffle="groups", eval_every=0).items()] + [*flags]
        self.args, self.method = training.parse_args(self.argv)

    def start_trainer(self):
        free_memory()
        began, problem = time.perf_counter(), dict(prompt="1 2 3" * 9, verifier="math", answer="1")
        with mock.patch.object(loading, "build", random_model):
            self.trainer = load_trainer(self.args, self.method, AutoTokenizer.from_pretrained(BASE),
                                        [EOS], problem)
        self.policy = self.trainer.policy
        self.parameters = sum(p.numel() for p in self.policy.parameters())
        return dict(s=time.perf_counter() - began, parameters=self.parameters, used_gb=used(),
                    dtype=self.policy.dtype, layout=self.policy.layout, budget=self.policy.budget)

    def start_sampler(self):
        began = time.perf_counter()
        self.sampler = load_sampler(self.args, self.trainer, [EOS])
        return dict(s=time.perf_counter() - began, used_gb=used())

    def sample(self, problems, tokens):
        """-> a Batch of `each` completions of up to `tokens` tokens for each problem, without keys
        and values that the engine has of earlier prompts, as after a sync."""
        prompts = [random_ids(self.size.prompt, i) for i in range(problems)]
        if self.args.sampler == "vllm":
            self.sampler.engine.reset_prefix_cache()
        groups = self.sampler.sample(prompts, self.size.each, seed=1, temperature=1.0,
                                     max_tokens=tokens)
        self.sampled = make_batch([*zip(prompts, groups, strict=True)], parallel.device())
        return self.sampled

    def sampling(self, problems, tokens):
        timed = watched(self.sample, problems, tokens)
        return dict(timed, tokens_per_s=round(int(self.sampled.mask.sum()) / timed["s"]))

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
        self.sampler.load_weights(self.trainer.weights(self.sampler.merged))


def started(name, *flags, **more):
    run = Run(name, *flags, **more)
    run.start_trainer()
    return run


def random_ids(n, seed, vocabulary=None):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocabulary or (32000 if on_gpu() else 500), (n,), generator=g).tolist()


def make_rows(lengths, prompt, group=1, vocabulary=None):
    """A Batch of random completions of `lengths` tokens; `group` rows share a prompt."""
    rows = [Completion(random_ids(n, 1000 + i, vocabulary), [-10.0] * n, False)
            for i, n in enumerate(lengths)]
    batch = make_batch([(random_ids(prompt, i, vocabulary), rows[i:i + group])
                        for i in range(0, len(rows), group)], parallel.device())
    batch.old_logprobs = batch.entropy = batch.sampler_logprobs
    signs = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0))
    batch.advantages = signs.to(parallel.device()).expand(batch.mask.shape)
    return batch


def uneven_rows(n, group):
    """n completions of log-normal length, sigma 0.5, up to the longest completion."""
    longest, g = sizes().tokens, torch.Generator().manual_seed(1)
    lengths = 0.4 * longest * (0.5 * torch.randn(n, generator=g)).exp()
    return make_rows(lengths.long().clamp(1, longest).tolist(), sizes().prompt, group)


def score(run, batch):
    """The policy's own log probabilities become the ratios' denominator."""
    batch.old_logprobs, batch.entropy = compute_logprobs(run.policy, batch)


def rated(run, batch, f, *given):
    """watched, and tokens a second of the model, without padding, a shared prompt once."""
    timed, prompts = watched(f, *given), batch.prompt_len
    if run.policy.layout == "shared":
        prompts = torch.stack([prompts[batch.group == g][0] for g in batch.group.unique()])
    rate = (prompts.sum() + batch.completion_len.sum()).item() / timed["s"]
    return dict(timed, tokens_per_s=round(rate))


def off(run, batch, reference):
    """How far the policy's log probabilities are from others, in nats."""
    gaps = (compute_logprobs(run.policy, batch)[0] - reference)[batch.mask].abs()
    return dict(mean=gaps.mean().item(), largest=gaps.max().item())


def errors(run, batch, exact):
    """Of log probabilities [nats] and of the gradient [relative], against those of `reference`."""
    pairs = [*zip(run.gradient(batch), exact[1], strict=True)]
    return dict(off(run, batch, exact[0]), gradient=math.sqrt(
        sum((a - b).square().sum().item() for a, b in pairs)
        / sum(b.square().sum().item() for _, b in pairs)))


# ---------------------------------------------------------------------------- a whole rollout

def gap(run):
    """Of sampler and trainer in fresh completions, scored while the sampler sleeps."""
    batch = run.sample(2, run.size.tokens // 4)
    run.sampler.sleep()
    figures = off(run, batch, batch.sampler_logprobs)
    run.hand_over()
    return dict(figures, limits=dict(mean=GAPS[run.args.dtype]))


def gap_of_others(run):
    """Other weights while the sampler is asleep: seen before the sync, gone after it."""
    batch = run.sample(2, run.size.tokens // 4)
    run.sampler.sleep()
    with torch.no_grad():
        for p in run.policy.parameters():
            p.mul_(-0.9)
    stale, limit = off(run, batch, batch.sampler_logprobs)["mean"], GAPS[run.args.dtype]
    run.hand_over()
    return dict(gap(run), before_sync=stale, seen=limit / stale, limits=dict(mean=limit, seen=1))


def rollout(sampler="transformers"):
    """A rollout by phase. The completions that are scored and learnt from are random tokens of full
    length, whatever the sampler has sampled."""
    size, peaks = sizes(), {}
    run = Run(size.model, f"--sampler={sampler}", weights=True)
    completions, tokens = size.problems * size.each, size.tokens // (1 if sampler == "vllm" else 8)
    yield "start: trainer", run.start_trainer
    before, fit = used(), start_fit(run)
    yield "start: sampler", run.start_sampler
    if not run.sampler:
        return
    yield f"sample: {completions} x {tokens}", partial(run.sampling, size.problems, tokens)
    yield "sleep", lambda: dict(watched(run.sampler.sleep), keeps_gb=used() - before)
    rows = make_rows([size.tokens] * completions, size.prompt, size.each)

    def learn():
        for _, minibatch in minibatches(rows, run.method, size.steps, 0, 0, size.each):
            run.update(minibatch)

    def phase(name, measure, *given):
        figures = measure(*given)
        peaks[name] = figures["peak_gb"]
        return figures
    yield f"score: {completions} x {size.tokens}", partial(
        phase, "scoring", rated, run, rows, score, run, rows)
    yield f"update: {size.steps} steps", partial(phase, "update", rated, run, rows, learn)
    yield "wake and sync", partial(phase, "sync", watched, run.hand_over)
    yield "gap", partial(gap, run)
    yield "gap after a sync of other weights", partial(gap_of_others, run)
    for sequences in (256, 512, 1024) if sampler == "vllm" else ():
        yield f"sample: {sequences} x {size.tokens // 4}", partial(
            run.sampling, sequences // size.each, size.tokens // 4)
    yield "peaks, and fit.py's", partial(beside_fit, fit, peaks)
    run.sampler.close()


def start_fit(run):
    """bench/fit.py for the same run, beside everything else."""
    memory = parallel.memory() / 1e9 if on_gpu() else 80
    command = [sys.executable, "bench/fit.py", f"{memory:.1f}", *run.argv,
               f"--dtype={run.args.dtype}", f"--tokens_per_micro_batch={run.policy.budget}"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))


def beside_fit(fit, peaks):
    """peaks [GB of the card]: must be below what fit.py says and the 0.05 that it leaves free."""
    text = fit.communicate()[0]
    rows = dict(re.findall(r"^(scoring|update|sync) .*?([\d.]+)(?:  too much)?$", text, re.M))
    if not rows:
        raise RuntimeError(f"fit.py printed no table: {text[-2000:]}")
    figures = {f"{name}_{side}": gb for name in peaks for side, gb in (
        ("measured", peaks[name]), ("fit", float(rows[name])))}
    room = 0.05 * parallel.memory() / 1e9
    return dict(figures, limits={
        f"{name}_measured": figures[f"{name}_fit"] + room for name in peaks} if on_gpu() else {})


# ---------------------------------------------------------------------------- updates, rounding

def speed(run, batch, layout, norms):
    """A whole update, the second of two. norm_off: relative to the norm of norms' first case."""
    if not norms:
        score(run, batch)
    run.policy.use_layout(layout)
    norms.append(run.update(batch))
    return dict(rated(run, batch, run.update, batch), grad_norm=norms[-1],
                norm_off=abs(norms[-1] / norms[0] - 1), limits=dict(norm_off=0.02))


def updates():
    """Uneven completions, eight of each prompt, with all weights and with adapters."""
    batch, all_weights = uneven_rows(48, 8), ([], ["--activation_checkpointing"])
    models = {sizes().model: all_weights, "0.5B": all_weights}
    for name, variants in (*models.items(), (sizes().lora, [["--lora_rank=16"]])):
        norms = []
        for flags in variants:
            run, label = Run(name, *flags), " ".join((name, *flags))
            yield f"{label}: start", run.start_trainer
            for layout in LAYOUTS[::-1]:
                yield f"{label}: {layout}", partial(speed, run, batch, layout, norms)


def reference(name, batch, **more):
    """-> a run in float32, with the batch's log probabilities and gradient in the layout padded."""
    run = started(name, "--dtype=float32", **more)
    run.policy.use_layout("padded")
    score(run, batch)
    return run, (batch.old_logprobs, run.gradient(batch))


def rounding(run, batch, exact, padded, dtype, layout):
    """times_padded: the larger of the two errors, over those of `padded` in the same dtype."""
    run.policy.dtype = dtype
    run.policy.use_layout(layout)
    figures = errors(run, batch, exact)
    if dtype == "float32":
        return dict(figures, limits=dict(mean=GAPS[dtype], gradient=1e-4))
    if layout == "padded":
        padded.update(figures)
    times = max(figures[x] / padded[x] for x in ("mean", "gradient"))
    return dict(figures, times_padded=times, limits=dict(mean=GAPS[dtype], times_padded=2))


def precision():
    """Layouts and dtypes on one model, and on one whose attention has a window."""
    dtypes = ("float16", "float32") if parallel.default_dtype() == "float16" else GAPS
    lengths = [1, 2, 33, 128, 500, 900, 1000, 64] if on_gpu() else [1, 2, 16, 60]
    window = dict(use_sliding_window=True, sliding_window=50, max_window_layers=0)
    for label, name, more in (("0.5B", "0.5B", {}), ("cut, a window of 50", "cut", window)):
        batch, padded = make_rows(lengths, 3, 2), {}
        run, exact = reference(name, batch, **more)
        for dtype in dtypes:
            for layout in LAYOUTS:
                yield f"{label}: {dtype}, {layout}", partial(
                    rounding, run, batch, exact, padded, dtype, layout)


def sharded(batch, exact, norm, *flags):
    """An update of shards, against one without: in float32 the gradient, in 16 bits its norm."""
    run = started("cut", *flags)
    limits = dict(gradient=1e-4) if run.args.dtype == "float32" else dict(norm_off=0.02)
    return dict(errors(run, batch, exact), norm_off=abs(run.update(batch) / norm - 1),
                **watched(run.update, batch), limits=dict(limits, mean=GAPS[run.args.dtype]))


def world():
    """FSDP2 on one rank, as under torchrun --nproc_per_node 1."""
    batch = uneven_rows(16, 2)
    exact = reference("cut", batch)[1]
    norm = started("cut").update(batch)
    rank = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_PORT="0",
                MASTER_ADDR="127.0.0.1", NCCL_SOCKET_IFNAME="lo")
    with mock.patch.dict(os.environ, rank):
        parallel.start()
        for flags in ("--dtype=float32", "", "--activation_checkpointing", "--offload"):
            yield f"update {flags}", partial(sharded, batch, exact, norm, *flags.split())
        parallel.stop()


def twice(run, batch, layout, **limits):
    """The tensors that differ between two gradients of the same weights."""
    run.policy.use_layout(layout)
    pairs = [*zip(run.gradient(batch), run.gradient(batch), strict=True)]
    return dict(tensors=len(pairs), differ=sum(not torch.equal(a, b) for a, b in pairs),
                **watched(run.gradient, batch), limits=limits)


def repeat():
    run, batch = started("cut"), uneven_rows(32, 2)
    for layout in LAYOUTS:
        yield layout, partial(twice, run, batch, layout)
    parallel.start(deterministic=True)
    for layout in LAYOUTS:
        yield f"{layout} --deterministic", partial(twice, run, batch, layout, differ=1)
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------------- the parts

PARTS = {  # name: its limit on a GPU in seconds, -> an iterator over (case, function -> figures)
    "machine": (20, machine), "train": (85, train), "rollout": (140, rollout),
    "updates": (80, updates), "precision": (85, precision), "world": (45, world),
    "repeat": (75, repeat)}


def report(out, part, case, measure):
    """Calls measure -> its figures, a dict in which `limits` says what some must be below. Prints
    them as a row, and appends them to the file `out` as a line of JSON."""
    figures, failed, error = {}, "", ""
    try:
        figures = measure() or {}
    except Exception as e:  # the other cases go on
        failed, error = f"{type(e).__name__}: {e}".split("\n")[0][:300], traceback.format_exc()
    limits = figures.pop("limits", {})
    if beyond := [name for name, limit in limits.items() if not figures[name] < limit]:
        failed = f"not below the limit: {', '.join(beyond)}"
    with open(out, "a") as file:
        file.write(json.dumps(dict(part=part, case=case, failed=failed, figures=figures,
                                   limits=limits, error=error)) + "\n")
    told = [f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}"
            for name, x in figures.items()]
    told += [f"{name} < {limit:.3g}" for name, limit in limits.items()]
    cells = (part, case, ", ".join(told), f"failed: {failed}" if failed else "ok")
    print("|", " | ".join(cell.replace("|", "\\|") for cell in cells), "|", flush=True)


def run_part(script, name, limit, out):
    """A part in a process, which ends with all that it started, and whose models are deleted."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, script, "--here", "--parts", name, "--out", out]
        process = subprocess.Popen(command, env=dict(os.environ, TMPDIR=folder), process_group=0)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"stopped after {limit} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise RuntimeError(f"its process ended with code {code}")


def main(script, doc, parts, out):
    """-> the exit code: 1 where a case failed."""
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts], help="some of them")
    parser.add_argument("--out", type=Path, default=Path(out), help="a line of JSON for each case")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1",
                      VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not on_gpu():
        parser.error("there is no GPU here that torch can use; --rehearse tries the parts on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not args.here:
        args.out.write_text("")
        print("| part | case | figures, and limits | result |\n|---|---|---|---|", flush=True)
    for name in args.parts:
        limit, cases = parts[name]
        if args.here or args.rehearse:
            for case, measure in cases():
                report(args.out, name, case, measure)
                del measure  # it may hold a model
                free_memory()
        else:
            report(args.out, name, "whole part", partial(run_part, script, name, limit, args.out))
    if args.here:
        return 0
    failed = sum(bool(json.loads(line)["failed"]) for line in args.out.read_text().splitlines())
    print(f"\n{failed} cases failed; to report it, open an issue with this table and {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, PARTS, "gpu.jsonl"))

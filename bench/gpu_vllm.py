"""Do vLLM and the trainer get along on a GPU? About a quarter of an hour on one or more NVIDIA
GPUs, with vLLM and without network.

    python bench/gpu_vllm.py --out gpu_vllm.json            on NVIDIA GPUs
    python bench/gpu_vllm.py --small                        tiny shapes, also on a CPU; two minutes
    python bench/gpu_vllm.py --parts gap_bfloat16,cycle_1.5B   some of the parts

To report the result, open an issue with the JSON file and the table: also, and above all, where
parts failed.

Parts, their processes and their files are as in bench/gpu.py; no engine shares a process with
another. Models have random weights: gaps between log probabilities are those of a spread like a
language model's, not those of a language model. "ok" says that a case ran, and that its figures are
within the limit, where it has one: log probabilities of engine and trainer may differ by what
`train.py --check` allows, and a repetition that should give the same bits must. "skipped" says what
is missing here.
"""

import importlib.util
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import gpu
from gpu import NotHere, Part, Wrong, free_memory, need_cuda, on_gpu, seconds_of, sync

from engine import loading, parallel
from engine.policy import compute_logprobs, make_batch
from engine.sampler import make_sampler

EOS = 1


def need_bfloat16():
    if on_gpu() and torch.cuda.get_device_capability() < (8, 0):
        raise NotHere("needs a GPU of compute capability 8.0 or more")


# ---------------------------------------------------------------------------- a policy, an engine

def make_folder(name, small):
    """The Hugging Face folder of a model with random weights in bfloat16, without a tokenizer."""
    folder = tempfile.mkdtemp(dir=os.environ.get("PART_FOLDER"))
    gpu.opinions(name, small, "float32").model.bfloat16().save_pretrained(folder)
    free_memory()
    return folder


def random_prompts(count, small):
    """`count` lists of 3 to 10 token ids, or of 16 to 80."""
    shortest, longest, size = (3, 10, 500) if small else (16, 80, 32000)
    g = torch.Generator().manual_seed(2)
    lengths = [shortest + i % (longest - shortest + 1) for i in range(count)]
    return [torch.randint(5, size, (n,), generator=g).tolist() for n in lengths]


class Pair:
    """A policy and an engine of the same weights, as train.py makes them. dtype: of both."""

    def __init__(self, name, small, dtype, **engine):
        self.name, self.small, self.dtype, self.settings = name, small, dtype, engine
        self.folder = self.policy = self.sampler = None
        self.longest = 64 if small else gpu.LONGEST

    def load_policy(self):
        self.folder = self.folder or parallel.on_rank0(
            lambda: make_folder(self.name, self.small))
        self.policy = loading.load(
            self.folder, [EOS], loading.probe_batch(list(range(5, 69)), EOS), longest=self.longest,
            budget=512 if self.small else None, dtype=self.dtype)
        return dict(parameters=sum(p.numel() for p in self.policy.parameters()),
                    tokens_at_once=self.policy.budget, layout=self.policy.layout)

    def start_engine(self):
        """-> what runs: mode 3 is vLLM's own compilation, 0 is none."""
        self.sampler = make_sampler("vllm", self.folder, dtype=self.dtype, eos=[EOS],
                                    max_length=self.longest, **self.settings)
        config = self.sampler.engine.llm_engine.vllm_config
        return dict(dtype=self.dtype, compilation=int(config.compilation_config.mode),
                    cuda_graphs=str(config.compilation_config.cudagraph_mode),
                    second_runner=on_gpu() and config.use_v2_model_runner,
                    max_num_seqs=config.scheduler_config.max_num_seqs,
                    cache_tokens=(config.cache_config.num_gpu_blocks or 0)
                    * config.cache_config.block_size)

    def start(self):
        return dict(self.load_policy(), **self.start_engine())

    def hand_over(self):
        self.sampler.load_weights(parallel.weights(self.policy))

    def sample(self, prompts, n=1, seed=1, temperature=1.0, max_tokens=None):
        """-> n Completions for each prompt. What was cached of prompts is forgotten first: it is
        after a sync, too."""
        self.sampler.engine.reset_prefix_cache()
        return self.sampler.sample(prompts, n, seed=seed, temperature=temperature,
                                   max_tokens=max_tokens or (16 if self.small else 256))

    def close(self):
        if self.sampler:
            self.sampler.close()


# ---------------------------------------------------------------------------- log probabilities

def sampled_batch(pair, prompts):
    """A Batch of 4 completions of each prompt; each engine samples its share of the prompts."""
    def on_engine(share, engine):
        return pair.sample(share, 4, seed=1 + engine)
    groups = parallel.map_over_engines(on_engine, prompts, pair.settings.get("tp", 1))
    rows = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    return make_batch(*zip(*rows, strict=True), parallel.device())


def gap_figures(pair, batch):
    """Differences [nats] of a token's log probability: of the policy's from the engine's."""
    logprobs = compute_logprobs(pair.policy, batch)[0][batch.mask]
    off = (logprobs - batch.sampler_logprobs[batch.mask]).abs()
    return dict(mean=off.mean().item(), max=off.max().item(), tokens=len(off),
                logprob_mean=logprobs.mean().item(), logprob_std=logprobs.std().item())


def within(pair, figures):
    """The limits of train.py --check."""
    if pair.dtype == "float32":
        return figures["max"] < 1e-3
    return figures["mean"] < 0.05


def gap(pair, prompts, before=None):
    """The gap of fresh completions. before: what is done to both sides first."""
    if before:
        before(pair)
    figures = gap_figures(pair, sampled_batch(pair, prompts))
    if not within(pair, figures):
        raise Wrong("engine and policy differ", figures)
    return figures


def change(pair, factor):
    with torch.no_grad():
        for p in pair.policy.parameters():
            p.mul_(factor)


def gap_after_sync(pair, prompts):
    """other_weights: the gap of completions of the weights before, which has to be seen."""
    batch = sampled_batch(pair, prompts)
    change(pair, -1.0)
    stale = gap_figures(pair, batch)
    pair.hand_over()
    figures = gap_figures(pair, sampled_batch(pair, prompts))
    figures["other_weights"] = stale["mean"]
    if within(pair, stale):
        raise Wrong("other weights are not seen", figures)
    if not within(pair, figures):
        raise Wrong("engine and policy differ", figures)
    return figures


def sleep_and_wake(pair, factor=1.0):
    """As in the loop: the weights change while the engine is asleep."""
    need_cuda()
    pair.sampler.sleep()
    change(pair, factor)
    pair.sampler.wake()
    pair.hand_over()


def gap_cases(pair, prompts):
    yield "gap at the start", partial(gap, pair, prompts)
    yield "gap after a sync", partial(gap_after_sync, pair, prompts)
    yield ("gap after sleep, wake and a sync",
           partial(gap, pair, prompts, partial(sleep_and_wake, factor=-0.9)))


def gaps(small, dtype):
    pair = Pair("0.5B", small, dtype)
    yield f"policy and engine in {dtype}", partial(start, pair, dtype == "bfloat16")
    if pair.sampler:
        yield from gap_cases(pair, random_prompts(8 if small else 64, small))
    pair.close()


def start(pair, bfloat16):
    if bfloat16:
        need_bfloat16()
    return pair.start()


# ---------------------------------------------------------------------------- memory, seconds

def used():
    """Bytes of the GPU that are not free, whoever has them."""
    sync()
    free, total = torch.cuda.mem_get_info()
    return total - free


class Watch:
    """The most bytes of the GPU that were in use at once, looked at every five milliseconds."""

    def __enter__(self):
        self.most, self.ended = used(), threading.Event()
        self.thread = threading.Thread(target=self.look, args=(torch.cuda.current_device(),))
        self.thread.start()
        return self

    def look(self, device):
        while not self.ended.wait(0.005):
            free, total = torch.cuda.mem_get_info(device)
            self.most = max(self.most, total - free)

    def __exit__(self, *error):
        self.ended.set()
        self.thread.join()


def memory(first=0, **figures):
    """In GB. used: of the GPU; own: of that, since `first`; torch counts what a sleeping engine
    has given back."""
    now = used()
    return dict(figures, used=now / 1e9, own=(now - first) / 1e9,
                torch_allocated=torch.cuda.memory_allocated() / 1e9,
                torch_reserved=torch.cuda.memory_reserved() / 1e9)


def update_beside(pair, first, state):
    """The largest update beside a sleeping engine: what it takes, and what peak_memory says."""
    row = pair.longest
    batch = gpu.make_rows([row - row // 8] * max(1, pair.policy.budget // row), 500, row // 8)
    if "optimizing" not in state:
        state["optimizing"] = gpu.optimizing_of(pair.policy)
    began = time.perf_counter()
    with Watch() as watch:
        norm = gpu.update(pair.policy, state["optimizing"], batch)
    figures = memory(first, peak_memory=parallel.peak_memory() / 1e9, peak_used=watch.most / 1e9,
                     torch_peak=torch.cuda.max_memory_allocated() / 1e9, grad_norm=norm,
                     tokens=gpu.tokens_of(batch), s=time.perf_counter() - began)
    if parallel.peak_memory() > parallel.memory():
        raise Wrong("peak_memory is more than the GPU has", figures)
    return figures


def memory_cases(pair, state):
    """One rollout's way through the memory, then another with the optimizer's moments there."""
    if not on_gpu():
        yield "memory", need_cuda
        return
    pair.folder = make_folder(pair.name, pair.small)
    first, prompts = used(), random_prompts(64, pair.small)

    def after(action):
        result = action()
        return memory(first, **(result if isinstance(result, dict) else {}))
    yield "memory before", partial(after, free_memory)
    yield "memory with the policy", partial(after, pair.load_policy)
    yield "memory with an engine", partial(after, pair.start_engine)
    if not pair.sampler:
        return
    for number in ("first", "second"):
        yield (f"memory when it has sampled, {number} time",
               partial(after, lambda: pair.sample(prompts, 8) and None))
        yield f"memory asleep, {number} time", partial(after, pair.sampler.sleep)
        yield (f"memory of an update beside it, {number} time",
               partial(update_beside, pair, first, state))
        yield f"memory awake for weights, {number} time", partial(after, pair.sampler.wake)
        yield f"memory awake, {number} time", partial(after, pair.hand_over)


def sync_seconds(pair):
    pair.hand_over()
    size = sum(x.numel() * x.element_size() for x in pair.policy.model.state_dict().values())
    seconds = seconds_of(pair.hand_over, 2)
    return dict(s=seconds, gb=size / 1e9, gb_per_s=size / 1e9 / seconds)


def sleep_seconds(pair):
    """The second time, which is like all that follow. sync: the KV cache's waking with it."""
    need_cuda()
    for _ in range(2):
        figures = {name: seconds_of(call) for name, call in (
            ("sleep", pair.sampler.sleep), ("wake", pair.sampler.wake), ("sync", pair.hand_over))}
    return figures


def cycle(small, name):
    """Memory and seconds of a shape in the default dtype, with the moments of an optimizer."""
    pair, state = Pair(name, small, parallel.default_dtype()), {}
    yield from memory_cases(pair, state)
    if not on_gpu():
        yield "policy and engine", pair.start
    if pair.sampler:
        yield "seconds of a sync", partial(sync_seconds, pair)
        yield "seconds of sleep, wake and sync", partial(sleep_seconds, pair)
        yield "gap after all that", partial(gap, pair, random_prompts(8, small))
    pair.close()


# ---------------------------------------------------------------------------- the same twice

def compared(a, b):
    """Two lists of Completions -> how many have the same tokens, and the largest difference of log
    probabilities before the first token that differs."""
    off, same = 0.0, 0
    for x, y in zip(a, b, strict=True):
        same += x.tokens == y.tokens
        for i, token in enumerate(x.tokens):
            if i >= len(y.tokens) or y.tokens[i] != token:
                break
            off = max(off, abs(x.logprobs[i] - y.logprobs[i]))
    return dict(identical=same == len(a) and off == 0, same_tokens=f"{same} of {len(a)}",
                logprobs_max=off)


def repeated(must, sample, again):
    """must: is anything but the same an error?"""
    figures = compared(sample(), again())
    if must and not figures["identical"]:
        raise Wrong("not the same", figures)
    return figures


def flat(groups):
    return [c for group in groups for c in group]


def repeat_cases(pair, small, invariant):
    """Draws depend on the place in the batch: across batches only the most likely tokens can be
    the same, so temperature is 0 there."""
    prompts = random_prompts(6 if small else 64, small)

    def sample():
        return flat(pair.sample(prompts, 4, seed=5))

    def greedy(some=prompts):
        return flat(pair.sample(some, temperature=0.0))
    yield "same seed twice", partial(repeated, invariant or not on_gpu(), sample, sample)

    def after_sleep():
        sleep_and_wake(pair)
        return sample()
    yield "same seed, after a sleep", partial(repeated, invariant, sample, after_sleep)
    yield ("most likely tokens, in another order",
           partial(repeated, invariant, greedy, lambda: greedy(prompts[::-1])[::-1]))
    yield ("most likely tokens, one prompt at a time",
           partial(repeated, invariant, lambda: greedy(prompts[:4]),
                   lambda: [c for prompt in prompts[:4] for c in greedy([prompt])]))


def repeat(small, invariant=False, deterministic=False):
    """invariant: vLLM was told to be; deterministic: so was torch, as by --deterministic."""
    pair = Pair("0.5B", small, parallel.default_dtype())
    if deterministic:
        parallel.start(deterministic=True)
    yield "policy and engine", partial(start, pair, invariant)
    if pair.sampler:
        yield from repeat_cases(pair, small, invariant)
    pair.close()


# ---------------------------------------------------------------------------- two ranks

def two_ranks(small, tp):
    """An odd number of prompts: the engines have different ones. tp: ranks of one engine."""
    parallel.start()
    pair = Pair("0.5B", small, parallel.default_dtype(), tp=tp)
    yield "policies and engines", pair.start
    if all(parallel.gather(pair.sampler is not None)):
        prompts = random_prompts(7 if small else 33, small)
        engines = 2 // tp
        yield "prompts", lambda: dict(of_each_engine=[len(prompts[e::engines])
                                                      for e in range(engines)])
        yield from gap_cases(pair, prompts)
    pair.close()
    parallel.stop()


# ---------------------------------------------------------------------------- whole runs, speed

def run(small):
    yield "whole run", partial(gpu.whole_run, small, "--sampler", "vllm")


def check(small):
    yield from gpu.check(small, "--sampler", "vllm")


def speed_case(pair, prompts, n, tokens):
    pair.sample(prompts, 2, max_tokens=8)
    count = 0

    def go():
        nonlocal count
        count = sum(len(c.tokens) for c in flat(pair.sample(prompts, n, max_tokens=tokens)))
    seconds = seconds_of(go)
    return dict(tokens_per_s=count / seconds, tokens=count, s=seconds, completions=n * len(prompts))


def speed(small, max_num_seqs):
    """A rollout of 64 problems x 16 completions: random weights hardly ever end one early."""
    pair = Pair("1.5B", small, parallel.default_dtype(), max_num_seqs=max_num_seqs)
    pair.folder = make_folder(pair.name, small)
    yield "engine", pair.start_engine
    if pair.sampler:
        yield "sampling", partial(speed_case, pair, random_prompts(64, small),
                                  4 if small else 16, 8 if small else 512)
    pair.close()


# ---------------------------------------------------------------------------- the parts

HERE = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}  # nothing asks for a network
INVARIANT = dict(HERE, VLLM_BATCH_INVARIANT="1")


# why a part is not started: asked before there is a process, so nothing here makes one use a GPU

def a_gpu(small):
    return None if on_gpu() else "needs a GPU"


def a_cpu(small):
    return "on a CPU alone: nobody samples in float32 on a GPU" if on_gpu() else None


def two_gpus(small):
    count = torch.cuda.device_count()
    return None if count > 1 else f"needs 2 GPUs, and there {'is 1' if count else 'is none'}"


def two_gpus_or_none(small):
    return two_gpus(small) if on_gpu() else None


def large_shapes(small):
    return "left out with --small, where all shapes are the same" if small else None


def part(cases, seconds, ranks=0, env=HERE, lacks=gpu.nothing, **settings):
    return Part(partial(cases, **settings), seconds, ranks, env, lacks)


PARTS = {  # the most important ones first
    "machine": part(gpu.machine, 90),
    "gap_bfloat16": part(gaps, 240, dtype="bfloat16"),
    "cycle_1.5B": part(cycle, 300, name="1.5B"),
    "run": part(run, 300),
    "check": part(check, 240),
    "ranks": part(two_ranks, 240, 2, lacks=two_gpus_or_none, tp=1),
    "tp": part(two_ranks, 240, 2, lacks=two_gpus, tp=2),
    "gap_float16": part(gaps, 240, dtype="float16"),
    "gap_float32": part(gaps, 240, lacks=a_cpu, dtype="float32"),
    "repeat": part(repeat, 240),
    "repeat_invariant": part(repeat, 240, env=INVARIANT, lacks=a_gpu, invariant=True),
    "repeat_deterministic": part(repeat, 240, env=INVARIANT, lacks=a_gpu, invariant=True,
                                 deterministic=True),
    "speed_256": part(speed, 240, max_num_seqs=256),
    "speed_1024": part(speed, 240, lacks=large_shapes, max_num_seqs=1024),
    "cycle_0.5B": part(cycle, 240, lacks=large_shapes, name="0.5B"),
    # the model runner that VLLM_USE_V2_MODEL_RUNNER=0 goes back to
    "first_runner": part(gaps, 240, env=dict(HERE, VLLM_USE_V2_MODEL_RUNNER="0"), lacks=a_gpu,
                         dtype="bfloat16"),
}
SUITE = gpu.Suite(__file__, __doc__, PARTS, 25, "gpu_vllm.json")


def main():
    if not importlib.util.find_spec("vllm"):
        print("bench/gpu_vllm.py: vllm is not installed; pip install -r requirements.txt brings "
              "it, and bench/gpu.py needs none", file=sys.stderr)
        return 2
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return gpu.main(SUITE)


if __name__ == "__main__":
    sys.exit(main())

"""Do vLLM and the trainer get along on a GPU, and how fast? At most nine minutes on one GPU, with
vLLM and without network.

    python bench/gpu_vllm.py                       on an NVIDIA GPU
    python bench/gpu_vllm.py --rehearse            every part on a CPU, with tiny shapes
    python bench/gpu_vllm.py --parts rollout gaps  some of the parts

Parts, limits, sizes and files are as in bench/gpu.py; gpu_vllm.json and gpu_vllm.md have the
result. The first part starts cold where vLLM's cache of compiled code is empty; "graphs" starts the
same model again.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import gpu
from gpu import Run, held, on_gpu, watched

from engine import parallel

SMALL = "0.5B"


def synced(run):
    """Sleep, wake, and a sync, as after an update."""
    run.sampler.sleep()
    run.hand_over()


def gaps(*flags):
    """A short way to the gap of trainer and sampler with other flags on both."""
    run = Run(SMALL, "--sampler=vllm", *flags, weights=True)
    yield f"start: trainer {' '.join(flags)}", run.start_trainer
    yield "start: sampler", run.start_sampler
    if run.sampler:
        yield "gap at the start", partial(gpu.gap_after, run)
        yield "gap after sleep, wake and a sync", partial(gpu.gap_after, run, synced)
        yield "gap after a sync of other weights", partial(gpu.gap_of_others, run)
        yield from more_cases(run) if not flags else ()
        run.sampler.close()


# ---------------------------------------------------------------------------- adapters, repetition

def learn_adapters(run):
    """50 updates of adapters, whose weights then go to the run's engine."""
    lora = Run(SMALL, "--sampler=vllm", "--lora_rank=16", "--lr=1e-3")
    run.sampler.sleep()
    lora.start_trainer()
    batch = gpu.make_rows([run.size.tokens // 4] * 8, run.size.prompt, 4)
    norms = [lora.update(batch) for _ in range(50 if on_gpu() else 3)]
    lora.sampler = run.sampler
    lora.hand_over()
    return dict(gpu.gap_after(lora), updates=len(norms), first_norm=norms[0], last_norm=norms[-1])


def repeated(run, action=lambda run: None):
    """The same seed twice: completions, and their log probabilities, must be the same."""
    first = run.sample(4, run.size.tokens // 4)
    action(run)
    second = run.sample(4, run.size.tokens // 4)
    same = all(map(torch.equal, (first.ids, first.sampler_logprobs),
                   (second.ids, second.sampler_logprobs)))
    return held(dict(differ=int(not same)), differ=1)


def update_beside(run):
    run.sampler.sleep()
    batch = gpu.make_rows(gpu.uneven_lengths(8), run.size.prompt, 4)
    return watched(lambda: run.update(batch))


def more_cases(run):
    yield "gap after 50 updates of adapters", partial(learn_adapters, run)
    run.hand_over()
    parallel.start(deterministic=True)
    yield "--deterministic: the same seed twice", partial(repeated, run)
    yield "--deterministic: the same seed, after sleep and sync", partial(repeated, run, synced)
    yield "--deterministic: an update beside the engine", partial(update_beside, run)
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------------- sampling

def graphs():
    """The largest model again, with the CUDA graphs that vLLM captures by itself."""
    import vllm
    llm = vllm.LLM
    run = Run(gpu.sizes().model, "--sampler=vllm", weights=True)
    with mock.patch.object(vllm, "LLM", lambda *given, compilation_config=None, **named: llm(
            *given, **named)):
        yield "start: vLLM's own graphs", run.start_sampler
    if run.sampler:
        for sequences in (256, 512, 1024) if on_gpu() else (4, 8):
            yield f"sample: {sequences} x 256", partial(
                run.sampling, sequences // run.size.each, 256 if on_gpu() else 8)
        run.sampler.close()


PARTS = {  # other flags on both sides are one line here
    "rollout": (270, partial(gpu.rollout, "vllm")),
    "gaps": (95, gaps),
    "train": (60, partial(gpu.whole, "vllm")),
    "graphs": (65, graphs),
    "float16": (45, partial(gaps, "--dtype=float16")),
}


def main():
    if not importlib.util.find_spec("vllm"):
        print("bench/gpu_vllm.py: vllm is not installed; pip install -r requirements.txt brings "
              "it, and bench/gpu.py needs none", file=sys.stderr)
        return 2
    return gpu.main(__file__, __doc__, PARTS, "gpu_vllm.json")


if __name__ == "__main__":
    sys.exit(main())

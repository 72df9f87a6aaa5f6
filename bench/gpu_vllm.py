"""Do vLLM and the trainer get along on a GPU, and how fast? At most nine minutes, no network.

    python bench/gpu_vllm.py                       on an NVIDIA GPU
    python bench/gpu_vllm.py --rehearse            every part on a CPU, with tiny shapes
    python bench/gpu_vllm.py --parts rollout gaps  some of the parts

Parts, limits, sizes and output are as in bench/gpu.py; the file is gpu_vllm.jsonl.
"""

import sys
from functools import partial

import gpu  # it puts the root into sys.path
import torch

from engine import parallel
from engine.sampler import has_vllm


def learn_adapters(run):
    """50 updates of adapters, whose weights then go to the run's engine."""
    lora = gpu.Run("0.5B", "--sampler=vllm", "--lora_rank=16", "--lr=1e-3")
    run.sampler.sleep()
    lora.start_trainer()
    batch = gpu.make_rows([run.size.tokens // 4] * 8, run.size.prompt, 4)
    norms = [lora.update(batch) for _ in range(50 if gpu.on_gpu() else 3)]
    lora.sampler = run.sampler
    lora.hand_over()
    return dict(gpu.gap(lora), updates=len(norms), first_norm=norms[0], last_norm=norms[-1])


def repeated(run):
    """The same seed twice, and after a sleep and a sync: log probabilities must be the same."""
    first, again = (run.sample(4, run.size.tokens // 4).sampler_logprobs for _ in range(2))
    run.sampler.sleep()
    run.hand_over()
    slept = run.sample(4, run.size.tokens // 4).sampler_logprobs
    return dict(again=int(not first.equal(again)), slept=int(not first.equal(slept)),
                limits=dict(again=1, slept=1))


def gaps(*flags):
    """A short way to the gap of trainer and sampler with other flags on both."""
    run = gpu.started("0.5B", "--sampler=vllm", *flags, weights=True)
    yield "start: sampler", run.start_sampler
    if not run.sampler:
        return
    yield "gap", partial(gpu.gap, run)
    yield "gap after a sync of other weights", partial(gpu.gap_of_others, run)
    if not flags:
        yield "gap after 50 updates of adapters", partial(learn_adapters, run)
        run.hand_over()
        parallel.start(deterministic=True)
        yield "--deterministic: differences with the same seed", partial(repeated, run)
        torch.use_deterministic_algorithms(False)
    run.sampler.close()


PARTS = {  # other flags on both sides are one line here
    "machine": (40, gpu.machine), "rollout": (250, partial(gpu.rollout, "vllm")),
    "gaps": (140, gaps), "float16": (105, partial(gaps, "--dtype=float16"))}


if __name__ == "__main__":
    if not has_vllm():
        print("bench/gpu_vllm.py: vllm is not installed; bench/gpu.py needs none", file=sys.stderr)
        sys.exit(2)
    sys.exit(gpu.main(__file__, __doc__, PARTS, "gpu_vllm.jsonl"))

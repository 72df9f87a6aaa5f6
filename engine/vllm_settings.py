"""vLLM's settings that depend on the machine, a GPU or a CPU, and adapters as vLLM reads them."""

import json
import os
import tempfile
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import cuda

# sequences of a CUDA graph; vLLM's own end at 512 on most cards, and larger batches run eagerly
GRAPHS = (*(2**i for i in range(11)), 192, 384, 768)
NUMBERS = count(1)  # of adapters: vLLM keeps those of a number
SMALL = 50e9  # bytes of a card where the memory of CUDA graphs is worth its way to the CPU and back


def of_text_model(overrides, config):
    """-> the configuration of a model's text model: its own where it has no other parts."""
    text = config.get_text_config()
    text.update(overrides)
    return text


def of_this_machine(max_length, gpu_memory_utilization=0.4, max_num_seqs=None, tp=1):
    """-> arguments of vllm.LLM. Raises ValueError where less memory is free.

    gpu_memory_utilization: fraction of a GPU's memory; None: what is free. max_num_seqs: sequences
    that it works on at once; None: by its memory. tp: ranks that it is spread over."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights stay in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not cuda.is_available():
        # without it, vLLM binds this process to one core, and the trainer with it
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        # compiling takes longer than it saves; completions share full blocks of their prompt,
        # and few prompts fill vLLM's default of 128 tokens
        return dict(gpu_memory_utilization=gpu_memory_utilization or 0.9, tensor_parallel_size=tp,
                    max_num_seqs=max_num_seqs or 1024, enforce_eager=True, block_size=32,
                    max_num_batched_tokens=max(16384, max_length))
    cuda.empty_cache()  # else what torch keeps is not free
    free, total = cuda.mem_get_info()
    # vLLM wants all of it free when it starts
    share = gpu_memory_utilization or min(0.9, free / total - 0.02)
    if not 0 < share <= free / total:
        raise ValueError(
            f"has no room for vLLM: {free / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB are free, "
            f"and it is to take {max(share, 0.02) * total / 1e9:.1f} GB; other programs on the GPU "
            "may be stopped, and in train.py --gpu_memory_utilization is its fraction")
    # vLLM's own 256 leave a small model idle
    sequences = max_num_seqs or (256 if share * total < 12e9 else 1024)
    return dict(gpu_memory_utilization=share, max_num_seqs=sequences, tensor_parallel_size=tp,
                enable_sleep_mode=True, sleep_mode_offload_cudagraph=total < SMALL,
                compilation_config=dict(
                    cudagraph_capture_sizes=sorted({min(n, sequences) for n in GRAPHS})))


def empty_model(config):
    """A model without memory, which knows the names of its weights in a checkpoint."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def as_saved(model, weights, adapters):
    """-> the pairs (name, weight) of a checkpoint, which has each expert by itself, for those of a
    policy. Its adapters go to a dict. Raises ValueError for a mixture of experts on a CPU."""
    from transformers.core_model_loading import revert_weight_conversion

    from engine.loading import experts_of
    if experts_of(model) and not cuda.is_available():
        raise ValueError("is a mixture of experts, which vLLM packs only once on a CPU: weights of "
                         "a trainer would overwrite them unpacked. --sampler transformers takes it")

    def pairs():
        for name, weight in weights:
            if "lora_" in name:
                adapters[f"base_model.model.{name}"] = weight.contiguous()  # PEFT's name
            else:
                name = name.replace(".base_layer", "")
                yield from revert_weight_conversion(model, {name: weight}).items()
    return pairs()


def request_of(adapters, rank, alpha):
    """-> vLLM's request for adapters, and the folder that it is for, in PEFT's format."""
    from vllm.lora.request import LoRARequest
    folder, number = tempfile.TemporaryDirectory(prefix="nanorlvr-"), next(NUMBERS)
    save_file(adapters, Path(folder.name, "adapter_model.safetensors"))
    config = dict(r=rank, lora_alpha=alpha,
                  target_modules=sorted({name.split(".")[-3] for name in adapters}))
    Path(folder.name, "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(str(number), number, folder.name), folder

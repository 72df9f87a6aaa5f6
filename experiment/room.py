"""Can a model fit at all? Refused by arithmetic, before its weights are read."""

import torch

GB = 1e9


def parameters_of(model):
    """The number of a model's parameters, from its configuration alone: folder or id. Raises
    ValueError, a sentence, for what is no causal language model."""
    from transformers import AutoConfig, AutoModelForCausalLM
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    except ValueError as e:  # its other lines list what there is
        raise ValueError(f"--model {model} is no causal language model: "
                         f"{str(e).splitlines()[0]}") from None
    return sum(p.numel() for p in empty.parameters())


def bytes_needed(args, parameters, ranks=1, sharded=False):
    """-> bytes of a GPU that the trainer holds during an update, and beside an engine that is
    awake, without what grows with the tokens.

    Weights and AdamW's two moments are float32; gradients, too, and they are gone before the
    engine wakes. Frozen weights are in the dtype of the computation, unless they are sharded."""
    half = args.dtype != "float32" and not sharded
    frozen, trained = 2 if half else 4, 0 if args.lora_rank else 1
    weights = (4 if trained else frozen) + frozen * bool(args.kl_coef)
    per_rank = parameters / ranks * (not args.offload)
    return per_rank * (weights + 12 * trained), per_rank * (weights + 8 * trained)


def refusal(args, parameters, memory, ranks=1, sharded=False):
    """-> the sentence that says why a model cannot fit into a GPU of so many bytes, or None."""
    update, beside_engine = bytes_needed(args, parameters, ranks, sharded)
    sampler_weights = parameters * (4 if args.sampler_dtype == "float32" else 2) / args.tp
    engine = memory * args.gpu_memory_utilization
    if args.sampler != "vllm":  # it never sleeps
        engine, update = sampler_weights, update + sampler_weights
    trainer = (f"--model {args.model} has {parameters / GB:.2f}e9 parameters: weights, gradients, "
               f"AdamW's moments{' and the reference' if args.kl_coef else ''} take "
               f"{update / GB:.1f} GB of a GPU of {memory / GB:.0f} GB")
    more = "--lora_rank, --offload (with torchrun) or more GPUs make room"
    if args.sampler == "vllm" and engine < 1.1 * sampler_weights:
        return (f"--gpu_memory_utilization {args.gpu_memory_utilization} gives vLLM "
                f"{engine / GB:.1f} GB of {memory / GB:.0f}, and the weights of --model "
                f"{args.model} alone take {sampler_weights / GB:.1f}: more of it, or --tp")
    if update > 0.9 * memory:
        return f"{trainer}; {more}"
    if beside_engine + engine > 0.97 * memory:
        return (f"{trainer}, and {beside_engine / GB:.1f} GB stay while vLLM samples with "
                f"{engine / GB:.1f} (--gpu_memory_utilization {args.gpu_memory_utilization}): "
                f"a smaller share, {more}")
    return None

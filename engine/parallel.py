"""Many ranks. torchrun starts a process for each GPU. Each rank has a shard of the weights (FSDP2)
and a sampler, samples its share of the problems, and puts its share of each optimizer step through
the model. Every rank gathers all completions and log probabilities, and computes advantages and
metrics of the whole. With one process the collectives change nothing.
"""

import glob
import hashlib
import os
import platform
import resource
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import cuda


def start(deterministic=False):
    """Joins the process group of torchrun or srun. deterministic: GPU kernels sum in one order."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ and not dist.is_initialized():
        if cuda.is_available():
            cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # the slowest rank may sample and grade for hours, beyond NCCL's ten minutes
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo",
                                timeout=timedelta(hours=4))


def stop():
    """Leaves the process group, all ranks together. The pause and the second barrier wait for
    gloo's thread, which frees the last tensors under Python's lock and aborts if Python ends."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.1)
        dist.barrier()
        dist.destroy_process_group()


def rank():
    return int(os.environ.get("RANK", 0))


def world():
    """The number of ranks, from the environment: flags are checked before start()."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def sharded():
    """Whether weights are sharded: wherever torchrun started this process, also alone. Without it,
    vLLM's engine makes a group of its own."""
    return "RANK" in os.environ and dist.is_initialized()


def seed_of(*parts):
    """A seed from (seed, rollout, ...): the same in every process, unrelated to its neighbours."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


def say(text):
    if rank() == 0:
        print(text, flush=True)


def device():
    return torch.device(cuda.current_device() if cuda.is_available() else "cpu")


def default_dtype():
    """Of computation: float32 on a CPU, bfloat16 on a GPU that has it, float16 on older ones."""
    if not cuda.is_available():
        return "float32"
    return "bfloat16" if cuda.get_device_capability() >= (8, 0) else "float16"


def unusable_gpu():
    """A sentence on why torch cannot use this machine's GPU; None if it can, or without one."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if cuda.is_available() or hidden or not glob.glob("/dev/nvidia[0-9]*"):
        return None
    why = (f"its driver may be too old for CUDA {torch.version.cuda}" if torch.version.cuda
           else f"torch {torch.__version__} is built without CUDA: pip install -r requirements.txt")
    return (f"torch cannot use the GPU that is there: {why}. CUDA_VISIBLE_DEVICES= in front runs "
            "on the CPU all the same, with --sampler transformers where vLLM is built for GPUs")


def memory():
    """Bytes of this rank's GPU, or its share of half the machine's memory."""
    if cuda.is_available():
        return cuda.get_device_properties(device()).total_memory
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / ranks_here


def usable_memory():
    """`memory`, of a GPU without the part that other programs use at this moment."""
    return cuda.mem_get_info()[0] + cuda.memory_reserved() if cuda.is_available() else memory()


UNCOUNTED = 0  # GPU bytes in use that torch does not count; negative: counted, and unmapped by vLLM


def watch_memory():
    """Restarts peak_memory beside a sleeping vLLM, whose freed memory torch counts (its #17117)."""
    global UNCOUNTED
    free, total = cuda.mem_get_info()
    cuda.reset_peak_memory_stats()
    UNCOUNTED = total - free - cuda.memory_allocated()


def peak_memory():
    """Peak bytes: of the GPU since watch_memory, or of this process."""
    if cuda.is_available():
        return cuda.max_memory_allocated() + UNCOUNTED
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def all_reduce(x):
    """The sum of a tensor over the ranks, in place."""
    if world() > 1:
        dist.all_reduce(x)
    return x


def gather(value):
    """The values of all ranks, any picklable thing, in their order."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def on_rank0(f, *inputs):
    """Calls f on rank 0. Every rank returns its result, or raises its error."""
    value = error = None
    if rank() == 0:
        try:
            value = f(*inputs)
        except (Exception, SystemExit) as e:
            error = e
    value, error = gather((value, error))[0]
    if error:
        raise error
    return value


def shard(policy, layers, offload):
    """FSDP2: each layer, and the rest, is gathered while it is computed. 16-bit computation is on
    copies; shards, their gradients and the optimizer are float32."""
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh
    halved = None if policy.dtype == "float32" else getattr(torch, policy.dtype)
    place = (fsdp.CPUOffloadPolicy(pin_memory=cuda.is_available()) if offload
             else fsdp.OffloadPolicy())
    mesh = init_device_mesh(device().type, (world(),))
    for module in (*layers, policy):
        # the root is resharded after its forward, too: its parameters are always shards
        fsdp.fully_shard(module, mesh=mesh, offload_policy=place, reshard_after_forward=True,
                         mp_policy=fsdp.MixedPrecisionPolicy(halved, halved and torch.float32))
        # the losses' denominators are the whole step's, so gradients add up over the ranks
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def full(x):
    """The whole of a tensor, gathered if it is sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@torch.no_grad()
def weights(policy, merged=True):
    """Yields the model's weights, LoRA merged into them, by their names in state_dict(): one at a
    time, so that no second model is in memory. Every rank must take all of them. Not merged,
    adapters come beside the weights, under the policy's own names."""
    for name, value in policy.model.state_dict().items():
        if "lora_" in name and merged:
            continue
        value = full(value.to(device()))  # gloo would gather --offload's shards: 0.3 GB/s
        if merged and name.endswith(".base_layer.weight"):
            adapter = policy.model.get_submodule(name.removesuffix(".base_layer.weight"))
            value = value + adapter.change()
        yield name.replace(".base_layer", "") if merged else name, value

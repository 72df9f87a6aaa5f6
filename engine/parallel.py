"""Many ranks. torchrun starts one process for each GPU, and each holds a shard of the weights
(FSDP2) and a sampler of its own, samples its share of the problems, and puts its share of every
optimizer step through the model. Completions and log probabilities are small beside weights: every
rank gets all of them, and computes losses and advantages of the whole. With one process, nothing
in this file changes anything.
"""

import glob
import os
import platform
import re
import resource
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def start(deterministic=False):
    """Joins the process group where torchrun, or srun with the same variables, started us.

    deterministic: what runs on a GPU adds up in one order, whatever the batch."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if torch.cuda.is_available():
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # gloo serves what is on a CPU. Ranks wait for the slowest one to sample and grade: that
        # takes hours, not NCCL's ten minutes
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                                timeout=timedelta(hours=4))


def stop():
    """Leaves the process group. All ranks do it together, for the barriers: a thread of gloo takes
    Python's lock to let go of the last collective's tensors, and aborts where Python is ending. The
    pause gives it time; the second barrier has no tensors, and waits for a thread that is busy."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.1)
        dist.barrier()
        dist.destroy_process_group()


def rank():
    return int(os.environ["RANK"]) if "RANK" in os.environ else 0


def world():
    """The number of ranks. It comes from the environment: flags are checked before start()."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def sharded():
    """Are weights sharded? They are wherever torchrun has started us, also alone."""
    return dist.is_initialized()


def say(text):
    if rank() == 0:
        print(text, flush=True)


def device():
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_dtype():
    """Of computation: float32 on a CPU, bfloat16 on a GPU that has it, and float16 before."""
    if not torch.cuda.is_available():
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"


def unusable_gpu():
    """A sentence on why torch cannot use the GPU that is there; None where it can, or none is."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        built_for = [int(re.search(r"\d+", x)[0]) for x in torch.cuda.get_arch_list()]
        if built_for and 10 * capability[0] + capability[1] < min(built_for):
            return (f"torch {torch.__version__} has no kernels for this GPU, of compute capability "
                    f"{capability[0]}.{capability[1]}: it begins at {min(built_for) / 10}; an "
                    "older release of torch may have them")
        return None
    if hidden or not glob.glob("/dev/nvidia[0-9]*"):
        return None
    why = (f"its driver may be too old for CUDA {torch.version.cuda}" if torch.version.cuda
           else f"torch {torch.__version__} is built without CUDA: pip install -r requirements.txt")
    return (f"torch cannot use the GPU that is there: {why}. CUDA_VISIBLE_DEVICES= in front runs "
            "on the CPU all the same, with --sampler transformers where vLLM is built for GPUs")


def memory():
    """Bytes of this rank's GPU, or its share of half the machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(device()).total_memory
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / ranks_here


BESIDE = 0  # bytes of the GPU that torch counts and that are free, or the other way round


def watch_memory():
    """From here on, peak_memory is of the trainer with an engine asleep beside it. torch goes on
    counting what a sleeping vLLM has given back (vllm-project/vllm issue 17117)."""
    global BESIDE
    free, total = torch.cuda.mem_get_info()
    torch.cuda.reset_peak_memory_stats()
    BESIDE = total - free - torch.cuda.memory_allocated()


def peak_memory():
    """The most bytes that were held so far: of the GPU since watch_memory, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() + BESIDE
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---------------------------------------------------------------------------- collectives

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


def on_rank0(f):
    """Calls f on rank 0. Every rank returns what it returned, and raises what it raised."""
    def attempt():
        try:
            return f(), None
        except (Exception, SystemExit) as e:
            return None, e
    value, error = gather(attempt() if rank() == 0 else None)[0]
    if error:
        raise error
    return value


def map_over_engines(f, items, tp=1):
    """f(items of an engine, number of the engine) on every engine -> its results for all items,
    in the items' order. An engine is `tp` ranks, which all go through the same items."""
    engines, engine = world() // tp, rank() // tp
    results = [None] * len(items)
    for i, part in enumerate(gather(f(items[engine::engines], engine))[::tp]):
        results[i::engines] = part
    return results


# ---------------------------------------------------------------------------- sharded weights

def shard(policy, layers, offload):
    """FSDP2: each layer, and the rest, is gathered when it is computed and sharded between.

    Computation in 16 bits is on copies; what is sharded, reduced and optimized is float32."""
    if not sharded():
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )
    precision = MixedPrecisionPolicy()
    if policy.dtype != "float32":
        precision = MixedPrecisionPolicy(getattr(torch, policy.dtype), reduce_dtype=torch.float32)
    place = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    mesh = init_device_mesh(device().type, (world(),))
    for module in (*layers, policy):
        # the root reshards after its forward, too: whoever asks for parameters gets shards
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=place,
                    reshard_after_forward=True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # the losses' denominators are the whole step's, so gradients add up over the ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def full(x):
    """A tensor as a whole, also where it is sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def shard_of(x):
    """A copy of what this rank has of a tensor: all of it, where it is not sharded."""
    return (x.to_local() if hasattr(x, "to_local") else x).clone()


@torch.no_grad()
def weights(policy):
    """Yields the model's weights under their names in a checkpoint, LoRA merged into them. They
    come one by one, so that no second copy is ever whole. Every rank must go through all of it."""
    for name, value in policy.model.state_dict().items():
        if "lora_" in name:
            continue
        # a gather of shards on the CPU (--offload) would go through gloo: 0.3 GB a second
        value = full(value.to(device()) if hasattr(value, "full_tensor") else value)
        if ".base_layer" in name:
            layer = policy.model.get_submodule(name[:name.index(".base_layer")])
            if name.endswith("weight"):
                a, b = (full(part["default"].weight).to(value.device)
                        for part in (layer.lora_A, layer.lora_B))
                value = value + layer.scaling["default"] * (b @ a)
        yield name.replace(".base_layer", ""), value

"""Many ranks: torchrun starts one process for each GPU. Each holds a shard of the weights (FSDP2) and a sampler of its
own, samples its share of the problems, and puts its share of every optimizer step through the model. Completions and
log probabilities are small beside weights: every rank gets all of them, and computes losses and advantages of the
whole. With one process, all that is here changes nothing.
"""

import os
import platform
import resource
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def start():
    """Joins the process group, where torchrun (or Slurm's srun, by the same variables) has started this process."""
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # gloo for what is on a CPU. Ranks wait for the slowest to sample and grade: hours, not NCCL's ten minutes
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=4))


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def device():
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def memory():
    """Bytes of this rank's GPU, or its share of half the machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def peak_memory():
    """The most bytes that this process has held so far: of its GPU where there is one, else of the machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def total(x):
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


def first_says(f):
    """f() of rank 0, and what it returned on every rank; what it raised, too."""
    def tried():
        try:
            return f(), None
        except (Exception, SystemExit) as e:
            return None, e
    value, error = gather(tried() if rank() == 0 else None)[0]
    if error:
        raise error
    return value


def spread(f, items, tp=1):
    """f(share, number of the share) on each engine's share of a list -> what it returns for each item, in the items'
    order. An engine is `tp` ranks, which all go through the same share."""
    engines, own = world() // tp, rank() // tp
    results, out = gather(f(items[own::engines], own))[::tp], [None] * len(items)
    for engine, result in enumerate(results):
        out[engine::engines] = result
    return out


def shard(policy, layers, offload):
    """FSDP2: each layer, and the rest, are gathered when they are computed and sharded between. bfloat16 computation is on
    copies; what is sharded, reduced and optimized is float32."""
    if not dist.is_initialized():
        return
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if policy.dtype == "bfloat16" else MixedPrecisionPolicy()
    options = dict(mesh=init_device_mesh(device().type, (world(),)), mp_policy=precision,
                   offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy())
    for module in (*layers, policy):  # the root, too, after its forward: whoever asks for parameters gets shards
        fully_shard(module, reshard_after_forward=True, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the losses' denominators are the whole step's: gradients add up
            module.set_force_sum_reduction_for_comms(True)


def full(x):
    """A tensor as a whole, also where it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard_of(x):
    """A copy of what this rank has of a tensor: all of it, where it is not sharded."""
    return (x.to_local() if isinstance(x, DTensor) else x).clone()


@torch.no_grad()
def weights(policy):
    """The model's weights under their names in a checkpoint, one by one so that no second copy is ever whole; LoRA is
    merged into them. Every rank must go through all of it."""
    for name, value in policy.model.state_dict().items():
        if "lora_" in name:
            continue
        value = full(value)
        if ".base_layer" in name:
            layer = policy.model.get_submodule(name[:name.index(".base_layer")])
            if name.endswith("weight"):
                a, b = (full(part["default"].weight).to(value.device) for part in (layer.lora_A, layer.lora_B))
                value = value + layer.scaling["default"] * (b @ a)
        yield name.replace(".base_layer", ""), value

"""Does a run fit? Rehearsed without weights, on a CPU, before a GPU is rented.

    python bench/fit.py 8x80 --model Qwen/Qwen2.5-7B --max_tokens 3072         8 GPUs of 80 GB
    python bench/fit.py cpu24 --model models/gemma                             a CPU with 24 GB

The flags are train.py's. Its code loads, scores, updates and syncs, as rank 0 of a process group
that sends nothing. Weights are fake tensors (torch's FakeTensorMode); ids, lengths and masks are
real, because sizes depend on them. A Ledger adds up the bytes of the tensors alive. Not counted:
workspaces, CUDA's context, NCCL's buffers, fragmentation, FSDP's next layer (USABLE leaves room).
"""

import gc
import os
import re
import sys
from collections import deque
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
import harness.start
from data import BASE
from engine import forward, loading, parallel
from engine import policy as policies
from engine.forward import lay
from harness import files
from harness.check import by_size, longest_rollout, step_of
from harness.failures import refuse
from harness.flags import parse_args

GB = 1e9
USABLE = 0.95  # of a GPU's memory, or of half a machine's, as parallel.memory has it
KEPT = 0.5e9   # of a CPU's: freed memory that glibc keeps, 0.3 to 0.9 GB in bench/measured.md
NO_WORDS = SimpleNamespace(get_vocab=dict)  # in place of the tokenizers, which are not read
MORE = ("--activation_checkpointing or fewer --tokens_per_micro_batch (scoring, update), "
        "--lora_rank, and on a GPU less --gpu_memory_utilization (beside an awake vLLM), --offload "
        "(with torchrun) or more GPUs make room")


def empty_model(model):
    """A model of the shapes in a folder's or an id's config.json. Raises ValueError."""
    try:
        data.sources.reach(model)
        return AutoModelForCausalLM.from_config(loading.text_config(model)[0], dtype=torch.float32)
    except Exception as e:  # a folder's files, and the Hub, may raise anything
        raise ValueError("has no configuration of a causal language model that can be read: "
                         f"{data.sources.reason(e)}") from None


# ---------------------------------------------------------------------------- bytes of live tensors

class Ledger(TorchDispatchMode):
    """Bytes of the tensors alive, and their peak. fake: the FakeTensorMode; None in tests."""

    def __init__(self, fake):
        super().__init__()
        self.fake, self.peak = fake, 0
        self.alive = WeakValueDictionary()  # {address: storage}; a fake's data_ptr is always 0

    @property
    def live(self):
        return sum(storage.nbytes() for storage in self.alive.values())

    def count(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage
            self.peak = max(self.peak, self.live)

    def peak_of(self, action):
        gc.collect()
        self.peak = self.live
        action()
        return self.peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the shards
        if active_fake_mode() not in (None, self.fake):
            return func(*args, **kwargs)  # DTensor infers a global shape: no memory
        out = self.answer(func, args, kwargs) if self.fake else func(*args, **kwargs)
        tree_map_only(torch.Tensor, self.count, out)
        return out

    def answer(self, func, args, kwargs):
        """-> an operator's result where some tensors are fake."""
        fakes = [isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs))
                 if isinstance(x, torch.Tensor)]
        if fakes and not any(fakes):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # .item(): an unknown number, taken to be finite and true
        if "index" in func._opname and isinstance(args[1], list):  # a real mask's size is known
            places = [i.nonzero().unbind(1) if i is not None and i.dtype == torch.bool else [i]
                      for i in args[1]]
            args = (args[0], [i for part in places for i in part], *args[2:])
        with self.fake:
            out = func(*args, **kwargs)
        # modules move their parameters, which must have no weak references then
        self.fake.fake_tensor_converter.tensor_memo.clear()
        if fakes or isinstance(out, torch.Tensor) and out.is_floating_point():
            return out
        return func(*args, **kwargs)  # a new tensor that counts or points is real


# ---------------------------------------------------------------------------- the rehearsal

def rank_0(gpus, offload):
    """The environment of torchrun's rank 0. One GPU has none, except for --offload, FSDP's."""
    given = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(gpus), LOCAL_WORLD_SIZE=str(gpus))
    return mock.patch.dict(os.environ, given if gpus > 1 or offload else {},
                           CUDA_VISIBLE_DEVICES="")


def head_on_gpu(hidden, weight, bias=None, wide=False, own=forward.head_logits):
    """forward.head_logits, with the product that it takes on a GPU: 16 bits in, float32 out."""
    if not wide or hidden.dtype.itemsize > 2:
        return own(hidden, weight, bias)
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


@contextmanager
def stage(memory, by_kernel):
    """Replaces the process group, the GPU's memory, the weights' files, and checks of numbers.
    by_kernel: attention is flash, for 16 bits; else keys and values are repeated; None: a CPU."""
    gpu = by_kernel is not None
    usable = memory if gpu else memory / 2  # as parallel.memory has it
    with ExitStack() as stack:
        def replace(owner, **values):
            stack.enter_context(mock.patch.multiple(owner, **values))
        if "RANK" in os.environ:
            from torch.distributed._tools import fake_collectives  # noqa: F401
            from torch.testing._internal.distributed.fake_pg import FakeStore
            dist.init_process_group("fake", rank=0, world_size=parallel.world(), store=FakeStore())
            stack.callback(parallel.stop)
        gc.disable()  # a collection in the middle of a phase would depend on the code before
        stack.callback(gc.enable)
        replace(parallel, memory=lambda: usable, gather=lambda value: [value] * parallel.world())
        replace(loading, build=lambda model, _: empty_model(model),
                # both look at numbers; a model is taken to agree with the layout
                check_head=lambda *_: None,
                try_shared=lambda policy, _, **__: policy.use_layout("shared") or True)
        if gpu:
            on_gpu = mock.patch.object(parallel, "device", lambda: torch.device("cuda"))
            replace(loading, head_chunk=on_gpu(loading.head_chunk),
                    token_budget=on_gpu(loading.token_budget))  # their limits
            replace(forward, must_repeat=lambda _: not by_kernel, head_logits=head_on_gpu)
        replace(bias, causal_lower_right=lambda *_: None)  # a subclass of tensors, without memory
        # the batch is one micro-batch of this rank, see rehearse
        replace(policies, rank_micro_batches=lambda _, batch, *__: [
            ([*range(len(batch.ids))], batch)], lay=lambda *given: lay(*given[:2], by_kernel))
        replace(harness.start, encode=lambda *_: [1] * 64)
        replace(harness.start, read_tokenizer=lambda _: [NO_WORDS])  # of the teacher
        replace(files, checksum_of_weights=lambda _: "not read")
        yield


def rehearse(args, method, memory, cpu=False):
    """-> the trainer's bytes on a GPU of `memory` bytes in each phase, and sizes of the run, whose
    prompts and completions are as long as they may be. cpu: in a CPU's memory."""
    rollout = longest_rollout(args, "cpu")
    ledger = Ledger(FakeTensorMode(allow_non_fake_inputs=True))
    with stage(memory, None if cpu else args.dtype != "float32"), ledger:
        trainer = harness.start.load_trainer(args, method, NO_WORDS, [2], None)
        policy, optimizer = trainer.policy, trainer.optimizer
        trained = optimizer.param_groups[0]["params"]

        def fill_gradients():
            for p in trained:
                p.grad = torch.zeros_like(p)
        fill_gradients()
        optimizer.step()  # it makes AdamW's moments
        optimizer.zero_grad()
        f = SimpleNamespace(
            base=sum(p.numel() for n, p in policy.named_parameters() if "lora_" not in n),
            trained=sum(p.numel() for p in trained), layout=policy.layout, budget=policy.budget,
            between=ledger.live)
        batch = rollout.rows(by_size(rollout, policy)[-1])
        f.scoring = ledger.peak_of(lambda: [policies.compute_logprobs(model, batch) for model in (
            policy, trainer.reference, trainer.teacher) if model])
        step = step_of(args, rollout)
        parts = by_size(step, policy)
        batch, f.parts = step.rows(parts[-1]), len(parts) // parallel.world()
        if f.parts > 1 or args.offload:
            fill_gradients()  # of the micro-batches before
        state = ledger.live
        f.update = ledger.peak_of(lambda: trainer.step(batch))
        f.sync = ledger.peak_of(lambda: deque(trainer.weights(), maxlen=0))
    if args.offload:  # weights, moments and gradients, which the step gives up, are on the CPU
        f.scoring, f.update, f.sync = f.scoring - f.between, f.update - state, f.sync - f.between
        f.between = 0
    return f


# ---------------------------------------------------------------------------- the verdict

def program_bytes(model):
    """-> the most memory that this process had, with the model's tokenizer, without its tensors,
    and what a run's process keeps of what it freed."""
    try:
        AutoTokenizer.from_pretrained(model)
    except Exception as e:  # a folder's files, and the Hub, may raise anything
        parallel.say(f"the tokenizer's memory is not counted: {data.sources.reason(e)}")
    return parallel.peak_memory() + KEPT


def report(args, f, memory, gpus, program=0):
    """Prints the table of a rehearsal f and whether the run fits -> exit code. program: its bytes
    on a CPU, of Python and its libraries."""
    usable = USABLE * (memory / 2 if program else memory)
    dtype = args.dtype if args.sampler_dtype == "float8" else args.sampler_dtype
    weights = f.base * (4 if dtype == "float32" else 2) / args.tp  # the sampler's
    awake = asleep = waking = weights + program
    fault = None
    if args.sampler == "vllm":
        awake, asleep, waking = args.gpu_memory_utilization * memory, 0, weights
    print(f"""\
{args.model}: {f.base:,} parameters, {f.trained:,} trained, on \
{"a CPU with" if program else f"{gpus} x"} {memory / GB:g} GB
--tokens_per_micro_batch {f.budget:,}, layout {f.layout}; micro-batches on \
each rank in an optimizer step: {f.parts}

GB{"" if program else " of each GPU":13}  trainer   sampler  together""")
    for name, trainer, sampler in (
            ("sampling", f.between, awake), ("scoring", f.scoring, asleep),
            ("update", f.update, asleep), ("sync", f.sync, waking), ("checkpoint", f.sync, awake)):
        together, much = trainer + sampler, ""
        if together > usable:
            much, fault = "  too much", MORE
        print(f"{name:14}{trainer / GB:10.1f}{sampler / GB:10.1f}{together / GB:10.1f}{much}")
    if args.sampler == "vllm" and awake < 1.1 * weights:
        fault = (f"--gpu_memory_utilization {args.gpu_memory_utilization} gives vLLM "
                 f"{awake / GB:.1f} GB, and its weights alone take {weights / GB:.1f}: more of it, "
                 "or --tp")
    print(f"\nIt does not fit: {fault}" if fault else
          f"\nIt fits: no phase takes more than {usable / GB:.1f} GB, {USABLE} of "
          f"{'half of the machine' if program else 'the memory'}")
    return 1 if fault else 0


def size_of(word):
    """-> GPUs, the bytes of each, and whether they are a CPU's. Refuses a word that is no size."""
    size = re.fullmatch(r"(?:([1-9]\d{0,4})x|(cpu))?([1-9]\d{0,4}(?:\.\d+)?)", word)
    if not size:
        refuse("its first word is GPUs x GB of each, as 8x80, or 80 for one GPU, or cpu24 for a "
               "CPU with 24", "bench/fit.py")
    return int(size[1] or 1), float(size[3]) * GB, bool(size[2])


def main(argv):
    """-> the exit code."""
    word, *flags = argv or [""]
    if word in ("-h", "--help"):
        parse_args(argv, __doc__, rehearsal=True)  # prints the page, and ends
    gpus, memory, cpu = size_of(word)
    # the defaults of a CPU, or of a GPU with bfloat16 and vLLM
    dtype, sampler = ("float32", "transformers") if cpu else ("bfloat16", "vllm")
    with rank_0(gpus, "--offload" in flags):
        args, method = parse_args([f"--dtype={dtype}", f"--sampler={sampler}", *flags], __doc__,
                                  rehearsal=True)
        if args.model == BASE:
            refuse("it needs --model; the embedded base fits anywhere", "bench/fit.py")
        if cpu and (args.sampler == "vllm" or args.offload):
            refuse(f"{word} is for --sampler transformers, and not --offload", "bench/fit.py")
        found = rehearse(args, method, memory, cpu)
        return report(args, found, memory, gpus, program_bytes(args.model) if cpu else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A training run without its weights, on a CPU: the project's own code goes through scoring, an
update and a weight sync on tensors that have shapes and no numbers, as one rank of a process group
that sends nothing. What is counted is the bytes that live, and the collectives.

What holds weights is fake (torch's FakeTensorMode); ids, lengths and masks are real, so that what
is cut by them has a size. Attention on a GPU in 16 bits is that of torch's kernel for it, as far as
shapes go. A model is taken to give the same in every layout. Not counted: what a kernel takes for
itself, CUDA's context, NCCL's buffers, memory that lies between blocks, and a layer that FSDP
gathers ahead.
"""

import gc
import os
import weakref
from collections import Counter, deque
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import data
from engine import kernels, loading, parallel, policy
from engine.layout import lay, micro_batches
from engine.sampler import Completion

aten = torch.ops.aten
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
            aten._index_put_impl_.default}
KINDS = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}


class Ledger(TorchDispatchMode):
    """Bytes of the tensors that live, the most of them, and the collectives.

    fake: the mode whose tensors stand for weights; None counts real tensors."""

    def __init__(self, fake=None):
        super().__init__()
        self.fake, self.live, self.peak, self.collectives = fake, 0, 0, Counter()
        self.held = {}  # {storage: [bytes, weak reference]}; a fake's data_ptr is always 0

    def resized(self, key, size):
        self.live += size - self.held[key][0]
        self.held[key][0] = size
        self.peak = max(self.peak, self.live)

    def resize_(self, storage, size, original=torch.UntypedStorage.resize_):
        """FSDP frees with it, which no operator tells."""
        original(storage, size)
        if storage._cdata in self.held:
            self.resized(storage._cdata, size)

    def freed(self, key):
        self.live -= self.held.pop(key)[0]

    def count(self, tensor):
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.held:
            self.held[key] = [0, weakref.ref(storage, lambda _: self.freed(key))]
            self.resized(key, storage.nbytes())

    def leave_out(self, tensors):
        """These are on the CPU of the node, not on the GPU."""
        for tensor in tensors:
            key = getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata
            if key in self.held:
                self.resized(key, 0)

    def peak_of(self, action):
        """-> what action gives, and the most bytes that lived meanwhile. Collectives are counted
        from its beginning on."""
        gc.collect()  # and not in the middle, at a moment that depends on what ran before
        gc.disable()
        try:
            self.peak = self.live
            self.collectives.clear()
            return action(), self.peak
        finally:
            gc.enable()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the shards
        if active_fake_mode() not in (None, self.fake):
            return func(*args, **kwargs)  # DTensor asks for the shape of a whole: nothing is made
        out = self.answer(func, args, kwargs) if self.fake else func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        if func.namespace in ("c10d", "_c10d_functional") \
                and any(word in func._opname for word in KINDS):
            self.collectives[func._opname] += 1
        return out

    def answer(self, func, args, kwargs):
        """What an operator gives, where some tensors are fake."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(isinstance(x, FakeTensor) for x in tensors):
            if func is aten._local_scalar_dense.default:
                return 1  # a number that nobody knows: finite, and true
            if func in BY_INDEX:  # a real mask has a known number of places
                places = [i.nonzero().unbind(1) if i is not None and i.dtype == torch.bool else [i]
                          for i in args[1]]
                args = (args[0], [i for part in places for i in part], *args[2:])
            with self.fake:
                out = func(*args, **kwargs)
            # peft moves parameters, which must have no weak references then
            self.fake.fake_tensor_converter.tensor_memo.clear()
            return out
        if not tensors:  # new ones: numbers are fake; what counts or points is real
            with self.fake:
                out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                return out
        return func(*args, **kwargs)


# ---------------------------------------------------------------------------- the stage

@contextmanager
def torchrun(gpus, offload=False):
    """The variables that torchrun sets for rank 0 of so many; none for one process alone."""
    names = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=gpus, LOCAL_WORLD_SIZE=gpus)
    with mock.patch.dict(os.environ):
        for name, value in names.items():
            os.environ.pop(name, None)
            if gpus > 1 or offload:  # --offload is FSDP's, also on one GPU
                os.environ[name] = str(value)
        yield


@contextmanager
def stage(build, memory, ledger, gpu_dtype):
    """In place of what only a node has: a process group, the GPU's memory, the weights' files.

    gpu_dtype: chunks and attention are those of a GPU that computes in it; None is a CPU."""
    def layout_agrees(model, probe, layout):  # the original looks at numbers, as check_head does
        model.use_layout(layout)
        return True

    with ExitStack() as stack:
        def replace(owner, **values):
            stack.enter_context(mock.patch.multiple(owner, **values))
        replace(torch.UntypedStorage, resize_=lambda *given: ledger.resize_(*given))
        if "RANK" in os.environ:
            from torch.distributed._tools import fake_collectives  # noqa: F401
            from torch.testing._internal.distributed.fake_pg import FakeStore
            backend, store = ("fake", FakeStore()) if ledger.fake else ("gloo", dist.HashStore())
            dist.init_process_group(backend, rank=0, world_size=parallel.world(), store=store)
            stack.callback(parallel.stop)
        replace(parallel, memory=lambda: memory, gather=lambda value: [value] * parallel.world())
        replace(loading, build=lambda *_: build(), check_head=lambda *_: None,
                layout_agrees=layout_agrees, token_budget=token_budget)
        # all that goes in is this rank's only micro-batch
        replace(policy, rank_micro_batches=lambda _, batch, *__: [
            ([*range(len(batch.ids))], batch)])
        replace(data, encode=lambda *_: [1] * 64)
        if gpu_dtype:
            replace(kernels, CHUNK=int(memory / 300))
        if gpu_dtype not in (None, "float32"):
            replace(policy, lay=lambda batch, name, _: lay(batch, name, True))
        yield


def token_budget(model, probe, longest, *settings, find=loading.token_budget):
    """loading.token_budget with a GPU's limit, and one row where it refuses."""
    with mock.patch.object(parallel, "device", lambda: torch.device("cuda")):
        try:
            return find(model, probe, longest, *settings)
        except ValueError as e:
            model.no_room = str(e)
            return longest


# ---------------------------------------------------------------------------- the run

@dataclass
class Figures:
    """Bytes are the most on one GPU, without the sampler's."""

    base: int = 0         # parameters of the model
    parameters: int = 0   # with adapters
    trained: int = 0      # those with a gradient
    layout: str = ""
    budget: int = 0       # tokens at once that the run finds, or was given
    no_room: str = ""     # what the run says where it cannot find any
    start: int = 0        # bytes of the weights
    between: int = 0      # bytes of weights and AdamW's moments
    scoring: list = field(default_factory=list)  # (tokens at once as counted, bytes), twice
    update: list = field(default_factory=list)
    sync: int = 0         # bytes while tensors are gathered one by one
    parts: int = 0        # micro-batches of each rank in an optimizer step
    step_tokens: int = 0  # that go through the model in it, on all ranks
    collectives: dict = field(default_factory=dict)  # of it

    def largest(self, room):
        """The most tokens at once with which scoring and update take at most `room` bytes."""
        most = 2**17  # loading.token_budget's limit
        for (few, low), (many, high) in (self.scoring, self.update):
            each = (high - low) / (many - few)
            most = min(most, many + (room - high) / each if each > 0 else most)
        return max(0, int(most))


def rehearse(args, method, config, prompt, completion, memory, fake=True, on_gpu=True):
    """-> Figures of a run whose prompts and completions have so many tokens.

    args, method: of train.parse_args; args is changed. config: the model's, of transformers.
    memory: bytes of a GPU. fake: without numbers. on_gpu: computes as a GPU does."""
    from transformers import AutoModelForCausalLM
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None

    def build():
        try:
            with mode or nullcontext():
                return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except ValueError as e:  # its other lines list what there is
            raise ValueError(f"is no causal language model: {str(e).splitlines()[0]}") from None

    args.compile = False  # layers as they are written
    gpu_dtype, ledger = args.dtype if on_gpu else None, Ledger(mode)
    with stage(build, memory, ledger, gpu_dtype), ledger:
        run = Run(args, method, ledger)
        if gpu_dtype not in (None, "float32") and not args.share_prompts:
            for model in filter(None, (run.policy, run.reference)):
                model.use_layout("packed")
        run.start()
        run.score(prompt, completion)
        run.update(prompt, completion)
        # the weights one by one, as the sampler and a checkpoint take them
        _, run.figures.sync = ledger.peak_of(
            lambda: deque(parallel.weights(run.policy), maxlen=0))
    return run.figures


class Run:
    """A run on the stage; its methods are phases, to be called in their order."""

    def __init__(self, args, method, ledger):
        import train
        self.args, self.method, self.ledger, self.figures = args, method, ledger, Figures()
        self.policy, self.reference, self.optimizer, self.schedule, _ = train.load_policy(
            args, method, None, [2], None, None)
        # float16's asks whether gradients overflowed
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def on_cpu(self, tensors):
        if self.args.offload:
            self.ledger.leave_out(tensors)

    def give_gradients(self):
        """Those of a micro-batch that went before."""
        for p in self.optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
            self.on_cpu([p.grad])

    def start(self):
        """The weights; then a step, since AdamW's moments come with it and stay."""
        named, figures = dict(self.policy.named_parameters()), self.figures
        figures.base = sum(p.numel() for name, p in named.items() if "lora_" not in name)
        figures.parameters = sum(p.numel() for p in named.values())
        figures.trained = sum(p.numel() for p in named.values() if p.requires_grad)
        figures.layout, figures.budget = self.policy.layout, self.policy.budget
        figures.no_room = getattr(self.policy, "no_room", "")
        self.on_cpu([*named.values(), *(self.reference.parameters() if self.reference else ())])
        figures.start = self.ledger.live
        self.give_gradients()
        self.optimizer.step()
        self.on_cpu(x for state in self.optimizer.state.values() for x in state.values())
        self.optimizer.zero_grad()
        figures.between = self.ledger.live

    def halves(self, rows, prompt, completion):
        """Yields the micro-batches of these rows of a rollout, as lists of them, and the groups of
        the largest: with half the tokens in a row and at once, then with all."""
        size = self.args.group_size
        for part in (2, 1):
            lengths = -(-prompt // part), -(-completion // part)
            cut = micro_batches(batch_of(groups_of(rows, size, *lengths)),
                                self.figures.budget // part, self.figures.layout, parallel.world())
            parts = [[rows[i] for i in places] for places in cut]
            yield parts, groups_of(max(parts, key=lambda part: self.tokens(part, *lengths)), size,
                                   *lengths)

    def tokens(self, part, prompt, completion):
        """Those of a micro-batch that go through the model, without padding."""
        if self.figures.layout != "shared":
            return len(part) * (prompt + completion)
        prompts = len({row // self.args.group_size for row in part})
        return prompts * prompt + len(part) * (completion - 1)  # its last token predicts nothing

    def counted(self, groups):
        """The tokens of a micro-batch as layout.micro_batches counts them."""
        shared = self.figures.layout == "shared"
        return sum(len(g.prompt) * (shared or len(g.completions)) + sum(
            len(c.tokens) + shared * (len(g.prompt) // 16) for c in g.completions) for g in groups)

    def score(self, *lengths):
        import train
        rows = range(self.args.problems_per_rollout * self.args.group_size)
        for _, groups in self.halves(rows, *lengths):
            _, peak = self.ledger.peak_of(
                lambda: train.scored_batch(self.policy, self.reference, groups, self.args))
            self.figures.scoring.append((self.counted(groups), peak))

    def update(self, prompt, completion):
        import train
        args, figures, size = self.args, self.figures, self.args.group_size
        together = size if args.shuffle == "groups" else 1
        rows = policy.shuffled_shares(args.problems_per_rollout * size, args.steps_per_rollout,
                                      args.seed, 0, together)[0]
        # sorted, they stand as groups_of has them
        for parts, groups in self.halves(sorted(rows.tolist()), prompt, completion):
            figures.parts = len(parts) // parallel.world()
            batch = batch_of(groups)
            batch.old_logprobs = batch.entropy = batch.ref_logprobs = batch.sampler_logprobs
            batch.advantages = batch.mask.float()  # real, as the mask is: every row has one
            if figures.parts > 1 or args.offload:
                self.give_gradients()
            _, peak = self.ledger.peak_of(lambda: train.update(
                self.policy, self.optimizer, self.schedule, self.scaler, batch, self.method, args))
            figures.update.append((self.counted(groups), peak))
        once = {}  # of a step with one micro-batch
        for name, n in self.ledger.collectives.items():
            kind = next(kind for word, kind in KINDS.items() if word in name)
            once[kind] = once.get(kind, 0) + n
        figures.collectives = {kind: n if kind == "all-reduce" else n * figures.parts
                               for kind, n in once.items()}
        figures.step_tokens = sum(self.tokens(part, prompt, completion) for part in parts)


def groups_of(rows, size, prompt, completion):
    """These rows of a rollout as the sampler gives them, in their groups; `size` is a whole one's.

    prompt, completion: their tokens."""
    import train
    sampled = Completion([2] * completion, [-1.0] * completion, True)
    return [train.Group({}, [3 + i] * prompt, [sampled] * n, [""] * n, [0.0] * n)
            for i, n in Counter(row // size for row in rows).items()]


def batch_of(groups):
    return policy.make_batch(*zip(*[(group.prompt, completion) for group in groups
                                    for completion in group.completions]))

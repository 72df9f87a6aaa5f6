"""From a Hugging Face folder to a Policy: checks, adapters, shards, the token budget."""

import math
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, logging

from engine import parallel
from engine.forward import CHUNK, lay
from engine.policy import Completion, Policy, make_batch

# of models with other parts, such as a vision tower, the names of their text model's weights
TEXT_ALONE = {r"^(model\.language_model|language_model\.model)\.": "model.",
              r"^language_model\.lm_head\.": "lm_head."}


def text_config(folder):
    """-> the configuration of a folder's text model, and whether the folder has other parts."""
    whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = whole.get_text_config()
    return config, config is not whole


def eos_ids(model, tokenizer):
    """The tokens that end a completion; chat models have several: <|im_end|>, <|endoftext|>."""
    config, _ = text_config(model)
    found = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    with suppress(OSError):  # of a folder without generation_config.json
        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    return sorted({i for ids in found for i in (ids if isinstance(ids, list) else [ids])
                   if i in range(config.vocab_size)})  # some folders have -1 for none


def layers_of(model):
    """The model's transformer blocks, also of a class that FSDP derived from theirs."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules()
            if names & {kind.__name__ for kind in type(module).__mro__}]


def experts_of(model):
    """A mixture's experts: parameters [experts, ...]. Those of a convolution are [C, 1, width]."""
    return [p for p in model.parameters() if p.dim() == 3 and p.shape[1] > 1]


def pretrained(folder, dtype="float32"):
    """A folder's text model, on the CPU. Raises ValueError for quantised or missing weights."""
    logging.set_verbosity_error()  # a table of all missing weights, before our sentence
    config, has_parts = text_config(folder)
    if getattr(config, "quantization_config", None):
        raise ValueError("has quantised weights, which cannot be trained; their originals can")
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False,
        key_mapping=TEXT_ALONE if has_parts else None)
    if info["missing_keys"]:
        raise ValueError(f"lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
    if has_parts:
        del model._weight_conversions  # it would be saved under the names that it came from
    return model


def probe_batch(ids, eos):
    """Four rows to try a model on: all, half, a third and one of the ids. Three share a prompt."""
    *three, one = [Completion(ids[::step], [0.0], False) for step in (1, 2, 3, len(ids))]
    return make_batch([([eos] + (ids * 2)[:2], three), ([eos], [one])])


@dataclass(frozen=True)
class Compute:
    """How a model goes through its passes: longest, budget, and flags with these names."""

    longest: int = 1024        # tokens of the longest row to come
    budget: int | None = None  # tokens that go through the model at once; None: from the memory
    temperature: float = 1.0
    dtype: str = "float32"
    head_dtype: str = "model"
    share_prompts: bool = True  # takes the layout "shared" where it agrees with "padded"
    activation_checkpointing: bool = False
    offload: bool = False
    lora_rank: int = 0
    lora_alpha: float = 32.0


def load(folder, eos, probe, compute=Compute(), frozen=False, beside=0):
    """-> the Policy, its trained weights in float32, on the GPU if there is one, or sharded.

    probe: a Batch of a few short rows to try it on. frozen: nothing is trained. beside: frozen
    models of the same size, whose memory counts. Raises ValueError for missing weights, a softcap
    or a scale after the LM head, or no memory for one row."""
    # first unsharded, in float32: 16 bits would hide small errors; few tokens: for one core
    policy = Policy(build(folder, eos), compute.temperature, chunk=head_chunk())
    few = probe.to(policy.model.device)
    few.completion_len, few.mask = few.completion_len.clamp(max=8), few.mask[:, :8]
    check_head(policy, few)
    shared = compute.share_prompts and try_shared(policy, few)
    policy.use_layout("padded")
    policy.dtype, policy.head_dtype = compute.dtype, compute.head_dtype
    if compute.lora_rank:
        adapted = add_adapters(policy.model, compute.lora_rank, compute.lora_alpha)
        parallel.say(f"adapters on {adapted} linear layers; the rest, fused experts too, is frozen")
    if frozen:
        policy.requires_grad_(False)
    layers = layers_of(policy.model)
    for layer in layers:  # of the layer alone: its dropout stays off
        layer.training = compute.activation_checkpointing
    if parallel.sharded():  # FSDP's layers have one dtype
        parallel.shard(policy, layers, compute.offload)
    else:
        halve_frozen(policy, experts=compute.lora_rank)
    probe = probe.to(parallel.device())
    policy.budget = compute.budget or min(parallel.gather(
        token_budget(policy, probe, compute, beside)))
    if compute.activation_checkpointing:  # after the budget, whose measurement it would hide
        policy.model.gradient_checkpointing_enable()
    if shared:  # the layout from now on, unless the GPU's kernel lacks the model's head size
        try_shared(policy, probe, backward=not frozen)
    return policy


def head_chunk():
    """Elements of a chunk of logits: on a GPU by its memory, 1 GB in float32 of 80 GB."""
    return int(parallel.memory() / 300) if parallel.device().type == "cuda" else CHUNK


def halve_frozen(policy, experts):
    """Keeps frozen linear layers in the dtype to which autocast would copy them: the same bits.
    experts: those, too, which most models would compute in float32, as a policy trains its own."""
    dtype, embeddings = getattr(torch, policy.dtype), policy.model.get_input_embeddings()
    for module in policy.model.modules():
        if (isinstance(module, nn.Linear) and not module.weight.requires_grad
                and module.weight is not embeddings.weight):  # which the LM head may share
            module.to(dtype)
    for p in experts_of(policy.model) if experts else ():
        p.data = p.to(dtype)


class LoRA(nn.Module):
    """A linear layer of weights W + scale B A: W is frozen, B is 0 at first (arXiv 2106.09685)."""
    on = True  # of all adapters

    def __init__(self, layer, rank, scale):
        super().__init__()
        self.base_layer, self.scale = layer, scale
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.to(layer.weight)  # its device and dtype

    def forward(self, x):
        y = self.base_layer(x)
        return y + self.lora_B(self.lora_A(x)) * self.scale if LoRA.on else y

    def change(self):
        """scale B A, gathered where they are sharded."""
        a, b = (parallel.full(part.weight).to(parallel.device())
                for part in (self.lora_A, self.lora_B))
        return b @ a * self.scale

    @property
    def weight(self):  # Jamba reads it, and so do Mamba's kernels
        return self.base_layer.weight + LoRA.on * self.change()

    bias = property(lambda self: self.base_layer.bias)


class WithoutAdapters:
    """A policy with its adapters off: the initial model, without a second one in memory."""
    def __init__(self, policy):
        self.policy, self.budget, self.layout = policy, policy.budget, policy.layout

    def __call__(self, batch):
        LoRA.on = False
        outputs = self.policy(batch)
        LoRA.on = True
        return outputs


def build(folder, eos):
    """A folder's model in float32, on this rank's device unless sharded. Raises ValueError."""
    try:
        model = pretrained(folder)
    except Exception as e:  # a folder's files, and the Hub, may raise anything
        raise ValueError(f"cannot be loaded: {(str(e) or repr(e)).splitlines()[0][:300]}") from None
    model.generation_config = GenerationConfig(  # the folder's may be invalid
        eos_token_id=eos, **{name: getattr(model.config, name, None)
                             for name in ("bos_token_id", "pad_token_id")})
    if not parallel.sharded():
        model.to(parallel.device())
    return model


@torch.no_grad()
def check_head(policy, probe):
    """Raises ValueError where Policy's log probabilities are not those of the model's logits."""
    inputs, predicts, targets = lay(probe, policy.layout)
    try:
        logprobs = policy(probe)[0][probe.mask]
    except AttributeError as e:  # there is no one base model beside the head
        raise ValueError(f"is not one plain model and an LM head: {e}") from None
    logits = policy.model(**inputs).logits.flatten(0, 1)[predicts] / policy.temperature
    minus_own = nn.functional.cross_entropy(logits, targets, reduction="none")
    gap = (logprobs + minus_own).abs().max().item()
    if not gap < 1e-3:
        raise ValueError("changes its logits after the LM head, or its weights are not finite: "
                         f"Policy's log probabilities are off by {gap:.2g}")


def add_adapters(model, rank, alpha):
    """LoRA, of scale alpha / rank, on all linear layers but the head -> how many, or ValueError."""
    # parallel.weights merges these: not GPT-2's Conv1D, not the experts of a mixture
    linear = {name: module for name, module in model.named_modules()
              if type(module) is nn.Linear and module is not model.get_output_embeddings()}
    most = max((min(layer.weight.shape) for layer in linear.values()), default=0)
    if rank > most:
        raise ValueError(f"has linear layers of rank {most} at most, and --lora_rank is {rank}"
                         if linear else "has no linear layers for --lora_rank")
    model.requires_grad_(False)
    for name, layer in linear.items():
        model.set_submodule(name, LoRA(layer, rank, alpha / rank))
    return len(linear)


@torch.no_grad()
def try_shared(policy, probe, backward=False):
    """-> whether the layout "shared", which the policy then keeps, computes what "padded" does."""
    padded = policy(probe)[0]
    policy.use_layout("shared")
    try:
        gaps = (policy(probe)[0] - padded)[probe.mask].abs()
        # bfloat16 rounds by about 0.01, rarely by much more
        gap = (gaps.max() if policy.dtype == "float32" else gaps.mean()).item()
        reason = f"log probabilities are off by {gap:.2g}"
        if backward:
            with torch.enable_grad():
                policy(probe)[0].sum().backward()
    except (RuntimeError, TypeError) as e:  # of the GPU's kernel, or of shared_attention
        gap, reason = math.inf, e
    policy.zero_grad()
    agrees = max(parallel.gather(gap)) < (2e-4 if policy.dtype == "float32" else 0.05)
    if not agrees:
        parallel.say(f"the model does not allow for the layout 'shared' ({reason})")
        policy.use_layout("padded")
    return agrees


def kept_bytes(policy, batch):
    """-> bytes that autograd keeps of a forward pass on the batch."""
    storages = {}

    def record(x):
        storage = x.untyped_storage()  # held, or FSDP's next one may get its address
        storages[storage._cdata] = storage.nbytes(), storage
        return x.detach()  # x would hold its graph, a circle
    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        output = policy(batch)
    if parallel.sharded():  # FSDP waits for the backward pass of each forward pass
        sum(x.sum() for x in output).backward()
        policy.zero_grad()
    del output  # and with it the graph
    return sum(size for size, _ in storages.values())


def state_bytes(policy, offload, beside=0):
    """Bytes, on the GPU or else the CPU, that do not grow with the tokens: weights, gradients,
    AdamW's two moments, frozen models of the same size, and 16-bit or gathered copies."""
    size, sharded = getattr(torch, policy.dtype).itemsize, parallel.sharded()

    def total(module, bytes_of=lambda p: 1):
        return sum(p.numel() * bytes_of(p) for p in module.parameters())
    state = total(policy, lambda p: 16 if p.requires_grad else p.element_size())
    # their linear layers are in 16 bits, unless FSDP shards them
    state += beside * total(policy) * (4 if sharded else size)
    if not sharded:  # autocast keeps a copy of every weight until the backward pass
        return state + total(policy, lambda p: size * (p.element_size() > size))
    # FSDP gathers two layers, and all outside of layers, with gradients in float32
    layers = layers_of(policy.model)
    whole = total(policy) - sum(map(total, layers)) * (1 - 2 / max(2, len(layers)))
    return (0 if offload else state / parallel.world()) + (size + 4) * whole


def token_budget(policy, probe, compute, beside=0):
    """Tokens that may go through the model at once: 0.7 of the memory that other programs and
    `state_bytes` leave, over the bytes that autograd keeps of a token, by two sizes of `probe`. On
    a CPU at most 16,384. Raises ValueError where the longest row does not fit."""
    one, four = (kept_bytes(policy, probe.rows([0] * n)) for n in (1, 4))
    each, layers = (four - one) / (3 * probe.lengths[0].item()), len(layers_of(policy.model)) or 1
    if compute.activation_checkpointing:  # the layers' inputs, and one layer's activations
        each = each / layers + 4 * layers * policy.model.config.get_text_config().hidden_size
    state = state_bytes(policy, compute.offload, beside)
    free = 0.7 * (parallel.usable_memory() - state) - 20 * policy.chunk
    budget = int(min(free / each, 2**14 if parallel.device().type == "cpu" else 2**17))
    if budget < compute.longest:
        raise ValueError(
            f"leaves room for {max(0, budget)} tokens at once beside weights, gradients and "
            f"optimizer, and a row has up to {compute.longest}: --activation_checkpointing, "
            "--offload, --lora_rank or more GPUs make room, --tokens_per_micro_batch overrides it")
    return budget

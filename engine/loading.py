"""From a Hugging Face folder to a Policy: what it may be, adapters, the token budget, shards."""

import math

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine import kernels, parallel
from engine.completion import Completion
from engine.policy import Policy, make_batch


def eos_ids(model, tokenizer):
    """Every token that ends a completion. Chat models often have several: <|im_end|> and
    <|endoftext|>."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    candidates = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    try:
        candidates.append(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:
        pass  # a folder without generation_config.json
    lists = [ids if isinstance(ids, list) else [ids] for ids in candidates]
    return sorted({i for ids in lists for i in ids if i is not None})


def positions_of(model):
    """The most tokens that a prompt and its completion may have together."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    return getattr(config, "max_position_embeddings", None) or math.inf


def layers_of(model):
    """The model's transformer blocks."""
    names = set(model._no_split_modules or ())
    # FSDP derives a class of its own from a layer's
    return [module for module in model.modules()
            if names & {kind.__name__ for kind in type(module).__mro__}]


def head_of(folder):
    """The weights of a model's LM head, [vocabulary, hidden size], in float32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.get_output_embeddings().weight.detach()


def lr_factor(warmup, schedule, steps):
    """-> the factor of the learning rate by optimizer step: a linear warm-up, then 1, or a cosine
    to 0 after `steps` of them."""
    def factor(step):
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1, step / steps))
        return min(1, (step + 1) / (warmup + 1)) * (cosine if schedule == "cosine" else 1)
    return factor


def probe_batch(ids, eos):
    """A few short rows to try a model on: all, half, a third and one of the ids as completions, of
    one prompt of three tokens and, the last one, of another."""
    lengths = (len(ids), len(ids) // 2, len(ids) // 3, 1)
    prompts = [[eos] + (ids * 2)[:2]] * 3 + [[eos]]
    return make_batch(prompts, [Completion(ids[:max(1, n)], [0.0], False) for n in lengths])


def load(folder, eos, probe, longest=1024, budget=None, layout=None, share_prompts=True,
         lora_rank=0, lora_alpha=32, frozen=False, activation_checkpointing=False, compile=False,
         offload=False, reference=False, **settings):
    """-> the Policy, its master weights in float32, on the GPU where there is one, sharded over
    the ranks.

    probe: a Batch of a few short rows to try it on. longest: tokens of the longest row to come.
    budget: tokens that go through the model at once; None finds them from the memory. layout: None
    takes "shared" if it gives what padding gives, and share_prompts is on; else "packed" if that
    does, on a GPU in 16 bits. frozen: nothing is trained. reference: a frozen model of the same
    size is to be loaded, too. settings: of Policy.
    Raises ValueError for a folder that lacks weights, for a model that does more after its LM head
    than Policy does (a softcap, a scale), and where the memory cannot hold one row."""
    if parallel.device().type == "cuda":
        kernels.CHUNK = int(parallel.memory() / 300)  # 2^28 of 80 GB: 1 GB in float32
    policy = Policy(build(folder, eos), **settings)
    check_head(policy, probe.to(policy.model.device))
    by_kernel = policy.dtype != "float32" and parallel.device().type == "cuda"
    wanted = ["shared"] * share_prompts + ["packed"] * by_kernel
    wanted = [] if layout else exact_layouts(policy, probe.to(policy.model.device), wanted)
    if lora_rank:
        add_adapters(policy.model, lora_rank, lora_alpha)
    if frozen:
        policy.requires_grad_(False)
    place(policy, activation_checkpointing, compile, offload)
    probe = probe.to(parallel.device())
    policy.budget = budget or min(parallel.gather(
        token_budget(policy, probe, longest, activation_checkpointing, offload, reference)))
    if activation_checkpointing:  # not before: it hides what the budget is measured by
        policy.model.gradient_checkpointing_enable(dict(use_reentrant=False))
    if layout:
        policy.use_layout(layout)
    elif wanted:  # the kernel may lack heads like the model's
        layout_agrees(policy, probe, wanted[0])
    return policy


def place(policy, activation_checkpointing, compile, offload):
    """Makes the layers what they are to be, and puts shards of them onto the ranks' GPUs."""
    layers = layers_of(policy.model)
    if compile:  # the number of blocks differs from call to call
        kernels.attention_by_blocks = torch.compiler.disable(kernels.attention_by_blocks)
    for layer in layers:
        # transformers looks at the layer's own flag; what it contains stays without dropout
        layer.training = activation_checkpointing
        if compile:
            layer.compile(dynamic=True)
    if not parallel.sharded():
        halve_frozen(policy)
    parallel.shard(policy, layers, offload)


def halve_frozen(policy):
    """Frozen linear layers in the dtype that they are computed in, to which autocast would copy
    them: the same bits in half the memory. FSDP wants one dtype in a layer: not for its shards."""
    tied = policy.model.get_input_embeddings().weight
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not tied \
                and not any(p.requires_grad for p in module.parameters()):
            module.to(getattr(torch, policy.dtype))


def build(folder, eos):
    """The model of a folder in float32, with all of its weights. Raises ValueError."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True)
    except Exception as e:  # a folder's files, and the Hub, may raise anything
        raise ValueError(f"cannot be loaded: {str(e).splitlines()[0][:300]}") from None
    if info["missing_keys"]:
        raise ValueError(f"lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
    # it is saved with checkpoints; the model's own may not be valid
    model.generation_config = GenerationConfig(eos_token_id=eos)
    if not parallel.sharded():
        model.to(parallel.device())  # shards go there one by one otherwise
    return model


@torch.no_grad()
def check_head(policy, probe):
    """Raises ValueError where Policy's log probabilities are not those of the model's logits. A
    few tokens tell: before the model is sharded, a rank may have one thread of a CPU for them."""
    row = probe.rows([0])
    start, n = int(row.prompt_len), min(8, int(row.completion_len))
    row.completion_len, row.mask = row.completion_len.clamp(max=8), row.mask[:, :8]
    ids = row.ids[:, :start + n]
    try:
        logprobs = Policy(policy.model, policy.temperature)(row)[0][:, :n]
    except AttributeError as e:  # there is no one base model beside the head
        raise ValueError(f"is not one plain model and an LM head: {e}") from None
    log_pi = (policy.model(ids).logits[:, start - 1:-1] / policy.temperature).log_softmax(-1)
    gap = (logprobs - log_pi.gather(-1, ids[:, start:, None])[..., 0]).abs().max().item()
    if not gap < 1e-3:
        raise ValueError("changes its logits after the LM head, or its weights are not finite: "
                         f"Policy's log probabilities are off by {gap:.2g}")


def add_adapters(model, rank, alpha):
    """LoRA on every linear layer but the LM head, scaled by alpha / rank. Raises ValueError where
    there is none."""
    from peft import LoraConfig, inject_adapter_in_model
    # those that parallel.weights can merge: not GPT-2's Conv1D, not the experts of a mixture
    linear = [name for name, module in model.named_modules()
              if type(module) is torch.nn.Linear and module is not model.get_output_embeddings()]
    if not linear:
        raise ValueError("has no linear layers for --lora_rank")
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=linear, bias="none"), model)


def exact_layouts(policy, probe, wanted):
    """The first of the wanted layouts that the model allows for, in a list, while it is in float32
    and whole: rounding in 16 bits hides what is wrong by little. A few tokens tell."""
    probe = probe.rows(torch.arange(len(probe.ids), device=probe.ids.device))
    probe.completion_len, probe.mask = probe.completion_len.clamp(max=4), probe.mask[:, :4]
    exact = Policy(policy.model, policy.temperature)
    allowed = next(([name] for name in wanted if layout_agrees(exact, probe, name)), [])
    exact.use_layout("padded")
    return allowed


@torch.no_grad()
def layout_agrees(policy, probe, layout):
    """Goes over to a layout if the model gives there what it gives with padding -> whether it does.
    A model that has more than attention between places does not."""
    padded = policy(probe)[0]
    policy.use_layout(layout)
    try:
        gaps = (policy(probe)[0] - padded)[probe.mask].abs()
        # bfloat16 rounds by about 0.01, and now and then by much more
        gap = gaps.max().item() if policy.dtype == "float32" else gaps.mean().item()
        reason = f"log probabilities are off by {gap:.2g}"
    except (RuntimeError, TypeError) as e:  # the kernel lacks such heads, or attention does more
        gap, reason = math.inf, e
    gap = max(parallel.gather(gap))
    agrees = gap < (2e-4 if policy.dtype == "float32" else 0.05)
    if not agrees:
        parallel.say(f"the model does not allow for the layout {layout!r} ({reason})")
        policy.use_layout("padded")
    return agrees


def kept_bytes(policy, batch):
    """-> bytes that autograd keeps of a forward pass, and the tokens that went through."""
    storages = {}

    def record(x):
        storage = x.untyped_storage()  # held, or FSDP's next one may get its address
        storages[storage._cdata] = storage.nbytes(), storage
        return x.detach()  # x itself would hold its own graph, for ever
    # compiled layers as they are written: the measurement is no reason to compile them
    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x), \
            torch.compiler.set_stance("force_eager"):
        output = policy(batch)  # as long as it lives, so does the graph, and what was recorded
    if parallel.sharded():  # FSDP waits for the backward pass of each forward pass
        sum(x.sum() for x in output).backward()
        policy.zero_grad(set_to_none=True)
    del output
    tokens = int((batch.prompt_len + batch.completion_len).sum())
    return sum(size for size, _ in storages.values()), tokens


def state_bytes(policy, offload, reference=False):
    """Bytes of the GPU, or of the CPU where there is none, beside what grows with the tokens:
    weights, gradients and AdamW's two moments, a reference model of the same size, and copies that
    are made of weights on the way."""
    state = sum(p.numel() * (16 if p.requires_grad else p.element_size())
                for p in policy.parameters())
    size = torch.finfo(getattr(torch, policy.dtype)).bits // 8
    if reference:  # its linear layers are in 16 bits, unless FSDP shards them
        state += sum(p.numel() for p in policy.parameters()) * (4 if parallel.sharded() else size)
    if not parallel.sharded():  # autocast keeps a copy of every weight until the backward pass
        copies = sum(p.numel() for p in policy.parameters() if p.element_size() > size)
        return state + size * copies
    # what is outside of layers and two layers are whole at a time, with gradients in float32
    layers = layers_of(policy.model)
    in_layers = sum(p.numel() for layer in layers for p in layer.parameters())
    whole = sum(p.numel() for p in policy.parameters()) - in_layers * (1 - 2 / max(2, len(layers)))
    return (0 if offload else state / parallel.world()) + (size + 4) * whole


def token_budget(policy, probe, longest, activation_checkpointing, offload, reference=False):
    """Tokens that may go through the model at once, from the memory there is and what autograd
    keeps of a token.

    The latter is measured on two sizes of `probe`, so that what does not grow with the tokens
    cancels out. 0.7 of the memory beside `state_bytes` is given away; on a CPU, at most 16,384
    tokens."""
    few, few_tokens = kept_bytes(policy, probe.rows([0]))
    many, many_tokens = kept_bytes(policy, probe.rows([0, 0, 0, 0]))
    each = (many - few) / (many_tokens - few_tokens)
    layers = max(1, len(layers_of(policy.model)))
    if activation_checkpointing:  # the layers' inputs, and one layer's inside
        each = each / layers + 4 * layers * policy.model.config.get_text_config().hidden_size
    beside = state_bytes(policy, offload, reference)
    free = 0.7 * (parallel.memory() - beside) - 20 * kernels.CHUNK
    budget = int(min(free / each, 2**14 if parallel.device().type == "cpu" else 2**17))
    if budget < longest:
        more = ["--activation_checkpointing"] * (not activation_checkpointing) + [
            "--offload"] * (not offload) + ["--lora_rank", "more GPUs"]
        raise ValueError(
            f"leaves room for {max(0, budget)} tokens at once beside weights, gradients and "
            f"optimizer, and a row has up to {longest}: {', '.join(more)} make room, "
            "--tokens_per_micro_batch overrides this")
    return budget

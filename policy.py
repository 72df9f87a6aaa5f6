"""The policy: log probabilities, entropies, and the exact gradient of one optimizer step, on one rank or on many."""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, GenerationConfig

import parallel
from losses import Tokens, call, every_token, policy_loss, step_size

CHUNK = 2**25  # numbers in a [tokens, vocabulary] tensor at most: 128 MB in float32, 220 tokens of Qwen's vocabulary


@dataclass
class Batch:
    """Completions, a row each: N of them, T tokens at most."""

    ids: torch.Tensor               # [N, L] prompt, completion, padding on the right
    prompt_len: torch.Tensor        # [N]
    completion_len: torch.Tensor    # [N]
    mask: torch.Tensor              # [N, T] bool: the completion tokens that count
    sampler_logprobs: torch.Tensor  # [N, T], as all that follows
    old_logprobs: torch.Tensor = None
    entropy: torch.Tensor = None
    advantages: torch.Tensor = None
    ref_logprobs: torch.Tensor = None

    def rows(self, index):
        return Batch(*(None if (x := getattr(self, f.name)) is None else x[index] for f in fields(self)))

    def to(self, device):
        return Batch(*(None if (x := getattr(self, f.name)) is None else x.to(device) for f in fields(self)))

    def tokens(self, logprobs, entropy):
        """The optimizer step as losses.py takes it, at the policy's present logprobs and entropy."""
        return Tokens(logprobs, self.old_logprobs, self.advantages, self.mask, entropy, self.sampler_logprobs,
                      self.ref_logprobs)


def make_batch(prompts, completions, device="cpu"):
    """prompts: N lists of token ids; completions: N sampler.Completions."""
    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    return Batch(ids=pad([torch.tensor(p + c.tokens) for p, c in zip(prompts, completions)]),
                 prompt_len=torch.tensor([len(p) for p in prompts], device=device),
                 completion_len=torch.tensor([len(c.tokens) for c in completions], device=device),
                 mask=pad([torch.ones(len(c.tokens), dtype=torch.bool) for c in completions]),
                 sampler_logprobs=pad([torch.tensor(c.logprobs) for c in completions]))


# ---------------------------------------------------------------------------- from hidden states to log probabilities

def head_log_pi(hidden, weight, bias, temperature):
    logits = F.linear(hidden, weight, bias)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


class HeadLogprobs(torch.autograd.Function):
    """(hidden [n, H], weight [V, H], bias [V] or None, ids [n], temperature) -> log pi of the ids and the entropy, [n].

    A chunk of tokens at a time, and again in the backward pass: what is ever held of [tokens, vocabulary] is one chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, temperature):
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.temperature, ctx.rows = temperature, max(1, CHUNK // len(weight))
        ctx.set_materialize_grads(False)
        logprobs, entropy = [hidden.new_empty(0)], [hidden.new_empty(0)]  # where there is no token at all
        for h, i in zip(hidden.to(ctx.dtype).split(ctx.rows), ids.split(ctx.rows)):
            log_pi = head_log_pi(h, weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype), temperature)
            logprobs.append(log_pi.gather(-1, i[:, None])[:, 0])
            entropy.append(-log_pi.exp().mul_(log_pi).sum(-1))
        return torch.cat(logprobs), torch.cat(entropy)

    @staticmethod
    def backward(ctx, of_logprobs, of_entropy):
        """d log pi_i / d logit_j = ([i = j] - pi_j) / T and d H / d logit_j = -pi_j (log pi_j + H) / T"""
        hidden, weight, bias, ids = ctx.saved_tensors
        w, b = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        total = torch.promote_types(weight.dtype, torch.float32)
        to_hidden, to_bias = torch.empty_like(hidden), None if bias is None else torch.zeros_like(bias, dtype=total)
        to_weight = torch.zeros_like(weight, dtype=total) if ctx.needs_input_grad[1] else None
        for rows in torch.arange(len(ids), device=ids.device).split(ctx.rows):
            h = hidden[rows].to(ctx.dtype)
            log_pi = head_log_pi(h, w, b, ctx.temperature)
            pi, zero = log_pi.exp(), log_pi.new_zeros(())
            scale = zero if of_logprobs is None else -of_logprobs[rows, None]
            if of_entropy is not None:
                entropy = -(pi * log_pi).sum(-1, keepdim=True)
                scale = scale - log_pi.add_(entropy).mul_(of_entropy[rows, None])
            to_logits = pi.mul_(scale)
            if of_logprobs is not None:
                to_logits.scatter_add_(1, ids[rows, None], of_logprobs[rows, None].to(to_logits.dtype))
            to_logits = to_logits.div_(ctx.temperature).to(ctx.dtype)
            to_hidden[rows] = (to_logits @ w).to(hidden.dtype)
            if to_weight is not None:
                to_weight.addmm_(to_logits.T, h) if h.dtype == total else to_weight.add_(to_logits.T @ h)
            if bias is not None:
                to_bias += to_logits.sum(0)
        return (to_hidden, None if to_weight is None else to_weight.to(weight.dtype),
                None if bias is None else to_bias.to(bias.dtype), None, None)


# ---------------------------------------------------------------------------- sequences end to end

def packed_attention(module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q, scaling=None,
                     sliding_window=None, **_):
    """Attention of sequences that stand end to end, query [1, heads, tokens, d], none of them looking into another."""
    groups = query.shape[1] != key.shape[1]
    if query.is_cuda:
        q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # rotations may have made float32 of some
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, enable_gqa=groups,
                          window_size=(sliding_window - 1 if sliding_window else -1, 0))
        return out[None], None
    assert not sliding_window, "only on a GPU"  # elsewhere there is no such kernel: one by one, for tests
    parts = zip(*(x.split(cu_seq_lens_q.diff().tolist(), 2) for x in (query, key, value)))
    return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=groups)
                      for q, k, v in parts], 2).transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *_, **__: None)


class Policy(torch.nn.Module):
    """A causal language model as the loop sees it: completions in, log probabilities and entropies out.

    temperature: the sampling temperature, at which the sampler takes its logprobs too. dtype: "float32" or "bfloat16"
    computation over float32 weights. budget: tokens that go through the model at once. packed: sequences stand end to
    end, without padding."""

    def __init__(self, model, temperature=1.0, dtype="float32", budget=16384, packed=False):
        super().__init__()
        self.model, self.temperature, self.dtype, self.budget = model, temperature, dtype, budget
        self.padded_attention = model.config._attn_implementation
        self.pack(packed)

    def pack(self, packed=True):
        """Sequences end to end from here on, or not."""
        self.packed = packed
        self.model.set_attn_implementation("packed" if packed else self.padded_attention)

    def forward(self, batch):
        """-> log pi of the completion tokens and the entropy there in nats, each [N, T], 0 in padding."""
        length = batch.prompt_len + batch.completion_len
        ids = batch.ids[:, :length.max()]
        place = torch.arange(ids.shape[1], device=ids.device)
        real = place < length[:, None]
        predicts = (place >= batch.prompt_len[:, None] - 1) & (place < length[:, None] - 1)  # place t predicts token t + 1
        head = self.model.get_output_embeddings()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            if self.packed:
                hidden = self.model.base_model(
                    input_ids=ids[real][None], position_ids=place.expand_as(ids)[real][None], use_cache=False,
                    cu_seq_lens_q=F.pad(length.cumsum(0), (1, 0)).int(), max_length_q=ids.shape[1]).last_hidden_state[0][predicts[real]]
            else:  # and no attention mask: the padding is on the right, where causal attention never looks
                hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[predicts]
            found = HeadLogprobs.apply(hidden, head.weight, head.bias, ids.roll(-1, 1)[predicts], self.temperature)
        completion = torch.arange(batch.mask.shape[1], device=ids.device) < batch.completion_len[:, None]
        return tuple(x.new_zeros(completion.shape).masked_scatter(completion, x) for x in found)


def layers_of(model):
    """The model's transformer blocks."""
    return [m for m in model.modules() if type(m).__name__ in set(model._no_split_modules or ())]


def load(folder, eos, probe, longest=1024, budget=None, packed=None, lora_rank=0, activation_checkpointing=False,
         compile=False, offload=False, **settings):
    """-> the Policy, its master weights in float32, on the GPU where there is one, shared out over the ranks.

    probe: a Batch of a few short rows to try it on. longest: tokens of the longest row to come. budget: None is found
    from the memory. packed: None is where a GPU has the kernel and it gives what padding gives. settings: of Policy.
    Raises ValueError for a folder that lacks weights, for a model that does more after its LM head than Policy does (a
    softcap, a scale), and where the memory cannot hold one row."""
    try:
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as e:  # what can be wrong with a folder has no end
        raise ValueError(f"cannot be loaded: {(str(e) or type(e).__name__).splitlines()[0]}") from None
    if told["missing_keys"]:
        raise ValueError(f"lacks weights: {', '.join(sorted(told['missing_keys'])[:3])}")
    model.generation_config = GenerationConfig(eos_token_id=eos)  # saved with checkpoints; the model's own may not be valid
    if parallel.world() == 1:
        model.to(parallel.device())  # shards go there one by one otherwise
    probe = probe.to(model.device)
    policy = Policy(model, **settings)
    row = probe.rows([0])
    start, n = int(row.prompt_len), int(row.completion_len)
    with torch.no_grad():
        ours, ids = Policy(model, policy.temperature)(row)[0][:, :n], row.ids[:, :start + n]
        whole = (model(ids).logits[:, start - 1:-1] / policy.temperature).log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
    gap = (ours - whole).abs().max().item()
    if not gap < 1e-3:
        raise ValueError(f"changes its logits after the LM head, or its weights are not finite: policy.py's log probabilities are off by {gap:.2g}")
    if lora_rank:
        # those that parallel.weights can merge: not GPT-2's Conv1D, not the experts of a mixture
        linear = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear and m is not model.get_output_embeddings()]
        if not linear:
            raise ValueError("has no linear layers for --lora_rank")
        inject_adapter_in_model(LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=linear, bias="none"), model)
    policy.budget = budget or min(parallel.gather(token_budget(policy, probe, longest, activation_checkpointing, offload)))
    if activation_checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    for layer in layers_of(model):
        layer.training = activation_checkpointing  # transformers looks at the layer's; what it holds stays without dropout
        if compile:
            layer.compile(dynamic=True)
    parallel.shard(policy, layers_of(model), offload)
    if packed is None:
        packed = policy.dtype == "bfloat16" and parallel.device().type == "cuda" and packing_agrees(policy, probe.to(parallel.device()))
    if packed:
        policy.pack()
    return policy


def head_of(folder):
    """The weights of a model's LM head, [vocabulary, hidden size], in float32 on the CPU."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_output_embeddings().weight.detach()


@torch.no_grad()
def packing_agrees(policy, probe):
    """Does the model give end to end what it gives with padding? Not one that has more than attention between places."""
    padded = policy(probe)[0]
    policy.pack()
    try:
        gap = (policy(probe)[0] - padded)[probe.mask].abs().mean().item()
    except (RuntimeError, TypeError) as e:  # said below: heads that the kernel is not made for, attention of the model's own
        gap, padded = math.inf, e
    gap = max(parallel.gather(gap))
    if not gap < 0.05:  # bfloat16 rounds by about 0.01
        if parallel.rank() == 0:
            print(f"the model does not allow for packing ({padded if gap == math.inf else f'log probabilities are off by {gap:.2g}'}): padding instead")
        policy.pack(False)
    return gap < 0.05


def token_budget(policy, probe, longest, activation_checkpointing, offload):
    """Tokens that may go through the model at once, from what autograd keeps of a token and the memory there is.

    That is measured on two sizes of `probe`, so that what does not grow with the tokens falls out. 0.7 of the memory
    beside weights, gradients and AdamW's two moments is given away; on a CPU, at most 16,384 tokens."""
    def kept(rows):
        seen = {}

        def note(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = policy(rows)  # holds the graph, and so all that was noted
        return sum(seen.values()), int((rows.prompt_len + rows.completion_len).sum()), out
    (few, few_tokens, _), (many, many_tokens, _) = kept(probe.rows([0])), kept(probe.rows([0, 0, 0, 0]))
    each = (many - few) / (many_tokens - few_tokens)
    layers, config = max(1, len(layers_of(policy.model))), policy.model.config.get_text_config()
    if activation_checkpointing:  # the layers' inputs, and one layer's inside
        each = each / layers + 4 * layers * config.hidden_size
    parameters = list(policy.parameters())
    state = sum(p.numel() * (4 if not p.requires_grad else 16) for p in parameters) / parallel.world()
    free = 0.7 * (parallel.memory() - (0 if offload else state)) - 20 * CHUNK
    budget = int(min(free / each, 2**14 if parallel.device().type == "cpu" else 2**17))
    if budget < longest:
        raise ValueError(f"leaves room for {max(0, budget)} tokens at once beside weights, gradients and optimizer, and a row has up to "
                         f"{longest}: --activation_checkpointing, --offload, --lora_rank or more GPUs make room, --tokens_per_micro_batch overrides this")
    return budget


def lr_factor(warmup, schedule, steps):
    """-> what the learning rate is multiplied with at each optimizer step: linear warm-up, and a cosine to 0 after `steps` of them."""
    return lambda step: min(1, (step + 1) / (warmup + 1)) * (0.5 + 0.5 * math.cos(math.pi * min(1, step / steps)) if schedule == "cosine" else 1)


# ---------------------------------------------------------------------------- a step, in micro-batches, over the ranks

def micro_batches(batch, budget, packed=False, ranks=1):
    """Rows in groups of at most `budget` tokens (with the padding, unless packed; a longer row goes alone), like lengths
    together. As many groups for each rank, some of them empty where there are too few rows: all go through the sharded
    model equally often, or they would wait for each other for ever."""
    lengths = (batch.prompt_len + batch.completion_len).tolist()
    groups, used = [], 0
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        used += lengths[row] if packed or not groups else lengths[groups[-1][0]]
        if not groups or used > budget:
            groups.append([])
            used = lengths[row]
        groups[-1].append(row)
    while len(groups) % ranks:
        largest = max(range(len(groups)), key=lambda g: len(groups[g]))
        rows = groups[largest]
        groups[largest:largest + 1] = [rows[:len(rows) // 2], rows[len(rows) // 2:]]
    return groups


def own_parts(policy, batch):
    """The micro-batches of this rank, an empty one standing as a row that does not count: (rows to keep, sub-batch)."""
    parts = micro_batches(batch, policy.budget, policy.packed, parallel.world())[parallel.rank()::parallel.world()]
    return [(part, batch.rows(part or [0])) for part in parts]


def in_order(batch, parts, outputs):
    """What the policy gave for each micro-batch of every rank -> logprobs, entropy [N, T] of the whole batch."""
    whole = outputs[0][0].new_zeros(2, *batch.mask.shape)
    for (part, _), out in zip(parts, outputs):
        whole[:, part] = torch.stack(out)[:, :len(part)]
    return parallel.total(whole).unbind()  # each row is one rank's, and 0 elsewhere


@torch.no_grad()
def score(policy, batch):
    """The policy's logprobs and entropy [N, T], without gradient, micro-batch by micro-batch."""
    parts = own_parts(policy, batch)
    return in_order(batch, parts, [policy(rows) for _, rows in parts])


def backward(policy, batch, method, hp, max_tokens, only=every_token, entropy_coef=0.0, **coefficients):
    """Adds the gradient of one optimizer step on the completions of `batch` to the parameters' .grad, and returns
    what to log of it. only: one of the method's passes; coefficients: tis_cap and kl_coef of losses.policy_loss.

    The gradient is that of the loss of the whole step, however it is cut into micro-batches and over ranks: every rank
    has the whole batch, so the denominators are the step's, and a method that looks at the whole step is shown it. For
    such a method the logprobs are gathered without gradient first, the loss is differentiated with respect to them, and
    that is pushed through the model part by part; a step in one micro-batch never pays for this."""
    size = step_size(batch.mask, max_tokens)

    def loss_of(rows, logprobs, entropy, size=size):
        return policy_loss(method, rows.tokens(logprobs, entropy.detach()), max_tokens, size=size, only=only,
                           **coefficients, **hp)

    def bonus(rows, logprobs, entropy):
        counts = call(only, hp, rows.tokens(logprobs.detach(), entropy.detach()))
        return call(method.aggregate, hp, entropy * counts, rows.mask, size)

    parts = own_parts(policy, batch)
    gather_first = method.whole_step and len(parts) * parallel.world() > 1
    if gather_first:
        logprobs, entropy = score(policy, batch)
        pull, = torch.autograd.grad(loss_of(batch, logprobs.requires_grad_(), entropy)[0], logprobs)
    seen = []
    for part, rows in parts:
        logprobs, entropy = policy(rows)
        if not part:
            loss = 0 * logprobs.sum()
        else:
            loss = (logprobs * pull[part]).sum() if gather_first else loss_of(rows, logprobs, entropy)[0]
            if entropy_coef:
                loss = loss - entropy_coef * bonus(rows, logprobs, entropy)
        loss.backward()
        seen.append((logprobs.detach(), entropy.detach()))
    logprobs, entropy = in_order(batch, parts, seen)
    _, metrics = loss_of(batch, logprobs, entropy, size=None)  # of the whole step: no average of averages
    if entropy_coef:
        metrics["entropy_loss"] = -entropy_coef * bonus(batch, logprobs, entropy)
        metrics["loss"] = metrics["loss"] + metrics["entropy_loss"]
    return metrics

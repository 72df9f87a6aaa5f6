"""What is computed in an order of its own: the LM head in chunks, attention end to end."""

import torch
import torch.nn.functional as F

# numbers in a [tokens, vocabulary] tensor at most: 128 MB in float32, 220 tokens of Qwen's. On a
# GPU loading.load makes it larger: every chunk rewrites the gradient of all of the head's weights
CHUNK = 2**25


def head_log_pi(hidden, weight, bias, temperature):
    """log pi [n, V] of hidden states [n, H], in float32 or better."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits / temperature).log_softmax(-1)


class HeadLogprobs(torch.autograd.Function):
    """(hidden [n, H], weight [V, H], bias [V] or None, ids [n], temperature)
    -> log pi of the ids and the entropy in nats, [n] each.

    It computes a chunk of tokens at a time, and computes it again in the backward pass: of
    [tokens, vocabulary] only one chunk is ever held."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, temperature):
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.temperature, ctx.rows = temperature, max(1, CHUNK // len(weight))
        ctx.set_materialize_grads(False)
        w, b = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        logprobs, entropy = [hidden.new_empty(0)], [hidden.new_empty(0)]  # there may be no token
        for h, i in zip(hidden.to(ctx.dtype).split(ctx.rows), ids.split(ctx.rows), strict=True):
            log_pi = head_log_pi(h, w, b, temperature)
            logprobs.append(log_pi.gather(-1, i[:, None])[:, 0])
            entropy.append(-log_pi.exp().mul_(log_pi).sum(-1))
        return torch.cat(logprobs), torch.cat(entropy)

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        """d log pi_i / d logit_j = ([i = j] - pi_j) / T
        d H / d logit_j = -pi_j (log pi_j + H) / T"""
        hidden, weight, bias, ids = ctx.saved_tensors
        w, b = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=sum_dtype)
        d_weight = torch.zeros_like(weight, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        for rows in torch.arange(len(ids), device=ids.device).split(ctx.rows):
            h = hidden[rows].to(ctx.dtype)
            log_pi = head_log_pi(h, w, b, ctx.temperature)
            pi = log_pi.exp()
            scale = log_pi.new_zeros(()) if d_logprobs is None else -d_logprobs[rows, None]
            if d_entropy is not None:
                entropy = -(pi * log_pi).sum(-1, keepdim=True)
                scale = scale - log_pi.add_(entropy).mul_(d_entropy[rows, None])
            d_logits = pi.mul_(scale)
            if d_logprobs is not None:
                at_ids = d_logprobs[rows, None].to(d_logits.dtype)
                d_logits.scatter_add_(1, ids[rows, None], at_ids)
            d_logits = d_logits.div_(ctx.temperature).to(ctx.dtype)
            d_hidden[rows] = (d_logits @ w).to(hidden.dtype)
            if d_weight is not None and h.dtype == sum_dtype:
                d_weight.addmm_(d_logits.T, h)
            elif d_weight is not None:
                d_weight.add_(d_logits.T @ h)
            if bias is not None:
                d_bias += d_logits.sum(0)
        return (d_hidden, None if d_weight is None else d_weight.to(weight.dtype),
                None if bias is None else d_bias.to(bias.dtype), None, None)


def packed_attention(module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q,
                     scaling=None, sliding_window=None, **_):
    """Attention of sequences that stand end to end, none of them looking into another.

    query, key, value: [1, heads, tokens, d]; cu_seq_lens_q: the sequences' borders [n + 1].
    Returns [1, tokens, heads, d], as transformers' attention functions do."""
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn  # takes long to import
        # rotations may have made float32 of some
        q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        options = dict(scale=scaling, window_size=(sliding_window - 1 if sliding_window else -1, 0))
        if grouped:  # torch 2.11 does not know the word
            options["enable_gqa"] = True
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
                          **options)
        return out[None], None
    assert not sliding_window, "only on a GPU"  # elsewhere there is no such kernel: one by one
    sequences = zip(*(x.split(cu_seq_lens_q.diff().tolist(), 2) for x in (query, key, value)),
                    strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling,
                                                     enable_gqa=grouped)
                      for q, k, v in sequences], 2).transpose(1, 2), None


def register_packed_attention():
    """Makes "packed" a name that a transformers model's attention can be set to."""
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", lambda *_, **__: None)

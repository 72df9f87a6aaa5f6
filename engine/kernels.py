"""What is computed in an order of its own: the LM head in chunks, attention end to end."""

import torch
import torch.nn.functional as F

# numbers in a [tokens, vocabulary] tensor at most: 128 MB in float32, 220 tokens of Qwen's. On a
# GPU loading.load makes it larger: every chunk rewrites the gradient of all of the head's weights
CHUNK = 2**25
QUERIES = 256  # of a sequence, in one call of attention, where it has a context


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


def take(x, index):
    """The rows of x that an index tensor names: [*index.shape, ...]. Where a row is taken many
    times, its gradient is a sum: in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).to(x.dtype)


def end_to_end_attention(module, query, key, value, attention_mask, *, scaling=None,
                         sliding_window=None, s_aux=None, softcap=None, blocks=None, keys=None,
                         cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None,
                         max_length_k=None, **_):
    """Attention of segments that stand end to end. See layout.Segments.

    query, key, value: [1, heads, places, d]. On a GPU in 16 bits: keys, the places of the keys of
    all segments, None where they are the places themselves; the borders of queries and keys, and
    the longest. Elsewhere: blocks of layout.attention_blocks.
    Returns [1, places, heads, d], as transformers' attention functions do. Raises TypeError for
    attention that does more: sinks, a softcap, a mask of the model's own."""
    if s_aux is not None or softcap is not None:
        raise TypeError("its attention has sinks or a softcap")
    if attention_mask is not None and (
            attention_mask.numel() > 1 or attention_mask.item() != sliding_window):
        raise TypeError("its masks limit what is seen, and its attention does not know of it")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [places, heads, d]
    grouped = q.shape[1] != k.shape[1]
    if blocks is not None:
        return attention_by_blocks(q, k, v, *blocks, sliding_window, scale=scaling,
                                   enable_gqa=grouped)[None], None
    from torch.nn.attention.varlen import varlen_attn  # takes long to import
    q, k = q.to(v.dtype), k.to(v.dtype)  # rotations may have made float32 of them
    if keys is not None:
        k, v = take(k, keys), take(v, keys)
    # causal, from the last key: of fewer queries than keys, the first sees what is before it
    options = dict(scale=scaling, window_size=(sliding_window - 1 if sliding_window else -1, 0))
    if grouped:  # torch 2.11 does not know the word
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k,
                       **options)[None], None


def part(x, rows, start, end):
    """x[:rows, :, start:end]; where that is all of x, its gradient needs no copy."""
    return x if (rows, start, end) == (len(x), 0, x.shape[2]) else x[:rows, :, start:end]


def attention_by_blocks(q, k, v, blocks, order, window, **options):
    """[places, heads, d] of q, k and v, block by block, and within one by QUERIES, so that little
    is computed that is not seen. window: of so many keys a query sees the last; None is all."""
    outputs = []
    for block in blocks:
        queries, keys, values = (take(x, index).transpose(1, 2) for x, index in (
            (q, block.queries), (k, block.keys), (v, block.keys)))  # [B, heads, T or C + T, d]
        context = keys.shape[2] - queries.shape[2]
        within = None
        if window and keys.shape[2] > window:
            place = torch.arange(keys.shape[2], device=q.device)
            within = (place - place[context:, None]).abs() < window
        if block.sees is None:
            mask = dict(is_causal=True) if within is None else dict(attn_mask=within.tril())
            out = F.scaled_dot_product_attention(queries, keys, values, **mask, **options)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            continue
        seen = block.sees if within is None else block.sees & within
        for start in range(0, queries.shape[2], QUERIES):
            rows, end = block.going[start // QUERIES], min(start + QUERIES, queries.shape[2])
            out = F.scaled_dot_product_attention(
                part(queries, rows, start, end), part(keys, rows, 0, context + end),
                part(values, rows, 0, context + end),
                attn_mask=seen[:rows, :, start:end, :context + end], **options)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
    return take(torch.cat(outputs), order)  # without padding


def register_end_to_end():
    """Makes "end_to_end" a name that a transformers model's attention can be set to."""
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register("end_to_end", end_to_end_attention)
    AttentionMaskInterface.register("end_to_end", limit_of_mask)


def limit_of_mask(*_, local_size=None, **__):
    """In place of a mask: the window or the chunk that it would have had, since some models tell
    it to their masks alone. In four dimensions, for models that slice a mask."""
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)

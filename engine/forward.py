"""How completions go through the model: how many at once, the places of their tokens, attention,
and the LM head in chunks of tokens. Two layouts:

    padded   [N, L]: prompt, completion, padding on the right
    shared   [1, places]: each prompt once, end to end, then the completions of all of them; a
             completion sees its prompt and itself

loading.try_shared takes "shared" where it agrees with "padded": only attention mixes positions.
"""

import torch
import torch.nn.functional as F

# elements of a [tokens, vocabulary] tensor at most: 128 MB in float32, 220 tokens of Qwen's. On a
# GPU loading.load has more: every chunk rewrites the gradient of all of the head's weights
CHUNK = 2**25


def places_of(lengths):
    """-> row and column of each place in rows of these lengths, row by row."""
    place = torch.arange(int(lengths.max()), device=lengths.device)
    return (place < lengths[:, None]).nonzero(as_tuple=True)


def micro_batches(batch, budget, layout="padded", ranks=1, among=None):
    """Lists of rows, all or those `among`, of at most `budget` tokens each, like lengths together.

    Padding counts. A shared prompt counts once, and a sixteenth of it for each completion, which
    copies its keys and values. A larger group is cut, and its prompt computed in each part; a
    larger row is alone. The number of lists is a multiple of `ranks`, some of them empty: a rank
    that went through the sharded model once more would wait forever."""
    prompts, completions = batch.prompt_len.tolist(), batch.completion_len.tolist()
    lengths = batch.lengths.tolist()
    group = batch.group.tolist() if layout == "shared" else range(len(lengths))

    def cost(rows):
        if layout == "padded":
            return len(rows) * lengths[rows[0]]
        return (sum({group[r]: prompts[r] for r in rows}.values())
                + sum(completions[r] + prompts[r] // 16 for r in rows))

    groups, parts = {}, []
    for row in sorted(among or range(len(lengths)), key=lambda r: -lengths[r]):
        groups.setdefault(group[row], []).append(row)
    for together in groups.values():
        if not parts or cost(parts[-1] + together) > budget:
            parts.append([])
        for row in together:
            if parts[-1] and cost([*parts[-1], row]) > budget:
                parts.append([])
            parts[-1].append(row)
    while len(parts) % ranks:
        rows = max(parts, key=len)
        at, half = parts.index(rows), len(rows) // 2
        parts[at:at + 1] = rows[:half], rows[half:]
    return parts


def lay(batch, name, by_kernel=False):
    """-> inputs of the model, a dict; predicts [n], the place that predicts each completion token;
    targets [n], the completion tokens, row by row.

    by_kernel: attention is one call of the GPU's kernel, in 16 bits. "shared" leaves out the last
    token of each completion, which predicts nothing."""
    row, t = places_of(batch.completion_len)
    column = batch.prompt_len[row] + t  # of completion token t in its row of batch.ids
    targets = batch.ids[row, column]
    if name == "padded":  # on the right, where causal attention does not look: no mask
        ids = batch.ids[:, :batch.lengths.max()]
        return dict(input_ids=ids), row * ids.shape[1] + column - 1, targets

    numbers, group = batch.group.unique(return_inverse=True)
    first = (batch.group == numbers[:, None]).int().argmax(1)  # a row of each prompt
    # segments: the prompts, then the completion of each row, in the context of its prompt
    length = torch.cat([batch.prompt_len[first], batch.completion_len - 1])
    start, P = length.cumsum(0) - length, len(first)
    context = torch.cat([start[:P], start[group]])
    context_length = torch.cat([torch.zeros_like(first), batch.prompt_len])
    segment, nth = places_of(length)
    position = context_length[segment] + nth
    inputs = dict(input_ids=torch.cat([batch.ids[first], batch.ids])[segment, position][None],
                  position_ids=position[None], **(kernel_inputs if by_kernel else block_inputs)(
                      torch.stack([start, length, context, context_length])))
    before = torch.where(t == 0, (context + context_length)[P + row], start[P + row] + t)
    return inputs, before - 1, targets


def kernel_inputs(segments):
    """segments [4, S]: each one's first place and length, at consecutive places, and those of its
    context, another (length 0: none). It attends to its context and to itself.

    -> the argument `varlen` of shared_attention."""
    start, length, context, context_length = segments
    seen = context_length + length
    borders, seen_borders = (F.pad(x.cumsum(0), (1, 0)).int() for x in (length, seen))
    of, nth = places_of(seen)  # each segment and its keys
    keys = nth + torch.where(nth < context_length[of], context[of], (start - context_length)[of])
    return dict(varlen=(keys, borders, seen_borders, int(length.max()), int(seen.max())))


def block_inputs(segments):
    """segments: of kernel_inputs -> the argument `blocks` of shared_attention."""
    like = {}
    for i, (_, length, _, context_length) in enumerate(segments.T.tolist()):
        if length:  # 0 for a completion of one token
            # a block's have one context, or all a short one or none; lengths within a factor of two
            short = max(length, context_length) <= 64  # then no mask of a block is large
            kind = bool(context_length) if short else context_length, max(length, 32).bit_length()
            like.setdefault(kind, []).append(i)
    blocks = [block_of(*segments[:, members, None]) for members in like.values()]
    places, order = torch.cat([queries.flatten() for queries, *_ in blocks]).sort(stable=True)
    order = order[places.diff(prepend=places[:1] - 1) > 0]  # padding repeats a place
    return dict(blocks=(blocks, order))


def block_of(start, length, context, context_length):
    """B segments, [B, 1] each, whose attention is computed together -> places of the queries
    [B, T], where padding on the right repeats a segment's first; places of the keys [B, C + T],
    contexts, padded on the left, and queries; and which keys a query sees, [B or 1, 1, T, C + T]
    bool, or None: no context, causal."""
    T = int(length.max())
    place = torch.arange(T, device=start.device)
    queries = (start + place).where(place < length, start)
    if not context_length.any():
        return queries, queries, None
    at = torch.arange(-int(context_length.max()), T, device=start.device)  # 0: the first query
    sees = at >= -context_length
    keys = (context + context_length + at).where(sees, context)[:, :-T]
    sees = (sees[:1] if sees.all() else sees)[:, None] & (at <= place[:, None])
    return queries, torch.cat([keys, queries], 1), sees[:, None]


def take(x, index):
    """x[index], [*index.shape, ...]. Gradients of a repeated index add up in float32 or more."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).to(x.dtype)


def flash_runs(device, dtype):
    """Whether attention has flash kernels: 16 bits on a GPU of compute capability 8.0 or more."""
    return (device.type == "cuda" and dtype.itemsize == 2
            and torch.cuda.get_device_capability(device) >= (8, 0))


def must_repeat(values):
    """Whether keys and values are repeated for each query head: without flash, CUDA has grouped
    queries in its math kernel alone, which keeps [heads, T, T], not in the memory-efficient one."""
    return values.is_cuda and not flash_runs(values.device, values.dtype)


def repeated(query, key, value):
    """[B, heads, places, d] each -> the same in value's dtype, all with the query's heads."""
    from transformers.integrations.sdpa_attention import repeat_kv
    each = query.shape[1] // key.shape[1]
    return query.to(value.dtype), repeat_kv(key.to(value.dtype), each), repeat_kv(value, each)


def padded_attention(module, query, key, value, attention_mask, **options):
    """transformers' "sdpa", on repeated keys and values where must_repeat asks for it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    if must_repeat(value):
        query, key, value = repeated(query, key, value)
        module = None  # which says how often to repeat
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def shared_attention(module, query, key, value, attention_mask, *, scaling=None,
                     sliding_window=None, blocks=None, varlen=None, **others):
    """Attention of the layout "shared", [1, heads, places, d] each -> [1, places, heads, d], None.

    varlen, on a GPU in 16 bits: places of the keys of all segments, cumulative lengths of queries
    and keys, and their longest. blocks, elsewhere: a list of block_of's, and the index [places] of
    each place's result among theirs. Raises TypeError for sinks, a softcap, or a model's own mask.
    """
    if others.get("s_aux") is not None or others.get("softcap") is not None:
        raise TypeError("its attention has sinks or a softcap")
    if attention_mask is not None and (
            attention_mask.numel() > 1 or attention_mask.item() != sliding_window):
        raise TypeError("its masks limit attention, and its attention gets no such limit")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [places, heads, d]
    if blocks is not None:
        return attention_by_blocks(q, k, v, *blocks, sliding_window, scaling)[None], None
    from torch.nn.attention.varlen import varlen_attn  # takes long to import
    keys, *lengths = varlen
    q, k, v = q.to(v.dtype), take(k.to(v.dtype), keys), take(v, keys)  # rotations may widen q, k
    window = sliding_window - 1 if sliding_window else -1, 0  # query 0 sees the whole prompt
    return varlen_attn(q, k, v, *lengths, window_size=window, scale=scaling,
                       enable_gqa=q.shape[1] != k.shape[1])[None], None


def attention_by_blocks(q, k, v, blocks, order, window, scale):
    """q, k, v [places, heads, d] -> [places, heads, d]. window: keys a query sees; None: all"""
    from torch.nn.attention import bias  # imports more than flags need
    outputs, repeat = [], must_repeat(v)
    for asks, seen, sees in blocks:  # of block_of
        queries, keys, values = (take(x, places).transpose(1, 2) for x, places in (
            (q, asks), (k, seen), (v, seen)))  # [B, heads, T or C + T, d]
        if repeat:
            queries, keys, values = repeated(queries, keys, values)
        length = keys.shape[2]
        context_length = length - queries.shape[2]
        if window and length > window:
            place = torch.arange(length, device=q.device)
            within = place > place[context_length:, None] - window
            sees = within.tril()[None, None] if sees is None else sees & within
        elif repeat and sees is not None and len(sees) == 1:  # or each layer keeps it, as floats
            sees = bias.causal_lower_right(queries.shape[2], length)
        out = F.scaled_dot_product_attention(
            queries, keys, values, sees, is_causal=sees is None, scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1])
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return take(torch.cat(outputs), order)  # without padding


def register_attention():
    """Adds "shared" to transformers' attentions, and replaces its "sdpa" in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register("sdpa", padded_attention)
    AttentionInterface.register("shared", shared_attention)
    AttentionMaskInterface.register("shared", limit_of_mask)


def limit_of_mask(*_, local_size=None, **__):
    """Instead of a mask: its window or chunk, which some models give to masks alone, in 4-D."""
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def head_logits(hidden, weight, bias=None, wide=False):
    """Logits [n, V] of hidden states [n, H] and weights [V, H]. wide: 16-bit numbers are multiplied
    and summed in float32, as vLLM's head_dtype has it, and the logits are not rounded."""
    if not wide or hidden.dtype.itemsize > 2:
        return F.linear(hidden, weight, bias)
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = F.linear(hidden.float(), weight.float())
    return logits if bias is None else logits.add_(bias)


def head_log_pi(hidden, weight, bias, temperature, wide):
    """log pi [n, V] of hidden states [n, H], in float32 or better."""
    logits = head_logits(hidden, weight, bias, wide)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits.div_(temperature)
    return logits.log_softmax(-1)


class HeadLogprobs(torch.autograd.Function):
    """(hidden [n, H], weight [V, H], bias [V] or None, ids [n], temperature, wide, chunk)
    -> log pi of the ids and the entropy in nats, [n] each, computed in hidden's dtype.

    `chunk` elements of [tokens, vocabulary] are in memory at a time, and computed again backwards.
    wide: of head_logits; the gradient's products have 16-bit factors all the same."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, temperature, wide=False, chunk=CHUNK):
        ctx.settings, ctx.rows = (temperature, wide), max(1, chunk // len(weight))
        ctx.set_materialize_grads(False)
        w, b = (x if x is None else x.to(hidden.dtype) for x in (weight, bias))
        logprobs, entropy = [], []
        for h, i in zip(hidden.split(ctx.rows), ids.split(ctx.rows)):
            log_pi = head_log_pi(h, w, b, *ctx.settings)
            logprobs.append(log_pi.gather(-1, i[:, None])[:, 0])
            entropy.append(-log_pi.exp().mul_(log_pi).sum(-1))
        logprobs, entropy = torch.cat(logprobs), torch.cat(entropy)
        ctx.save_for_backward(hidden, weight, bias, ids, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        """d log pi_i / d logit_j = ([i = j] - pi_j) / T
        d H / d logit_j = -pi_j (log pi_j + H) / T"""
        hidden, weight, bias, ids, entropy = ctx.saved_tensors
        w, b = (x if x is None else x.to(hidden.dtype) for x in (weight, bias))
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden)
        d_weight, d_bias = (torch.zeros_like(x, dtype=sum_dtype) if needed else None
                            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:]))
        if d_logprobs is None:
            d_logprobs = hidden.new_zeros(ids.shape)
        for rows in torch.arange(len(ids), device=ids.device).split(ctx.rows):
            h, d_log_pi = hidden[rows], d_logprobs[rows, None]
            log_pi = head_log_pi(h, w, b, *ctx.settings)
            pi = log_pi.exp()
            scale = -d_log_pi
            if d_entropy is not None:
                scale = scale - log_pi.add_(entropy[rows, None]).mul_(d_entropy[rows, None])
            d_logits = pi.mul_(scale)
            d_logits.scatter_add_(1, ids[rows, None], d_log_pi.to(d_logits.dtype))
            if (temperature := ctx.settings[0]) != 1:
                d_logits.div_(temperature)
            d_logits = d_logits.to(h.dtype)
            d_hidden[rows] = d_logits @ w
            if d_weight is not None and h.dtype == sum_dtype:
                d_weight.addmm_(d_logits.T, h)
            elif d_weight is not None:
                d_weight.add_(d_logits.T @ h)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, *[None] * 4  # autograd casts them to the inputs' dtypes

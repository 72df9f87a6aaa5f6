"""The LM head, in chunks of tokens: log probabilities and entropies without all logits at once."""

import torch
import torch.nn.functional as F

# elements of a [tokens, vocabulary] tensor at most: 128 MB in float32, 220 tokens of Qwen's. On a
# GPU loading.load has more: every chunk rewrites the gradient of all of the head's weights
CHUNK = 2**25


def head_logits(hidden, weight, bias=None, wide=False):
    """Logits [n, V] of hidden states [n, H] and weights [V, H]. wide: 16-bit numbers are multiplied
    and summed in float32, as vLLM's head_dtype has it, and the logits are not rounded."""
    if not wide or hidden.dtype.itemsize > 2:
        return F.linear(hidden, weight, bias)
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        with torch.autocast(hidden.device.type, enabled=False):
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
    -> log pi of the ids and the entropy in nats, [n] each.

    `chunk` elements of [tokens, vocabulary] are in memory at a time, and computed again backwards.
    wide: of head_logits; the gradient's products have 16-bit factors all the same."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, temperature, wide=False, chunk=CHUNK):
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.settings, ctx.rows = (temperature, wide), max(1, chunk // len(weight))
        ctx.set_materialize_grads(False)
        w, b = (x if x is None else x.to(ctx.dtype) for x in (weight, bias))
        logprobs, entropy = [], []
        for h, i in zip(hidden.to(ctx.dtype).split(ctx.rows), ids.split(ctx.rows)):
            log_pi = head_log_pi(h, w, b, *ctx.settings)
            logprobs.append(log_pi.gather(-1, i[:, None])[:, 0])
            entropy.append(-log_pi.exp().mul_(log_pi).sum(-1))
        return torch.cat(logprobs), torch.cat(entropy)

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        """d log pi_i / d logit_j = ([i = j] - pi_j) / T
        d H / d logit_j = -pi_j (log pi_j + H) / T"""
        hidden, weight, bias, ids = ctx.saved_tensors
        w, b = (x if x is None else x.to(ctx.dtype) for x in (weight, bias))
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden)
        d_weight, d_bias = (torch.zeros_like(x, dtype=sum_dtype) if needed else None
                            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:]))
        if d_logprobs is None:
            d_logprobs = hidden.new_zeros(ids.shape)
        for rows in torch.arange(len(ids), device=ids.device).split(ctx.rows):
            h, d_log_pi = hidden[rows].to(ctx.dtype), d_logprobs[rows, None]
            log_pi = head_log_pi(h, w, b, *ctx.settings)
            pi = log_pi.exp()
            scale = -d_log_pi
            if d_entropy is not None:
                entropy = -(pi * log_pi).sum(-1, keepdim=True)
                scale = scale - log_pi.add_(entropy).mul_(d_entropy[rows, None])
            d_logits = pi.mul_(scale)
            d_logits.scatter_add_(1, ids[rows, None], d_log_pi.to(d_logits.dtype))
            if (temperature := ctx.settings[0]) != 1:
                d_logits.div_(temperature)
            d_logits = d_logits.to(ctx.dtype)
            d_hidden[rows] = (d_logits @ w).to(hidden.dtype)
            if d_weight is not None and h.dtype == sum_dtype:
                d_weight.addmm_(d_logits.T, h)
            elif d_weight is not None:
                d_weight.add_(d_logits.T @ h)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, *[None] * 4  # autograd casts them to the inputs' dtypes

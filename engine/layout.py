"""How completions go through the model, and how many at once.

    padded   [N, L]: prompt, completion, padding on the right
    shared   [1, places]: each prompt once, end to end, then the completions of all of them; a
             completion sees its prompt and itself

Both give the same log probabilities, since only attention mixes positions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

LAYOUTS = ("padded", "shared")
QUERIES = 256  # of a segment in one call of attention, where it has a context


class Segments(NamedTuple):
    """S runs of consecutive places. One attends to its context, another, and to itself."""

    start: torch.Tensor           # [S] its first place
    length: torch.Tensor          # [S]
    context: torch.Tensor         # [S] first place of the context
    context_length: torch.Tensor  # [S] 0: none


def lay(batch, name, by_kernel=False):
    """-> inputs of the model, a dict; predicts [n], the place that predicts each completion token;
    targets [n], the completion tokens, row by row.

    by_kernel: attention is one call of the GPU's kernel, in 16 bits. "shared" leaves out the last
    token of each completion, which predicts nothing."""
    device, T = batch.ids.device, batch.mask.shape[1]
    row, t = (torch.arange(T, device=device) < batch.completion_len[:, None]).nonzero(as_tuple=True)
    column = batch.prompt_len[row] + t  # of completion token t in its row of batch.ids
    targets = batch.ids[row, column]
    if name == "padded":  # on the right, where causal attention does not look: no mask
        ids = batch.ids[:, :(batch.prompt_len + batch.completion_len).max()]
        return dict(input_ids=ids), row * ids.shape[1] + column - 1, targets

    numbers, group = batch.group.unique(return_inverse=True)
    first = (batch.group == numbers[:, None]).int().argmax(1)  # a row of each prompt
    prompt_len, own_len = batch.prompt_len[first], batch.completion_len - 1
    prompt_start = prompt_len.cumsum(0) - prompt_len
    own_start = prompt_len.sum() + own_len.cumsum(0) - own_len

    place = torch.arange(int(prompt_len.max()), device=device).expand(len(first), -1)
    real, enters = place < prompt_len[:, None], t < own_len[row]
    segments = Segments(*(torch.cat(pair) for pair in (
        (prompt_start, own_start), (prompt_len, own_len), (prompt_start, prompt_start[group]),
        (torch.zeros_like(prompt_len), prompt_len[group]))))
    inputs = dict(
        input_ids=torch.cat([batch.ids[first, :place.shape[1]][real], targets[enters]])[None],
        position_ids=torch.cat([place[real], column[enters]])[None],
        **attention_inputs(segments, by_kernel))
    end_of_prompt = (prompt_start + prompt_len - 1)[group][row]
    return inputs, torch.where(t == 0, end_of_prompt, own_start[row] + t - 1), targets


# ---------------------------------------------------------------------------- attention end to end

def attention_inputs(segments, by_kernel):
    """-> the arguments of kernels.end_to_end_attention that describe the segments."""
    if not by_kernel:
        return dict(blocks=attention_blocks(segments))
    start, length, context, context_length = segments
    seen = context_length + length
    borders, seen_borders = (F.pad(x.cumsum(0), (1, 0)) for x in (length, seen))
    of = torch.repeat_interleave(seen)  # [keys] the segment that attends to the key
    nth = torch.arange(len(of), device=of.device) - seen_borders[of]
    keys = torch.where(nth < context_length[of], context[of] + nth,
                       start[of] + nth - context_length[of])
    return dict(varlen=(keys, borders.int(), seen_borders.int(), int(length.max()),
                        int(seen.max())))


class Block(NamedTuple):
    """B segments of like lengths, the longest first, whose attention is computed together."""

    queries: torch.Tensor  # [B, T] places; padding on the right repeats a segment's first place
    keys: torch.Tensor     # [B, C + T] places of contexts, padded on the left, and of queries
    sees: torch.Tensor     # [B or 1, 1, T, C + T] bool; None: no context, causal
    pieces: list           # (segments, start, end) of the queries in one call of attention


def attention_blocks(segments):
    """Segments -> Blocks, and the index [places] of each place's result among theirs."""
    like = {}
    lengths, contexts = segments.length.tolist(), segments.context_length.tolist()
    for i, (length, context) in enumerate(zip(lengths, contexts)):
        if length:  # 0 for a completion of one token
            like.setdefault(shape_class(length, context), []).append(i)
    blocks, places, kept = [], [], []
    for members in like.values():
        members.sort(key=lambda i: -lengths[i])
        block, real = attention_block(Segments(*(x[members] for x in segments)))
        for n, start, end in block.pieces:
            places.append(block.queries[:n, start:end].flatten())
            kept.append(real[:n, start:end].flatten())
        blocks.append(block)
    places, kept = torch.cat(places), torch.cat(kept).nonzero()[:, 0]
    return blocks, kept[places[kept].argsort()]


def shape_class(length, context):
    """Segments of one class are a Block: with one context, or all with a short one or without, and
    lengths within a factor of two."""
    short = max(length, context) <= 64  # then no mask of a block is large
    return bool(context) if short else context, max(length, 32).bit_length()


def attention_block(segments):
    """-> the Block of the segments, and where its queries [B, T] are no padding."""
    start, length, context, context_length = (x[:, None] for x in segments)
    T = int(length.max())
    place = torch.arange(T, device=start.device)
    real = place < length
    queries = (start + place).where(real, start)
    if not context_length.any():
        return Block(queries, queries, None, [(len(start), 0, T)]), real
    pieces = [(int(real[:, i].sum()), i, min(i + QUERIES, T)) for i in range(0, T, QUERIES)]
    before = torch.arange(-int(context_length.max()), 0, device=start.device) + context_length
    keys = torch.cat([(context + before).where(before >= 0, context), queries], 1)
    sees = before >= 0
    sees = sees[:1] if sees.all() else sees
    causal = (place[:, None] >= place).expand(len(sees), -1, -1)
    sees = torch.cat([sees[:, None].expand(-1, T, -1), causal], 2)[:, None]
    return Block(queries, keys, sees, pieces), real


# ---------------------------------------------------------------------------- how many at once

def micro_batches(batch, budget, layout="padded", ranks=1):
    """Lists of rows of at most `budget` tokens each, rows of like lengths together.

    Padding counts. A shared prompt counts once, and a sixteenth of it for each completion, which
    copies its keys and values. A larger group is cut, and its prompt computed in each part; a
    larger row is alone. The number of lists is a multiple of `ranks`, some of them empty: a rank
    that went through the sharded model once more would wait forever."""
    prompts, completions = batch.prompt_len.tolist(), batch.completion_len.tolist()
    lengths = [p + c for p, c in zip(prompts, completions)]
    group = batch.group.tolist() if layout == "shared" else range(len(lengths))

    def cost(rows):
        if layout == "padded":
            return len(rows) * lengths[rows[0]]
        return (sum({group[r]: prompts[r] for r in rows}.values())
                + sum(completions[r] + prompts[r] // 16 for r in rows))

    groups, parts = {}, []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        groups.setdefault(group[row], []).append(row)
    for together in groups.values():
        if parts and cost(parts[-1] + together) <= budget:
            parts[-1] += together
            continue
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

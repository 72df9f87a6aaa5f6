"""How completions go through the model, and how many at once.

    padded   a row each: its prompt, its completion, padding on the right
    packed   the rows end to end, without padding
    shared   the prompts end to end, each once, then the completions of all of them; a completion
             sees its prompt and itself

All give the same log probabilities, since attention is all that looks from one place to another.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine import kernels

LAYOUTS = ("padded", "packed", "shared")


class Layout(NamedTuple):
    """What the model is called with, and where its answers stand."""

    inputs: dict                # of the model: input_ids and position_ids, [1, places] or [N, L]
    predicts: torch.Tensor      # [n] for each completion token, the place that predicts it
    targets: torch.Tensor       # [n] the completion tokens, row by row


class Segments(NamedTuple):
    """Places that stand end to end, cut into S segments. A segment sees its context, another
    segment of the same call, and then itself, causally."""

    start: torch.Tensor         # [S] its first place
    length: torch.Tensor        # [S]
    context: torch.Tensor       # [S] first place of what it sees besides
    context_length: torch.Tensor  # [S] 0 where it sees itself alone


def lay(batch, name, by_kernel=False):
    """-> the Layout of a Batch. by_kernel: attention is one call of a GPU's kernel for 16 bits."""
    T = batch.mask.shape[1]
    row, t = (torch.arange(T, device=batch.ids.device) < batch.completion_len[:, None]).nonzero(
        as_tuple=True)
    column = batch.prompt_len[row] + t  # place t of a row predicts its token t + 1
    targets = batch.ids[row, column]
    if name == "shared":
        return shared(batch, row, t, column, targets, by_kernel)
    length = batch.prompt_len + batch.completion_len
    ids = batch.ids[:, :length.max()]
    if name == "padded":  # padding is on the right, where causal attention never looks: no mask
        return Layout(dict(input_ids=ids), row * ids.shape[1] + column - 1, targets)
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    real, start = place < length[:, None], length.cumsum(0) - length
    segments = Segments(start, length, start, torch.zeros_like(length))
    inputs = dict(input_ids=ids[real][None], position_ids=place[real][None],
                  **attention_inputs(segments, by_kernel))
    return Layout(inputs, start[row] + column - 1, targets)


def shared(batch, row, t, column, targets, by_kernel):
    """Each prompt once, then the completions without their last tokens, which predict nothing.

    row, t, column: [n] of each completion token its row, its number there, and its place in the
    row with the prompt in front."""
    numbers = torch.arange(len(batch.ids), device=batch.ids.device)
    group = numbers if batch.group is None else batch.group.unique(return_inverse=True)[1]
    first = numbers.new_full((int(group.max()) + 1,), len(numbers)).scatter_reduce(
        0, group, numbers, "amin")  # a row of each prompt
    prompt_len, own_len = batch.prompt_len[first], batch.completion_len - 1
    prompt_start = prompt_len.cumsum(0) - prompt_len
    own_start = prompt_len.sum() + own_len.cumsum(0) - own_len

    place = torch.arange(int(prompt_len.max()), device=batch.ids.device).expand(len(first), -1)
    real, goes_in = place < prompt_len[:, None], t < own_len[row]
    segments = Segments(*(torch.cat(pair) for pair in (
        (prompt_start, own_start), (prompt_len, own_len), (prompt_start, prompt_start[group]),
        (torch.zeros_like(prompt_len), prompt_len[group]))))
    inputs = dict(
        input_ids=torch.cat([batch.ids[first, :place.shape[1]][real], targets[goes_in]])[None],
        position_ids=torch.cat([place[real], column[goes_in]])[None],
        **attention_inputs(segments, by_kernel))
    end_of_prompt = (prompt_start + prompt_len - 1)[group][row]
    return Layout(inputs, torch.where(t == 0, end_of_prompt, own_start[row] + t - 1), targets)


# ---------------------------------------------------------------------------- attention end to end

def attention_inputs(segments, by_kernel):
    """-> what kernels.end_to_end_attention is told of the segments."""
    if not by_kernel:
        return dict(blocks=attention_blocks(segments))
    start, length, context, context_length = segments
    seen = context_length + length
    borders, seen_borders = (F.pad(x.cumsum(0), (1, 0)) for x in (length, seen))
    keys = None
    if context_length.any():  # else every segment's keys are its own, in their order
        of = torch.repeat_interleave(seen)  # the segment that a key is for
        nth = torch.arange(len(of), device=of.device) - seen_borders[of]
        keys = torch.where(nth < context_length[of], context[of] + nth,
                           start[of] + nth - context_length[of])
    return dict(keys=keys, cu_seq_lens_q=borders.int(), cu_seq_lens_k=seen_borders.int(),
                max_length_q=int(length.max()), max_length_k=int(seen.max()))


class Block(NamedTuple):
    """Segments of like lengths, the longest first, whose attention is computed at once."""

    queries: torch.Tensor  # [B, T] places, with any place for padding on the right
    keys: torch.Tensor     # [B, C + T] places of the contexts, padded on the left, and the queries'
    sees: torch.Tensor     # [B or 1, 1, T, C + T] bool; None is causal, where there is no context
    real: torch.Tensor     # [B, T] bool: no padding
    going: list            # for each kernels.QUERIES of T, the segments that have any of them


def attention_blocks(segments):
    """Segments -> (Blocks, where each place's result stands among theirs, padding included)."""
    like = {}
    lengths, contexts = segments.length.tolist(), segments.context_length.tolist()
    for i, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        if not length:  # a completion of one token
            continue
        short = max(length, context) <= 64  # then no mask of a block is large
        # contexts alike, and lengths within a factor of two
        like.setdefault((bool(context) if short else context, max(length, 32).bit_length()),
                        []).append(i)
    blocks, places, real = [], [], []
    for members in like.values():
        members.sort(key=lambda i: -lengths[i])
        block = attention_block(Segments(*(x[members] for x in segments)))
        # in the order in which kernels.attention_by_blocks computes them
        size = block.real.shape[1] if block.sees is None else kernels.QUERIES
        for n, start in zip(block.going, range(0, block.real.shape[1], size), strict=True):
            places.append(block.queries[:n, start:start + size].flatten())
            real.append(block.real[:n, start:start + size].flatten())
        blocks.append(block)
    places, stands = torch.cat(places), torch.cat(real).nonzero()[:, 0]
    return blocks, stands[places[stands].argsort()]


def attention_block(segments):
    start, length, context, context_length = (x[:, None] for x in segments)
    place = torch.arange(int(length.max()), device=start.device)
    real = place < length
    queries = (start + place).where(real, start)
    if not context_length.any():
        return Block(queries, queries, None, real, [len(start)])
    going = real[:, ::kernels.QUERIES].sum(0).tolist()
    before = torch.arange(-int(context_length.max()), 0, device=start.device) + context_length
    keys = torch.cat([(context + before).where(before >= 0, context), queries], 1)
    causal = place[:, None] >= place
    if (before >= 0).all():
        sees = F.pad(causal, (before.shape[1], 0), value=True)[None, None]
    else:
        of_context = (before >= 0)[:, None].expand(-1, len(place), -1)
        sees = torch.cat([of_context, causal.expand(len(start), -1, -1)], 2)[:, None]
    return Block(queries, keys, sees, real, going)


# ---------------------------------------------------------------------------- how many at once

def rows_together(batch, name):
    """Lists of rows that are best computed together, the longest first: groups, or single rows."""
    lengths = (batch.prompt_len + batch.completion_len).tolist()
    rows = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    if name != "shared" or batch.group is None:
        return [[row] for row in rows]
    groups, group = {}, batch.group.tolist()
    for row in rows:
        groups.setdefault(group[row], []).append(row)
    return list(groups.values())


def micro_batches(batch, budget, layout="padded", ranks=1):
    """Lists of rows of at most `budget` tokens each, rows of like lengths together.

    What counts is what goes through the model: padding where rows are padded, a prompt once where
    prompts are shared, and a sixteenth of it for each completion, which has its keys and values.
    A group that is larger is cut, and its prompt computed once a part; a row that is larger goes
    alone. The number of lists is a multiple of `ranks`, and some are empty where there are too few
    rows: all ranks must go through the sharded model equally often, or they would wait for each
    other for ever."""
    prompts, completions = batch.prompt_len.tolist(), batch.completion_len.tolist()

    def added(row, part, last):
        """The tokens that a row adds to a part; last: the row that came before it, if it is there
        and they share a prompt."""
        if layout == "padded" and part:
            return prompts[part[0]] + completions[part[0]]
        keys = prompts[row] // 16 if layout == "shared" else 0
        return completions[row] + keys + (0 if last is not None else prompts[row])

    parts, used = [[]], 0
    for together in rows_together(batch, layout):
        whole = added(together[0], parts[-1], None) + sum(
            added(row, [], together[0]) for row in together[1:])
        if parts[-1] and used + whole > budget:
            parts.append([])
            used = 0
        last = None
        for row in together:
            tokens = added(row, parts[-1], last)
            if parts[-1] and used + tokens > budget:
                parts.append([])
                used, tokens = 0, added(row, [], None)
            parts[-1].append(row)
            used, last = used + tokens, row
    while len(parts) % ranks:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        rows = parts[largest]
        parts[largest:largest + 1] = [rows[:len(rows) // 2], rows[len(rows) // 2:]]
    return parts

"""How completions go through the model, and how many at once.

    padded   [N, L]: prompt, completion, padding on the right
    shared   [1, places]: each prompt once, end to end, then the completions of all of them; a
             completion sees its prompt and itself

loading.try_shared takes "shared" where it agrees with "padded": only attention mixes positions.
"""

import torch
import torch.nn.functional as F


def places_of(lengths):
    """-> row and column of each place in rows of these lengths, row by row."""
    place = torch.arange(int(lengths.max()), device=lengths.device)
    return (place < lengths[:, None]).nonzero(as_tuple=True)


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
    prompt_len, P = batch.prompt_len[first], len(first)
    length = torch.cat([prompt_len, batch.completion_len - 1])
    start = length.cumsum(0) - length  # of the prompts, then of the completions
    context = torch.cat([start[:P], start[group]])
    context_length = torch.cat([torch.zeros_like(prompt_len), prompt_len[group]])
    segments = torch.stack([start, length, context, context_length])
    prompt, place = places_of(prompt_len)
    enters = t < length[P + row]  # segment P + row: of the row's completion
    inputs = dict(input_ids=torch.cat([batch.ids[first[prompt], place], targets[enters]])[None],
                  position_ids=torch.cat([place, column[enters]])[None],
                  **(kernel_inputs if by_kernel else block_inputs)(segments))
    after_prompt = (start[:P] + prompt_len)[group][row]
    return inputs, torch.where(t == 0, after_prompt, start[P + row] + t) - 1, targets


def kernel_inputs(segments):
    """segments [4, S]: each one's first place and length, at consecutive places, and those of its
    context, another (length 0: none). It attends to its context and to itself.

    -> the argument `varlen` of kernels.shared_attention."""
    start, length, context, context_length = segments
    seen = context_length + length
    borders, seen_borders = (F.pad(x.cumsum(0), (1, 0)).int() for x in (length, seen))
    of, nth = places_of(seen)  # each segment and its keys
    keys = nth + torch.where(nth < context_length[of], context[of], (start - context_length)[of])
    return dict(varlen=(keys, borders, seen_borders, int(length.max()), int(seen.max())))


def block_inputs(segments):
    """segments: of kernel_inputs -> the argument `blocks` of kernels.shared_attention."""
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


def micro_batches(batch, budget, layout="padded", ranks=1):
    """Lists of rows of at most `budget` tokens each, rows of like lengths together.

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
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
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

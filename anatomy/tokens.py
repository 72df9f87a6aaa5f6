"""The token page: one HTML file with the effect of an update on every token of a kept rollout.

anatomy/tokens.html is the page, with its style and script; here are the numbers that it shows.
Each method takes its own walk along the steps from the same start, and the rollout is looked at
before the first step and after each. All texts and numbers are JSON, deflated and in base64, a
piece for each problem and method, so that nothing of a text is ever markup.
"""

import base64
import copy
import json
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from anatomy.rollout import bound, logged, open_rollout, walk
from harness.files import numbers
from harness.start import read_tokenizer
from losses import describe, selected, weight_on_logprob

TEMPLATE = Path(__file__).with_suffix(".html")
# of a token; the page has their names and colours
PASSES, UP, DOWN, UNSELECTED, OUT, NO_ADVANTAGE = range(6)


def token_texts(tokenizer, ids):
    """The text of each token; together they are the text of all.

    A character can be spread over several tokens: the last has it, and those before have "". A
    character that is never completed is U+FFFD."""
    def decode(part):
        return tokenizer.decode(part, clean_up_tokenization_spaces=False)
    pieces, start, done = [], 0, 0  # the text of ids[:done] is out; ids[start:done] is context
    for end in range(1, len(ids) + 1):
        before, text = decode(ids[start:done]), decode(ids[start:end])
        whole_characters = not text.endswith("\ufffd") or end == len(ids)
        pieces.append(text[len(before):] if whole_characters else "")
        if whole_characters:
            start, done = done, end
    return pieces


def completions_of(kept, tokenizer, eos):
    """The page's facts of each completion of the rollout, the same for all methods."""
    batch, limit, stop = kept.batch, kept.flags["max_tokens"], kept.flags["stop"]

    def ended(row):  # by a token, or by the text of --stop
        ids = batch.ids[row, batch.prompt_len[row]:batch.lengths[row]].tolist()
        return ids[-1] in eos or stop and stop in tokenizer.decode(ids)
    columns = batch.completion_len, kept.shaped_rewards, kept.rewards == 1
    return [dict(tokens=n, reward=round(reward, 6), right=right,
                 truncated=n >= limit and not ended(row))
            for row, (n, reward, right) in enumerate(zip(*(x.flatten().tolist() for x in columns)))]


def problem_text(batch, rows, tokenizer):
    """A problem's prompt, and its completions' tokens as ids and texts. rows: a range."""
    prompt = batch.ids[rows[0], :batch.prompt_len[rows[0]]].tolist()  # of all of them
    ids = [batch.ids[row, len(prompt):][:batch.completion_len[row]].tolist() for row in rows]
    return dict(prompt=tokenizer.decode(prompt), ids=ids,
                texts=[token_texts(tokenizer, line) for line in ids])


# ---------------------------------------------------------------------------- numbers

def token_numbers(tokens, method, shown):
    """{name: numbers} of the tokens at which shown [N, T] is true. The loss sees the whole rollout
    as one step, which a @whole_step method has its statistics of. The KL penalty's gradient and the
    entropy bonus's are not shown.
    Raises ValueError where the model's log probabilities are no numbers."""
    if not torch.isfinite(tokens.logprobs[shown]).all():
        raise ValueError("they lead to weights whose probabilities are no numbers; a smaller --lr "
                         "may do")
    clean = tokens.masked()
    weight, (factor, _) = weight_on_logprob(method, clean), selected(method, clean)
    gradient = (1 - clean.probs) * weight * factor * clean.mask
    status = torch.full_like(weight, PASSES)
    status[(factor == 0).expand_as(weight)] = UNSELECTED
    status[(weight == 0) & (clean.advantages > 0)] = UP
    status[(weight == 0) & (clean.advantages < 0)] = DOWN
    status[clean.advantages == 0] = NO_ADVANTAGE
    status[~tokens.mask] = OUT
    found = dict(logprob=tokens.logprobs, entropy=tokens.entropy, gradient=gradient, status=status)
    return {name: x[shown].double().cpu().numpy() for name, x in found.items()}


def walked(kept, name, shown, start, steps=None, lr=None):
    """Takes the steps of a method from the weights `start`. -> for the header its text, the shares
    (rows of each step), a summary of the rollout at each state, as train.py logs it of a step, and
    the advantages of the completions; and {name: numbers [n, states]} of the n shown tokens, with
    a teacher their advantages [n, 1], too."""
    kept.policy.load_state_dict(start)
    states, shares, summaries = [], [], []
    try:
        kept = kept.follow(name)
        for _, rows in walk(kept, steps, lr):
            tokens = kept.tokens()
            states.append(token_numbers(tokens, kept.method, shown))
            summaries.append(numbers(logged(tokens, kept.method, "entropy", "approx_kl", "ess",
                                            "clip_high_frac", "clip_low_frac")))
            if rows is not None:
                shares.append(rows.tolist())
    except ValueError as e:
        raise ValueError(f"the steps of {name} cannot be taken: {e}") from None
    found = {key: np.stack([state[key] for state in states], 1) for key in states[0]}
    batch, of_rows = kept.batch, kept.batch.advantages[:, 0]
    if batch.teacher_logprobs is not None:
        found["advantage"] = batch.advantages[shown][:, None].double().cpu().numpy()
        gap = batch.teacher_logprobs - batch.old_logprobs
        of_rows = of_rows - gap[:, 0]
    return (dict(name=name, text=describe(name, kept.method), shares=shares, summary=summaries,
                 advantages=[float(f"{a:.6g}") for a in of_rows.tolist()]), found)


# ---------------------------------------------------------------------------- the payload

def deflated(content):
    return base64.b64encode(zlib.compress(json.dumps(content).encode(), 9)).decode()


def rounded(arrays, part):
    """A part, a slice of the tokens, of {name: numbers [n, ...]} as lists, to six digits."""
    shorter = np.vectorize(lambda x: float(f"{x:.6g}"), otypes=[float])
    return {name: shorter(array[part]).tolist() for name, array in arrays.items()}


def reference_numbers(kept, shown, start):
    """Log pi_old of the shown tokens, and the trainer's log probability less the sampler's. The
    trainer's is pi_old, or with --old_logprobs sampler that at the start, a walk's numbers."""
    old, sampler = (x[shown].double().cpu().numpy()
                    for x in (kept.batch.old_logprobs, kept.batch.sampler_logprobs))
    trainer = start["logprob"][:, 0] if kept.flags["old_logprobs"] == "sampler" else old
    return dict(old=old, gap=trainer - sampler)


def largest(methods, walks, reference):
    """{quantity: the end of its colours}; 1% of ratios, gradients and gaps may lie beyond."""
    def far(values):
        return np.quantile(np.abs(values), 0.99)
    log_ratio = max(far(walk["logprob"] - reference["old"][:, None]) for walk in walks)
    ends = dict(
        entropy=max(walk["entropy"].max() for walk in walks),
        advantage=max(np.abs(walk.get("advantage", method["advantages"])).max()
                      for method, walk in zip(methods, walks)),
        ratio=math.expm1(min(log_ratio, 10)),
        gradient=max(far(walk["gradient"]) for walk in walks), gap=far(reference["gap"]))
    return {name: float(x) or 1.0 for name, x in ends.items()}


def note_on_start(kept):
    """A sentence, where the weights of the walk's start are not those of pi_old; else ""."""
    tokens = kept.tokens()
    away = tokens.log_ratio[tokens.mask].abs()
    if away.max() < 1e-3:
        return ""
    return (f"Before the first step the log ratios are {away.mean():.2g} on average and up to "
            f"{away.max():.2g}: the model is not quite the one that the ratio is taken against")


def make_page(path, model=None, methods=None, steps=None, lr=None, problems=None):
    """-> the HTML of a kept rollout's page.

    methods: names with commas between, by default the run's. problems: their number on the page,
    from the first; None is all. Raises ValueError where steps cannot be taken."""
    names = [" ".join(name.split()) for name in methods.split(",")] if methods else []
    for name in names:
        bound(name)  # before a model is loaded
    kept = open_rollout(path, model)
    flags, batch, (count, size) = kept.flags, kept.batch, kept.rewards.shape
    tokenizer, eos, *_ = read_tokenizer(model or flags["model"])
    n = min(problems or count, count) * size
    lengths = batch.completion_len
    shown = torch.arange(batch.mask.shape[1], device=lengths.device) < lengths[:, None]
    shown[n:] = False
    note, start = note_on_start(kept), copy.deepcopy(kept.policy.state_dict())
    of_methods, walks = zip(*(walked(kept, name, shown, start, steps, lr)
                              for name in dict.fromkeys(names or [flags["loss"]])))
    reference = reference_numbers(kept, shown, walks[0])
    facts = completions_of(kept, tokenizer, eos)
    groups = [range(i, i + size) for i in range(0, n, size)]
    header = dict(
        rollout=kept.rollout, run=flags["loss"], model=Path(tokenizer.name_or_path).name,
        data=Path(flags["data"]).name, lr=lr or flags["lr"], note=note, size=size,
        largest=largest(of_methods, walks, reference),
        problems=[[facts[row] for row in rows] for rows in groups],
        methods=[dict(method, advantages=method["advantages"][:n]) for method in of_methods])
    ends, pieces = [0, *lengths.cumsum(0).tolist()], {}
    for p, rows in enumerate(groups):
        part, text = slice(ends[rows.start], ends[rows.stop]), problem_text(batch, rows, tokenizer)
        pieces[f"problem-{p}"] = deflated({**text, **rounded(reference, part)})
        for m, states in enumerate(walks):
            pieces[f"walk-{p}-{m}"] = deflated(rounded(states, part))
    return fill(header, pieces)


def fill(header, pieces):
    """The template with its data."""
    text = json.dumps(header, allow_nan=False).replace("<", "\\u003c")  # ASCII, and no tag in it
    data = [f'<script type="application/json" id="page">{text}</script>']
    data += [f'<script type="text/plain" id="{name}">{text}</script>'
             for name, text in pieces.items()]
    return TEMPLATE.read_text(encoding="utf-8").replace("<!-- data -->", "\n".join(data))

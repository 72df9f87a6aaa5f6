"""The token page: one HTML file with the effect of an update on every token of a kept rollout.

analysis/tokens.html is the page, with its style and script; here are the numbers that it shows and
the form in which it gets them. Each method takes its own walk along the steps from the same start,
and the rollout is looked at before the first step and after each.

The payload. All texts and numbers are deflated and written in base64, a piece for each problem, so
that nothing of a text is ever markup. A number is a whole number of 16 bits (its code):

    log pi     round(-log pi * LOGPROB), which 0 and 65535 bound
    entropy    round(entropy * ENTROPY)
    x of any   0 for 0, else the sign of x times 1 + round(GRADIENT * ln(|x| / SMALLEST)),
    sign       where an |x| below SMALLEST counts as SMALLEST

An array [states, tokens] is written as its change from state to state, and these changes as low
bytes, then high bytes: most are small, so that they deflate well.
"""

import base64
import copy
import hashlib
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import torch

from analysis.anatomy import logged, weight_on_logprob
from analysis.rollout import first_line, open_rollout, walk
from engine.loading import eos_ids
from experiment.log import numbers
from losses import correct, describe

LOGPROB, ENTROPY, GRADIENT, SMALLEST = 2048, 1024, 100, 1e-8
TEMPLATE = Path(__file__).with_suffix(".html")
# of a token; the page has their names and colours
PASSES, UP, DOWN, UNSELECTED, OUT, NO_ADVANTAGE = range(6)


# ---------------------------------------------------------------------------- texts


def read_tokenizer(model, prompt):
    """-> the tokenizer, and the ids that end a completion. Raises ValueError for a model without
    one, or without a text for the ids of a prompt."""
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        eos = eos_ids(model, tokenizer)
        if not tokenizer.decode(prompt):  # transformers makes an empty one of some folders without
            raise ValueError("it has no text for the rollout's tokens")
    except Exception as e:  # a folder can be wrong in any way
        raise ValueError(f"the tokenizer of {model} cannot be used ({first_line(e)}); --model "
                         "names a folder that has one, such as a checkpoint of the run") from None
    return tokenizer, eos


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


def is_right(kept):
    """Is each completion right? [P, G] A reward of 1 is, before --overlong_penalty is taken off."""
    penalty, rewards = kept.flags["overlong_penalty"], kept.rewards
    if penalty:
        over = kept.batch.completion_len - (kept.flags["max_tokens"] - penalty)
        rewards = rewards + (over / penalty).clamp(0, 1).view_as(rewards)
    return (rewards - 1).abs() < 1e-6


def completions_of(kept, eos):
    """The page's facts of each completion of the rollout, the same for all methods."""
    batch, limit = kept.batch, kept.flags["max_tokens"]
    last = batch.ids.gather(1, (batch.prompt_len + batch.completion_len - 1)[:, None])
    columns = batch.completion_len, kept.rewards, is_right(kept), last
    return [dict(tokens=n, reward=round(reward, 6), right=right,
                 truncated=n >= limit and end not in eos)
            for n, reward, right, end in zip(*(x.flatten().tolist() for x in columns))]


def problem_text(batch, rows, tokenizer):
    """A problem's prompt, and its completions' tokens as ids and texts. rows: a range."""
    start = batch.prompt_len.tolist()
    end = (batch.prompt_len + batch.completion_len).tolist()
    ids = [batch.ids[row, start[row]:end[row]].tolist() for row in rows]
    return dict(prompt=tokenizer.decode(batch.ids[rows[0], :start[rows[0]]].tolist()), ids=ids,
                texts=[token_texts(tokenizer, line) for line in ids])


# ---------------------------------------------------------------------------- numbers


def code(x, scale):
    return (x.double() * scale).round().clamp(0, 65535).long().cpu().numpy()


def signed_code(x):
    size = (x.double().abs() / SMALLEST).clamp(min=1).log().mul(GRADIENT).round() + 1
    return (x.sign() * size).clamp(-32767, 32767).long().cpu().numpy()


def signed_value(code):
    """The number of a code of signed_code."""
    size = np.exp((np.abs(code) - 1) / GRADIENT) * SMALLEST
    return np.where(code == 0, 0.0, np.sign(code) * size)


def token_codes(tokens, method, shown, coefficients):
    """The codes of the tokens at which shown [N, T] is true. The loss sees the whole rollout as
    one step, which a @whole_step method has its statistics of. Of the run's coefficients the
    correction counts; the KL penalty's gradient and the entropy bonus's are not shown.
    Raises ValueError where the model's log probabilities are no numbers."""
    if not torch.isfinite(tokens.logprobs[shown]).all():
        raise ValueError("they lead to weights whose probabilities are no numbers; a smaller --lr "
                         "may do")
    clean = tokens.without_junk()
    weight, selected = weight_on_logprob(clean, method), method.call(method.select, clean)
    if coefficients.get("correction"):
        bounds = coefficients["correction_low"], coefficients["correction_high"]
        selected = selected * correct(clean, coefficients["correction"], *bounds)[0]
    gradient = (1 - clean.probs) * weight * selected * clean.mask
    status = torch.full_like(weight, PASSES)
    status[selected == 0] = UNSELECTED
    status[(weight == 0) & (clean.advantages > 0)] = UP
    status[(weight == 0) & (clean.advantages < 0)] = DOWN
    status[clean.advantages == 0] = NO_ADVANTAGE
    status[~tokens.mask] = OUT
    return dict(logprob=code(tokens.logprobs[shown], -LOGPROB),
                entropy=code(tokens.entropy[shown], ENTROPY),
                gradient=signed_code(gradient[shown]), status=status[shown].long().cpu().numpy())


def walked(kept, name, shown, steps=None, lr=None):
    """Takes the steps of a method. -> for the header its text, the shares (rows of each step), a
    summary of the rollout at each state, as train.py logs it of a step, and the advantages of the
    completions; and {array: codes [states, n]} of the n shown tokens."""
    kept.follow(name)
    states, shares, summaries = [], [], []
    for _, rows in walk(kept, steps, lr):
        tokens = kept.tokens()
        states.append(token_codes(tokens, kept.method, shown, kept.coefficients))
        summaries.append(numbers(logged(tokens, kept.method, "entropy", "approx_kl", "ess",
                                        "clip_high_frac", "clip_low_frac")))
        if rows is not None:
            shares.append(rows.tolist())
    advantages = [float(f"{a:.6g}") for a in kept.batch.advantages[:, 0].tolist()]
    return (dict(name=name, text=describe(name, kept.method), shares=shares, summary=summaries,
                 advantages=advantages),
            {key: np.stack([state[key] for state in states]) for key in states[0]})


def walks(kept, names, shown, steps=None, lr=None):
    """walked of each method, from the same start. -> two lists"""
    start, found = copy.deepcopy(kept.policy.state_dict()), []
    for name in dict.fromkeys(names):
        kept.policy.load_state_dict(start)
        try:
            found.append(walked(kept, name, shown, steps, lr))
        except ValueError as e:
            raise ValueError(f"the steps of {name} cannot be taken: {e}") from None
    return zip(*found)


# ---------------------------------------------------------------------------- the payload


def deflated(raw):
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def pack(arrays, part):
    """A part, a slice of the tokens, of {name: codes [states, n]} -> text."""
    parts = []
    for array in arrays.values():
        change = np.diff(array[:, part], axis=0, prepend=0)
        change = change.astype(np.int16).astype(np.int32)  # modulo 2^16
        folded = ((change << 1) ^ (change >> 31)).astype(np.uint16)  # 0, -1, 1, -2: 0, 1, 2, 3
        parts += [(folded & 255).astype(np.uint8), (folded >> 8).astype(np.uint8)]
    return deflated(b"".join(part.tobytes() for part in parts))


def reference_codes(kept, shown, start):
    """Log pi_old of the shown tokens, and the trainer's log probability minus the sampler's.

    The trainer's are pi_old, or where the ratio is taken against the sampler, those of the model
    before the first step (start, a walk's codes)."""
    batch = kept.batch
    old, sampler = batch.old_logprobs[shown].double(), batch.sampler_logprobs[shown].double()
    trainer = old
    if torch.equal(old, sampler):
        trainer = -torch.from_numpy(start["logprob"][0]).to(old) / LOGPROB
    return dict(old=code(old, -LOGPROB)[None], gap=signed_code(trainer - sampler)[None])


def round_up(x):
    """The next number of 1, 2 and 5 times a power of ten, for the end of a legend."""
    if not x > 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(x))
    return next(f * unit for f in (1, 2, 5, 10) if f * unit >= x * 0.999)


def largest(methods, codes, reference):
    """{quantity: the end of its colours}: for ratio, gradient and gap, one token in a hundred may
    lie beyond."""
    def far(values):
        return float(np.quantile(np.abs(values), 0.99))
    log_ratio = max(far(c["logprob"] - reference["old"]) for c in codes) / LOGPROB
    ends = dict(
        entropy=max(c["entropy"].max() for c in codes) / ENTROPY,
        advantage=max(abs(a) for method in methods for a in method["advantages"]),
        ratio=math.expm1(min(log_ratio, 10)),
        gradient=max(far(signed_value(c["gradient"])) for c in codes),
        gap=far(signed_value(reference["gap"])))
    return {name: round_up(x) for name, x in ends.items()}


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

    methods: names, by default the run's. problems: their number on the page, from the first; None
    is all. Raises ValueError for a rollout, a model or a method whose steps cannot be taken."""
    kept = open_rollout(path, model)
    flags, batch, (count, size) = kept.flags, kept.batch, kept.rewards.shape
    tokenizer, eos = read_tokenizer(model or flags["model"],
                                    batch.ids[0, :batch.prompt_len[0]].tolist())
    n = min(problems or count, count) * size
    lengths = batch.completion_len
    shown = torch.arange(batch.mask.shape[1], device=lengths.device) < lengths[:, None]
    shown[n:] = False
    note = note_on_start(kept)  # before the walks, which move the weights
    of_methods, codes = walks(kept, methods or [flags["loss"]], shown, steps, lr)
    reference, facts = reference_codes(kept, shown, codes[0]), completions_of(kept, eos)
    groups = [range(i, i + size) for i in range(0, n, size)]
    header = dict(
        rollout=kept.rollout, run=flags["loss"], model=Path(tokenizer.name_or_path).name,
        data=Path(flags["data"]).name, lr=lr or flags["lr"], note=note, size=size,
        codes=dict(logprob=LOGPROB, entropy=ENTROPY, gradient=GRADIENT, smallest=SMALLEST),
        largest=largest(of_methods, codes, reference),
        problems=[[facts[row] for row in rows] for rows in groups],
        methods=[dict(method, advantages=method["advantages"][:n]) for method in of_methods])
    ends, pieces = [0, *lengths.cumsum(0).tolist()], {}
    for p, rows in enumerate(groups):
        part, text = slice(ends[rows.start], ends[rows.stop]), problem_text(batch, rows, tokenizer)
        pieces[f"text-{p}"] = deflated(json.dumps(text).encode())
        pieces[f"reference-{p}"] = pack(reference, part)
        for m, arrays in enumerate(codes):
            pieces[f"walk-{p}-{m}"] = pack(arrays, part)
    return fill(header, pieces)


def fill(header, pieces):
    """The template with its data and a policy that allows its own script and style, and nothing of
    the network."""
    template = TEMPLATE.read_text(encoding="utf-8")

    def allowed(tag):
        text, = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        return f"{tag}-src 'sha256-{digest}'"
    policy = f"default-src 'none'; {allowed('script')}; {allowed('style')}; base-uri 'none'; " \
             "form-action 'none'"
    text = json.dumps(header, allow_nan=False).replace("<", "\\u003c")  # ASCII, and no tag in it
    data = [f'<script type="application/json" id="page">{text}</script>']
    data += [f'<script type="text/plain" id="{name}">{text}</script>'
             for name, text in pieces.items()]
    page = template.replace("<!-- policy -->",
                            f'<meta http-equiv="Content-Security-Policy" content="{policy}">')
    return page.replace("<!-- data -->", "\n".join(data))

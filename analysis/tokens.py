"""The token page: one HTML file that shows what an update does to every token of a kept rollout.

analysis/tokens.html is the page, with its style and script; here are the numbers that it shows and
the form in which it gets them. Each method takes its own walk along the steps from the same start,
and the rollout is looked at before the first step and after each.

The payload. All texts and numbers are deflated and written in base64, a piece for each problem, so
that nothing of a text is ever markup. A number is a whole number of 16 bits (its code):

    log pi     round(-log pi * LOGPROB), which 0 and 65535 bound
    entropy    round(entropy * ENTROPY)
    x of any   0 for 0, else the sign of x times 1 + round(GRADIENT * ln(|x| / SMALLEST)),
    sign       where what is smaller than SMALLEST counts as SMALLEST

An array [states, tokens] is written as its change from state to state, and these changes as low
bytes, then high bytes: most are small, so that they deflate well.
"""

import base64
import hashlib
import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from analysis.quantities import weight_on_logprob
from analysis.rollout import NO_ROLLOUT, walk
from engine.loading import eos_ids
from experiment.log import numbers
from losses import METHODS, correct, describe, measure

LOGPROB, ENTROPY, GRADIENT, SMALLEST = 2048, 1024, 100, 1e-8
TEMPLATE = Path(__file__).with_suffix(".html")
PRECISION = (
    f"Numbers are rounded: log probabilities to 1/{LOGPROB} nat (probabilities and ratios to 0.05% "
    f"of their size), entropies to 1/{ENTROPY} nat, gradients and the difference to the sampler to "
    f"{50 / GRADIENT:g}% of their size; what is not 0 there but below {SMALLEST:g} is shown as "
    f"{SMALLEST:g}. Log probabilities below {-65535 / LOGPROB:.0f} are shown as that.")

# name, what it says, its colour, and the class of its mark, for those who do not see the colour
STATUSES = [
    ("passes", "the token has a gradient", "#eeeeee", ""),
    ("clipped up", "advantage above 0, and the objective gives no gradient", "#fdae61", "up"),
    ("clipped down", "advantage below 0, and the objective gives no gradient", "#74add1", "down"),
    ("not selected", "the method's select or --correction gives it weight 0", "#bdbdbd", "dotted"),
    ("out of the loss", "its completion was cut off, and --mask_truncated leaves it out",
     "#ffffff", "struck"),
    ("advantage 0", "there is nothing to clip", "#ffffff", "")]
PASSES, UP, DOWN, UNSELECTED, OUT, NO_ADVANTAGE = range(len(STATUSES))
MAPS = dict(  # of equally far stops. In each, what is dark is what stands out
    low_is_dark=["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779",
                 "#6ece58", "#b5de2b", "#fde725"],
    diverging=["#08519c", "#4292c6", "#9ecae1", "#f7f7f7", "#fdbe85", "#e6762b", "#8c2d04"])
MAPS["high_is_dark"] = MAPS["low_is_dark"][::-1]


# ---------------------------------------------------------------------------- before a model loads


def saved(path):
    """The flags of the run that kept a rollout, and the token ids of its first prompt; None where
    the file is no rollout, of which open_rollout says more. Raises ValueError for a run whose
    method there is no more."""
    try:
        kept = torch.load(path, map_location="cpu", weights_only=False)
        flags, batch = kept["flags"], kept["batch"]
        name, prompt = flags["loss"], batch["ids"][0, :batch["prompt_len"][0]].tolist()
    except NO_ROLLOUT:
        return None
    if name not in METHODS:
        raise ValueError(f"its run's method {name} is not in losses.py: its steps cannot be taken "
                         f"again; there are {', '.join(METHODS)}")
    return flags, prompt


def read_tokenizer(model, prompt):
    """-> the tokenizer, and the ids that end a completion. Raises ValueError, a sentence, for one
    that cannot be read or has no text for the ids of a prompt."""
    advice = "--model names a folder that has it, such as a checkpoint of the run"
    from transformers import AutoTokenizer

    from data import hub
    try:
        hub.reach(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        eos = eos_ids(model, tokenizer)
    except Exception as e:  # there is no end to what can be wrong with a folder
        raise ValueError(f"the tokenizer of {model} cannot be read ({hub.reason(e)}); "
                         f"{advice}") from None
    if not tokenizer.decode(prompt):  # transformers makes an empty one of some folders without
        raise ValueError(f"the tokenizer of {model} has no text for the rollout's tokens: its "
                         f"files are not complete; {advice}")
    return tokenizer, eos


# ---------------------------------------------------------------------------- texts


def token_texts(tokenizer, ids, alone):
    """The text of each token; together they are the text of all.

    A character can be spread over several tokens: the last has it, and those before have "". What
    is never completed is U+FFFD. alone: a dict of the texts of single tokens, which is filled."""
    def decode(part):
        return tokenizer.decode(part, clean_up_tokenization_spaces=False)
    for i in ids:
        if i not in alone:
            alone[i] = decode([i])
    whole, pieces = decode(ids), [alone[i] for i in ids]
    if "".join(pieces) == whole:
        return pieces
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


def problem_text(kept, problem, tokenizer, alone):
    """What the page says of a problem in words: its prompt, and its completions' tokens."""
    batch, size = kept.batch, kept.rewards.shape[1]
    rows = range(problem * size, (problem + 1) * size)
    ids = [row.tolist() for row in batch.ids[rows.start:rows.stop].cpu()]
    first, lengths = batch.prompt_len.tolist(), batch.completion_len.tolist()
    tokens = [line[first[r]:first[r] + lengths[r]] for r, line in zip(rows, ids, strict=True)]
    return dict(prompt=tokenizer.decode(ids[0][:first[rows.start]]), ids=tokens,
                texts=[token_texts(tokenizer, line, alone) for line in tokens])


# ---------------------------------------------------------------------------- numbers


def logprob_code(x):
    return (-x.double() * LOGPROB).round().clamp(0, 65535).long().cpu().numpy()


def entropy_code(x):
    return (x.double() * ENTROPY).round().clamp(0, 65535).long().cpu().numpy()


def signed_code(x):
    size = (x.double().abs() / SMALLEST).clamp(min=1).log().mul(GRADIENT).round() + 1
    return (x.sign() * size).clamp(-32767, 32767).long().cpu().numpy()


def signed_value(code):
    """What a code of signed_code stands for."""
    size = np.exp((np.abs(code) - 1) / GRADIENT) * SMALLEST
    return np.where(code == 0, 0.0, np.sign(code) * size)


@dataclass
class Walked:
    """What a method's steps do to the n tokens of the page, in the order of the completions."""

    text: str          # of the method
    advantages: list   # of each completion of the rollout
    shares: list       # the rows of the completions that each step had
    summary: list      # of the whole rollout, at each state
    codes: dict        # {logprob, entropy, gradient, status}: [states, n] each


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
    return dict(logprob=logprob_code(tokens.logprobs[shown]),
                entropy=entropy_code(tokens.entropy[shown]),
                gradient=signed_code(gradient[shown]), status=status[shown].long().cpu().numpy())


def summary(tokens, method):
    """A few means over the whole rollout, as train.py logs them of a step."""
    measured = measure(method, tokens.without_junk())
    return numbers({name: measured[name].item() for name in ("entropy", "approx_kl", "ess",
                                                             "clip_high_frac", "clip_low_frac")})


def walk_of(kept, shown, steps=None, lr=None):
    """Takes the steps of the method that kept uses. -> Walked"""
    method, states, shares, summaries = kept.method, [], [], []
    for _, rows, _ in walk(kept, steps, lr):
        tokens = kept.tokens()
        states.append(token_codes(tokens, method, shown, kept.coefficients))
        summaries.append(summary(tokens, method))
        if rows is not None:
            shares.append(rows.tolist())
    codes = {name: np.stack([state[name] for state in states]) for name in states[0]}
    return Walked("", kept.batch.advantages[:, 0].tolist(), shares, summaries, codes)


def walks(kept, names, shown, steps=None, lr=None):
    """{name: Walked} of each method from the same start. A method has its flags at their defaults;
    the run's own has the run's, and its coefficients."""
    run_name, run_method, coefficients = kept.flags["loss"], kept.method, kept.coefficients
    start, result = [p.detach().clone() for p in kept.policy.parameters()], {}
    for name in dict.fromkeys(names):
        with torch.no_grad():
            for p, value in zip(kept.policy.parameters(), start, strict=True):
                p.copy_(value)
        kept.coefficients = coefficients if name == run_name else {}
        try:
            kept.use(run_method if name == run_name else METHODS[name])
            result[name] = walk_of(kept, shown, steps, lr)
        except ValueError as e:
            raise ValueError(f"the steps of {name} cannot be taken: {e}") from None
        result[name].text = describe(name, kept.method)
    return result


# ---------------------------------------------------------------------------- the payload


def deflated(raw):
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def pack(arrays):
    """Arrays of codes [states, n] -> text."""
    parts = []
    for array in arrays:
        change = np.diff(array, axis=0, prepend=0).astype(np.int16).astype(np.int32)  # modulo 2^16
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
    return dict(old=logprob_code(old)[None], gap=signed_code(trainer - sampler)[None])


def round_up(x):
    """The next number of 1, 2 and 5 times a power of ten, for the end of a legend."""
    if not x > 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(x))
    return next(f * unit for f in (1, 2, 5, 10) if f * unit >= x * 0.999)


def quantities(walked, reference):
    """What the tokens can be coloured by, and from where to where the colours go: for ratio, |G|
    and the sampler, where one token in a hundred may lie beyond."""
    def far(values):
        return float(np.quantile(np.abs(values), 0.99)) if values.size else 0.0
    every = [w.codes for w in walked.values()]
    entropy = round_up(max(int(c["entropy"].max()) for c in every) / ENTROPY)
    advantage = round_up(max(abs(a) for w in walked.values() for a in w.advantages))
    spread = max(far(c["logprob"] - reference["old"]) for c in every) / LOGPROB
    ratio = 1 + round_up(math.expm1(min(spread, 10)))
    gradient = round_up(max(far(signed_value(c["gradient"])) for c in every))
    gap = round_up(far(signed_value(reference["gap"])))

    def quantity(key, name, kind, low, high, scale="linear"):
        return dict(key=key, name=name, map=kind, low=low, high=high, scale=scale)
    return [quantity("probability", "probability", "low_is_dark", 0, 1),
            quantity("entropy", "entropy (nats)", "high_is_dark", 0, entropy),
            quantity("advantage", "advantage", "diverging", -advantage, advantage),
            quantity("ratio", "ratio", "diverging", 1 / ratio, ratio, "log"),
            quantity("clipped", "clipped or not", None, 0, 0),
            quantity("gradient", "|gradient|", "high_is_dark", gradient / 1000, gradient, "log"),
            quantity("gap", "trainer against sampler", "diverging", -gap, gap)]


def completions_of(kept, eos, problems):
    """What the page says of each completion of its problems, whatever the method."""
    batch, limit = kept.batch, kept.flags["max_tokens"]
    size, right = kept.rewards.shape[1], is_right(kept)
    lengths, rewards = batch.completion_len.tolist(), kept.rewards.flatten().tolist()
    last = batch.ids.gather(1, (batch.prompt_len + batch.completion_len - 1)[:, None])[:, 0]
    truncated = [n >= limit and i not in eos for n, i in zip(lengths, last.tolist(), strict=True)]
    return [[dict(tokens=lengths[row], reward=round(rewards[row], 6),
                  right=bool(right.flatten()[row]), truncated=truncated[row])
             for row in range(problem * size, (problem + 1) * size)]
            for problem in range(problems)]


def note_on_start(kept, path):
    """-> a sentence, where the weights of the walk's start are not those that pi_old is of, and
    what to add to it for whoever has the run's folder."""
    tokens = kept.tokens()
    away = tokens.log_ratio[tokens.mask].abs()
    if away.max() < 1e-3:
        return "", ""
    said = (f"Before the first step the log ratios are {away.mean():.2g} on average and up to "
            f"{away.max():.2g}: the model is not quite the one that the ratio is taken against")
    before = Path(path).resolve().parent.parent / "checkpoints" / f"rollout_{kept.rollout - 1:06d}"
    found = kept.rollout > 1 and (before / "config.json").exists()
    return said, f"; the weights of rollout {kept.rollout} are --model {before}" if found else ""


def short(name):
    """An id of the Hub, or the name of a folder or file: a page that is passed on names no paths of
    the machine."""
    return Path(name).name if Path(name).exists() else str(name)


def page_of(kept, path, tokenizer, eos, names, steps=None, lr=None, problems=None):
    """-> the page's HTML, and a note for whoever makes it, or "".

    names: of the methods. problems: how many the page shows, from the first; None is all.
    Raises ValueError for a method whose steps cannot be taken on this rollout."""
    size = kept.rewards.shape[1]
    problems = min(problems or len(kept.rewards), len(kept.rewards))
    lengths, alone = kept.batch.completion_len, {}
    shown = torch.arange(kept.batch.mask.shape[1], device=lengths.device) < lengths[:, None]
    shown[problems * size:] = False
    note, advice = note_on_start(kept, path)
    walked = walks(kept, names, shown, steps, lr)
    reference = reference_codes(kept, shown, next(iter(walked.values())).codes)
    header = dict(
        rollout=kept.rollout, run=kept.flags["loss"], model=short(tokenizer.name_or_path),
        data=short(kept.flags["data"]), lr=lr or kept.flags["lr"], note=note, size=size,
        precision=PRECISION, statuses=STATUSES, maps=MAPS,
        codes=dict(logprob=LOGPROB, entropy=ENTROPY, gradient=GRADIENT, smallest=SMALLEST),
        quantities=quantities(walked, reference), problems=completions_of(kept, eos, problems),
        methods=[dict(name=name, text=w.text, shares=w.shares, summary=w.summary,
                      advantages=[float(f"{a:.6g}") for a in w.advantages[:problems * size]])
                 for name, w in walked.items()])
    ends = [0, *lengths[:problems * size].cumsum(0).tolist()[size - 1::size]]
    pieces = {}
    for p in range(problems):
        part = slice(ends[p], ends[p + 1])
        text = problem_text(kept, p, tokenizer, alone)
        pieces[f"text-{p}"] = deflated(json.dumps(text).encode())
        pieces[f"reference-{p}"] = pack(x[:, part] for x in reference.values())
        for m, w in enumerate(walked.values()):
            pieces[f"walk-{p}-{m}"] = pack(w.codes[name][:, part] for name in
                                           ("logprob", "entropy", "gradient", "status"))
    return fill(header, pieces), note + advice


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

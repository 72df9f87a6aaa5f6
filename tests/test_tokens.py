"""The token page: its numbers against the analysis that they come from, and the page itself in a
headless Chromium.

The tests in the browser need the package playwright and a Chromium, and are skipped without:
pip install playwright; then apt-get install chromium, or python -m playwright install chromium."""

import base64
import functools
import hashlib
import json
import math
import re
import shutil
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import train
from analysis import tokens
from analysis.__main__ import main
from analysis.__main__ import main as analyse
from analysis.rollout import open_rollout, walk
from engine.loading import load
from engine.policy import compute_logprobs, make_batch
from engine.sampler import Completion
from harness.checkpoint import save_rollout
from harness.flags import flags_of
from helpers import refused
from losses import measure
from study.quantities import signed_gradient

HOSTILE = "<script>window.hacked=1</script>"
COMPLETIONS = [  # of two problems
    [HOSTILE, "</p><img src=x onerror=window.hacked=1>", "&lt;b&gt; &amp;", "2+2=4\n\t\u2028!"],
    ["caf\u00e9 \u05e9\u05dc\u05d5\u05dd\u202eabc", "12", "<!-- data -->", "a" * 60]]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
PROMPTS = ["<b>1&2</b>:", "second\nprompt:"]


def kept_rollout(folder, model, flags="", completions=COMPLETIONS, rewards=REWARDS, max_tokens=48,
                 prompts=PROMPTS):
    """A rollout as train.py keeps it, of completions as one likes them: those shorter than
    max_tokens end with <eos>. -> its path"""
    tokenizer, size = AutoTokenizer.from_pretrained(model), len(completions[0])
    args, method = train.parse_args((
        f"--model {model} --loss grpo --lr 0.01 --steps_per_rollout 4 --max_tokens {max_tokens} "
        f"--problems_per_rollout {len(completions)} --group_size {size} --save_rollouts "
        f"--data countdown {flags}").split())
    args.tokens_per_micro_batch = 4096
    ids = [tokenizer.encode(text)[:max_tokens] for group in completions for text in group]
    ids = [line if len(line) == max_tokens else [*line, tokenizer.eos_token_id] for line in ids]
    torch.manual_seed(0)
    rows = [Completion(line, [0.0] * len(line), False) for line in ids]
    batch = make_batch([(tokenizer.encode(p), rows[i * size:(i + 1) * size])
                        for i, p in enumerate(prompts)])
    policy = load(model, None, batch.rows(torch.arange(4)), budget=4096)
    batch.old_logprobs, batch.entropy = compute_logprobs(policy, batch)
    gap = 0.05 * torch.randn(batch.mask.shape) * batch.mask
    batch.sampler_logprobs = batch.old_logprobs - gap
    if args.mask_truncated:
        batch.mask &= (batch.completion_len < max_tokens)[:, None]
    state = dict(entropy=batch.entropy[batch.mask].mean().item())
    folder.mkdir(exist_ok=True)
    save_rollout(folder, 1, batch=vars(batch), rewards=torch.tensor(rewards),
                 shaped_rewards=torch.tensor(rewards), state=state,
                 flags=flags_of(args), hp=method.flags)
    return folder / "rollouts" / "rollout_000001.pt"


@pytest.fixture(scope="module")
def model(small):
    return small()


@pytest.fixture(scope="module")
def rollout(model, tmp_path_factory):
    return kept_rollout(tmp_path_factory.mktemp("rollout"), model, "--mask_truncated")


@pytest.fixture(scope="module")
def page(rollout):
    """The page of two methods."""
    out = rollout.parent / "tokens.html"
    main(["tokens", str(rollout), "--methods", "grpo,acpo", "--out", str(out)])
    return out


def changed(rollout, file, **parts):
    """-> file: the rollout with other parts, or without those that are None."""
    saved = {**torch.load(rollout), **parts}
    torch.save({name: part for name, part in saved.items() if part is not None}, file)
    return file


# ---------------------------------------------------------------------------- reading a page

def page_of(rollout, *flags):
    """The text of the page that the command writes beside a rollout."""
    main(["tokens", str(rollout), *flags])
    return rollout.with_name(f"{rollout.stem}-tokens.html").read_text()


def raw(text, name):
    data, = re.findall(f'<script type="text/plain" id="{name}">(.*?)</script>', text)
    return zlib.decompress(base64.b64decode(data))


def header(text):
    found, = re.findall('<script type="application/json" id="page">(.*?)</script>', text)
    return json.loads(found)


def unpacked(text, name):
    """{name: array} of a piece's numbers: [n], or of a walk [states, n]."""
    return {key: np.array(x).T for key, x in json.loads(raw(text, name)).items()}


@functools.cache
def expected(rollout, name):
    """What the analysis says of each state of a method's walk, in float64 lists over [N, T]."""
    kept, states = open_rollout(rollout).follow(name), []
    for _, rows in walk(kept):
        t = kept.tokens()
        states.append(SimpleNamespace(
            logprobs=t.logprobs.double(), ratio=t.ratio.double(), entropy=t.entropy.double(),
            gradient=signed_gradient(t, kept.method).double(), rows=rows,
            measured=measure(kept.method, t), advantages=t.advantages.double()))
    return kept, states


def shown_of(kept, problem):
    """[N, T]: the tokens of a problem's completions."""
    lengths = kept.batch.completion_len * (torch.arange(8) // 4 == problem)
    return torch.arange(kept.batch.mask.shape[1]) < lengths[:, None]


# ---------------------------------------------------------------------------- the payload

@pytest.mark.quick
def test_numbers_are_rounded_as_the_page_says():
    x = np.array([0.0, 1e-12, -3e-7, 0.12345, -2.5, -100.04], dtype=np.float64)
    found = tokens.rounded(dict(logprob=x, gradient=np.stack([x, -x], 1)), slice(1, 6))
    assert found["logprob"] == pytest.approx(x[1:].tolist(), rel=0.501e-4, abs=0)
    gradient = np.array(found["gradient"])
    assert gradient.shape == (5, 2) and gradient == pytest.approx(
        np.stack([x[1:], -x[1:]], 1), rel=0.501e-4, abs=0)


@pytest.mark.quick
@pytest.mark.parametrize("number, name", [(0, "grpo"), (1, "acpo")])
def test_numbers_are_those_of_the_analysis(rollout, page, number, name):
    """Of every token, state and method, in the order of the completions."""
    text, (kept, states), seen = page.read_text(), expected(rollout, name), set()
    method = header(text)["methods"][number]
    assert method["name"] == name and method["text"].startswith(f"{name} = zscore | every_token")
    assert method["shares"] == [state.rows.tolist() for state in states[:-1]]
    assert method["advantages"] == pytest.approx(states[0].advantages[:, 0].tolist(), abs=1e-5)
    for problem in range(2):
        here = shown_of(kept, problem)
        n = int(here.sum())
        walk = unpacked(text, f"walk-{problem}-{number}")
        reference = json.loads(raw(text, f"problem-{problem}"))
        old, gap = np.array(reference["old"]), np.array(reference["gap"])
        assert {x.shape for x in walk.values()} == {(5, n)} and old.shape == gap.shape == (n,)
        status = walk["status"]
        is_masked = ~kept.batch.mask[here].numpy()
        for k, state in enumerate(states):
            said = np.exp(walk["logprob"][k] - old)
            assert said == pytest.approx(state.ratio[here].numpy(), rel=1.1e-4)
            assert walk["logprob"][k] == pytest.approx(state.logprobs[here].numpy(), abs=0.51e-4)
            assert walk["entropy"][k] == pytest.approx(state.entropy[here].numpy(), abs=0.51e-3)
            exact = state.gradient[here].numpy()
            assert walk["gradient"][k] == pytest.approx(exact, rel=0.006, abs=2e-8)
            assert ((status[k] == tokens.OUT) == is_masked).all()
            weightless = (exact == 0) & ~is_masked
            assert (np.isin(status[k], (tokens.UP, tokens.DOWN)) == weightless).all()
            positive = state.advantages[here].numpy() > 0
            assert positive[status[k] == tokens.UP].all()
            assert not positive[status[k] == tokens.DOWN].any()
            seen |= set(status[k].tolist())
        old_logprobs = kept.batch.old_logprobs[here].numpy()
        assert old == pytest.approx(old_logprobs, abs=0.51e-4)
        exact = old_logprobs - kept.batch.sampler_logprobs[here].numpy()
        assert gap == pytest.approx(exact, rel=0.006, abs=2e-8)
    assert {tokens.PASSES, tokens.OUT, *([tokens.DOWN] if name == "grpo" else [])} <= seen
    for line, state in zip(method["summary"], states, strict=True):
        assert line == {key: pytest.approx(state.measured[key].item(), abs=1e-5) for key in line}
    assert name == "acpo" or method["summary"][-1]["clip_low_frac"] > 0


def test_select_and_advantage_0_have_a_status(model, tmp_path):
    path = kept_rollout(tmp_path / "a", model, "--loss top_entropy",
                        rewards=[[1.0, 0.0, 0.0, 1.0], [1.0] * 4])
    text, kept = page_of(path, "--steps", "2", "--lr", "1e-5"), open_rollout(path)
    for problem, kinds in ((0, {tokens.PASSES, tokens.UNSELECTED}), (1, {tokens.NO_ADVANTAGE})):
        status = unpacked(text, f"walk-{problem}-0")["status"]
        assert status.shape == (3, int(shown_of(kept, problem).sum()))
        assert set(status[0].tolist()) == kinds


def test_a_token_that_a_correction_drops_is_not_selected(model, tmp_path):
    path = kept_rollout(tmp_path / "a", model, "--correction token_mask")
    batch = torch.load(path)["batch"]
    batch["sampler_logprobs"][:, ::2] -= 3  # r = e^3 is above the bound, 5
    changed(path, path, batch=batch)
    text = page_of(path, "--methods", "grpo,cispo", "--steps", "2", "--lr", "1e-6")
    shown = shown_of(open_rollout(path), 0)
    dropped = (torch.arange(shown.shape[1]) % 2 == 0).expand(shown.shape)[shown]
    for method, kinds in enumerate((tokens.UNSELECTED, tokens.PASSES)):  # the run's, and another
        walk = unpacked(text, f"walk-0-{method}")
        assert (walk["status"][0][dropped] == kinds).all()
        assert (walk["status"][0][~dropped] == tokens.PASSES).all()
        assert (walk["gradient"][0][dropped] == 0).all() == (method == 0)


def test_fewer_problems_and_a_method_of_two_passes(rollout):
    text = page_of(rollout, "--methods", "ar_lopti,ar_lopti", "--problems", "1")
    method, = header(text)["methods"]
    assert len(method["shares"]) == 8 and method["shares"][:4] == method["shares"][4:]
    assert len(method["advantages"]) == 4 and "walk-1-0" not in text
    assert len(header(text)["problems"]) == 1


def test_methods_take_flags(rollout):
    """The run's own has the run's flags but for those given; its coefficients stay."""
    texts = ["grpo", "grpo --eps_low 0.99 --eps_high 99", "p3o --no-ess_kl"]
    methods = header(page_of(rollout, "--methods", " , ".join(texts)))["methods"]
    assert [method["name"] for method in methods] == texts
    assert "eps_low=0.2, eps_high=0.2" in methods[0]["text"]
    assert "eps_low=0.99, eps_high=99" in methods[1]["text"]
    assert "ess_kl=False" in methods[2]["text"]
    assert methods[0]["summary"][-1] != methods[1]["summary"][-1]
    kept = open_rollout(rollout)
    kept.method, kept.coefficients = kept.method.bind(dual_clip=3.0), dict(kl_coef=0.5)
    kept = kept.follow("grpo --eps_low 0.05")
    assert kept.method.flags == dict(eps_low=0.05, eps_high=0.2, dual_clip=3.0)
    assert kept.coefficients == dict(kl_coef=0.5)


def test_what_a_completion_is(rollout, page):
    said = header(page.read_text())["problems"]
    lengths = open_rollout(rollout).batch.completion_len.view(2, 4).tolist()
    assert said == [[dict(tokens=n, reward=reward, right=reward == 1,
                          truncated=len(text.encode()) >= 48)
                     for n, reward, text in zip(*columns)]
                    for columns in zip(lengths, REWARDS, COMPLETIONS)]


def test_a_late_right_completion_is_right(model, tmp_path):
    """--overlong_penalty takes from the reward of the right ones, too."""
    kept = open_rollout(kept_rollout(tmp_path / "a", model, "--overlong_penalty 20"))
    kept.shaped_rewards[0, :2] = torch.tensor([0.25, -1.0])
    kept.rewards[0, 3] = 2.0  # a reward of 1 is right, and nothing else
    found = tokens.completions_of(kept, [0])[:4]
    assert [c["right"] for c in found] == [True, False, False, False]
    assert [c["reward"] for c in found[:2]] == [0.25, -1.0]


# ---------------------------------------------------------------------------- texts

@pytest.mark.quick
def test_texts_of_tokens_are_the_text(page, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    for problem, group in enumerate(COMPLETIONS):
        text = json.loads(raw(page.read_text(), f"problem-{problem}"))
        assert text["prompt"] == PROMPTS[problem]
        for pieces, ids, whole in zip(text["texts"], text["ids"], group, strict=True):
            assert "".join(pieces).removesuffix("<eos>") == whole[:48]
            assert len(pieces) == len(ids) and tokenizer.decode(ids) == "".join(pieces)
    # é is two tokens, the first without a text of its own
    accented = json.loads(raw(page.read_text(), "problem-1"))["texts"][0]
    assert accented[:6] == ["c", "a", "f", "", "é", " "]


@pytest.mark.quick
@pytest.mark.parametrize("text, cut", [
    ("日本", 2), ("a\u00e9", None), ("x😀y", 3), ("", None), ("\ufffd\ufffd", None)])
def test_bytes_that_are_no_text(tokenizer, text, cut):
    """A completion can end within a character, or hold bytes that are none."""
    ids = tokenizer.encode(text)[:cut]
    pieces = tokens.token_texts(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)
    stray = [tokenizer.encode("é")[1], *tokenizer.encode("ab"), tokenizer.encode("é")[0]]
    pieces = tokens.token_texts(tokenizer, [*stray, *ids])
    assert "".join(pieces) == tokenizer.decode([*stray, *ids]) and len(pieces) == 4 + len(ids)


@pytest.mark.quick
def test_words_that_begin_with_a_space():
    """A tokenizer whose first token loses its space, as Llama's did."""
    words = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "▁": 4}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces = tokens.token_texts(PreTrainedTokenizerFast(tokenizer_object=backend), [1, 2, 3, 1])
    assert pieces == ["the", " cat", "s", " the"]


@pytest.mark.quick
def test_no_text_is_markup(page):
    """The texts of a model or a prompt are in the file as base64 alone, and its policy allows its
    own script and no network."""
    text, template = page.read_text(), tokens.TEMPLATE.read_text()
    assert "hacked" not in text and text.count("<!-- data -->") == 0
    assert "<b>1" not in text and "\u2028" not in text
    rest = re.sub(r'<script type="text/plain" id="[\w-]+">[\w+/=]*</script>\n?', "", text)
    rest = re.sub(r'<script type="application/json" id="page">[^<]*</script>\n?', "", rest)
    assert rest.count("<script") == template.count("<script") == 1
    filled = tokens.fill(dict(name="</script><script>\u2028&"), {})
    assert '"\\u003c/script>\\u003cscript>\\u2028&"' in filled
    assert header(filled) == dict(name="</script><script>\u2028&")
    policy, = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    own = [re.findall(f"<{tag}>(.*?)</{tag}>", template, re.S) for tag in ("script", "style")]
    script, style = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
                     for part, in own)
    assert policy == (f"default-src 'none'; script-src 'sha256-{script}'; style-src "
                      f"'sha256-{style}'; base-uri 'none'; form-action 'none'")
    assert not re.search(r"(src|href)=", template)


# ---------------------------------------------------------------------------- bad input

@pytest.mark.quick
def test_what_is_wrong_is_said(rollout, model, tmp_path, capsys):
    for number, text in enumerate(("ccc\nfoo\n", "cos\nfoo\n", "")):  # pickle takes c for a name
        (tmp_path / f"{number}.pt").write_text(text)
        assert "no rollout that" in refused(capsys, analyse, "tokens", tmp_path / f"{number}.pt")
    for part in ("rewards", "hp", "state"):
        without = changed(rollout, tmp_path / "part.pt", **{part: None})
        assert "no rollout that" in refused(capsys, analyse, "tokens", without)
    assert "--problems" in refused(capsys, analyse, "tokens", rollout, "--problems", "0")
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("token*", "vocab*", "merges*"))
    said = refused(capsys, analyse, "tokens", rollout, "--model", bare)
    assert f"--model {bare} has no tokenizer" in said


def test_steps_that_cannot_be_taken_are_said(rollout, tmp_path, capsys):
    batch, rewards = torch.load(rollout)["batch"], torch.tensor(REWARDS)
    batch["mask"][:] = False
    rewards[0, 0] = 0.5
    none = changed(rollout, tmp_path / "none.pt", batch=batch)
    half = changed(rollout, tmp_path / "half.pt", shaped_rewards=rewards)
    for args, words in (
            ([rollout, "--steps", "3"], "the steps of grpo cannot be taken: its 8 completions"),
            ([rollout, "--lr", "1e8"], "steps of grpo cannot be taken: optimizer step 2: loss "),
            ([none], "none of its completions has a gradient"),
            ([half, "--methods", "grpo,passk"],
             "the steps of passk cannot be taken: passk counts successes")):
        assert words in refused(capsys, analyse, "tokens", *args), args


def test_other_weights_than_those_that_sampled_are_noted(rollout, tmp_path):
    batch = torch.load(rollout)["batch"]
    batch["old_logprobs"] -= 0.25
    text = page_of(changed(rollout, tmp_path / "a.pt", batch=batch), "--problems", "1")
    assert "log ratios are 0.25 on average and up to 0.25" in header(text)["note"]
    assert str(tmp_path) not in text


# ---------------------------------------------------------------------------- in the browser

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")  # None stands for Playwright's own


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with playwright.sync_playwright() as p:
        try:
            opened = p.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as e:
            if found or "Executable doesn't exist" not in str(e):
                raise
            pytest.skip(f"there is no Chromium: none of {', '.join(CHROMIUMS)} is on the PATH, and "
                        "python -m playwright install chromium was not run")
        yield opened
        opened.close()


def until(tab, expression):
    """Waits until the expression holds. (Playwright's own waiting takes eval, which the page's
    policy forbids.)"""
    end = time.monotonic() + 20
    while not tab.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.02)


def until_begins(tab, element, text):
    until(tab, f"document.getElementById('{element}').textContent.startsWith('{text}')")


@pytest.fixture
def visit(browser):
    """visit(file) -> the opened page. In the end: nothing was asked of the network, no error."""
    seen, requests, opened = [], [], []

    def go(file, **context):
        tab = browser.new_context(viewport=dict(width=1200, height=800), **context).new_page()
        tab.on("console", lambda message: seen.append(message.text))
        tab.on("pageerror", lambda error: seen.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(file.as_uri())
        until(tab, PAINTED)
        opened.append((tab, file))
        return tab
    yield go
    for tab, _ in opened:
        assert tab.evaluate("window.hacked") is None
        tab.context.close()
    assert seen == [] and requests == [file.as_uri() for _, file in opened]


PAINTED = "document.querySelector('.tokens span')?.style.backgroundColor"
TOKEN = ".completion:nth-child({}) .tokens span:nth-child({})"


def channels(colour):
    """Of #rrggbb."""
    return [int(colour[i:i + 2], 16) for i in (1, 3, 5)]


def colour_of(quantity, stops, x):
    """The colour that a value has by the page's own legend, reckoned anew."""
    low, high = quantity["low"], quantity["high"]
    if "log" in quantity:
        low, high, x = math.log(low), math.log(high), math.log(x)
    stops = np.array([channels(stop) for stop in stops])
    place = min(max((x - low) / (high - low), 0), 1) * (len(stops) - 1)
    return [np.interp(place, range(len(stops)), stops[:, c]) for c in range(3)]


def background(tab, completion, token):
    style = f"getComputedStyle(document.querySelector('{TOKEN.format(completion, token)}'))"
    return [int(x) for x in re.findall(r"\d+", tab.evaluate(f"{style}.backgroundColor"))]


def at_step(tab, step):
    tab.evaluate("""step => { const slider = document.getElementById("step");
        slider.value = step; slider.dispatchEvent(new Event("input")); }""", step)
    until_begins(tab, "of", f"{step} of")


def colour_by(tab, name):
    tab.locator("#quantity").select_option(label=name)


def values_of(state, kept, row, place):
    """What Python says of a token, as the page's quantities have it."""
    quantities = dict(
        probability=state.logprobs.exp(), entropy=state.entropy, advantage=state.advantages,
        ratio=state.ratio, gradient=state.gradient.abs(),
        gap=kept.batch.old_logprobs - kept.batch.sampler_logprobs)
    return {name: values[row, place].item() for name, values in quantities.items()}


def panel(tab):
    return dict(tab.evaluate("""[...document.querySelectorAll("#panel dd")].map(
        dd => [dd.dataset.key, dd.textContent])"""))


def test_colours_are_those_of_the_numbers(visit, rollout, page):
    """Each quantity, before the first step and after the last, of tokens of two completions."""
    tab, (kept, states), drawn = visit(page), expected(rollout, "grpo"), {}
    maps = tab.evaluate("MAPS")
    for quantity in tab.evaluate("QUANTITIES"):
        if quantity["key"] == "clipped":
            continue
        colour_by(tab, quantity["name"])
        for step in (0, 4):
            at_step(tab, step)
            for row, place in ((0, 0), (0, 7), (3, 2), (3, 4)):
                x = values_of(states[step], kept, row, place)[quantity["key"]]
                want = [238] * 3 if "log" in quantity and x == 0 else colour_of(
                    quantity, maps[quantity["map"]], x)
                key, have = (quantity["key"], step, row, place), background(tab, row + 1, place + 1)
                # half of a 256th along the map, and the rounding of the number
                assert have == pytest.approx(want, abs=4), key
                drawn[key] = have
    for key in ("probability", "entropy", "ratio", "gradient"):
        assert any(drawn[key, 0, r, p] != drawn[key, 4, r, p] for _, _, r, p in drawn), key
    assert len({tuple(c) for c in drawn.values()}) > 15


def test_clipped_tokens_are_marked_not_by_colour_alone(visit, rollout, page):
    tab, states = visit(page), expected(rollout, "grpo")[1]
    colours = [status[2] for status in tab.evaluate("STATUSES")]
    colour_by(tab, "clipped or not")
    at_step(tab, 4)
    marks, found = {tokens.UP: "overline", tokens.DOWN: "underline"}, set()
    for row in (0, 2, 3):
        lines = tab.evaluate(f"""[...document.querySelectorAll(
            ".completion:nth-child({row + 1}) .tokens span")].map(span =>
            [getComputedStyle(span).textDecorationLine, span.style.backgroundColor])""")
        for place, (line, drawn) in enumerate(lines):
            status = tokens.PASSES
            if states[4].gradient[row, place] == 0:
                status = tokens.UP if states[4].advantages[row, place] > 0 else tokens.DOWN
            assert line == marks.get(status, "none")
            assert list(map(int, re.findall(r"\d+", drawn))) == channels(colours[status])
            found.add(status)
    assert {tokens.PASSES, tokens.DOWN} <= found


@pytest.mark.parametrize("way", ["hover", "focus", "tap"])
def test_the_panel_has_the_numbers(visit, rollout, page, way):
    tab = visit(page, has_touch=way == "tap")
    kept, states = expected(rollout, "grpo")
    at_step(tab, 3)
    for row, place in ((0, 4), (3, 1)):
        span = tab.locator(TOKEN.format(row + 1, place + 1))
        if way == "focus":
            tab.locator(f".completion:nth-child({row + 1}) .tokens span:first-child").focus()
            for _ in range(place):
                tab.keyboard.press("ArrowRight")
            assert span.evaluate("x => x === document.activeElement")
        else:
            getattr(span, way)()
        have, want = panel(tab), values_of(states[3], kept, row, place)
        assert (have["completion"], have["place"]) == (
            str(row + 1), f"{place + 1} of {kept.batch.completion_len[row]}")
        exact = want["gradient"] = states[3].gradient[row, place].item()
        for key, bound in dict(
                probability=dict(rel=6e-4), ratio=dict(rel=7e-4), entropy=dict(abs=1e-3),
                advantage=dict(rel=1e-3), gap=dict(rel=0.011), gradient=dict(rel=0.011)).items():
            assert float(have[key]) == pytest.approx(want[key], **bound), key
        assert (have["clipped"] in ("clipped up", "clipped down")) == (exact == 0)
        at = int(kept.batch.prompt_len[row]) + place
        assert int(have["id"]) == int(kept.batch.ids[row, at])
        character = COMPLETIONS[0][row][place]
        assert tab.locator("#panel h2").inner_text() == json.dumps(character)
    # it follows the slider
    at_step(tab, 0)
    assert float(panel(tab)["ratio"]) == 1


def test_the_panel_is_closed_and_begins_anew_with_another_problem(visit, page):
    tab, token = visit(page), TOKEN.format(1, 5)
    tab.set_viewport_size(dict(width=360, height=844))
    hint = tab.locator("#numbers").inner_text()
    for close in (tab.locator("#close").click, lambda: tab.keyboard.press("Escape")):
        for place in range(1, 33):
            tab.evaluate("span => choose(document.querySelector(span))", TOKEN.format(1, place))
            lines = tab.evaluate("""[...document.querySelectorAll("#panel dd")].map(dd => {
                const text = document.createRange();
                text.selectNodeContents(dd);
                return text.getClientRects().length; })""")
            assert set(lines) == {1}  # no number is broken
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        close()
        assert not tab.locator("#panel").is_visible()
    tab.locator(token).click()
    assert panel(tab)["place"].startswith("5 of")
    tab.locator("#after").click()
    until_begins(tab, "prompt", "second")
    assert panel(tab) == {} and tab.locator("#numbers").inner_text() == hint


def test_keys(visit, page):
    tab = visit(page)
    here = "document.activeElement.number"
    tab.locator(TOKEN.format(1, 1)).focus()
    for key, place in (("ArrowRight", 1), ("End", 32), ("ArrowRight", 33), ("ArrowLeft", 32),
                       ("Home", 0), ("ArrowLeft", 0), ("ArrowDown", 33), ("ArrowUp", 0)):
        tab.keyboard.press(key)
        assert tab.evaluate(here) == place, key
    tab.keyboard.press("Tab")
    assert tab.evaluate(here) == 33 and panel(tab)["completion"] == "2"
    for key, text in ((".", "1 of 4"), (".", "2 of 4"), (",", "1 of 4")):
        tab.keyboard.press(key)
        until(tab, f"document.getElementById('of').textContent === '{text}'")
    tab.keyboard.press("4")
    assert tab.locator("#quantity option:checked").inner_text() == "ratio"
    tab.keyboard.press("m")
    until_begins(tab, "method-text", "acpo")
    tab.keyboard.press("n")
    until_begins(tab, "prompt", "second")
    tab.keyboard.press("p")
    until_begins(tab, "prompt", "<b>")
    documented = tab.locator("#help").inner_text()
    assert all(word in documented for word in ("Tab", "Home", "slider", "method", "colour"))


def test_the_completions_of_a_step_are_marked(visit, page):
    tab, method = visit(page), header(page.read_text())["methods"][0]
    for step in (0, 1, 2, 4):
        at_step(tab, step)
        own = tab.evaluate("""[...document.querySelectorAll(".completion")].map(
            x => x.classList.contains("own") && x.innerText.includes("share"))""")
        share = method["shares"][step - 1] if step else []
        assert own == [row in share for row in range(4)]


def test_filters(visit, page):
    tab = visit(page)
    said = header(page.read_text())["problems"]
    titles = tab.locator(".completion h2").all_inner_texts()
    assert [title[:7] for title in titles] == ["✓ right", "✗ wrong", "✗ wrong", "✓ right"]

    def there(reward, end):
        tab.locator("#reward").select_option(reward)
        tab.locator("#end").select_option(end)
        rows = tab.evaluate("""[...document.querySelectorAll(".completion")].flatMap(
            (x, k) => x.offsetParent ? [k] : [])""")
        assert tab.locator("#count").inner_text() == f"{len(rows)} of 4 completions"
        return rows
    assert there("right", "all") == [0, 3] and there("all", "truncated") == []
    assert there("all", "ended") == [0, 1, 2, 3] and there("wrong", "all") == [1, 2]
    tab.locator("#problem").select_option(index=1)  # they stay with another problem
    until_begins(tab, "prompt", "second")
    assert there("wrong", "all") == [k for k, c in enumerate(said[1]) if not c["right"]]
    assert there("wrong", "truncated") == [3]


def test_texts_are_data(visit, page):
    """Tags, entities, marks of direction and of lines stand there to be read."""
    tab = visit(page)
    lines = [line.replace("\n", "") for line in tab.evaluate(
        '[...document.querySelectorAll(".tokens")].map(x => x.textContent)')]
    assert lines == [f"{HOSTILE}<eos>", f"{COMPLETIONS[0][1]}<eos>", "&lt;b&gt; &amp;<eos>",
                     "2+2=4↵⇥\t◌◌⟨U+2028⟩!<eos>"]
    assert tab.evaluate("document.querySelectorAll('.tokens img, .tokens script').length") == 0
    tab.locator("#problem").select_option(index=1)
    until_begins(tab, "prompt", "second")
    line = tab.evaluate('document.querySelector(".tokens").textContent')
    assert line.startswith("caf◌é ◌ש◌ל") and "⟨U+202E⟩abc" in line
    boxes = [tab.locator(TOKEN.format(1, k)).bounding_box() for k in range(7, 15)]
    assert [box["x"] for box in boxes] == sorted(box["x"] for box in boxes)  # in their order


def test_completions_of_3000_tokens(visit, model, tmp_path):
    texts = ["".join(chr(97 + (i * k) % 26) for i in range(3000)) for k in (1, 3, 5, 7)]
    path = kept_rollout(tmp_path / "long", model, "", [texts], REWARDS[:1], 3100, ["p"])
    page_of(path, "--methods", "grpo")
    tab = visit(path.with_name("rollout_000001-tokens.html"))
    assert tab.locator(".tokens span").count() == 4 * 3001
    colour_by(tab, "ratio")
    # a token far from the screen is painted when one comes to it, and again after a move
    first, last = tab.locator(TOKEN.format(1, 1)), tab.locator(TOKEN.format(4, 3001))
    is_of_now = "shown.spans.at(-1).style.backgroundColor === lookOf(4 * 3001 - 1).background"
    for step in (4, 0):
        first.scroll_into_view_if_needed()
        until(tab, "!shown.sections[3].near")
        at_step(tab, step)
        assert not tab.evaluate(is_of_now)
        last.scroll_into_view_if_needed()
        until(tab, is_of_now)
    tab.set_viewport_size(dict(width=360, height=700))  # there is no space in them to break at
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")

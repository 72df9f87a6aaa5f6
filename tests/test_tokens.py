"""The token page: its numbers against the analysis, and the page in a headless Chromium where there
is one: pip install playwright; apt-get install chromium, or playwright install chromium."""

import base64
import functools
import hashlib
import json
import math
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from pytest import approx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import train
from anatomy import tokens
from anatomy.__main__ import main
from anatomy.rollout import open_rollout, signed_gradient, walk
from engine.loading import Compute, load
from engine.policy import compute_logprobs, make_batch
from engine.sampler import Completion
from harness.flags import flags_of
from helpers import refused, until
from losses import measure

HOSTILE = "<script>window.hacked=1</script>"
COMPLETIONS = [  # of two problems
    [HOSTILE, "</p><img src=x onerror=window.hacked=1>", "&lt;b&gt; &amp;", "2+2=4\n\t\u2028!"],
    ["caf\u00e9 \u05e9\u05dc\u05d5\u05dd\u202eabc", "12", "<!-- data -->", "a" * 60]]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
PROMPTS = ["<b>1&2</b>:", "second\nprompt:"]


def kept_rollout(folder, model, flags="", completions=COMPLETIONS, rewards=REWARDS, max_tokens=48):
    """A rollout as train.py keeps it, of any completions, as far as max_tokens go. -> its path"""
    tokenizer = AutoTokenizer.from_pretrained(model)
    args, method = train.parse_args((
        f"--model {model} --loss grpo --lr 0.01 --steps_per_rollout 4 --max_tokens {max_tokens} "
        f"--problems_per_rollout {len(rewards)} --group_size 4 --save_rollouts "
        f"--tokens_per_micro_batch 4096 {flags}").split())
    ids = [[(tokenizer.encode(text) + [tokenizer.eos_token_id])[:max_tokens] for text in texts]
           for texts in completions]
    batch = make_batch([
        (tokenizer.encode(prompt), [Completion(line, [0.0] * len(line), False) for line in lines])
        for prompt, lines in zip(PROMPTS, ids)])
    policy = load(model, None, batch.rows(torch.arange(4)), Compute(budget=4096))
    batch.old_logprobs, batch.entropy = compute_logprobs(policy, batch)
    torch.manual_seed(0)
    batch.sampler_logprobs = batch.old_logprobs - 0.05 * torch.randn(batch.mask.shape) * batch.mask
    if args.mask_truncated:
        batch.mask &= (batch.completion_len < max_tokens)[:, None]
    path = folder / "rollouts" / "rollout_000001.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(batch=vars(batch), rewards=torch.tensor(rewards), rollout=1,
                    shaped_rewards=torch.tensor(rewards), hp=method.flags, flags=flags_of(args),
                    state=dict(entropy=batch.entropy[batch.mask].mean().item())), path)
    return path


@pytest.fixture(scope="module")
def rollout(model, tmp_path_factory):
    return kept_rollout(tmp_path_factory.mktemp("rollout"), model, "--mask_truncated")


def page_of(rollout, *flags):
    """-> the file that the command writes beside the rollout."""
    main(["page", str(rollout), *flags])
    return rollout.with_name(f"{rollout.stem}-tokens.html")


@pytest.fixture(scope="module")
def page(rollout):
    return page_of(rollout, "--methods", "grpo,acpo").rename(rollout.parent / "page.html")


def changed(rollout, file, **parts):
    """-> file: the rollout with other parts."""
    torch.save({**torch.load(rollout), **parts}, file)
    return file


def header(text):
    found, = re.findall('<script type="application/json" id="page">(.*?)</script>', text)
    return json.loads(found)


def piece(text, name):
    data, = re.findall(f'<script type="text/plain" id="{name}">(.*?)</script>', text)
    return json.loads(zlib.decompress(base64.b64decode(data)))


def walk_of(text, problem, method):
    """{name: numbers [states, n]} of a problem's tokens."""
    return {key: np.array(x).T for key, x in piece(text, f"walk-{problem}-{method}").items()}


@functools.cache
def analysed(rollout, name):
    """-> Kept, and of each state of a method's walk by the analysis: numbers {name: [N, T]} as the
    page calls them, metrics, and the rows of the next step."""
    kept, states = open_rollout(rollout).follow(name), []
    for _, rows in walk(kept):
        t = kept.tokens()
        signed = signed_gradient(t, kept.method)
        found = dict(logprob=t.logprobs, probability=t.probs, entropy=t.entropy, ratio=t.ratio,
                     advantage=t.advantages, signed=signed, gradient=signed.abs(),
                     gap=kept.batch.old_logprobs - kept.batch.sampler_logprobs)
        numbers = {key: x.double().numpy() for key, x in found.items()}
        states.append((numbers, measure(kept.method, t), rows))
    return kept, states


def shown_of(kept, problem):
    """[N, T]: the tokens of a problem's completions."""
    lengths = kept.batch.completion_len * (torch.arange(8) // 4 == problem)
    return (torch.arange(kept.batch.mask.shape[1]) < lengths[:, None]).numpy()


# ---------------------------------------------------------------------------- the payload

@pytest.mark.quick
@pytest.mark.parametrize("number, name", [(0, "grpo"), (1, "acpo")])
def test_numbers_are_those_of_the_analysis(rollout, page, number, name):
    text, (kept, states), seen = page.read_text(), analysed(rollout, name), set()
    method = header(text)["methods"][number]
    assert method["name"] == name and method["text"].startswith(f"{name} = zscore | every_token")
    assert method["shares"] == [rows.tolist() for *_, rows in states[:-1]]
    assert method["advantages"] == approx(states[0][0]["advantage"][:, 0], abs=1e-5)
    for line, (_, metrics, _) in zip(method["summary"], states, strict=True):
        assert line == {key: approx(metrics[key].item(), abs=1e-5) for key in line}
    for problem in range(2):
        here, reference = shown_of(kept, problem), piece(text, f"problem-{problem}")
        said, old = walk_of(text, problem, number), np.array(reference["old"])
        assert {x.shape for x in said.values()} == {(5, int(here.sum()))}
        assert old == approx(kept.batch.old_logprobs.numpy()[here], abs=2e-8, rel=1e-5)
        for k, (numbers, *_) in enumerate(states):
            exact = {key: x[here] for key, x in numbers.items()}
            assert reference["gap"] == approx(exact["gap"], rel=1e-5, abs=2e-8)
            for key, of in dict(logprob="logprob", entropy="entropy", gradient="signed").items():
                assert said[key][k] == approx(exact[of], rel=1e-5, abs=2e-8)
            assert np.exp(said["logprob"][k] - old) == approx(exact["ratio"], rel=1.1e-4)
            clipped, up = exact["signed"] == 0, exact["advantage"] > 0
            status = np.select([~kept.batch.mask.numpy()[here], clipped & up, clipped],
                               [tokens.OUT, tokens.UP, tokens.DOWN], tokens.PASSES)
            assert (said["status"][k] == status).all()
            seen |= set(status.tolist())
    assert {tokens.PASSES, tokens.OUT, *([tokens.DOWN] if name == "grpo" else [])} <= seen


def test_tokens_that_do_not_count_have_a_status(model, tmp_path):
    path = kept_rollout(tmp_path, model, "--loss top_entropy --select own,token_mask",
                        rewards=[REWARDS[0], [1.0] * 4])
    batch = torch.load(path)["batch"]
    batch["sampler_logprobs"][:, ::2] -= 3  # r = e^3 is above the bound, 5
    text = page_of(changed(path, path, batch=batch), "--methods", "top_entropy,cispo", "--steps",
                   "2", "--lr", "1e-6").read_text()
    shown = shown_of(open_rollout(path), 0)
    dropped = np.broadcast_to(np.arange(shown.shape[1]) % 2 == 0, shown.shape)[shown]
    run, other = walk_of(text, 0, 0), walk_of(text, 0, 1)
    assert (run["status"][0][dropped] == tokens.UNSELECTED).all()
    assert set(run["status"][0][~dropped]) == {tokens.UNSELECTED, tokens.PASSES}
    assert ((run["gradient"][0] == 0) == (run["status"][0] == tokens.UNSELECTED)).all()
    assert (other["status"][0] == tokens.PASSES).all() and other["gradient"][0][dropped].any()
    assert (walk_of(text, 1, 0)["status"] == tokens.NO_ADVANTAGE).all()


def test_methods_take_flags(rollout):
    """The run's own has the run's flags but for those given; its coefficients stay."""
    texts = ["grpo", "grpo --eps_low 0.99 --eps_high 99", "p3o --no-ess_kl", "ar_lopti"]
    names = " , ".join([*texts, "grpo"])
    text = page_of(rollout, "--methods", names, "--problems", "1").read_text()
    said = header(text)
    assert [method["name"] for method in said["methods"]] == texts
    for method, flags in zip(said["methods"], ("eps_low=0.2, eps_high=0.2", "eps_high=99",
                                               "ess_kl=False", "lopti")):
        assert flags in method["text"] and len(method["advantages"]) == 4
    own, other, _, of_two_passes = said["methods"]
    assert own["summary"][-1] != other["summary"][-1]
    assert of_two_passes["shares"] == own["shares"] * 2
    assert len(said["problems"]) == 1 and "walk-1-0" not in text
    kept = open_rollout(rollout)
    kept.method, kept.coefficients = kept.method.bind(dual_clip=3.0), dict(kl_coef=0.5)
    own, other = kept.follow("grpo --eps_low 0.05"), kept.follow("cispo")
    assert own.method.flags == dict(eps_low=0.05, eps_high=0.2, dual_clip=3.0)
    assert own.coefficients == dict(kl_coef=0.5) and other.coefficients == {}


def test_facts_of_a_completion(rollout, page):
    kept = open_rollout(rollout)
    lengths = kept.batch.completion_len.view(2, 4).tolist()
    assert header(page.read_text())["problems"] == [
        [dict(tokens=n, reward=reward, right=reward == 1, truncated=len(text.encode()) >= 48)
         for n, reward, text in zip(*columns)] for columns in zip(lengths, REWARDS, COMPLETIONS)]
    # --overlong_penalty takes from a right one's reward, too, and a reward of 1 alone is right
    kept.shaped_rewards[0, 0], kept.rewards[0, 3] = 0.25, 2.0
    tokenizer = AutoTokenizer.from_pretrained(kept.flags["model"])
    first, *_, fourth = tokens.completions_of(kept, tokenizer, [0])[:4]
    assert first["right"] and first["reward"] == 0.25 and not fourth["right"]
    kept.flags["stop"] = "a" * 40  # which ends the last one at the limit, too
    assert not any(fact["truncated"] for fact in tokens.completions_of(kept, tokenizer, [0]))


@pytest.mark.quick
def test_texts_of_tokens_are_the_text_and_no_markup(page, model):
    """Texts of a model or a prompt are base64; the page's policy allows its own script alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for problem, group in enumerate(COMPLETIONS):
        text = piece(page.read_text(), f"problem-{problem}")
        assert text["prompt"] == PROMPTS[problem]
        for pieces, ids, whole in zip(text["texts"], text["ids"], group, strict=True):
            assert "".join(pieces).removesuffix("<eos>") == whole[:48]
            assert len(pieces) == len(ids) and tokenizer.decode(ids) == "".join(pieces)
    # é is two tokens, the first without a text of its own
    assert text["texts"][0][:6] == ["c", "a", "f", "", "é", " "]
    text, template = page.read_text(), tokens.TEMPLATE.read_text()
    assert not any(word in text for word in ("hacked", "<!-- data -->", "<b>1", "\u2028"))
    rest = re.sub(r"<script type=.(text/plain|application/json). id=[^>]*>[^<]*</script>", "", text)
    assert rest.count("<script") == template.count("<script") == 1
    hostile = dict(name="</script><script>\u2028&")
    assert header(tokens.fill(hostile, {})) == hostile
    script, style = (
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for tag in
        ("script", "style") for part in re.findall(f"<{tag}>(.*?)</{tag}>", template, re.S))
    assert (f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
            "base-uri 'none'; form-action 'none'") in text


@pytest.mark.quick
@pytest.mark.parametrize("text, cut", [
    ("日本", 2), ("a\u00e9", None), ("x😀y", 3), ("", None), ("\ufffd\ufffd", None)])
def test_bytes_that_are_no_text(tokenizer, text, cut):
    """A completion can end within a character, or hold bytes that are none."""
    first, second = tokenizer.encode("é")
    for before in ([], [second, first]):
        ids = before + tokenizer.encode(text)[:cut]
        pieces = tokens.token_texts(tokenizer, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.quick
def test_words_that_begin_with_a_space():
    """A tokenizer whose first token loses its space, as Llama's did."""
    words = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "▁": 4}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces = tokens.token_texts(PreTrainedTokenizerFast(tokenizer_object=backend), [1, 2, 3, 1])
    assert pieces == ["the", " cat", "s", " the"]


def test_steps_that_cannot_be_taken_and_other_weights_are_said(rollout, tmp_path, capsys):
    rewards = torch.tensor(REWARDS)
    rewards[0, 0] = 0.5
    half = changed(rollout, tmp_path / "half.pt", shaped_rewards=rewards)
    for words, *args in (
            ("steps of grpo cannot be taken: optimizer step 2: loss ", rollout, "--lr", "1e8"),
            ("passk cannot be taken: passk counts successes", half, "--methods", "grpo,passk")):
        assert words in refused(capsys, main, "page", *args)
    # the weights are not those that sampled
    batch = torch.load(rollout)["batch"]
    batch["old_logprobs"] -= 0.25
    text = page_of(changed(rollout, tmp_path / "a.pt", batch=batch), "--problems", "1").read_text()
    assert "log ratios are 0.25 on average and up to 0.25" in header(text)["note"]


# ---------------------------------------------------------------------------- in the browser

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")  # before Playwright's own
TOKEN = ".completion:nth-child({}) .tokens span:nth-child({})"
OF_COMPLETIONS = '[...document.querySelectorAll(".completion")]'
# of each token of each completion its colour, and the line over or under it
LOOKS = OF_COMPLETIONS + """.map(x => [...x.querySelectorAll(".tokens span")].map(span => [
    span.style.backgroundColor.match(/\\d+/g).map(Number),
    getComputedStyle(span).textDecorationLine]))"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with playwright.sync_playwright() as p:
        if not (found or Path(p.chromium.executable_path).exists()):
            pytest.skip(f"no Chromium: neither {', '.join(CHROMIUMS)} nor Playwright's own")
        opened = p.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def holds(tab, expression):
    """Waits for it. (Playwright's own waiting takes eval, which the page's policy forbids.)"""
    assert until(lambda: tab.evaluate(expression), 20), expression


def begins(tab, element, text):
    holds(tab, f"document.getElementById('{element}').textContent.startsWith('{text}')")


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
        holds(tab, "document.querySelector('.tokens span')?.style.backgroundColor")
        opened.append((tab, file))
        return tab
    yield go
    for tab, _ in opened:
        assert tab.evaluate("window.hacked") is None
        tab.context.close()
    assert seen == [] and requests == [file.as_uri() for _, file in opened]


def channels(colour):
    return [int(colour[i:i + 2], 16) for i in (1, 3, 5)]


def colour_of(quantity, stops, x):
    """The colour that a value has by the page's own legend, reckoned anew."""
    ends = np.array([quantity["low"], quantity["high"]])
    if "log" in quantity:
        if x == 0:
            return [238] * 3
        ends, x = np.log(ends), math.log(x)
    place = np.interp(x, ends, [0, len(stops) - 1])
    return [np.interp(place, range(len(stops)), line) for line in zip(*map(channels, stops))]


def at_step(tab, step):
    tab.evaluate("""step => { const slider = document.getElementById("step");
        slider.value = step; slider.dispatchEvent(new Event("input")); }""", step)
    begins(tab, "of", f"{step} of")


def panel(tab):
    return dict(tab.evaluate("""[...document.querySelectorAll("#panel dd")].map(
        dd => [dd.dataset.key, dd.textContent])"""))


def test_colours_are_those_of_the_numbers(visit, rollout, page):
    """Each quantity, before the first step and after the last; clipped tokens have a line, too."""
    tab, (kept, states) = visit(page), analysed(rollout, "grpo")
    maps, statuses = tab.evaluate("MAPS"), tab.evaluate("STATUSES")
    clipped = np.argwhere((states[4][0]["signed"][:4] == 0) & kept.batch.mask[:4].numpy())
    for quantity in tab.evaluate("QUANTITIES"):
        tab.locator("#quantity").select_option(label=quantity["name"])
        drawn, key = [], quantity["key"]
        for step in (0, 4):
            at_step(tab, step)
            drawn.append(tab.evaluate(LOOKS))
            for row, place in ((0, 0), (0, 7), (3, 2), (3, 4), *clipped[::5]):
                x = {name: values[row, place] for name, values in states[step][0].items()}
                colour, line = drawn[-1][row][place]
                if key == "clipped":
                    status, mark = (tokens.PASSES, "none") if x["signed"] else (
                        (tokens.UP, "overline") if x["advantage"] > 0 else
                        (tokens.DOWN, "underline"))
                    assert (colour, line) == (channels(statuses[status][2]), mark)
                else:  # half of a 256th along the map, and the rounding of the number
                    want = colour_of(quantity, maps[quantity["map"]], x[key])
                    assert colour == approx(want, abs=4), (key, step, row, place)
        assert (drawn[0] != drawn[1]) == (key not in ("advantage", "gap"))


@pytest.mark.parametrize("way", ["hover", "tap"])
def test_the_panel_has_the_numbers(visit, rollout, page, way):
    tab = visit(page, has_touch=way == "tap")
    kept, states = analysed(rollout, "grpo")
    at_step(tab, 3)
    for row, place in ((0, 4), (3, 1)):
        getattr(tab.locator(TOKEN.format(row + 1, place + 1)), way)()
        have = panel(tab)
        assert (have["completion"], have["place"]) == (
            str(row + 1), f"{place + 1} of {kept.batch.completion_len[row]}")
        want = {name: x[row, place] for name, x in states[3][0].items()}
        want["gradient"] = want["signed"]
        for key in ("probability", "ratio", "entropy", "advantage", "gap", "gradient"):
            assert float(have[key]) == approx(want[key], rel=0.006, abs=1e-6), key
        assert (have["clipped"] in ("clipped up", "clipped down")) == (want["signed"] == 0)
        at = int(kept.batch.prompt_len[row]) + place
        assert int(have["id"]) == int(kept.batch.ids[row, at])
        assert tab.locator("#panel h2").inner_text() == json.dumps(COMPLETIONS[0][row][place])
    at_step(tab, 0)  # it follows the slider
    assert float(panel(tab)["ratio"]) == 1


def test_keys(visit, page):
    tab = visit(page)
    tab.locator(TOKEN.format(1, 1)).focus()
    for key, place in (("ArrowRight", 1), ("End", 32), ("ArrowRight", 33), ("ArrowLeft", 32),
                       ("Home", 0), ("ArrowLeft", 0), ("ArrowDown", 33), ("ArrowUp", 0),
                       ("Tab", 33)):
        tab.keyboard.press(key)
        assert tab.evaluate("document.activeElement.number") == place, key
    assert panel(tab)["completion"] == "2"
    for key, element, text in ((".", "of", "1 of 4"), (".", "of", "2 of 4"), (",", "of", "1 of 4"),
                               ("m", "method-text", "acpo"), ("n", "prompt", "second"),
                               ("p", "prompt", "<b>")):
        tab.keyboard.press(key)
        begins(tab, element, text)
    assert panel(tab) == {}  # it begins anew with another problem
    tab.keyboard.press("4")
    assert tab.locator("#quantity option:checked").inner_text() == "ratio"
    for close in (tab.locator("#close").click, lambda: tab.keyboard.press("Escape")):
        tab.locator(TOKEN.format(1, 5)).click()
        assert panel(tab)["place"].startswith("5 of")
        close()
        assert not tab.locator("#panel").is_visible()


def test_filters_and_the_completions_of_a_step(visit, page):
    tab, said = visit(page), header(page.read_text())
    titles = tab.locator(".completion h2").all_inner_texts()
    assert [title[:7] for title in titles] == ["✓ right", "✗ wrong", "✗ wrong", "✓ right"]
    for step in (0, 1, 4):
        at_step(tab, step)
        own = tab.evaluate(OF_COMPLETIONS + """.map(
            x => x.classList.contains("own") && x.innerText.includes("share"))""")
        share = said["methods"][0]["shares"][step - 1] if step else []
        assert own == [row in share for row in range(4)]

    def there(reward, end):
        tab.locator("#reward").select_option(reward)
        tab.locator("#end").select_option(end)
        rows = tab.evaluate(OF_COMPLETIONS + ".flatMap((x, k) => x.offsetParent ? [k] : [])")
        assert tab.locator("#count").inner_text() == f"{len(rows)} of 4 completions"
        return rows
    assert there("right", "all") == [0, 3] and there("all", "truncated") == []
    assert there("all", "ended") == [0, 1, 2, 3] and there("wrong", "all") == [1, 2]
    tab.locator("#problem").select_option(index=1)  # they stay with another problem
    begins(tab, "prompt", "second")
    assert there("wrong", "all") == [0, 2, 3] and there("wrong", "truncated") == [3]


def test_texts_are_data(visit, page):
    tab = visit(page)
    lines = [line.replace("\n", "") for line in tab.evaluate(
        '[...document.querySelectorAll(".tokens")].map(x => x.textContent)')]
    assert lines == [f"{HOSTILE}<eos>", f"{COMPLETIONS[0][1]}<eos>", "&lt;b&gt; &amp;<eos>",
                     "2+2=4↵⇥\t◌◌⟨U+2028⟩!<eos>"]
    assert tab.evaluate("document.querySelectorAll('.tokens img, .tokens script').length") == 0
    tab.locator("#problem").select_option(index=1)
    begins(tab, "prompt", "second")
    line = tab.evaluate('document.querySelector(".tokens").textContent')
    assert line.startswith("caf◌é ◌ש◌ל") and "⟨U+202E⟩abc" in line
    boxes = [tab.locator(TOKEN.format(1, k)).bounding_box() for k in range(7, 15)]
    assert [box["x"] for box in boxes] == sorted(box["x"] for box in boxes)  # in their order


def test_tokens_far_from_the_screen_are_painted_when_one_comes_to_them(visit, model, tmp_path):
    texts = ["".join(chr(97 + (i * k) % 26) for i in range(3000)) for k in (1, 3, 5, 7)]
    tab = visit(page_of(kept_rollout(tmp_path, model, "", [texts], REWARDS[:1], 3100)))
    assert tab.locator(".tokens span").count() == 4 * 3001
    tab.locator("#quantity").select_option(label="ratio")
    is_of_now = "shown.spans.at(-1).style.backgroundColor === lookOf(4 * 3001 - 1).background"
    for step in (4, 0):
        tab.locator(TOKEN.format(1, 1)).scroll_into_view_if_needed()
        holds(tab, "!shown.sections[3].near")
        at_step(tab, step)
        assert not tab.evaluate(is_of_now)
        tab.locator(TOKEN.format(4, 3001)).scroll_into_view_if_needed()
        holds(tab, is_of_now)
    tab.set_viewport_size(dict(width=360, height=700))  # there is no space in them to break at
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")

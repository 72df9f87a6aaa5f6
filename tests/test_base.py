"""The embedded bases, made by study/tiny.py and study/worked.py, solve some of their puzzles."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

import data
from data import BASE
from engine.loading import eos_ids
from engine.sampler import make_sampler
from harness.flags import settings_of
from harness.stats import summarise
from rollout import sample_on_engines
from study import tiny, worked

MADE = {"countdown": tiny, "worked": worked}
BASES = {"countdown": BASE, "worked": worked.BASE}


@pytest.mark.parametrize("task", MADE)
def test_the_code_makes_the_folder_deterministically_and_keeps_the_settings(task, tmp_path):
    # a miniature, trained anew, has the loss that was written with the folder
    module, content = MADE[task], json.loads(Path(BASES[task], "recipe.json").read_text())
    again = f"{module.__name__} makes {BASES[task]} again, with all that was measured"
    assert content["trained"] == module.RECIPE, again
    _, _, loss = module.train({**module.RECIPE, **module.MINIATURE})
    assert loss == pytest.approx(content["miniature"]["loss"], rel=1e-4), again
    weights = []
    (tmp_path / "recipe.json").write_text(json.dumps(dict(settings=dict(lr=0.5))))
    for seed in (0, 0, 1):
        recipe = {**module.RECIPE, **module.MINIATURE, "steps": 9, "seed": seed}
        tiny.save_base(str(tmp_path), recipe, module.train, dict(steps=2))
        weights.append((tmp_path / "model.safetensors").read_bytes())
        content = json.loads((tmp_path / "recipe.json").read_text())
        assert content["settings"] == dict(lr=0.5) and content["trained"] == recipe
        assert content["miniature"]["loss"] > 0
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("task, most", [("countdown", 1.8e6), ("worked", 1e6)])
def test_a_base_is_an_ordinary_folder_in_bfloat16(task, most, tmp_path):
    folder, module = Path(BASES[task]), MADE[task]
    assert sum(path.stat().st_size for path in folder.iterdir()) < most
    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module.tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((folder / name).read_text())
    model = (tiny.empty_model(tiny.RECIPE, len(tokenizer)) if task == "countdown"
             else worked.empty_model(worked.RECIPE))
    made, kept = model.config.to_dict(), AutoConfig.from_pretrained(folder).to_dict()
    machines = {"dtype", "_name_or_path", "architectures", "transformers_version"}
    assert {k: v for k, v in made.items() if k not in machines} == {
        k: kept.get(k) for k in made if k not in machines}
    assert eos_ids(str(folder), tokenizer) == [tokenizer.eos_token_id]
    assert set(settings_of(str(folder))) >= {"lr", "max_tokens"}


# mean@16 of all held-out puzzles, as python eval.py gives it
@pytest.mark.parametrize("task, score", [("countdown", 0.165), ("worked", 0.170)])
def test_the_base_solves_some_and_has_something_to_learn(task, score):
    """The score is that of the documents, and the same along the problems: some stand for all."""
    folder = BASES[task]
    settings, tokenizer = settings_of(folder), AutoTokenizer.from_pretrained(folder)
    length = settings["max_tokens"] + settings["max_prompt_tokens"]
    sampler = make_sampler("transformers", folder, dtype="float32", max_length=length,
                           eos=eos_ids(folder, tokenizer))
    problems = data.load(task, "test") if task == "countdown" else worked.held_out()[:256]
    groups = sample_on_engines(sampler, tokenizer, problems, None, (0,), n=16, temperature=1.0,
                               max_tokens=settings["max_tokens"])
    rows = [group.rows() for group in groups]
    scores = summarise(problems, rows)
    error = scores["mean@16_stderr"]
    assert scores["mean@16"] == pytest.approx(score, abs=2 * error) and error < 0.015
    assert scores["pass@16"] > 0.6 and scores["truncated_frac"] < 0.05
    quarter = len(rows) // 4
    for i in range(4):
        here = slice(i * quarter, (i + 1) * quarter)
        part = summarise(problems[here], rows[here])
        assert part["mean@16"] == pytest.approx(scores["mean@16"], abs=4 * part["mean@16_stderr"])

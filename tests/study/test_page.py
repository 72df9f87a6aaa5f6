"""RESULTS.md is what study/page.py writes from the numbers in study/results."""

import csv
import json
import shutil
from statistics import fmean as mean

import pytest

from study import page, rule, runs

RESULTS_MD = (runs.HERE.parent / "RESULTS.md").read_text()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The page from made-up runs of the whole plan, three seeds of it."""
    for part, of in runs.read_plan().items():
        lines = []
        for run in (run for run in of if run.seed < of[0].seed + 3):
            score = 0.2 + 0.02 * (run.name == "acpo") + 0.001 * (run.seed % 5) + 20 * run.lr
            score += 1e-4 * len(run.name) * (run.seed % 2)
            lines.append(json.dumps(dict(
                id=run.id, **run._asdict(), test={"mean@16": score, "pass@16": 2 * score},
                validation=[[0, 0.1], [5, score], [10, score + 0.01]],
                mean={"clip/frac": 0.01 * run.steps, "policy/ess": 0.9},
                trace={"policy/ess": [0.9, 0.8], "adv/fade_alpha": [2.0, 1.0]})))
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    of_base = {"mean@16": 0.1, "pass@16": 0.5}
    (tmp_path / "bases.json").write_text(json.dumps(dict(countdown=of_base, comparisons=of_base)))
    here = tmp_path / "study"
    here.mkdir()
    for name in ("RESULTS.in.md", "tables.in.md"):
        shutil.copy(runs.HERE / name, here)
    for module, name, folder in ((runs, "RESULTS", tmp_path), (page, "RESULTS", tmp_path),
                                 (page, "HERE", here)):
        monkeypatch.setattr(module, name, folder)
    page.write_results()
    return tmp_path


def test_the_page_has_every_claim_and_names_those_without_runs(written):
    text = (written / "RESULTS.md").read_text() + (written / "tables.md").read_text()
    rows, missing = rule.rows()
    of_gemma, missing_of_gemma = rule.rows(rule.read_claims(gemma=True))
    assert not missing + missing_of_gemma and len(of_gemma) > 8
    assert "Not trained yet" not in text and "{" not in text
    assert all(claim["words"] in text for claim in rule.read_claims())
    found = list(csv.DictReader((written / "claims.csv").read_text().splitlines()))
    assert len(found) == len(rows) + len(of_gemma) + 25 + 8  # single updates
    for row, line in zip(rows, found):
        assert float(line["measured"]) == pytest.approx(row.interval.mean, rel=1e-3)
        assert line["verdict"] == row.verdict(rule.gain(rule.Runs(["map"]), 0.1))
    for row, line in zip(of_gemma, found[len(rows):]):
        assert line["model"] == "gemma" and line["verdict"] == row.verdict(rule.gain(
            rule.Runs(rule.GEMMA), 0.1, task="comparisons"))
    assert all((written / f"{name}.png").stat().st_size > 30_000
               for name in ("map", "gemma", "mechanism"))
    assert (written / "summary.png").stat().st_size > 10_000
    (written / "cold.jsonl").unlink()
    page.write_results()
    named = (written / "tables.md").read_text().split("Not trained yet: ")[1].split("\n")[0]
    assert "T = 0.6" in named and "ACPO" not in named


def test_the_page_is_that_of_the_numbers(tmp_path, monkeypatch):
    """./run_all.sh results would write the same again."""
    monkeypatch.setattr(page, "write", lambda path, text: (tmp_path / path.name).write_text(text))
    for name in ("write_csv", "draw_map", "draw_gemma", "draw_summary"):
        monkeypatch.setattr(page, name, lambda *args: None)
    monkeypatch.setattr(page.mechanism, "draw", lambda *args: None)
    page.write_results()
    assert (tmp_path / "RESULTS.md").read_text() == RESULTS_MD
    assert (tmp_path / "tables.md").read_text() == (runs.RESULTS / "tables.md").read_text()
    assert len(RESULTS_MD.split()) <= 1350


def test_what_the_page_says_in_words_is_what_the_rule_says():
    """Its first sentences, which are written by hand."""
    rows, of_gemma = rule.rows()[0], rule.rows(rule.read_claims(gemma=True))[0]
    ends = {row.claim["id"]: row.interval.ends(row.level) for row in rows if not row.beside}
    assert all(ends[name][0] <= 0 for name in ("acpo_grpo", "p3o_grpo", "fade_grpo"))
    assert ends["acpo_grpo"][1] < 0 and "ACPO is lower than GRPO, because" in RESULTS_MD
    assert all(low <= 0 <= high for low, high in (x.interval.ends(x.level) for x in of_gemma))
    runs_of_gemma = rule.Runs(rule.GEMMA)
    collapsed = [name for name in ("grpo", "acpo", "dapo", "p3o", "fade")
                 for run in runs_of_gemma.of["comparisons", name, 16][4e-5].values()
                 if run["test"]["pass@4"] < run["test"]["mean@4"] + 0.01]
    assert collapsed == ["acpo"] * 2 and "two of ACPO's eight runs collapsed" in RESULTS_MD
    half = rule.Runs(["gemma_half"])
    x = rule.Interval.of(rule.values(half, ["acpo/16 - grpo/16"]).values())
    assert "is {:+.3f} ({:+.3f} to {:+.3f}; 95%".format(x.mean, *x.ends()) in RESULTS_MD
    assert all(run["test"]["pass@4"] > run["test"]["mean@4"] + 0.03 for setting in half.of.values()
               for run in setting[2e-5].values())
    levels = rule.holm_levels([row.interval.p for row in rows], 0.05)  # before Gemma was added
    assert {"acpo_dapo", "acpo_gated"} < {row.claim["id"] for row, level in zip(rows, levels)
                                          if not row.beside and row.interval.ends(level)[1] < 0}
    of = rule.Runs(["map"]).of
    gaps = {(steps, lr): mean(rule.score(setting[lr][seed], "test") - rule.score(run, "test")
                              for seed, run in of["countdown", "grpo", steps][lr].items())
            for steps in (2, 16) for setting in [of["countdown", "acpo", steps]] for lr in setting}
    assert gaps[16, 2e-4] < sum(gaps.values()) / 2
    assert "More than half of ACPO's difference on the toy is that of 16 steps" in RESULTS_MD
    assert max(abs(gaps[16, 5e-5]), abs(gaps[2, 1e-4])) < 0.002

"""RESULTS.md is what study/page.py writes from the numbers in study/results."""

import shutil
from statistics import fmean as mean

from study import page, rule, runs

RESULTS_MD = (runs.HERE.parent / "RESULTS.md").read_text()


def test_the_page_is_that_of_the_numbers(tmp_path, monkeypatch):
    """./run_all.sh results would write the same again, and names claims that are without runs."""
    here = tmp_path / "study"
    results = shutil.copytree(runs.RESULTS, here / "results")
    for name in ("RESULTS.in.md", "tables.in.md"):
        shutil.copy(runs.HERE / name, here)
    for module, name, folder in ((runs, "RESULTS", results), (page, "RESULTS", results),
                                 (page, "HERE", here)):
        monkeypatch.setattr(module, name, folder)
    texts, figures = ["RESULTS.md", "tables.md", "claims.csv"], [*results.glob("*.png")]
    for path in [*figures, results / "tables.md", results / "claims.csv"]:
        path.unlink()
    written = page.write_results()
    assert sorted(path.name for path in written) == sorted([*texts, *(x.name for x in figures)])
    for path in written:
        if path in figures:
            assert path.stat().st_size > (10_000 if path.stem == "summary" else 30_000)
        else:
            own = runs.HERE.parent / path.relative_to(tmp_path)
            assert path.read_bytes() == own.read_bytes(), path.name
    assert all(claim["words"] in RESULTS_MD + (results / "tables.md").read_text()
               for claim in rule.read_claims()) and len(RESULTS_MD.split()) <= 1350
    (results / "cold.jsonl").unlink()
    page.write_results()
    named = (results / "tables.md").read_text().split("Not trained yet: ")[1].split("\n")[0]
    assert "T = 0.6" in named and "ACPO" not in named


def test_what_the_page_says_in_words_is_what_the_rule_says():
    """Its first sentences, which are written by hand."""
    rows, of_gemma = rule.rows()[0], rule.rows(rule.read_claims(gemma=True))[0]
    ends = {row.claim["id"]: row.interval.ends(row.level) for row in rows if not row.beside}
    assert all(ends[name][0] <= 0 for name in ("acpo_grpo", "p3o_grpo", "fade_grpo"))
    assert ends["acpo_grpo"][1] < 0 and "ACPO is lower than GRPO, because" in RESULTS_MD
    assert all(low <= 0 <= high for low, high in (x.interval.ends(x.level) for x in of_gemma))
    runs_of_gemma = rule.read_runs(rule.GEMMA)
    collapsed = [name for name in ("grpo", "acpo", "dapo", "p3o", "fade")
                 for run in runs_of_gemma["comparisons", name, 16][4e-5].values()
                 if run["test"]["pass@4"] < run["test"]["mean@4"] + 0.01]
    assert collapsed == ["acpo"] * 2 and "two of ACPO's eight runs collapsed" in RESULTS_MD
    half = rule.read_runs(["gemma_half"])
    x = rule.Interval.of(rule.values(half, ["acpo/16 - grpo/16"]).values())
    assert "is {:+.3f} ({:+.3f} to {:+.3f}; 95%".format(x.mean, *x.ends()) in RESULTS_MD
    assert all(run["test"]["pass@4"] > run["test"]["mean@4"] + 0.03 for setting in half.values()
               for run in setting[2e-5].values())
    levels = rule.holm_levels([row.interval.p for row in rows], 0.05)  # before Gemma was added
    assert {"acpo_dapo", "acpo_gated"} < {row.claim["id"] for row, level in zip(rows, levels)
                                          if not row.beside and row.interval.ends(level)[1] < 0}
    of = rule.read_runs(["map"])
    gaps = {(steps, lr): mean(rule.score(setting[lr][seed], "test") - rule.score(run, "test")
                              for seed, run in of["countdown", "grpo", steps][lr].items())
            for steps in (2, 16) for setting in [of["countdown", "acpo", steps]] for lr in setting}
    assert gaps[16, 2e-4] < sum(gaps.values()) / 2
    assert "More than half of ACPO's difference on the toy is that of 16 steps" in RESULTS_MD
    assert max(abs(gaps[16, 5e-5]), abs(gaps[2, 1e-4])) < 0.002

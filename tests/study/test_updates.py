"""All numbers of an update; the commands of python -m study."""

import json
import re

import pytest

from harness import files
from study import updates
from study.__main__ import main


def test_anatomy_of_a_rollout(kept, kept_run):
    result = updates.anatomy_of(kept_run / "rollouts" / "rollout_000001.pt")
    json.dumps(files.numbers(result), allow_nan=False)
    assert list(result["near"]) == [0, 1, 2, 4]
    assert list(result["far"]) == [0, 1, 2, 4, 8, 16, 32, 64]
    low, high = result["near"][0]  # before the first step all ratios are 1: G is (1 - pi) A
    assert abs(low) > abs(high) and result["far"][0] == result["near"][0]
    assert 0 < result["own_slope"] < 3 and len(result["spread"]) > 10
    assert result["ratio_std"]["low"] > result["ratio_std"]["high"] > 0
    clipped, (every, low) = result["clipped"], zip(*result["met"], strict=True)
    counts = [clipped[kind]["tokens"] for kind in ("clipped", "passed")]
    # every token is in one step
    assert sum(counts) == sum(every) == (kept.batch.mask & (kept.batch.advantages != 0)).sum()
    assert len(low) == 4 and all(0 < x < y / 2 for x, y in zip(low, every, strict=True))
    assert min(counts) > 0
    part = result["subsets"]["A < 0"]  # fade divides by the limit of tokens: a length alone differs
    assert part["angle_selected"] == pytest.approx(part["angle"], abs=0.1)
    assert part["norm_selected"] > part["norm"] and len(result["solve_rates"]) == 8


def test_the_rank_of_a_change(kept_run, capsys):
    main(["rank", str(kept_run)])
    (rollout, share), = re.findall(r"^rollout (\d+): ([\d.]+)$", capsys.readouterr().out, re.M)
    assert rollout == "1" and 0 < float(share) < 1


@pytest.mark.parametrize("args, says", [
    (["rank"], "takes one path"), (["measure", "x.pt"], "takes no path")])
def test_a_mistake_ends_with_a_sentence(args, says, capsys):
    with pytest.raises(SystemExit) as e:
        main(args)
    said = capsys.readouterr().err
    assert e.value.code == 2 and "usage: python -m study" in said and says in said

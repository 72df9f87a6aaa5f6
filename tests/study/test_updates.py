"""All numbers of an update."""

import json

import pytest

from harness import files
from study import updates


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

"""eval.py: pass@k."""

from itertools import combinations

import pytest

from eval import pass_at_k, powers_of_two


def test_pass_at_k_is_the_share_of_choices_with_a_correct_one():
    for n in range(1, 9):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                choices = list(combinations([1] * correct + [0] * (n - correct), k))
                assert pass_at_k(n, correct, k) == pytest.approx(sum(map(max, choices)) / len(choices), abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_samples_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(4, 2, k)


def test_powers_of_two():
    assert [powers_of_two(n) for n in (1, 2, 3, 16)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8, 16]]

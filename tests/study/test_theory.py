"""The theory of ACPO's claims by integration, by simulation or in closed form."""

import math

import pytest

from study import theory


@pytest.mark.parametrize("kappa", [0.3, 3.0, 40.0])
@pytest.mark.parametrize("eq, high", [(53, 0.2), (53, 0.3), (56, 0.3)])
def test_means_over_a_band_are_the_integrals(kappa, eq, high, n=20_000):
    """By the midpoint rule, from expected_gradient's own formula."""
    for name, band in theory.BANDS.items():
        if kappa == 0.3 and (eq, name) == (53, "high"):
            continue  # 1e-66: the formula as it stands in the paper loses every digit
        rest = [1 - band[0] - (band[1] - band[0]) * (i + 0.5) / n for i in range(n)]
        integral = math.fsum(x * theory.expected_gradient(kappa * x * x, 0.2, high, eq)
                             for x in rest) / n / math.sqrt(2 * math.pi)
        sign, log = theory.band_mean(kappa, band, 0.2, high, eq)
        assert sign * math.exp(log) == pytest.approx(integral, rel=1e-5, abs=1e-12)


def test_the_reversal_over_kappa():
    """By eq. 53, whose ratio goes to (1 - 0.8^4) / 0.2^4 = 369 as kappa grows, there is none. With
    a symmetric clip it is -2 s phi(e / s): no float holds it."""
    result = theory.scan(0.2)
    assert result["reversed"][53] == []
    (start, end), = result["reversed"][56]
    assert 0.48 < start < 0.51 and 0.62 < end < 0.67 and min(result["log10"][56]) < 0
    assert min(result["log10"][53]) == pytest.approx(math.log10(372), abs=0.01)
    assert theory.low_over_high(1e4) == pytest.approx(math.log10(369), abs=1e-4)
    sign, log = theory.band_mean(0.01, (0.8, 1.0))
    assert sign == -1 and log == pytest.approx(-0.02 / (0.01 * 0.2**2)**2, rel=1e-3)


@pytest.mark.parametrize("n, vocabulary, left_out", [(4000, 2, 1), (1000, 30_000, math.e / 30_000)])
def test_the_slope_is_2_in_lemma_1s_own_model(n, vocabulary, left_out):
    """Of two tokens, what eq. 15 leaves out is as large as what it keeps; the squares of V shares
    of a softmax of N(0, 1) add up to about e / V."""
    model = theory.tabular_model(n, vocabulary)
    assert model["left_out"] == pytest.approx(left_out, rel=0.1)
    assert model["slope"] == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("s, low, high", [(0.2, 0.2, 0.2), (0.4, 0.2, 0.3), (0.8, 0.2, 0.28)])
def test_equation_53_is_the_expectation_and_56_is_not(s, low, high):
    mean, error = theory.monte_carlo(s, low, high)
    assert abs(mean - theory.expected_gradient(s, low, high)) < 4 * error
    assert abs(mean - theory.expected_gradient(s, low, high, 56)) > 20 * error

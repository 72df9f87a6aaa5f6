"""The quantities of ACPO's claims against answers that are known by hand, by integration or in
closed form."""

import math

import pytest
import torch

from analysis.anatomy import signed_gradient
from analysis.rollout import Kept
from losses import METHODS, Tokens
from study import anatomy, quantities, theory

GRPO = METHODS["grpo"]


def some_tokens(pi, ratio, advantage, entropy=None):
    """Tokens of [B][T] numbers; None is padding."""
    mask = torch.tensor([[x is not None for x in line] for line in pi])

    def tensor(lines, filler):
        return torch.tensor([[filler if x is None else x for x in line] for line in lines],
                            dtype=torch.float64)
    pi, ratio, advantage = tensor(pi, 1.0), tensor(ratio, 1.0), tensor(advantage, 0.0)
    entropy = torch.zeros_like(pi) if entropy is None else tensor(entropy, 0.0)
    return Tokens(pi.log(), (pi / ratio).log(), advantage, mask, entropy)


# ---------------------------------------------------------------------------- the reversal


def test_g_has_a_sign_and_is_0_where_it_is_clipped():
    tokens = some_tokens([[0.1, 0.1, 0.9, 0.9, 0.5]], [[1.1, 1.5, 1.5, 0.5, 1.0]],
                         [[2.0, 2.0, -1.0, -1.0, 0.0]])
    g = signed_gradient(tokens, GRPO)
    assert g[0].tolist() == pytest.approx([0.9 * 1.1 * 2, 0, -0.1 * 1.5, 0, 0])


def test_the_mean_is_uniform_in_pi_and_not_over_tokens():
    """Two sub-bins: 3 tokens of 1 and 1 token of -5 are (1 - 5) / 2 and not (3 - 5) / 4; of four
    sub-bins the second and the third have no token and are left out. pi = 1 is in the last one."""
    probs = torch.tensor([0.02, 0.03, 0.04, 0.17, 0.5, 0.25])
    values = torch.tensor([1.0, 1.0, 1.0, -5.0, 100.0, 100.0])
    for parts in (2, 4):
        assert quantities.uniform_mean(values, probs, (0.0, 0.2), parts) == pytest.approx(-2.0)
    assert quantities.uniform_mean(values, probs, (0.8, 1.0), 2) is None
    probs = torch.tensor([1.0, 0.9999999, 0.81])
    mean = quantities.uniform_mean(torch.tensor([2.0, 4.0, 7.0]), probs, (0.8, 1.0), 2)
    assert mean == pytest.approx((7 + 3) / 2)


def test_the_sides_of_remark_1():
    """Low: one sub-bin has 0.9 * 1 and 0.9 * -1 of two tokens, the other 0.8 * 3 clipped and
    0.8 * 1. High: one token, 0.1 * -2."""
    tokens = some_tokens([[0.1, 0.1, 0.2], [0.2, 0.9, None]], [[1.0, 1.0, 1.5], [1.0, 1.0, None]],
                         [[1.0, -1.0, 3.0], [1.0, -2.0, None]])
    assert quantities.reversal(tokens, GRPO) == pytest.approx([(0 + 0.4) / 2, -0.2])
    alone = some_tokens([[0.1]], [[1.0]], [[1.0]])
    assert quantities.reversal(alone, GRPO) == [pytest.approx(0.9), None]


# ---------------------------------------------------------------------------- over kappa


def integral(kappa, band, low, high, eq, n=20_000):
    """The same mean by the midpoint rule, from expected_gradient's own formula."""
    start, end = band
    total = 0.0
    for i in range(n):
        pi = start + (end - start) * (i + 0.5) / n
        total += (1 - pi) * theory.expected_gradient(kappa * (1 - pi) ** 2, low, high, eq)
    return total / n / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("kappa", [0.3, 3.0, 40.0])
@pytest.mark.parametrize("eq, high", [(53, 0.2), (53, 0.3), (56, 0.3)])
def test_means_over_a_band_are_the_integrals(kappa, eq, high):
    for name, band in theory.BANDS.items():
        if kappa == 0.3 and (eq, name) == (53, "high"):
            continue  # 1e-66: the formula as it stands in the paper loses every digit
        sign, log = theory.band_mean(kappa, band, 0.2, high, eq)
        assert sign * math.exp(log) == pytest.approx(integral(kappa, band, 0.2, high, eq),
                                                     rel=1e-5, abs=1e-12)


def test_what_no_float_holds_has_a_logarithm():
    """Eq. 53 with a symmetric clip is -2 s phi(e / s), which falls as exp(-e^2 / 2 s^2): over pi it
    is largest at 0.8, by far."""
    kappa = 0.01
    sign, log = theory.band_mean(kappa, (0.8, 1.0))
    s = kappa * 0.2**2
    assert sign == -1 and log == pytest.approx(-0.02 / s**2, rel=1e-3)
    assert theory.low_over_high(kappa) > 50_000


def test_the_reversal_over_kappa():
    assert theory.reversed_between(eq=53, per_decade=20) == []
    (start, end), = theory.reversed_between(eq=56, per_decade=50)
    assert 0.48 < start < 0.51 and 0.62 < end < 0.67
    assert min(theory.low_over_high(10 ** (i / 10)) for i in range(-20, 21)) == pytest.approx(
        math.log10(372), abs=0.01)


def test_the_scan_has_both_equations():
    result = theory.scan(kappas=(0.55, 10.0))
    assert result["log10"][56][0] < 0 < min(result["log10"][53])
    assert result["reversed"][53] == [] and len(result["reversed"][56]) == 1


# ---------------------------------------------------------------------------- Lemma 1


def test_the_second_term_of_equation_14_is_the_step_itself():
    """log rho of a step of eq. 11 on a token's own logits, over lr A, is |e - pi|^2."""
    logits = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    pi, step = logits.softmax(0), 1e-6
    moved = logits - step * pi
    moved[1] += step
    log_rho = moved.log_softmax(0)[1] - logits.log_softmax(0)[1]
    others = pi[0] ** 2 + pi[2] ** 2
    assert log_rho.item() / step == pytest.approx(((1 - pi[1]) ** 2 + others).item(), rel=1e-5)


def test_with_two_tokens_the_slope_is_2():
    """What eq. 15 leaves out is as large as what it keeps."""
    model = theory.tabular_model(vocabulary=2)
    assert model["left_out"] == pytest.approx(1) and model["slope"] == pytest.approx(2, abs=0.02)


def test_with_a_large_vocabulary_the_slope_is_2():
    """The squares of V shares of a softmax of N(0, 1) add up to about e / V."""
    model = theory.tabular_model(1000, 30_000)
    assert model["left_out"] == pytest.approx(math.e / 30_000, rel=0.1)
    assert model["slope"] == pytest.approx(2, abs=0.05)


def test_slope_of_narrow_groups():
    rest = torch.cat([torch.full((16,), 0.5), torch.full((15,), 0.05), torch.full((20,), 1e-4)])
    groups = theory.narrow_groups(rest)
    assert len(groups) == 1 and groups[0].tolist() == [True] * 16 + [False] * 35


def test_too_few_tokens_for_a_line_have_no_slope():
    assert quantities.own_slope(some_tokens([[0.5, 1.0]], [[1.1, 1.0]], [[1.0, 1.0]])) is None


def test_slope_of_a_spread_that_is_known():
    g = torch.Generator().manual_seed(0)
    pi = torch.rand(1, 100_000, generator=g, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    for power in (1, 2):
        noise = torch.randn(pi.shape, generator=g, dtype=torch.float64)
        ratio = 1 + 0.01 * (1 - pi) ** power * noise
        tokens = Tokens(pi.log() + ratio.log(), pi.log(), torch.ones_like(pi),
                        torch.ones_like(pi, dtype=torch.bool), pi)
        # 20 wide bins: a little low
        assert quantities.slope(quantities.ratio_spread(tokens)) == pytest.approx(power, abs=0.15)


@pytest.mark.parametrize("s, low, high", [(0.2, 0.2, 0.2), (0.4, 0.2, 0.3), (0.8, 0.2, 0.28)])
def test_equation_53_is_the_expectation_and_56_is_not(s, low, high):
    mean, error = theory.monte_carlo(s, low, high)
    assert abs(mean - theory.expected_gradient(s, low, high)) < 4 * error
    assert abs(mean - theory.expected_gradient(s, low, high, 56)) > 20 * error


# ---------------------------------------------------------------------------- clipped tokens


def test_clipped_tokens_by_hand():
    """A < 0 below 0.8 and A > 0 above 1.2 are clipped; a token without advantage is not counted."""
    tokens = some_tokens([[0.1, 0.1, 0.9, 0.95], [0.5, 0.5, None, None]],
                         [[0.7, 1.0, 1.3, 1.3], [1.3, 1.3, None, None]],
                         [[-1.0, -1.0, 1.0, -1.0], [0.0, 1.0, None, None]])
    probs = torch.tensor([[0.15, 0.1, 0.7, 0.73], [0.4, 0.4, 0.0, 0.0]])
    entropy = torch.tensor([[0.1, 2.0, 0.3, 0.2], [9.0, 1.0, 0.0, 0.0]])
    status = quantities.clip_status(tokens, GRPO, probs, entropy)
    assert status[0].tolist() == [True, False, True, False, True]
    edges = torch.tensor([0.15, 0.25, 0.5, 1.5])
    result = quantities.clipped_tokens(*status, edges)
    clipped, passed = result["clipped"], result["passed"]
    assert (clipped["tokens"], passed["tokens"]) == (3, 2)
    assert clipped["probability"] == pytest.approx((0.15 + 0.7 + 0.4) / 3)
    assert clipped["entropy_if_low"] == pytest.approx(0.1)
    assert passed["entropy_if_low"] == pytest.approx(2.0)
    assert [line["clipped"] for line in result["by_entropy"]] == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_quantiles_cut_into_fifths():
    edges = quantities.quantiles(torch.arange(100.0))
    assert torch.bucketize(torch.arange(100.0), edges, right=True).bincount().tolist() == [20] * 5


# ---------------------------------------------------------------------------- partial gradients


class Line(torch.nn.Module):
    """A model with one matrix [1, 3]: the loss of a token with feature x is -A w x, so that the
    gradient is a sum over tokens that can be added up by hand."""

    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 3, dtype=torch.float64))
        self.features, self.budget, self.layout = features, 10**6, "padded"

    def forward(self, batch):
        logprobs = (self.features[batch.ids[:, 0]] @ self.weight[0]) + batch.old_logprobs
        return logprobs * batch.mask, batch.entropy


def three_completions():
    """Three completions of 3, 2 and 1 tokens, A = 1, 2 and -4; token t of completion c has a
    feature that no other has, as far as three places go."""
    from engine.policy import Batch
    features = torch.zeros(3, 3, 3, dtype=torch.float64)
    features[0, :, 0] = torch.tensor([1.0, 10.0, 100.0])
    features[1, :2, 1] = torch.tensor([1.0, 10.0])
    features[2, 0, 2] = 1.0
    lengths = torch.tensor([3, 2, 1])
    mask = torch.arange(3) < lengths[:, None]
    probs = torch.tensor([[0.1, 0.5, 0.15], [0.9, 0.1, 1.0], [0.95, 1.0, 1.0]],
                         dtype=torch.float64)
    batch = Batch(ids=torch.arange(3)[:, None].expand(3, 5), prompt_len=torch.full((3,), 2),
                  completion_len=lengths, mask=mask, sampler_logprobs=probs.log() * mask,
                  old_logprobs=probs.log() * mask, entropy=torch.zeros(3, 3, dtype=torch.float64),
                  advantages=torch.tensor([[1.0], [2.0], [-4.0]], dtype=torch.float64).expand(3, 3))
    return Line(features), batch


class Opened(Kept):
    """A rollout whose advantages are given."""

    def use(self, method):
        self.method = method


def opened(method):
    policy, batch = three_completions()
    return Opened(batch, torch.zeros(1, 3), {}, dict(max_tokens=8), METHODS[method], policy, 1, {})


def gradients(kept, chosen):
    matrices = {"weight": kept.policy.weight}
    by_all = anatomy.gradient_of(kept, matrices, weight=chosen.to(torch.float64))["weight"]
    selected = anatomy.gradient_of_selected(kept, matrices, None, chosen)["weight"]
    return [(-x[0]).tolist() for x in (by_all, selected)]


def test_seq_mean_over_the_selected_tokens():
    """pi < 0.2 has the first and the last token of the first completion and the second of the
    second; the third completion has none and is left out."""
    kept = opened("grpo")
    chosen = kept.tokens().probs < 0.2
    by_all, selected = gradients(kept, chosen & kept.batch.mask)
    assert by_all == pytest.approx([(1 + 100) / 3 / 3, 2 * 10 / 2 / 3, 0])
    assert selected == pytest.approx([(1 + 100) / 2 / 2, 2 * 10 / 1 / 2, 0])
    assert kept.batch.mask.sum() == 6  # the batch is as it was


def test_token_mean_over_the_selected_tokens():
    kept = opened("cispo")
    by_all, selected = gradients(kept, (kept.tokens().probs < 0.2) & kept.batch.mask)
    assert by_all == pytest.approx([101 / 6, 20 / 6, 0])
    assert selected == pytest.approx([101 / 3, 20 / 3, 0])


def test_a_sign_of_the_advantage_selects_whole_completions():
    """Then both differ by the share of the completions alone."""
    kept = opened("grpo")
    by_all, selected = gradients(kept, (kept.batch.advantages < 0) & kept.batch.mask)
    assert by_all == pytest.approx([0, 0, -4 / 3]) and selected == pytest.approx([0, 0, -4])


def test_all_tokens_are_the_full_gradient_by_both():
    by_all, selected = gradients(opened("grpo"), opened("grpo").batch.mask)
    assert by_all == pytest.approx(selected)
    assert by_all == pytest.approx([111 / 9, 2 * 11 / 6, -4 / 3])


def test_norm_and_angle_to_a_reference():
    full = anatomy.Reference(dict(a=torch.tensor([[3.0, 0.0]]), b=torch.tensor([[0.0, 4.0]])), 1)
    part = full.compare(dict(a=torch.tensor([[1.0, 1.0]]), b=torch.tensor([[0.0, 1.0]])))
    assert part == pytest.approx(dict(norm=math.sqrt(3) / 5, angle=45 / 2), abs=1e-4)
    nothing = full.compare(dict(a=torch.zeros(1, 2), b=torch.ones(1, 2)))
    assert math.isnan(nothing["angle"]) and nothing["norm"] == pytest.approx(math.sqrt(2) / 5)


def test_the_effective_number_of_problems_is_kishs():
    """Equal masses count whole; of one mass alone one problem counts, whatever its solve rate."""
    number = quantities.effective_problems
    for alpha in (1, 3):
        assert number([0.25] * 6, alpha) == pytest.approx(6)
        assert number([0.5, 0, 1, 0], alpha) == pytest.approx(1)
    # masses 0.25 and 0.1875 with alpha 1, 0.0625 and 0.1055 with alpha 3
    assert number([0.5, 0.25], 1) == pytest.approx(1.96)
    assert number([0.5, 0.25], 3) == pytest.approx(1.8771, abs=1e-4)


def test_the_released_codes_selection_by_entropy():
    """A fifth of each completion, at least one token, whatever the other completions have."""
    entropy = [[0.1, 0.2, 0.3, 0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1], [0.3, 0.5] + [None] * 8]
    pi = [[0.5] * 10, [0.5] * 2 + [None] * 8]
    tokens = some_tokens(pi, pi, pi, entropy)
    chosen = anatomy.top_entropy_of_each(tokens)
    assert chosen.nonzero().tolist() == [[0, 3], [0, 4], [1, 1]]

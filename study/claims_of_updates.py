"""What the papers claim of single updates, a claim an entry: measured on the first rollout of each
of several seeds, or computed from the paper's own assumptions (study/results/updates.json).

The quantities are defined in study/quantities.py, study/anatomy.py and study/theory.py; the claims
about training are in study/claims.py.
"""

import math

from experiment.tables import markdown_table
from study import anatomy, figures, theory
from study.claims import CAPTION, CODE, PAPER, SUMMARY, Claim
from study.verdicts import (
    FOLLOWS,
    INCONSISTENT,
    NOT_JUDGED,
    Interval,
    Verdict,
    beside,
    between,
    derived,
    less,
    more,
    with_remark,
)


def over_seeds(updates, quantity):
    """quantity: a rollout's part of the updates -> a number."""
    return Interval.of([quantity(rollout) for rollout in updates["seeds"]])


def measured(place, claim, quantity, test, unit="", known=PAPER, digits=2):
    """A claim about a number that every rollout gives."""
    def measure(updates):
        x = over_seeds(updates, quantity)
        return f"{x.plain(digits)}{unit}", test(x)
    return Claim("ACPO", place, known, claim, measure)


# ---------------------------------------------------------------------------- Lemma 1


def tabular(updates):
    """The lemma in its own model: the slope for the largest vocabulary, where the term that it
    leaves out is small."""
    lines = updates["theory"]["lemma_1"]
    slope = lines[-1]["diffuse"]["slope"]
    figure = "slope by vocabulary (where the rest is spread evenly): " + ", ".join(
        f"{line['slope']:.2f} ({line['diffuse']['slope']:.2f}) for {line['vocabulary']}"
        for line in lines)
    kind = FOLLOWS if abs(slope - 2) < 0.05 else INCONSISTENT
    return figure, Verdict(kind, f"{slope:.2f} where the term that it drops is smallest")


def lemma_1():
    yield Claim("ACPO", "Lemma 1, eq. 11-15", PAPER, "the std of the ratio goes as (1 - pi)^2 "
                "where a token has logits of its own", tabular)
    for step, walked in (("step of AdamW", "steps"), ("plain gradient step", "sgd")):
        for what, key in (("the step's own tokens", "own_slope"), ("the whole rollout", "slope")):
            yield measured("Lemma 1; fig. 4 of arXiv", f"it does so in a network, {what}, after "
                           f"one {step}: slope 2 in logarithms",
                           lambda r, walked=walked, key=key: r[walked][key]["1"],
                           lambda x: Verdict(NOT_JUDGED, "known from a figure's caption alone"),
                           known=CAPTION)

    def low_over_high(rollout):
        ratios = rollout["steps"]["ratios"]
        return ratios["low"]["std"] / ratios["high"]["std"]
    yield measured("fig. 2a", "ratios spread far more at low probability: std of rho after 16 "
                   "steps, pi <= 0.2 over pi > 0.8", low_over_high, lambda x: more(x, than=1),
                   " times", digits=1)


# ---------------------------------------------------------------------------- Prop. 1, Remark 1


def equation(eq):
    def measure(updates):
        lines = updates["theory"]["proposition_1"]
        gaps = [(line["monte_carlo"] - line[f"eq{eq}"]) / line["error"] for line in lines]
        return (f"{len(lines)} spreads of the ratio against a Monte Carlo, clip 0.2 to both sides",
                derived(gaps))
    return measure


def scanned(eq):
    """Remark 1 by an equation, over kappa from 0.01 to 100, for a symmetric clip and DAPO's: does
    low/high fall below 1, and stay there?"""
    def measure(updates):
        scans, parts = updates["theory"]["remark_1"], []
        for scan in scans:
            least = min(line[f"log10_{eq}"] for line in scan["lines"])
            parts.append(f"clip {scan['low']:g} / {scan['high']:g}: low/high is below 1 for "
                         f"{theory.ranges_text(scan[f'reversed_{eq}'])}, its least is "
                         f"{10 ** least:.3g}")
        figure = f"kappa from 0.01 to 100; {'; '.join(parts)}"
        ranges = [scan[f"reversed_{eq}"] for scan in scans]
        if not all(ranges):
            return figure, Verdict(INCONSISTENT, "there is no reversal at any kappa of the scan")
        if any(r[-1][1] < scan["lines"][-1]["kappa"] for r, scan in zip(ranges, scans,
                                                                        strict=True)):
            return figure, Verdict(INCONSISTENT, "it turns back as kappa grows, where B.3.4 says "
                                                 "that the approximation breaks down")
        return figure, Verdict(FOLLOWS)
    return measure


def log_ratio(taken, part="steps"):
    """log10 of eq. 54 over eq. 55 after so many steps."""
    return lambda r: math.log10(r[part]["reversal"][taken]["low_over_high"])


def dominates(place, claim, taken, test, part="steps"):
    """A claim about |G_L| - |G_H| after so many steps. Absolute values of single rollouts are
    biased upwards by noise: G of each is counted in the direction that it has over all."""
    def measure(updates):
        columns = [[r[part]["reversal"][taken][side]["mean"] for r in updates["seeds"]]
                   for side in ("low", "high")]
        low, high = ([math.copysign(1, sum(column)) * x for x in column] for column in columns)
        gap = Interval.of([a - b for a, b in zip(low, high, strict=True)])
        fewer = sum(abs(a) < abs(b) for a, b in zip(low, high, strict=True))
        there = all(r[part]["reversal"][taken]["low_over_high"] for r in updates["seeds"])
        logs = (f"log10 of their ratio {over_seeds(updates, log_ratio(taken, part)).signed(2)}; "
                if there else "")
        figure = (f"eq. 54: {Interval.of(low).plain()}, eq. 55: {Interval.of(high).plain()}, "
                  f"apart {gap.signed()}, by which it is judged; {logs}low is "
                  f"the smaller on {fewer} of {len(low)} rollouts")
        if all(x.low < 0 < x.high for x in map(Interval.of, (low, high))):
            return figure, Verdict(NOT_JUDGED, "both are 0 within their noise")
        verdict = test(gap)
        if there and (by_ratio := test(over_seeds(updates, log_ratio(taken, part)))).kind \
                != verdict.kind:
            verdict = with_remark(test, f"by the logarithm of the ratio {by_ratio.kind}")(gap)
        return figure, verdict
    return Claim("ACPO", place, PAPER, claim, measure)


def proposition_1():
    yield Claim("ACPO", "Prop. 1, eq. 53", PAPER, "the expected gradient by probability is eq. 53",
                equation(53))
    yield Claim("ACPO", "appendix, eq. 56", PAPER, "its asymptotic form is eq. 56 (and eq. 64)",
                equation(56))
    yield Claim("ACPO", "Remark 1 by eq. 53", PAPER, "far off-policy, high-probability tokens "
                "dominate", scanned(53))
    yield Claim("ACPO", "Remark 1 by eq. 56", PAPER, "the same by eq. 56", scanned(56))
    for when, taken, part, test in (
            ("near on-policy, low-probability tokens dominate: after 1 step", "1", "steps", more),
            ("far off-policy, high-probability tokens dominate: after 16 steps", "16", "steps",
             less),
            ("far off-policy, high-probability tokens dominate: after 64 steps on a fourth of the "
             "completions each", "64", "far", less),
            ("far off-policy, high-probability tokens dominate: after such 64 steps at five times "
             "the learning rate", "64", "fast", less)):
        yield dominates("Remark 1, fig. 2b", when, taken, test, part)
    yield measured("Remark 1, fig. 2b", "the dominance of low-probability tokens shrinks with the "
                   "steps: log10 of eq. 54 over eq. 55 after 16 less after 1",
                   lambda r: log_ratio("16")(r) - log_ratio("1")(r), less)


# ---------------------------------------------------------------------------- clipped tokens


def clipped_less(key):
    def quantity(rollout):
        clipped = rollout["steps"]["clipped"]["rollout"]
        return clipped["clipped"][key] - clipped["passed"][key]
    return quantity


def both_low(updates):
    """Clipped tokens in the region of low probability and low entropy, against passed ones."""
    shares = [over_seeds(updates, lambda r, kind=kind:
                         r["steps"]["clipped"]["rollout"][kind]["low_low"])
              for kind in ("clipped", "passed")]
    figure = f"share of the clipped {shares[0].plain(4)}, of the passed {shares[1].plain(4)}"
    if max(x.mean for x in shares) < 1e-3:
        return figure, Verdict(NOT_JUDGED, "there are no such tokens here")
    gap = over_seeds(updates, clipped_less("low_low"))
    return figure, more(gap)


def clipped_tokens():
    yield measured("app. C", "clipped tokens are of low probability: mean pi of clipped less "
                   "passed tokens", clipped_less("probability"), less)
    yield Claim("ACPO", "fig. 2c, app. C", PAPER, "clipped tokens are of low probability and low "
                "entropy (pi < 0.2, entropy in the lowest two fifths)", both_low)
    yield measured("app. C", "clipped tokens are of low entropy: mean entropy of clipped less "
                   "passed tokens", clipped_less("entropy"), lambda x: Verdict(
                       NOT_JUDGED, "the paper has it of low probability and low entropy together"),
                   " nats")
    yield measured("fig. 2c, app. C", "among tokens with pi < 0.2, clipped ones have the lower "
                   "entropy", clipped_less("entropy_if_low"), less, " nats")


# ---------------------------------------------------------------------------- partial gradients


def part(name, key):
    return lambda rollout: rollout["subsets"]["subsets"][name][key]


def apart(a, b, key):
    return lambda rollout: part(a, key)(rollout) - part(b, key)(rollout)


def times(a, b, key):
    return lambda rollout: part(a, key)(rollout) / part(b, key)(rollout)


def less_the_least(name, others, key):
    """A part's value less the least of the others'."""
    return lambda rollout: part(name, key)(rollout) - min(part(other, key)(rollout)
                                                          for other in others)


def unless_without_clip(name, claim):
    """The claim about a part, which is not judged where it is the gradient without the clip."""
    def measure(updates):
        figure, verdict = claim.measure(updates)
        if all(math.isclose(part(name, key)(r), part("no clip", key)(r), rel_tol=1e-3)
               for r in updates["seeds"] for key in ("norm", "angle")):
            verdict = Verdict(NOT_JUDGED, "no ratio reaches its bound: it is the gradient without "
                                          "the clip")
        return figure, verdict
    return claim._replace(measure=measure) if name != "no clip" else claim


def norms():
    for how, key, known in (("selected", "norm_selected", CODE), ("all", "norm", PAPER)):
        yield measured("sec. 3, app. D.1", f"norm, averaged over {how} tokens: pi < 0.2 less "
                       "pi > 0.8 (409% against 50%)", apart("pi < 0.2", "pi > 0.8", key),
                       with_remark(more, "the direction alone"), known=known)
    yield measured("sec. 3.2, app. D.2", "norm, averaged over all tokens: A > 0 over A < 0 (122% "
                   "over 92%, 1.33; within a factor of 1.5)", times("A > 0", "A < 0", "norm"),
                   lambda x: between(x, 1.33 / 1.5, 1.33 * 1.5), " times")
    yield measured("sec. 3.2, app. D.2", "norm, averaged over selected tokens: A > 0 over A < 0 "
                   "(1.33)", times("A > 0", "A < 0", "norm_selected"),
                   lambda x: Verdict(NOT_JUDGED, "a sign selects whole completions, and the "
                                     "released code divides by 0 for the others: to leave them "
                                     "out is our choice"), " times", CODE)
    for how, key, test in (("selected", "norm_selected", more), ("all", "norm", beside(
            "norm over selected tokens"))):
        yield measured("app. D.1", f"pi < 0.2 dominates the update: its norm, averaged over {how} "
                       "tokens, less that of 0.2 <= pi <= 0.8",
                       apart("pi < 0.2", "0.2 <= pi <= 0.8", key), test, known=CODE)
    yield measured("app. D.1", "norm, averaged over selected tokens: top entropy above the full "
                   "gradient's (340%)", part("top 20% entropy of each", "norm_selected"),
                   lambda x: more(x, than=1), known=CODE)
    for name, key, in_paper in (("without the clip", "no clip", "20177%"),
                                ("CISPO, which gates nothing", "cispo", "3268%"),
                                ("CISPO as its released code has it", "cispo of ACPO", "3268%")):
        yield unless_without_clip(key, measured(
            "app. D.3", f"norm above the clipped gradient's: {name} ({in_paper})",
            part(key, "norm"), with_remark(lambda x: more(x, than=1), "the direction alone")))
    yield measured("app. D.3", "the on-policy gradient has the norm of the off-policy one (98%, "
                   "within a factor of 1.5)", part(anatomy.ONE_STEP, "norm"),
                   lambda x: between(x, 0.98 / 1.5, 0.98 * 1.5))


def angles():
    """Degrees depend on the size of the matrices: only their order is judged."""
    for place, a, b, in_paper in (
            ("app. D.1", "pi > 0.8", "pi < 0.2", "42.8 against 27.8"),
            ("app. D.1", "top 20% entropy of each", "pi < 0.2", "44.2 against 27.8"),
            ("app. D.2", "A > 0", "A < 0", "40.5 against 28.0"),
            ("app. D.3", "no clip", "clip-higher", "50.7 against 1.3"),
            ("app. D.3", "cispo", "clip-higher", "49.7 against 1.3"),
            ("app. D.3", anatomy.ONE_STEP, "clip-higher", "47.4 against 1.3")):
        yield unless_without_clip(a, measured(
            place, f"angle to the full gradient: {a} less {b} ({in_paper} degrees)",
            apart(a, b, "angle"), more, " degrees", digits=1))
    yield measured("app. D.3", "clip-higher hardly turns the gradient: its angle less the least of "
                   "no clip, cispo and on-policy (1.3 against 47.4 degrees)",
                   less_the_least("clip-higher", ("no clip", "cispo", anatomy.ONE_STEP), "angle"),
                   less, " degrees")


# ---------------------------------------------------------------------------- difficulty


def effective_problems(alpha):
    """The effective number of problems of a rollout: (sum m)^2 / sum m^2, m = p (1 - p)^alpha the
    mass that power's advantage gives a problem of solve rate p on each side."""
    def quantity(rollout):
        masses = [p * (1 - p) ** alpha for p in rollout["solve_rates"]]
        return sum(masses) ** 2 / sum(m * m for m in masses)
    return quantity


def difficulty():
    def measure(updates):
        medium, hard = effective_problems(1), effective_problems(3)
        gap = over_seeds(updates, lambda r: hard(r) - medium(r))
        figure = (f"(sum m)^2 / sum m^2 over {len(updates['seeds'][0]['solve_rates'])} problems, m "
                  f"= p (1 - p)^alpha: alpha 1 {over_seeds(updates, medium).plain(1)}, alpha 3 "
                  f"{over_seeds(updates, hard).plain(1)}, apart {gap.signed(1)}")
        return figure, Verdict(NOT_JUDGED, "the quantity is ours, and alpha 3 weighs most what is "
                                           "solved one time in four, as this base does")
    yield Claim("FADE", "abstract", SUMMARY, "focus on hard problems (alpha 3) costs sample size, "
                "the base's first rollouts", measure)


def claims():
    """All claims about updates, in the order of RESULTS.md."""
    return [*lemma_1(), *proposition_1(), *clipped_tokens(), *norms(), *angles(),
            *difficulty()]


# ---------------------------------------------------------------------------- the page


def tables(updates):
    """The numbers behind the claims that a reader may want to see, as Markdown."""
    steps = ["1", "2", "4", "8", "16"]
    rows = []
    for taken in steps:
        sides = [over_seeds(updates, lambda r, s=side, t=taken:
                            r["steps"]["reversal"][t][s]["size"]) for side in ("low", "high")]
        weighted = [over_seeds(updates, lambda r, s=side, t=taken:
                               r["steps"]["dominance"][t][s]["mean"]) for side in ("low", "high")]
        slopes = [over_seeds(updates, lambda r, k=key, t=taken: r["steps"][k][t])
                  for key in ("own_slope", "slope")]
        rows.append((taken, *(x.plain(3) for x in sides),
                     over_seeds(updates, log_ratio(taken)).plain(2),
                     *(x.plain(3) for x in weighted), *(x.plain(2) for x in slopes)))
    first = markdown_table(("steps", "eq. 54, low", "eq. 55, high", "log10 low/high",
                            "mean abs G, low", "mean abs G, high", "slope, own tokens",
                            "slope, rollout"), rows)
    names = list(updates["seeds"][0]["subsets"]["subsets"])[1:]
    rows = []
    for name in names:
        cells = []
        for key in ("norm", "norm_selected", "angle"):
            there = updates["seeds"][0]["subsets"]["subsets"][name].get(key) is not None
            cells.append(over_seeds(updates, part(name, key)).plain(2) if there else "-")
        rows.append((name, *cells))
    second = markdown_table(("part of the gradient", "norm, all tokens", "norm, selected tokens",
                             "angle (degrees)"), rows)
    return f"{first}\n\n{second}"


def few_tokens(updates):
    """How many tokens eq. 55 rests on after 16 steps, but for those of its last sub-bin, and how
    many of the other sub-bins have any: the least and the most of the rollouts."""
    counts = [r["steps"]["reversal"]["16"]["high"]["tokens"][:-1] for r in updates["seeds"]]
    tokens, bins = [sum(c) for c in counts], [sum(n > 0 for n in c) for c in counts]
    return (f"{min(tokens)} to {max(tokens)} tokens in {min(bins)} to {max(bins)} of its first "
            "nine sub-bins")


def draw(updates, folder):
    """The figures of the first rollout and of the theory."""
    first = updates["seeds"][0]
    figures.steps(dict(first["steps"], rollout=1, method=first["method"], lr=first["lr"]),
                  folder / "steps.png")
    figures.subsets(dict(first["subsets"], rollout=1, method=first["method"]),
                    folder / "subsets.png")
    figures.theory(updates["theory"]["proposition_1"], folder / "theory.png",
                   updates["theory"]["remark_1"])


def without_what_only_figures_need(rollout):
    """Figures show the first rollout alone."""
    for subset in rollout["subsets"]["subsets"].values():
        subset["matrices"] = {}
    ratios = {side: dict(std=x["std"]) for side, x in rollout["steps"]["ratios"].items()}
    rollout["steps"].update(tables=[], spread={}, ratios=ratios)
    rollout["steps"]["clipped"]["steps"] = []
    return rollout


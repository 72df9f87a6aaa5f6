"""What the papers claim of single updates, a claim an entry: measured on the first rollout of each
of eight seeds, or computed from the paper's own assumptions (study/results/updates.json).

The quantities are defined in study/quantities.py, study/anatomy.py and study/theory.py."""

import copy
import math
from collections import namedtuple
from statistics import fmean

from analysis.figures import plt, save
from study.anatomy import ONE_STEP, PARTS
from study.rule import FACTOR, Interval

LOW, _, HIGH = PARTS
TOP = "top 20% entropy"
# ACPO's app. D: norm of a part of the gradient over that of the whole; angle in degrees
IN_PAPER = {LOW: (4.09, 27.8), TOP: (3.40, 44.2), HIGH: (0.50, 42.8), "A < 0": (0.92, 28.0),
            "A > 0": (1.22, 40.5), "no clip": (201.77, 50.7), ONE_STEP: (0.98, 47.4)}
Row = namedtuple("Row", "place claim paper measured verdict")


def judge(says, interval, than=0, size=None):
    """A verdict by the 95% interval alone, which is no part of the family of study/rule.py.

    says: more or less `than`, equal to `size`, or "" for what is not judged; size: the paper's."""
    low, high = interval.ends(0.05)
    if says == "equal":
        inside = size / FACTOR < low and high < size * FACTOR
        apart = high < size / FACTOR or low > size * FACTOR
        return "reproduced" if inside else "opposite" if apart else "not certain"
    if not says or low <= than <= high:
        return says and "not certain"
    if (low > than) != (says == "more"):
        return "opposite"
    near = size is not None and size / FACTOR <= interval.mean <= size * FACTOR
    return "holds" if size is None else "reproduced" if near else "direction alone"


def as_text(interval, unit=""):
    numbers = interval.mean, *interval.ends(0.05)
    mean, low, high = (f"{100 * x:.0f}" if unit == "%" else f"{x:.3g}" for x in numbers)
    return f"{mean}{unit} ({low} to {high})"


# ---------------------------------------------------------------------------- measured claims
# a measure: a rollout's part of updates.json -> a number, and {words: the same} for what stands
# beside it and is not judged


def part(name, key):
    return lambda r: r["subsets"][name][key]


def difference(a, b, key):
    return lambda r: r["subsets"][a][key] - r["subsets"][b][key]


def by_both(quantity, *names, key):
    """A norm or an angle averaged over the selected tokens, as in ACPO's code, and over all."""
    return quantity(*names, f"{key}_selected"), {"over all tokens": quantity(*names, key)}


def log_ratio(walk, taken):
    """log10 of |G_L| / |G_H|, ACPO's eq. 54 over eq. 55, after so many steps."""
    return lambda r: math.log10(abs(r[walk][taken][0] / r[walk][taken][1]))


def reversal(walk, taken):
    return lambda r: r[walk][taken][0] - r[walk][taken][1], {
        "eq. 54": lambda r: r[walk][taken][0], "eq. 55": lambda r: r[walk][taken][1]}


def less_passed(key):
    return lambda r: r["clipped"]["clipped"][key] - r["clipped"]["passed"][key], {}


def clipped_by_entropy(r):
    *others, top = [group["clipped"] for group in r["clipped"]["by_entropy"]]
    return top - fmean(others)


def problems(alpha):
    """(sum m)^2 / sum m^2 over a rollout's problems, m = p (1 - p)^alpha: the mass that power's
    advantage gives a problem of solve rate p on each side."""
    def number(r):
        masses = [p * (1 - p) ** alpha for p in r["solve_rates"]]
        return sum(masses) ** 2 / sum(m * m for m in masses)
    return number


Claim = namedtuple("Claim", "place words paper measure says than size unit", defaults=(0, None, ""))
CLAIMS = [
    Claim("fig. 2a", "std of rho after 16 steps, pi <= 0.2 over pi > 0.8", "far more", (
        lambda r: r["ratio_std"]["low"] / r["ratio_std"]["high"],
        {"slope of Lemma 1, one step's own tokens (we know the 2 of a network from a caption)":
         lambda r: r["own_slope"]}), "more", 1),
    *(Claim("Remark 1, fig. 2b", f"|G_L| - |G_H| after step {taken}", sign, reversal(walk, taken),
            says)
      for walk, taken, sign, says in (("near", "1", "above 0", "more"),
                                      ("near", "16", "below 0", "less"),
                                      ("far", "64", "below 0", "less"))),
    Claim("Remark 1, fig. 2b", "log10 |G_L| / |G_H| after step 16 less after step 1", "below 0", (
        lambda r: log_ratio("near", "16")(r) - log_ratio("near", "1")(r), {}), "less"),
    Claim("app. C", "pi of clipped less passed tokens", "below 0", less_passed("probability"),
          "less"),
    Claim("fig. 2c, app. C", "entropy of clipped less passed tokens with pi < 0.2, nats", "below 0",
          less_passed("entropy_if_low"), "less"),
    Claim("app. C", "share clipped of the top fifth by entropy, less that of the other fifths",
          "below 0", (clipped_by_entropy, {}), "less", 0, None, "%"),
    *(Claim("app. D", f"norm, {name}", f"{norm:.0%}", by_both(part, name, key="norm"),
            "equal" if name == ONE_STEP else "more" if norm > 1 else "less", 1, norm, "%")
      for name, (norm, _) in IN_PAPER.items()),
    Claim("app. D", f"norm, {LOW} less {TOP}", "409% - 340%",
          by_both(difference, LOW, TOP, key="norm"), "more", 0, None, "%"),
    *(Claim("app. D", f"angle, {a} less {b}", f"{IN_PAPER[a][1]} - {IN_PAPER[b][1]} degrees",
            by_both(difference, a, b, key="angle"), "more")
      for a, b in ((HIGH, LOW), (TOP, LOW), ("A > 0", "A < 0"))),
    Claim("app. D.3", "angle, clip-higher less no clip", "1.3 - 50.7 degrees",
          (difference("clip-higher", "no clip", "angle"), {}), "less"),
    Claim("FADE, abstract", "effective number of problems, alpha 3 less alpha 1", "below 0",
          (lambda r: problems(3)(r) - problems(1)(r), {
              "alpha 1": problems(1), "not judged: (sum m)^2 / sum m^2 is our quantity; alpha 3":
              problems(3)}), "")]


# ---------------------------------------------------------------------------- the algebra


def formulas(theory):
    """Rows of what follows from the papers' own assumptions, or does not."""
    slope, off = theory["lemma_1"]["slope"], theory["proposition_1"]
    scans = theory["remark_1"]
    fails = [eq for eq in ("53", "56") if any(  # to hold from some kappa on
        not scan["reversed"][eq] or scan["reversed"][eq][-1][1] < scan["kappas"][-1]
        for scan in scans)]
    ranges = [f"{a:.2f} to {b:.2f}" for x in scans for a, b in x["reversed"]["56"]]
    return [Row(*entry, f"contradicts eq. {' and '.join(eqs)}" if eqs else "follows")
            for *entry, eqs in (
        ("Lemma 1", "std of rho goes as (1 - pi)^2 where a token has logits of its own", "slope 2",
         f"slope {slope:.2f}, vocabulary of 100,000", [] if abs(slope - 2) < 0.05 else ["15"]),
        ("Prop. 1", "the expected gradient by probability", "eq. 53", f"within {off['53']:.1f} "
         "standard errors of a Monte Carlo of its assumptions", ["53"] if off["53"] > 4 else []),
        ("app. B", "its asymptotic form", "eq. 56, as eq. 64", f"up to {off['56']:.0f} standard "
         "errors from the same Monte Carlo", ["53"] if off["56"] > 4 else []),
        ("Remark 1", "from some kappa on |G_L| < |G_H|", "yes", "clip 0.2, kappa from 0.01 to 100: "
         f"by eq. 53 |G_L| / |G_H| is {10 ** min(scans[0]['log10']['53']):.0f} or more, by eq. 56 "
         f"below 1 for {ranges[0]} alone; clip 0.2 and 0.3: for {ranges[1]} alone", fails))]


def in_one_direction(rollouts):
    """With every mean of G, [low, high], in the direction that it has over all rollouts: absolute
    values of single ones are biased upwards by noise."""
    turned = copy.deepcopy(rollouts)
    for walk in ("near", "far"):
        for taken in rollouts[0][walk]:
            for i in (0, 1):
                if sum(r[walk][taken][i] for r in rollouts) < 0:
                    for r in turned:
                        r[walk][taken][i] *= -1
    return turned


def rows(updates):
    """-> the Rows, with means over the rollouts and their 95% intervals."""
    rollouts, found = in_one_direction(updates["seeds"]), formulas(updates["theory"])
    for c in CLAIMS:
        def interval(quantity):
            return Interval.of(map(quantity, rollouts))
        quantity, beside = c.measure
        measured = [as_text(interval(quantity), c.unit), *(
            f"{words} {as_text(interval(of), c.unit)}" for words, of in beside.items())]
        found.append(Row(c.place, c.words, c.paper, "; ".join(measured),
                         judge(c.says, interval(quantity), c.than, c.size)))
    return found


def few_tokens(updates):
    """A sentence on what ACPO's lowest bin rests on."""
    every, low = zip(*(step for r in updates["seeds"] for step in r["met"]), strict=True)
    return (f"An optimizer step has {fmean(every):.0f} tokens with an advantage "
            f"({min(every)} to {max(every)}), and {fmean(low):.0f} of them ({min(low)} to "
            f"{max(low)}) are in the lowest of ACPO's bins, pi < 0.2.")


# ---------------------------------------------------------------------------- figures


def draw(updates, file):
    """Lemma 1's spread; the reversal by step and by kappa; norms and angles of subsets."""
    rollouts = in_one_direction(updates["seeds"])
    figure, ((spread, by_step), (by_kappa, parts)) = plt.subplots(2, 2, figsize=(9.5, 7.2))
    for r in rollouts:
        spread.plot(*zip(*r["spread"], strict=True), "C0.", ms=3)
    for slope in (1, 2):
        spread.axline((0, -2.2), slope=slope, color=f"C{slope}", lw=1, label=f"slope {slope}")
    spread.set(xlabel="log(1 - pi)", ylabel="log std(rho) after one step")
    for walk, style in (("near", "o-"), ("far", "s--")):
        for i, side in enumerate(("|G_L|", "|G_H|")):
            steps = list(rollouts[0][walk])
            found = [Interval.of(r[walk][taken][i] for r in rollouts) for taken in steps]
            by_step.errorbar(list(map(int, steps)), [x.mean for x in found], fmt=style, ms=3, lw=1,
                             yerr=[x.mean - x.ends(0.05)[0] for x in found], capsize=2,
                             color=f"C{i}", label=f"{side}, run of {steps[-1]} steps")
    by_step.set_xscale("symlog", base=2, linthresh=1)
    by_step.set(xlabel="optimizer steps on the rollout", ylabel="mean of G, uniform in pi")
    for i, scan in enumerate(updates["theory"]["remark_1"]):
        for eq, style in (("53", "-"), ("56", "--")):
            by_kappa.plot(scan["kappas"], scan["log10"][eq], f"C{i}{style}", lw=1.2,
                          label=f"eq. {eq}, clip {scan['low']:g} and {scan['high']:g}")
    by_kappa.axhline(0, color="0.4", lw=0.7)
    by_kappa.set(xscale="log", yscale="symlog", xlabel="kappa", ylabel="log10 of |G_L| / |G_H|")
    for i, (name, (norm, angle)) in enumerate(IN_PAPER.items()):
        ours = [fmean(part(name, f"{key}_selected")(r) for r in rollouts)
                for key in ("angle", "norm")]
        parts.plot(*ours, f"C{i}o", ms=5, label=name)
        parts.plot(angle, norm, f"C{i}o", ms=5, mfc="none")
    parts.set(yscale="log", xlabel="angle to the full gradient (degrees)", ylabel="norm over its")
    for axis in (spread, by_step, by_kappa, parts):
        axis.legend()
    save(figure, file, f"{len(rollouts)} rollouts, 95% intervals; below right the means over the "
                       "selected tokens, and hollow those of ACPO's app. D")


def draw_subsets(result, file):
    """Norms and angles of one rollout, by all tokens (bars) and by the selected (diamonds)."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    names = list(result["subsets"])[1:]  # the first is the full gradient
    for axis, key, label in zip(axes, ("norm", "angle"), (
            "norm over the full gradient's", "mean principal angle to it (degrees)"), strict=True):
        for i, name in enumerate(names):
            axis.barh(-i, result["subsets"][name][key], color="C0")
            axis.plot(result["subsets"][name][f"{key}_selected"], -i, "D", color="C1", ms=4)
        axis.set(xlabel=label)
    axes[0].set_yticks([-i for i in range(len(names))], names)
    save(figure, file, f"rollout {result['rollout']}, {result['method']}, after {result['after']} "
                       "steps; bars: divided by all tokens, diamonds: by the selected")

"""What the papers claim of single updates, a claim an entry: measured on the first rollout of each
of eight seeds, or computed from the paper's own assumptions (study/results/updates.json).

study/quantities.py and study/theory.py define the quantities, study/updates.py measures them."""

import math
from collections import namedtuple
from statistics import fmean

from anatomy.subsets import ONE_STEP, PARTS
from harness.curves import plt, save
from study.quantities import effective_problems
from study.rule import FACTOR, Interval, of_side

LOW, _, HIGH = PARTS
TOP = "top 20% entropy"
# ACPO's app. D: norm of a part of the gradient over that of the whole; angle in degrees
IN_PAPER = {LOW: (4.09, 27.8), TOP: (3.40, 44.2), HIGH: (0.50, 42.8), "A < 0": (0.92, 28.0),
            "A > 0": (1.22, 40.5), "no clip": (201.77, 50.7), ONE_STEP: (0.98, 47.4)}
Row = namedtuple("Row", "place claim paper measured verdict gemma gemma_verdict",
                 defaults=("", ""))


def judge(says, interval, than, size):
    """A verdict by a 95% interval, no part of the family of study/rule.py. says: more or less
    `than`, equal to `size`, which is the paper's, or "" for what is not judged."""
    low, high = interval.ends()
    if says == "equal":
        inside = size / FACTOR < low and high < size * FACTOR
        apart = high < size / FACTOR or low > size * FACTOR
        return "reproduced" if inside else "opposite" if apart else "not certain"
    if not says or low <= than <= high:
        return says and "not certain"
    return of_side((low > than) == (says == "more"), interval.mean, size)


def as_text(interval, unit):
    numbers = interval.mean, *interval.ends()
    mean, low, high = (f"{100 * x:.0f}" if unit == "%" else f"{x:.3g}" for x in numbers)
    return f"{mean}{unit} ({low} to {high})"


def numbers_of(rollout):
    """{name: number}, by which CLAIMS have them."""
    clipped, rates = rollout["clipped"], rollout["solve_rates"]
    *others, top = (group["clipped"] for group in clipped["by_entropy"])
    low, high = rollout["ratio_std"].values()
    found = {"spread": low / high, "slope": rollout["own_slope"], "top": top,
             "others": fmean(others), "alpha 1": effective_problems(rates, 1),
             "alpha 3": effective_problems(rates, 3)}
    for name in ("clipped", "passed"):
        found.update({f"pi, {name}": clipped[name]["probability"],
                      f"entropy, {name}": clipped[name]["entropy_if_low"]})
    for walk in (rollout["near"], rollout.get("far", {})):
        for taken, (low, high) in walk.items():
            when = f"{taken} of {list(walk)[-1]}"
            found.update({f"|G_L| {when}": low, f"|G_H| {when}": high,
                          f"log {when}": math.log10(abs(low / high))})
    for name, subset in rollout.get("subsets", {}).items():
        found.update({f"{key}, {name}": x for key, x in subset.items()})
    return found


def columns(rollouts):
    """{name: [its number in each rollout]}, of what all of them have. G is taken in the direction
    that it has over all: absolute values of single rollouts are biased upwards by noise."""
    each = [numbers_of(rollout) for rollout in rollouts]
    found = {name: [numbers[name] for numbers in each] for name in each[0]}
    return {name: [-x for x in column] if name[:2] == "|G" and sum(column) < 0 else column
            for name, column in found.items() if None not in column}


def interval_of(found, name):
    """Of a number by its name, or of the difference of two, 'a - b'."""
    a, *b = (found[part] for part in name.split(" - "))
    return Interval.of(x - y for x, y in zip(a, b[0], strict=True)) if b else Interval.of(a)


# name: of numbers_of; beside: (words, name) of what is reported with it; size: the paper's
Claim = namedtuple("Claim", "place words paper name says than size unit beside",
                   defaults=(0, None, "", ()))


def of_parts(key, words, paper, *names, **judged):
    """A claim about a norm or an angle, or the first's less the second's, averaged over the
    selected tokens, as in ACPO's code; beside it over all."""
    selected, by_all = (" - ".join(f"{key}{end}, {name}" for name in names)
                        for end in ("_selected", ""))
    return Claim("app. D", f"{key}, {words}", paper, selected, **judged,
                 beside=() if names[0] in ("no clip", ONE_STEP) else (("over all tokens", by_all),))


CLAIMS = [
    Claim("fig. 2a", "std(rho) at pi <= 0.2 over that at pi > 0.8", "far more", "spread", "more", 1,
          beside=(("Lemma 1's slope, one step's tokens (not judged: 2 is a caption's)", "slope"),)),
    *(Claim("Remark 1, fig. 2b", f"size of G_L less that of G_H after {when} steps",
            f"{side} pi dominates", f"|G_L| {when} - |G_H| {when}", says,
            beside=(("G_L", f"|G_L| {when}"), ("G_H", f"|G_H| {when}")))
      for when, side, says in (("1 of 16", "low", "more"), ("16 of 16", "high", "less"),
                               ("64 of 64", "high", "less"))),
    Claim("Remark 1, fig. 2b", "log10 of their ratio, step 16 less step 1", "low pi dominates less",
          "log 16 of 16 - log 1 of 16", "less"),
    Claim("app. C", "mean pi, clipped less passed tokens", "below 0", "pi, clipped - pi, passed",
          "less"),
    Claim("fig. 2c, app. C", "entropy where pi < 0.2, clipped less passed tokens", "below 0",
          "entropy, clipped - entropy, passed", "less"),
    Claim("app. C", "share clipped, top fifth by entropy less other fifths", "below 0",
          "top - others", "less", unit="%"),
    *(of_parts("norm", name, f"{norm:.0%}", name, than=1, size=norm, unit="%", says=(
        "equal" if name == ONE_STEP else "more" if norm > 1 else "less"))
      for name, (norm, _) in IN_PAPER.items()),
    of_parts("norm", f"{LOW} less {TOP}", "409% - 340%", LOW, TOP, says="more", unit="%"),
    *(of_parts("angle", f"{a} less {b}, degrees", paper, a, b, says="more")
      for a, b, paper in ((HIGH, LOW, "42.8 - 27.8"), (TOP, LOW, "44.2 - 27.8"), (
          "A > 0", "A < 0", "40.5 - 28.0"))),
    Claim("app. D.3", "angle, no clip less clip-higher, degrees", "50.7 - 1.3",
          "angle, no clip - angle, clip-higher", "more",
          beside=(("clip-higher", "angle, clip-higher"),)),
    Claim("FADE, abstract", "effective number of problems, focus alpha 3 less 1", "below 0",
          "alpha 3 - alpha 1", "", beside=(("not judged, our measure; alpha 1", "alpha 1"),))]


def formulas(theory):
    """Rows of what follows from the papers' own assumptions, or does not."""
    slope, off, scans = theory["lemma_1"]["slope"], theory["proposition_1"], theory["remark_1"]
    turns = [eq for eq in ("53", "56") if any(  # it holds from no kappa on
        [b for _, b in scan["reversed"][eq]][-1:] != scan["kappas"][-1:] for scan in scans)]
    ranges = [f"{a:.2f} to {b:.2f}" for x in scans for a, b in x["reversed"]["56"]]
    found = [
        ("Lemma 1", "std(rho) in its own tabular model", "(1 - pi)^2", f"slope {slope:.2f}, "
         "vocabulary of 100,000", ["15"] if abs(slope - 2) > 0.05 else []),
        ("Prop. 1", "the expected gradient by probability", "eq. 53", f"within {off['53']:.1f} "
         "standard errors of a Monte Carlo of its assumptions", ["53"] if off["53"] > 4 else []),
        ("app. B", "its asymptotic form", "eq. 56, as eq. 64", f"up to {off['56']:.0f} standard "
         "errors from the same Monte Carlo", ["53"] if off["56"] > 4 else []),
        ("Remark 1", "size of G_L over that of G_H", "below 1 from some kappa on",
         f"eq. 53, clip 0.2: {10 ** min(scans[0]['log10']['53']):.0f} or more for kappa from 0.01 "
         f"to 100; eq. 56: below 1 for {ranges[0]} alone (clip 0.2 and 0.3: {ranges[1]})", turns)]
    return [Row(*entry, f"contradicts eq. {' and '.join(eqs)}" if eqs else "follows")
            for *entry, eqs in found]


def measured(claim, numbers):
    """-> the claim's numbers as a text, and its verdict; empty where they were not measured."""
    found = {words: interval_of(numbers, name) for words, name in (("", claim.name), *claim.beside)
             if {*name.split(" - ")} <= numbers.keys()}
    if "" not in found:
        return "", ""
    texts = [f"{words} {as_text(x, claim.unit)}".strip() for words, x in found.items()]
    return "; ".join(texts), judge(claim.says, found[""], claim.than, claim.size)


def rows(updates, gemma):
    """-> the Rows: means over the rollouts and their 95% intervals. gemma: those of Gemma."""
    toy, other = columns(updates["seeds"]), columns(gemma["seeds"])
    return formulas(updates["theory"]) + [
        Row(claim.place, claim.words, claim.paper, *measured(claim, toy), *measured(claim, other))
        for claim in CLAIMS]


def draw_steps(name, rollouts, spread, by_step):
    """Lemma 1's spread, and the reversal by step, of a model's rollouts."""
    found = columns(rollouts)
    points = [point for rollout in rollouts for point in rollout["spread"]]
    spread.plot(*zip(*points, strict=True), "C0.", ms=3)
    for slope in (1, 2):
        spread.axline((0, -2.2), slope=slope, color=f"C{slope}", lw=1, label=f"slope {slope}")
    spread.set(title=name, xlabel="log(1 - pi)", ylabel="log std(rho) after one step")
    for walk, style in (("near", "o-"), ("far", "s--")):
        if walk not in rollouts[0]:
            continue
        *_, last = steps = list(rollouts[0][walk])
        for i, side in enumerate(("|G_L|", "|G_H|")):
            of = [interval_of(found, f"{side} {taken} of {last}") for taken in steps]
            by_step.errorbar([int(x) for x in steps], [x.mean for x in of], fmt=style, ms=3, lw=1,
                             yerr=[x.half() for x in of], capsize=2,
                             color=f"C{i}", label=f"{side}, run of {last} steps")
    by_step.set_xscale("symlog", base=2, linthresh=1)
    by_step.set(title=name, xlabel="optimizer steps on the rollout",
                ylabel="mean of G, uniform in pi")


def draw(updates, gemma, file):
    """What draw_steps draws, of both models; the reversal by kappa; norms and angles of subsets."""
    rollouts, found = updates["seeds"], columns(updates["seeds"])
    figure, axes = plt.subplots(3, 2, figsize=(9.5, 10.4))
    by_kappa, parts = axes[2]
    draw_steps("0.86M parameters", rollouts, *axes[:2, 0])
    draw_steps("Gemma 3 270M", gemma["seeds"], *axes[:2, 1])
    for i, scan in enumerate(updates["theory"]["remark_1"]):
        for eq, style in (("53", "-"), ("56", "--")):
            by_kappa.plot(scan["kappas"], scan["log10"][eq], f"C{i}{style}", lw=1.2,
                          label=f"eq. {eq}, clip {scan['low']:g} and {scan['high']:g}")
    by_kappa.set(xscale="log", yscale="symlog", xlabel="kappa", ylabel="log10 of |G_L| / |G_H|",
                 ylim=(-3, 1e5))
    for i, (name, (norm, angle)) in enumerate(IN_PAPER.items()):
        parts.plot(fmean(found[f"angle_selected, {name}"]), fmean(
            found[f"norm_selected, {name}"]), f"C{i}o", label=name)
        parts.plot(angle, norm, f"C{i}o", mfc="none")
    parts.set(yscale="log", xlabel="angle to the full gradient (degrees)", ylabel="norm over its")
    for axis in axes.flat:
        axis.legend(loc="best")
    save(figure, file, f"{len(rollouts)} rollouts, 95% intervals; below right the means over the "
                       "selected tokens, and hollow those of ACPO's app. D")

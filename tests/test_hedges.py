"""Answers that hedge are paid nothing, and answers with units, names and choices are right."""

import itertools
import time

import pytest

import hedges
from graders.equal import equal
from helpers import counted, python, write_rows

VALUES = ["1.3", "-700", "4080", "15,000", "2.50", "4.5 \\times 10^{33}", "\\frac{3}{4}", "12\\pi"]
UNITS = [" \\text{ eV}", " \\text{ nm}", "\\text{ Å}", " \\mathrm{~K}", "\\text{m/s²}",
         " \\text{ kg}", " \\, \\text{kcal m}^{-2} \\text{ yr}^{-1}", "~\\mathrm{J\\,mol^{-1}}",
         "\\,\\mu\\text{m}", " \\text{ apples}", " \\text{ W m}^{-2}", " \\text{ grams per mole}",
         "\\,\\mathrm{km/s}", " \\frac{\\text{m}}{\\text{s}^2}", " \\text{ square meters}",
         "\\ \\text{solar masses}"]
CHOICES = ["\\text{{({}) Plane}}", "({}) \\text{{Two lines}}", "\\textbf{{({})}}\\ 27",
           "{}. Circle"]
RIGHT = [*((value + unit, value) for value, unit in itertools.product(VALUES, UNITS)),
         *((form.format(c), f"\\text{{({c})}}") for form in CHOICES for c in "ABCDE"),
         *((f"{n}{th} \\text{{ grade}}", str(n)) for n in (4, 12, 27) for th in (
             "^{\\mathrm{th}}", "^{\\text{th}}", "^\\text{th}", "\\text{th}", "th")),
         *((f"{a} = {v}", v) for a in ("x", "\\theta", "a_1", "AB", "f(x)", "\\angle ABC")
           for v in ("5", "m", "n^2", "\\frac{1}{3}", "2\\sqrt{3}"))]
# Words that make another number of the one they follow, or no answer.
NUMERALS = """
    eighths, sixths, quadrillion, lakh, permille, doubled, inverse, maximum, basis points, point
    eleven, choose eleven, versus eleven, halves, quarters, crore, squared, percentile,
    factorials, reciprocal, modulo seven, in base six, prime, decillion, primes, score, gross,
    myriad, octillion, not really, ish, -ish, instead of six, minimum, ln, conjugate, over
    seven, inverted, upward, choose, to the sixth, root, choose two, cubed, cube, square, cubic,
    sevenths, per thousand, parts per million""".strip().replace("\n    ", " ").split(", ")
# Another number, another power of ten, another prefix or unit than the gold answer's, another
# choice, another name.
WRONG = [*((value + unit, gold) for (value, gold), unit in itertools.product(
             [("1.31", "1.3"), ("1.3 \\times 10^{3}", "1.3"), ("15000000", "15,000"),
             ("70", "700")], UNITS)),
         *((f"5 \\text{{ {a}}}", f"5 \\text{{ {b}}}") for a, b in itertools.permutations(
             ("m", "mm", "km", "nm", "s", "eV", "keV", "mW", "MW", "J/s", "cents"), 2)),
         *((form.format(c), "\\text{(E)}") for form in CHOICES for c in "ABCD"),
         *((f"5 \\text{{ {words}}}", "5") for words in NUMERALS)]


def test_units_names_and_choices():
    assert len(RIGHT) > 190 and [pair for pair in RIGHT if not equal(*pair)] == []
    assert len(WRONG) > 230 and [pair for pair in WRONG if equal(*pair)] == []


def test_no_two_kinds_are_equal_no_answer_is_universal_and_no_hedge_is_accepted():
    kinds = hedges.split(hedges.KINDS)
    assert [pair for pair in itertools.product(kinds, kinds) if equal(*pair)] == [
        (kind, kind) for kind in kinds]
    # a share of those that `python tests/hedges.py --universal COUNT` tries
    assert hedges.universal(seed=0, count=60) == []
    # a share of the hedges on the project's gold answers, and on those of BENCHMARKS
    rows = hedges.golds()
    count, taken = hedges.accepted(rows, every=len(rows))
    assert taken == [] and count >= 200


@pytest.mark.parametrize("answer", hedges.split(r"""\infty+i\infty | e^{\infty}+ie^{\infty}
    5+i\infty-\infty | (\log 0)^{e} | 10^{99}\sin^2(1)+10^{99}\cos^2(1)-10^{99} | |\infty| \pm 1.0
    9^{99}\sqrt{3+2\sqrt{2}}-9^{99}\sqrt{2}-9^{99} | 99!\ln 6-99!\ln 2-99!\ln 3 = e^{i\pi}+1
    10^{99}\sin^2 x+10^{99}\cos^2 x-10^{99} | |\infty|+1.0,|\infty|+2.0,|\infty|+3.0
    (|\infty|+1.0,|\infty|+2.0] | [|\infty|+1.0,|\infty|+2.0) | (|\infty|+1.0,|\infty|+1.0)
    \log_0 \tan(\pi/2) | x \ge \exp\infty/0.5 | |i\infty| + \tan(\pi/2)+\infty
    \begin{pmatrix} |\infty|+1.0 \\ |\infty|+2.0 \end{pmatrix} | x > -\sqrt{\infty}+1.0"""))
def test_what_is_no_value_equals_nothing(answer):
    assert [gold for gold in hedges.split(hedges.KINDS) if equal(answer, gold)] == []


@pytest.mark.parametrize("answer", [
    "9^{9^{9}}", "9^{9^{9^{9}}}", "x^{1000000000}", "(9^9)!", "9^{99!}", "0.5^{9^{9^9}}",
    "\\{9^{9^9}, 2\\}", "\\binom{9^9}{9^8}", "\\frac{1}{9^{9^9}}", "10^{-40000}",
    "2^{-99999}", "1-\\frac{1}{2^{100000}}", "3^{80000}\\cdot" * 60 + "1", "A. " * 1600,
    "1 mod " * 800 + "1", "x<1 or " * 700 + "x>2", "x=1 or " * 300 + "x=2",
    "\\{" + ",".join(map(str, range(1200))) + "\\}",
    " \\cup ".join(f"(\\sqrt{{{2 * i}}}, \\sqrt{{{2 * i + 1}}})" for i in range(90))],
    ids=lambda text: text[:20])
def test_an_answer_takes_no_time(answer):
    for gold in ("\\frac{1}{3}", "x > 2", "5"):
        began = time.process_time()
        assert not equal(answer, gold)
        assert time.process_time() - began < 2, gold


def test_grading_counts_what_is_unread():
    problem = dict(verifier="math", answer="5")
    texts = [f"\\boxed{{{text}}}" for text in (
        "5", "6", "\\le 5", "5 or 6", "x+y=5", "\\text{yes}", "\\lim_{x \\to 5} x")]
    (rewards,), counters = counted([problem], [[*texts, "no box"]])
    assert rewards == [1] + [0] * 7
    assert counters["unparsed_answer"] == 3 and counters["error"] == 0


@pytest.mark.parametrize("gold", ["1" + "23" * 1999, "\\frac{1}{" + "7" * 2100 + "}"])
def test_long_golds_are_compared_whole(gold):
    assert equal(gold, gold) and not equal(gold[:2000], gold) and not equal(gold[:-2] + "9}", gold)
    assert not equal(gold + "0", gold) and not equal("1" * 5000, gold)


def test_verdicts_are_laid_beside_published_ones(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [
        dict(gt="\\frac12", pred=["0.5", "1/3"], score=[True, False]),
        dict(gt="2", pred=["1+1=2", "0.02"], score=[False, True])])
    done = python("bench/verdicts.py", path)
    assert done.stdout.splitlines() == [
        "right here, wrong there: '1+1=2' for '2'", "wrong here, right there: '0.02' for '2'",
        "1 wrong here, wrong there", "1 wrong here, right there", "1 right here, wrong there",
        "1 right here, right there"]

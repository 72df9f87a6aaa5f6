"""Are two mathematical answers the same? Exact numbers first, then math-verify, then the cases
that it misses."""

import functools
import itertools
import logging
import re
import threading
from fractions import Fraction

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import parse, verify
from math_verify.errors import TimeoutException
from math_verify.grader import should_treat_as_complex
from math_verify.utils import timeout
from sympy import Basic, Expr, Float, I, Rational, Symbol, simplify
from sympy.core.function import AppliedUndef

from graders import Hedge, UnparsedGold
from graders.answers import (
    NAME,
    NUMBER,
    RELATION,
    choice,
    clean,
    is_closed,
    is_word,
    items,
    named,
    number,
    tight,
    unfinished,
    words,
)

LONGEST = 5000  # characters of an answer
JOINED = rf"{RELATION}|\\vee|\\lor(?![a-z])|\\wedge|\\land(?![a-z])"
PLAIN = re.compile(NUMBER)
# Otherwise it warns whenever a timeout is switched off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


# ------------------------------------------------------------------ several values

def expand(text):
    """'x = 3 \\pm 1' -> '3 + 1, 3 - 1'; a text without \\pm or a name in front stays as it is."""
    if text.count("=") == 1:
        text = re.sub(r"^[a-zA-Z] *= *(?=.*(?:\\pm|,))", "", text)
    expanded = []
    for item in items(text):
        pieces = item.split("\\pm")
        if len(pieces) < 5:
            choices = itertools.product("+-", repeat=len(pieces) - 1)
        else:
            choices = [["\\pm"] * (len(pieces) - 1)]
        for signs in choices:
            expanded.append("".join(p + s for p, s in zip(pieces, [*signs, ""], strict=True)))
    return ", ".join(expanded)


def interval(clauses):
    """['-1 < x', 'x \\leq 2'] -> {'x'}, '(-1,2]'; None if one of them is no inequality about a
    name. Several names mean that it is no interval."""
    names, lower, upper = set(), ("-\\infty", "("), ("\\infty", ")")
    for clause in clauses:
        terms = re.split(f"({RELATION})", clause)
        sides, signs = [t.strip() for t in terms[::2]], terms[1::2]
        if len(sides) not in (2, 3) or not all(sides) or sum(
                bool(NAME.fullmatch(side)) for side in sides) != 1:
            return None
        place = next(i for i, side in enumerate(sides) if NAME.fullmatch(side))
        names.add(sides[place])
        for i, sign in enumerate(signs):
            if place not in (i, i + 1):
                return None
            bound = sides[i + 1] if i == place else sides[i]
            closed = "=" in sign or "\\" in sign
            if ("<" in sign or "\\l" in sign) == (i + 1 == place):
                lower = bound, "[" if closed else "("
            else:
                upper = bound, "]" if closed else ")"
    return names, f"{lower[1]}{lower[0]},{upper[0]}{upper[1]}"


def intervals(text):
    """'x < -2 or -1 < x' -> 'x', '(-\\infty,-2)\\cup(-1,\\infty)'; None where the text is no list
    of inequalities in one name."""
    if not re.search(RELATION, text):
        return None
    union, names = [], set()
    for part in re.split(r"\\vee|\\lor(?![a-z])|\bor\b|,", text):
        names_and_range = interval(re.split(r"\\wedge|\\land(?![a-z])|\band\b", part))
        if names_and_range is None:
            return None
        names |= names_and_range[0]
        union.append(names_and_range[1])
    return (names.pop(), "\\cup".join(union)) if len(names) == 1 else None


# ------------------------------------------------------------------ math-verify

# Units and boxes are ours.
AS_LATEX = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")


@functools.lru_cache(maxsize=1024)  # A gold answer is read once for its whole group.
def read(text, seconds):
    """-> [expression, text] of an answer, or [text] if it is no LaTeX. math-verify's own reader
    would take a number that it finds in such a text."""
    if text.endswith("}") and text.count("}") > text.count("{"):
        text = text[:-1]
    latex = normalize_latex(text, AS_LATEX)
    try:
        return [timeout(seconds)(latex2sympy)(
            latex, is_real=not should_treat_as_complex(latex), convert_degrees=False,
            normalization_config=None), latex]
    except Exception:  # whatever the parser says
        return [latex]


def limit():
    """Seconds for math-verify's timeouts. They are signals, so it is None, which switches them off,
    where there can be no signals."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def imaginary(x):
    """The expression with the name i as the imaginary unit, and other names as real numbers."""
    return x.subs({symbol: I if symbol.name == "i" else Symbol(symbol.name, real=True)
                   for symbol in x.free_symbols})


def agree(a, b):
    """Have two expressions the same value where their names are numbers? None where that does not
    tell: without names, with decimals, or where a root or a logarithm has several values."""
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    if not names or any(x.has(AppliedUndef) for x in (a, b)):
        return None
    near, decimals = [], any(x.has(Float) for x in (a, b))
    for k in range(4):  # At the last two points every other name is negative.
        point = {name: Rational(17 + 7 * i + 5 * k * k, 13 + 4 * i) * (-1 if k > 1 and (i + k) % 2
                 else 1) for i, name in enumerate(names)}
        x, y = (value.subs(point).n(60) for value in (a, b))
        if not x.is_finite or not y.is_finite or not x.is_real and k < 2 or abs(x) > 1e30:
            return None
        near.append(bool(abs(x - y) <= (1e-12 if decimals else 1e-50) * abs(x)))
    return None if near[0] and not all(near) or decimals and not near[0] else near[0]


def same(pred, gold):
    """Have two texts the same value? math-verify's verdict, but without its tolerance for very
    small and very large numbers, and with i as the imaginary unit. Sums that it would simplify for
    seconds are compared at points."""
    if len(pred) + len(gold) > 4000:
        return False
    seconds = limit()
    golds, preds = read(gold, seconds), read(pred, seconds)
    if not golds or not preds:
        return False
    a, b = golds[0], preds[0]
    expressions = isinstance(a, Expr) and isinstance(b, Expr)
    if expressions:
        verdict = timeout(seconds)(agree)(imaginary(a), imaginary(b))
        if verdict is not None:
            return verdict
    if verify(golds, preds, timeout_seconds=seconds):
        if expressions and a.is_number and b.is_number and "%" not in pred + gold:
            return bool(abs(a - b).n(30) <= 2e-6 * abs(a).n(30))
        return True
    if not isinstance(a, Basic) or not isinstance(b, Basic):
        return False
    if "i" not in {symbol.name for x in (a, b) for symbol in x.free_symbols}:
        return False
    a, b = imaginary(a), imaginary(b)
    if verify([a], [b], timeout_seconds=seconds):
        return True
    return isinstance(a, Expr) and isinstance(b, Expr) and simplify(a - b) == 0


def parses(gold):
    """Is a gold answer a number, a word, or something of which math-verify reads a part?"""
    text, _ = clean(gold)
    dollars = str(gold).replace("\\$", "").count("$")
    if gold is None or text.count("{") != text.count("}") or dollars % 2:
        return False
    try:
        return (number(text.rstrip("% ")) is not None or is_word(text)
                or len(text) <= 2000 and bool(read(expand(text), limit())))
    except (Exception, TimeoutException):
        return False


def readable(gold):
    """Does a gold answer parse, and equal itself by more than its letters? Never raises.

    data.load asks it of every gold answer."""
    try:
        text, _ = clean(gold)
        if not parses(gold) or text.lower().lstrip("-") in ("nan", "inf"):
            return False
        if number(text.rstrip("% ")) is not None or is_word(text):
            return True
        if same(expand(text), expand(text)):
            return True
        ranges = intervals(text)
        return bool(ranges) and same(ranges[1], ranges[1])
    except (Exception, TimeoutException):
        return False


def found_in(text, gold):
    """Does math-verify find the gold answer in a whole response, boxed or not? Never raises."""
    try:
        seconds = limit()
        return verify(read(clean(gold)[0], seconds), parse(text, parsing_timeout=seconds),
                      timeout_seconds=seconds)
    except (Exception, TimeoutException):
        return False


# ------------------------------------------------------------------ equality

def equal(pred, gold):
    """Are two bare answers the same? Numbers are compared exactly; a decimal of six digits or more
    may round a fraction that has no end. Never raises."""
    try:
        if len(str(pred)) > LONGEST or len(str(gold)) > LONGEST:
            return False
        if PLAIN.fullmatch(str(pred)) and PLAIN.fullmatch(str(gold)):
            return same_number(str(pred), Fraction(pred), str(gold), Fraction(str(gold)))
        (text, unit), (gold_text, gold_unit) = clean(pred), clean(gold)
        # 6m may be a product: a unit that nobody marked is no more optional than a name.
        if gold_unit and unit != gold_unit and re.search(r"[0-9] ?[A-Za-z]{1,2}\W*$", str(gold)):
            return False
        return (not unit or not gold_unit or unit == gold_unit) and same_answer(text, gold_text)
    except (Exception, TimeoutException):
        return False


def same_answer(pred, gold):
    """Are two answers, as `clean` gives them, the same?"""
    if not pred or not gold:
        return False
    x, y = number(pred.rstrip("% ")), number(gold.rstrip("% "))
    if x is not None and y is not None:
        return same_number(pred, x, gold, y)
    if re.fullmatch("[A-J]", gold):
        pred = choice(pred)
    if tight(pred) == tight(gold):
        return True
    ranges, gold_ranges = intervals(pred), intervals(gold)
    if not ranges and (verdict := without_names(pred, gold)) is not None:
        return verdict
    if is_word(pred) or is_word(gold) or words(pred) - words(gold):
        return False  # math-verify takes words for products of letters.
    if unfinished(re.sub(JOINED, ",", pred) if ranges else pred, gold) or other_names(pred, gold):
        return False
    if (x is None) != (y is None):
        # One is a number. math-verify may overlook a name in the other.
        formula = re.sub(r"\\[A-Za-z]+|^[^=]*=", "", pred if x is None else gold)
        if re.search("[A-DF-HJ-Za-df-hj-z]", formula):
            return False
    if re.search(r"\\[lc]?dots|\.\.\.|\u2026", pred + gold):
        return False  # math-verify compares no more than the parts of a pattern.
    pred_base, gold_base = (re.fullmatch(r"([0-9A-Fa-f]+)_\{?(\d+)\}?", t) for t in (pred, gold))
    if pred_base or gold_base:  # math-verify overlooks the base.
        if pred_base and gold_base and pred_base[2] != gold_base[2]:
            return False
        return (pred_base[1] if pred_base else pred) == (gold_base[1] if gold_base else gold)
    if (pred[0] in "([" and gold.startswith("\\{")
            or gold[0] in "([" and pred.startswith("\\{")):
        return False  # A tuple is no set.
    if ranges and gold_ranges:
        return ranges[0] == gold_ranges[0] and same(ranges[1], gold_ranges[1])
    if same(expand(pred), expand(gold)):
        return True
    return bool(ranges or gold_ranges) and same(
        ranges[1] if ranges else pred, gold_ranges[1] if gold_ranges else gold)


def without_names(pred, gold):
    """The verdict on answers of which one has names before its values, as in x = 5; None where the
    names do not tell, as in two equations."""
    (names, values, claims), (gold_names, gold_values, gold_claims) = named(pred), named(gold)
    if gold_claims or not (names or claims or gold_names):
        return None
    if gold_names and (names or claims):
        if sorted(names) != sorted(gold_names) or len({*names}) < len(values) or len(
                gold_values) != len(values):
            return None
        gold_of = dict(zip(gold_names, gold_values, strict=True))
        return all(map(holds, claims)) and all(
            same_answer(value, gold_of[name]) for name, value in zip(names, values, strict=True))
    if gold_names:
        form = "({})" if len({*gold_names}) == len(gold_values) > 1 else "{}"
        return same_answer(form.format(pred), form.format(", ".join(gold_values)))
    if not all(map(holds, claims)) or "=" in gold:
        return False
    if unfinished(re.sub(r"_\{[^{}]*\}", "", " ".join(names)), gold):
        return False
    return same_answer(", ".join(values), gold) or bool(
        claims and claims[-1][1] == "\\approx" and number(values[-1]) is None
        and same_answer(claims[-1][2], gold))


def holds(claim):
    """Is it true that left = right, that right is left in decimals, or that right is a set?"""
    left, sign, right = claim
    if sign == "\\in":
        return not left and right.startswith(("[", "(", "\\{", "{", "\\mathbb"))
    if sign == "=":
        return same_answer(left, right)
    decimal = re.fullmatch(r"-?[0-9]+(?:\.([0-9]+))?", right)
    exact = number(left) or is_closed(left) and read(left, limit())[0]
    return bool(decimal and exact) and (
        2 * abs(exact - number(right)) <= Fraction(1, 10 ** len(decimal[1] or "")))


def other_names(pred, gold):
    """Has an answer a letter that the gold answer has in the other case alone, or other primes?
    math-verify overlooks both."""
    letters, gold_letters = (set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+|_\{[^{}]*\}", "", t)))
                             for t in (pred, gold))
    return (any(c.swapcase() in gold_letters for c in letters - gold_letters)
            or pred.count("\\prime") != gold.count("\\prime"))


def refuse(pred, gold):
    """Says of an answer that is not equal to the gold answer if it is more than wrong: raises
    UnparsedGold, or Hedge where it has more candidates than the gold answer, a relation, or an
    operation that is left to do."""
    if not parses(gold):
        raise UnparsedGold(gold)
    (pred, _), (gold, _) = clean(pred[:LONGEST]), clean(gold)
    several = r",|;|\\pm|\b(?:or|and)\b|\\cup|\\boxed"
    claims = named(pred)[2]
    if number(pred.rstrip("% ")) is None and not is_word(pred) and (
            len(re.findall(several, pred)) > len(re.findall(several, gold))
            or re.search(RELATION, pred) and not re.search(RELATION, gold)
            or claims and "=" not in gold or unfinished(pred, gold)):
        raise Hedge(pred)


def same_number(pred, x, gold, y):
    """Are two answers, which are the numbers x and y, the same?"""
    if "%" not in pred + gold:
        return x == y or rounds(pred, x, y) or rounds(gold, y, x)
    if x == y or "%" in pred and "%" in gold:
        return x == y
    return x * 100 == y if "%" in gold else x == y * 100  # 28% is 28 and 0.28.


def rounds(text, value, other):
    """Is `text` the decimal of six digits or more that `other`, a fraction without an end, is
    rounded to? `value` is the number that `text` is."""
    digits = re.fullmatch(r"[-+]?(\d*)\.(\d+)(.*)", text)
    rest = other.denominator
    for p in (2, 5):
        while rest % p == 0:
            rest //= p
    if rest == 1 or not digits or len((digits[1] + digits[2]).lstrip("0")) < 6 or not value:
        return False
    unit = Fraction(1, 10 ** len(digits[2])) * abs(value / Fraction(f"{digits[1]}.{digits[2]}"))
    return abs(value - other) <= unit / 2

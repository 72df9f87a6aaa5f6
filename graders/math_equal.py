"""Are two mathematical answers the same? Exact numbers first, then math-verify, then the cases
that it misses."""

import functools
import itertools
import logging
import re
import threading
from fractions import Fraction

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from sympy import Basic, Expr, I, Symbol, simplify

# Otherwise it warns whenever a timeout is switched off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

NAME = re.compile("[a-zA-Z]")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
FRACTION = r"\\frac\{?(\d+)\}?\{?(\d+)\}?"
RELATION = r"\\leq?(?![a-z])|\\geq?(?![a-z])|<=|>=|<|>"
MATH_WORDS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "arcsin", "arccos", "arctan", "sinh",
    "cosh", "tanh", "sqrt", "max", "min", "gcd", "lcm", "mod", "and", "frac", "det", "deg", "cup",
    "cap", "infty"}
# The list of units is closed: other letters after a number are a product.
UNITS = {alias: names.split()[0] for names in (
    "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre",
    "km kilometer kilometre", "in inch", "ft foot feet", "yd yard", "mi mile", "mg milligram",
    "g gram", "kg kilogram", "lb pound", "oz ounce", "s sec second", "min minute", "h hr hour",
    "day", "week", "month", "year yr", "ml milliliter millilitre", "l liter litre", "dollar usd",
    "cent", "euro", "yuan", "rad radian", "degree deg", "unit", "hz", "kg/m", "m/s", "km/h", "mph")
    for alias in names.split()}
NOT_UNITS = {
    "million", "thousand", "hundred", "billion", "dozen", "half", "not", "mod", "factorial",
    "percent", "percentage", "pct", "and", "times"}
SPELLINGS = (
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\left", ""), ("\\right", ""), ("\\$", ""),
    ("$", ""), ("{,}", ","), ("\u2208", "\\in "), ("\u2212", "-"), ("\\(", ""), ("\\)", ""),
    ("\\[", ""), ("\\]", ""), ("\\geqslant", "\\geq"), ("\\leqslant", "\\leq"), ("\\%", "%"),
    ("\\mp", "\\pm"), ("\\!", ""), ("\\varnothing", "\\emptyset"))


# ------------------------------------------------------------------ reading an answer

def last_boxed(text):
    """The content of the complete \\boxed{...} that begins last in a text, braces balanced; None
    without one."""
    begins = {m.end() for m in re.finditer(r"\\boxed\s*\{", text)}
    still_open, last = [], None
    for brace in re.finditer(r"\\.|[{}]", text, re.S):  # \{ is read and groups nothing
        if brace[0] == "{":
            still_open.append(brace.end())
        elif brace[0] == "}" and still_open:
            start = still_open.pop()
            if start in begins and (last is None or start > last[0]):
                last = start, brace.start()
    return text[slice(*last)] if last else None


def clean(text):
    """-> an answer without its wrapping, and its unit with the power, None where it has none.

    The wrapping is dollars, \\boxed, \\text, spacing, degree signs and final stops:
    '$15\\text{ cm}^2$.' -> '15', ('cm', '2')."""
    text = re.sub(r",\\!\s*", ",", str(text)[:2000])
    for old, new in SPELLINGS:
        text = text.replace(old, new)
    if text.count("\\boxed") == 1:  # math-verify makes a set of several.
        text = last_boxed(text) or text
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\u00b0", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~", " ", text).strip().rstrip(".,;").strip()
    text, unit = split_unit(text)
    text = re.sub(r"\\(?:text|mbox|textnormal|textbf|mathrm|operatorname|rm)\s*\{([^{}]*)\}",
                  r" \1 ", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(r" *\b(?:percent(?:age)?|pct)\b", "%", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text.strip())
    return re.sub(r"^\+ *", "", text).strip().rstrip(".").strip(), unit


def split_unit(text):
    """'10 cm^2' -> '10', ('cm', '2'). A bare unit must follow a digit, one in \\text anything."""
    parts = re.fullmatch(
        r"(.*?)"
        r"(?:\\(?:text|textbf|mbox|textnormal|mathrm|rm) *\{ *(?:square )?([A-Za-z/]+) *\.?\}"
        r"|(?<=\d) *(?:square )?([A-Za-z/]+))"
        r"(?: *\^ *\{? *(\d) *\}?)?", text, re.S)
    if not parts or not parts[1].strip():
        return text, None
    quantity, in_text, power = parts[1].strip(), parts[2], parts[4] or "1"
    name = (in_text or parts[3]).lower()
    unit = (UNITS.get(name) or UNITS.get(name.removesuffix("s"))
            or UNITS.get(name.removesuffix("es")))
    if (not unit and in_text and number(quantity) is not None and len(name) > 2
            and name not in NOT_UNITS):
        unit = name  # 5\\text{ apples}
    return (quantity, (unit, power)) if unit else (text, None)


def number(text):
    """The exact value of a number as people write it, else None.

    They write 1e5, 4.5 \\times 10^{33}, 1,000, 3/4, \\frac{3}{4} and 1 1/2."""
    if len(text) > 1000:
        return None
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?|[-+]?\d{1,3}(?: \d{3})+", text):
        text = re.sub("[, ]", "", text)
    if power := re.fullmatch(rf"({NUMBER}) *(?:[eE]|(?:\\times|\\cdot|\*|x) *10 *(?:\^|\*\*) *)"
                             r"\{? *([-+]?\d{1,3}) *\}?", text):
        return Fraction(power[1]) * Fraction(10) ** int(power[2])
    if re.fullmatch(NUMBER, text):
        return Fraction(text)
    if mixed := re.fullmatch(
            rf"(-?) *(?:(\d+)(?: +| *(?=\\)))?(?:(\d+) *\.? */ *(\d+)|{FRACTION})", text):
        top, bottom = int(mixed[3] or mixed[5]), int(mixed[4] or mixed[6])
        if bottom and (not mixed[2] or top < bottom):
            return (-1 if mixed[1] else 1) * (int(mixed[2] or 0) + Fraction(top, bottom))
    return None


def items(text):
    """Splits at the commas outside all brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


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
        if len(sides) not in (2, 3) or sum(bool(NAME.fullmatch(side)) for side in sides) != 1:
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


def is_word(text):
    """Is it words, or a name of letters (ABC)? Those are no products: the letters are compared."""
    return (bool(re.fullmatch(r"[^\W\d_]+(?:[ -][^\W\d_]+)*", text))
            and (max(map(len, text.split())) > 2 or not text.islower()))


def words(text):
    """The bare words of a text that are neither functions nor a LaTeX environment's name."""
    text = re.sub(r"\\(?:begin|end) *\{\w+\}", "", text)
    return set(re.findall(r"(?<![A-Za-z\\])[A-Za-z]{3,}(?![A-Za-z])", text)) - MATH_WORDS


def tight(text):
    """Without spaces, but for those between digits; words in small letters."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", text)
    return text.lower() if re.fullmatch("[A-Ea-e]|[^\\W\\d_]{2,}", text) else text


# ------------------------------------------------------------------ math-verify

@functools.lru_cache(maxsize=1024)  # A gold answer is read once for its whole group.
def read(text, seconds):
    return parse(f"\\boxed{{{text}}}", parsing_timeout=seconds)


def limit():
    """Seconds for math-verify's timeouts. They are signals, so it is None, which switches them off,
    where there can be no signals."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def same(pred, gold):
    """math-verify's verdict, but without its tolerance for very small and very large numbers, and
    with i as the imaginary unit."""
    seconds = limit()
    golds, preds = read(gold, seconds), read(pred, seconds)
    if not golds or not preds:
        return False
    a, b = golds[0], preds[0]
    expressions = isinstance(a, Expr) and isinstance(b, Expr)
    if verify(golds, preds, timeout_seconds=seconds):
        if expressions and a.is_number and b.is_number and "%" not in pred + gold:
            return bool(abs(a - b).n(30) <= 2e-6 * abs(a).n(30))
        return True
    if not isinstance(a, Basic) or not isinstance(b, Basic):
        return False
    if "i" not in {symbol.name for x in (a, b) for symbol in x.free_symbols}:
        return False
    a, b = (x.subs({symbol: I if symbol.name == "i" else Symbol(symbol.name, real=True)
                    for symbol in x.free_symbols}) for x in (a, b))
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
                or bool(read(expand(text), limit())))
    except (Exception, TimeoutException):
        return False


def readable(gold):
    """Does a gold answer parse, and equal itself by more than its letters? Never raises.

    data.load asks it of every gold answer."""
    try:
        text, _ = clean(gold)
        if not parses(gold):
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
        return len(str(pred)) <= 2000 and same_answer(*clean(pred), *clean(gold))
    except (Exception, TimeoutException):
        return False


def same_answer(pred, pred_unit, gold, gold_unit):
    """Are two answers, as `clean` gives them, the same?"""
    if pred_unit and gold_unit and pred_unit != gold_unit or not pred or not gold:
        return False
    x, y = number(pred.rstrip("% ")), number(gold.rstrip("% "))
    if x is not None and y is not None:
        return same_number(pred, x, gold, y)
    if tight(pred) == tight(gold):
        return True
    if (x is None) != (y is None):
        # One is a number. math-verify may overlook a name in the other.
        formula = re.sub(r"\\[A-Za-z]+|^[^=]*=", "", pred if x is None else gold)
        if re.search("[A-DF-HJ-Za-df-hj-z]", formula):
            return False
    if is_word(pred) or is_word(gold) or words(pred) - words(gold):
        return False  # math-verify takes words for products of letters.
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
    pred_ranges, gold_ranges = intervals(pred), intervals(gold)
    if pred_ranges and gold_ranges:
        return pred_ranges[0] == gold_ranges[0] and same(pred_ranges[1], gold_ranges[1])
    left, equals, _ = pred.rpartition("=")
    if equals and "=" not in gold and not re.search("[A-Za-z]", left) and not same(left, gold):
        return False  # 1 + 2 = 4 is not 4.
    if same(expand(pred), expand(gold)):
        return True
    return bool(pred_ranges or gold_ranges) and same(
        pred_ranges[1] if pred_ranges else pred, gold_ranges[1] if gold_ranges else gold)


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

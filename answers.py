"""Are two mathematical answers the same? Exact numbers first, then math-verify, then what that misses."""

import functools
import itertools
import logging
import re
import threading
from fractions import Fraction

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from sympy import Basic, Expr, I, Symbol, simplify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # or each timeout that is off is a warning

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
FRACTION = r"\\frac\{?(\d+)\}?\{?(\d+)\}?"
RELATION = r"\\leq?(?![a-z])|\\geq?(?![a-z])|<=|>=|<|>"
MATH_WORDS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sqrt", "max", "min", "gcd",
              "lcm", "mod", "and", "frac", "det", "deg", "cup", "cap", "infty"}
UNITS = {alias: names.split()[0] for names in (  # a closed list: elsewhere letters after a number are a product
    "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "in inch", "ft foot feet", "yd yard", "mi mile",
    "mg milligram", "g gram", "kg kilogram", "lb pound", "oz ounce", "s sec second", "min minute", "h hr hour", "day", "week", "month", "year yr",
    "ml milliliter millilitre", "l liter litre", "dollar usd", "cent", "euro", "yuan", "rad radian", "degree deg", "unit", "hz", "kg/m", "m/s", "km/h", "mph")
    for alias in names.split()}
NOT_UNITS = {"million", "thousand", "hundred", "billion", "dozen", "half", "not", "mod", "factorial", "percent", "percentage", "pct", "and", "times"}


def last_boxed(text):
    """The content of the complete \\boxed{...} that begins last in a text, braces balanced; None without one."""
    begins = {m.end() for m in re.finditer(r"\\boxed\s*\{", text)}
    still_open, last = [], None
    for brace in re.finditer(r"\\.|[{}]", text, re.S):  # \{ is a brace to be read, not one that groups
        if brace[0] == "{":
            still_open.append(brace.end())
        elif brace[0] == "}" and still_open:
            start = still_open.pop()
            if start in begins and (last is None or start > last[0]):
                last = start, brace.start()
    return text[slice(*last)] if last else None


def clean(text):
    """-> an answer without its wrapping (dollars, \\boxed, \\text, spacing, degree signs, final stops), and its unit with the
    power, None where it has none: '$15\\text{ cm}^2$.' -> '15', ('cm', '2')."""
    text = re.sub(r",\\!\s*", ",", str(text)[:2000])
    for old, new in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\left", ""), ("\\right", ""), ("\\$", ""), ("$", ""), ("{,}", ","),
                     ("\u2208", "\\in "), ("\u2212", "-"), ("\\(", ""), ("\\)", ""), ("\\[", ""), ("\\]", ""), ("\\geqslant", "\\geq"),
                     ("\\leqslant", "\\leq"), ("\\%", "%"), ("\\mp", "\\pm"), ("\\!", ""), ("\\varnothing", "\\emptyset")):
        text = text.replace(old, new)
    if text.count("\\boxed") == 1:  # of several, math-verify makes a set
        text = last_boxed(text) or text
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\u00b0", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~", " ", text).strip().rstrip(".,;").strip()
    text, unit = split_unit(text)
    text = re.sub(r"\\(?:text|mbox|textnormal|textbf|mathrm|operatorname|rm)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(r" *\b(?:percent(?:age)?|pct)\b", "%", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text.strip())
    return re.sub(r"^\+ *", "", text).strip().rstrip(".").strip(), unit


def split_unit(text):
    """'10 cm^2' -> '10', ('cm', '2'). A bare unit has to follow a digit; one in \\text may follow anything."""
    found = re.fullmatch(r"(.*?)(?:\\(?:text|textbf|mbox|textnormal|mathrm|rm) *\{ *(?:square )?([A-Za-z/]+) *\.?\}|(?<=\d) *(?:square )?([A-Za-z/]+))(?: *\^ *\{? *(\d) *\}?)?", text, re.S)
    if not found or not found[1].strip():
        return text, None
    name = (found[2] or found[3]).lower()
    name = UNITS.get(name) or UNITS.get(name.removesuffix("s")) or UNITS.get(name.removesuffix("es"))
    if not name and found[2] and number(found[1].strip()) is not None and len(found[2]) > 2 and found[2].lower() not in NOT_UNITS:
        name = found[2].lower()  # 5\\text{ apples}
    return (found[1].strip(), (name, found[4] or "1")) if name else (text, None)


def number(text):
    """The exact value of a number as people write it (1e5, 4.5 \\times 10^{33}, 1,000, 3/4, \\frac{3}{4}, 1 1/2), else None."""
    if len(text) > 1000:
        return None
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?|[-+]?\d{1,3}(?: \d{3})+", text):
        text = re.sub("[, ]", "", text)
    if power := re.fullmatch(rf"({NUMBER}) *(?:[eE]|(?:\\times|\\cdot|\*|x) *10 *(?:\^|\*\*) *)\{{? *([-+]?\d{{1,3}}) *\}}?", text):
        return Fraction(power[1]) * Fraction(10) ** int(power[2])
    if re.fullmatch(NUMBER, text):
        return Fraction(text)
    if mixed := re.fullmatch(rf"(-?) *(?:(\d+)(?: +| *(?=\\)))?(?:(\d+) *\.? */ *(\d+)|{FRACTION})", text):
        top, bottom = (int(x) for x in (mixed[3] or mixed[5], mixed[4] or mixed[6]))
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
    """'x = 3 \\pm 1' -> '4, 2' in LaTeX; what has no \\pm and no name in front stays as it is."""
    text = re.sub(r"^[a-zA-Z] *= *(?=.*(?:\\pm|,))", "", text) if text.count("=") == 1 else text
    done = []
    for item in items(text):
        pieces = item.split("\\pm")
        signs = itertools.product("+-", repeat=len(pieces) - 1) if len(pieces) < 5 else [["\\pm"] * (len(pieces) - 1)]
        done += ["".join(itertools.chain.from_iterable(itertools.zip_longest(pieces, s, fillvalue=""))) for s in signs]
    return ", ".join(done)


def intervals(text):
    """'x < -2 or -1 < x' -> 'x', '(-\\infty,-2)\\cup(-1,\\infty)'; None where the text is no list of inequalities in one name."""
    if not re.search(RELATION, text):
        return None
    union, names = [], set()
    for part in re.split(r"\\vee|\\lor(?![a-z])|\bor\b|,", text):
        bounds = dict(lower=("-\\infty", "("), upper=("\\infty", ")"))
        for clause in re.split(r"\\wedge|\\land(?![a-z])|\band\b", part):
            terms = re.split(f"({RELATION})", clause)
            sides, signs = [t.strip() for t in terms[::2]], terms[1::2]
            if len(sides) not in (2, 3) or sum(bool(re.fullmatch("[a-zA-Z]", s)) for s in sides) != 1:
                return None
            name = next(i for i, s in enumerate(sides) if re.fullmatch("[a-zA-Z]", s))
            names.add(sides[name])
            for i, sign in enumerate(signs):
                other = sides[i + 1] if i == name else sides[i] if i + 1 == name else None
                if other is None:
                    return None
                below = ("<" in sign or "\\l" in sign) == (i + 1 == name)  # the other side is the lower bound
                closed = "=" in sign or "\\" in sign
                bounds["lower" if below else "upper"] = (other, ("[" if below else "]") if closed else ("(" if below else ")"))
        (low, left), (high, right) = bounds["lower"], bounds["upper"]
        union.append(f"{left}{low},{high}{right}")
    return (names.pop(), "\\cup".join(union)) if len(names) == 1 else None


@functools.lru_cache(maxsize=1024)  # a gold answer is read once for its whole group
def read(text, seconds):
    return parse(f"\\boxed{{{text}}}", parsing_timeout=seconds)


def limit():
    """Seconds for math-verify's timeouts, which are signals: None, that is off, where there can be no signals."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def same(pred, gold):
    """math-verify's verdict, without its tolerance for very small and very large numbers, and with i as the imaginary unit."""
    seconds = limit()
    golds, preds = read(gold, seconds), read(pred, seconds)
    if not golds or not preds:
        return False
    a, b = golds[0], preds[0]
    if verify(golds, preds, timeout_seconds=seconds):
        if isinstance(a, Expr) and isinstance(b, Expr) and a.is_number and b.is_number and "%" not in pred + gold:
            return bool(abs(a - b).n(30) <= 2e-6 * abs(a).n(30))
        return True
    if not all(isinstance(x, Basic) for x in (a, b)) or "i" not in {s.name for x in (a, b) for s in x.free_symbols}:
        return False
    a, b = (x.subs({s: I if s.name == "i" else Symbol(s.name, real=True) for s in x.free_symbols}) for x in (a, b))
    return verify([a], [b], timeout_seconds=seconds) or isinstance(a, Expr) and isinstance(b, Expr) and simplify(a - b) == 0


def is_word(text):
    """Words, or letters that are a name (ABC): compared as they stand, not as a product."""
    return bool(re.fullmatch(r"[^\W\d_]+(?:[ -][^\W\d_]+)*", text)) and (max(map(len, text.split())) > 2 or not text.islower())


def words(text):
    """The bare words of a text that are neither functions nor a LaTeX environment's name."""
    return set(re.findall(r"(?<![A-Za-z\\])[A-Za-z]{3,}(?![A-Za-z])", re.sub(r"\\(?:begin|end) *\{\w+\}", "", text))) - MATH_WORDS


def parses(gold):
    """Is a gold answer a number, a word, or something of which math-verify reads any? Never raises."""
    text, _ = clean(gold)
    if gold is None or text.count("{") != text.count("}") or str(gold).replace("\\$", "").count("$") % 2:
        return False
    try:
        return number(text.rstrip("% ")) is not None or is_word(text) or bool(read(expand(text), limit()))
    except (Exception, TimeoutException):
        return False


def readable(gold):
    """Does a gold answer parse, and equal itself by more than its letters? What data.load asks. Never raises."""
    try:
        text, _ = clean(gold)
        return parses(gold) and (number(text.rstrip("% ")) is not None or is_word(text) or same(expand(text), expand(text))
                                 or bool(ranges := intervals(text)) and same(ranges[1], ranges[1]))
    except (Exception, TimeoutException):
        return False


def tight(text):
    """Without spaces, but for those between digits; words in small letters."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", text)
    return text.lower() if re.fullmatch("[A-Ea-e]|[^\\W\\d_]{2,}", text) else text


def equal(pred, gold):
    """Are two bare answers the same? Numbers are compared exactly; a decimal of six digits or more may round a
    fraction that has no end. Never raises."""
    try:
        return len(str(pred)) <= 2000 and same_answer(*clean(pred), *clean(gold))
    except (Exception, TimeoutException):
        return False


def same_answer(p, one, g, other):
    if one and other and one != other or not p or not g:
        return False
    x, y = number(p.rstrip("% ")), number(g.rstrip("% "))
    if x is not None and y is not None:
        if "%" in p + g:  # 28% is 28 and 0.28
            return x == y or not ("%" in p and "%" in g) and (x * 100 == y if "%" in g else x == y * 100)
        return x == y or rounds(p, x, y) or rounds(g, y, x)
    if tight(p) == tight(g):
        return True
    if (x is None) != (y is None):  # a number against something with a name in it, which math-verify may overlook
        other = re.sub(r"\\[A-Za-z]+|^[^=]*=", "", p if x is None else g)
        if re.search("[A-DF-HJ-Za-df-hj-z]", other):
            return False
    if is_word(p) or is_word(g) or words(p) - words(g) or re.search(r"\\[lc]?dots|\.\.\.|\u2026", p + g):
        return False  # words are not products of letters; a pattern is not its parts, as math-verify has it
    based, base = (re.fullmatch(r"([0-9A-Fa-f]+)_\{?(\d+)\}?", t) for t in (p, g))
    if based or base:  # math-verify overlooks the base
        return (based[1] if based else p) == (base[1] if base else g) and not (based and base and based[2] != base[2])
    if p[0] in "([" and g.startswith("\\{") or g[0] in "([" and p.startswith("\\{"):
        return False  # a tuple is no set
    ranges, wanted = intervals(p), intervals(g)
    if ranges and wanted:
        return ranges[0] == wanted[0] and same(ranges[1], wanted[1])
    left, equals, _ = p.rpartition("=")
    if equals and "=" not in g and not re.search("[A-Za-z]", left) and not same(left, g):
        return False  # 1 + 2 = 4 is not 4
    return same(expand(p), expand(g)) or bool(ranges or wanted) and same(ranges[1] if ranges else p, wanted[1] if wanted else g)


def found_in(text, gold):
    """Does math-verify find the gold answer in a whole response, boxed or not? Never raises."""
    try:
        seconds = limit()
        return verify(read(clean(gold)[0], seconds), parse(text, parsing_timeout=seconds), timeout_seconds=seconds)
    except (Exception, TimeoutException):
        return False


def rounds(text, value, other):
    """Is `text` the decimal of at least six digits that `other`, a fraction without an end, is rounded to?"""
    digits = re.fullmatch(r"[-+]?(\d*)\.(\d+)(.*)", text)
    rest = other.denominator
    for p in (2, 5):
        while rest % p == 0:
            rest //= p
    if rest == 1 or not digits or len((digits[1] + digits[2]).lstrip("0")) < 6 or not value:
        return False
    unit = Fraction(1, 10 ** len(digits[2])) * abs(value / Fraction(f"{digits[1]}.{digits[2]}"))
    return abs(value - other) <= unit / 2

"""Are two mathematical answers the same? Exact numbers, then math-verify, then what it misses."""

import functools
import itertools
import logging
import re
import threading
from fractions import Fraction

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.errors import TimeoutException
from math_verify.grader import should_treat_as_complex
from math_verify.utils import timeout
from sympy import Expr, FiniteSet, MatrixBase, Rational, Tuple
from sympy.concrete.expr_with_limits import ExprWithLimits

from graders import Hedge, UnparsedGold
from graders.answers import (
    EQUALS,
    LONGEST,
    NAME,
    THOUSANDS,
    amount,
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

# Otherwise it warns whenever a timeout is switched off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

RELATION = r"\\leq?(?![a-z])|\\geq?(?![a-z])|<=|>=|<|>"
CONDITION = r"^(?=.*, ([A-Za-z]) \\in \\mathbb\{(\w)\}$)(.*\1.*), \1 .*"
# The single letters of a text with their numbers, apart from commands and words.
LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]{3,}(?![A-Za-z_^(])|\b(?:and|or)\b"
                     r"|([A-Za-z](?:_\{[0-9]+\})?)")


# ------------------------------------------------------------------ several values

def expand(text):
    """'3 \\pm 1, 7' -> '3 + 1, 3 - 1, 7'. Of more than four \\pm all stay."""
    if text.count("\\pm") > 4:
        return text
    if inside := re.fullmatch(r"\\\{((?!.*\\\{).*)\\\}", text, re.S):
        return f"\\{{{expand(inside[1])}\\}}"
    values = items(text)
    for _ in range(text.count("\\pm")):
        values = [value.replace("\\pm", sign, 1) for value in values
                  for sign in ("+-" if "\\pm" in value else "+")]
    return ", ".join(values)


def as_interval(text):
    """'x < -2 or -1 < x \\leq 2' -> '(-\\infty,-2)\\cup(-1,2]', 'x'; text, None of other texts."""
    ranges = []
    bare = re.sub(r"^\\\{ *\w+ *(?:\\in *\\mathbb\{R\})? *(?:\\mid|:|\|) *(.*)\\\}$", r"\1", text)
    bare, *holes = re.split(r",? *(?:\\land|\\wedge|\band\b|,) *([a-z]) *\\neq *", bare)
    names = {*holes[::2]}
    for part in re.split(r"\\vee|\\lor(?![a-z])|\bor\b|,", bare):
        ends = {}  # True: what it is less than. False: what it is greater than.
        for clause in re.split(r"\\wedge|\\land(?![a-z])|\band\b", part):
            terms = re.split(rf"\s*({RELATION})\s*", clause.strip())
            for left, sign, right in zip(terms[::2], terms[1::2], terms[2::2]):
                less, closed = "<" in sign or "\\l" in sign, "=" in sign or "\\" in sign
                if NAME.fullmatch(right):
                    left, right, less = right, left, not less
                if not NAME.fullmatch(left) or NAME.fullmatch(right) or not right or less in ends:
                    return text, None
                names.add(left)
                ends[less] = right + ")]"[closed] if less else "(["[closed] + right
        ranges.append(ends.get(False, "(-\\infty") + "," + ends.get(True, "\\infty)"))
        if len(terms) < 3 or len(names) > 1:
            return text, None
    return "\\setminus".join(["\\cup".join(ranges), *(f"\\{{{x}\\}}" for x in holes[1::2])]), *names


# ------------------------------------------------------------------ math-verify

LISTED = True, True  # as the ends of an interval that has neither
OF_INTEGERS = sympy.floor, sympy.ceiling, sympy.factorial, sympy.Mod
POWERS = sympy.Pow, sympy.factorial, sympy.binomial
ENDLESS = sympy.oo, -sympy.oo, sympy.zoo, sympy.nan, sympy.AccumBounds
WITH_CASE = ConversionConfig(lowercase_symbols=False)  # R and r are two names
AS_LATEX = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")  # boxes: ours


@functools.lru_cache(maxsize=1024)  # A gold answer is read once for its whole group.
def read(text):
    """-> the value of an answer, or its text if it is no LaTeX or has none. math-verify's own
    reader would take a number from a text that is none. The parser has no names e_1, gamma."""
    if text.endswith("}") and text.count("}") > text.count("{"):
        text = text[:-1]
    if "," not in text and (value := number(text)) is not None:
        return Rational(value)
    text = re.sub(r"(?<![A-Za-z]{2})([eE])(?=_)|\\(g)amma(?![A-Za-z])", r"\\mathfrak{\1\2}", text)
    text = re.sub("([0-9]{1,3})!!", lambda m: str(sympy.factorial2(int(m[1]))), text)
    latex = normalize_latex(text, AS_LATEX)
    ends = re.fullmatch(r"[(\[](.*,.*)[)\]]", text) if re.search(r"[!^]|binom", text) else None
    if ends and any(isinstance(read(end), str) for end in items(ends[1])):
        return latex  # The parser would compute which end of an interval is larger.
    try:
        value = latex2sympy(latex, is_real=not should_treat_as_complex(latex),
                            convert_degrees=False, normalization_config=None,
                            conversion_config=WITH_CASE)
    except Exception:  # whatever the parser says
        return latex
    if not is_value(value) or value is sympy.EmptySet and "," in text:  # (5, 3]
        return latex
    return plain(value) if isinstance(value, Expr) else value


def plain(value):
    """An expression as it is compared: i is the imaginary unit, other names are real, and so are
    functions and derivatives, which nothing is known of; decimals are exact."""
    opaque = value.atoms(sympy.core.function.AppliedUndef, sympy.Derivative) | value.free_symbols
    return value.xreplace(
        {number: Rational(str(number)) for number in value.atoms(sympy.Float)}
        | {name: sympy.I if str(name) == "i" else sympy.Symbol(str(name), real=True)
           for name in opaque})


def point(names, k):
    """Numbers for names. At the last two of the four points every other one is negative."""
    return {name: Rational(17 + 7 * i + 5 * k * k, 13 + 4 * i) * (-1 if k > 1 and (i + k) % 2
            else 1) for i, name in enumerate(sorted(names, key=str))}


def evaluated(value):
    """An expression at the first point."""
    value = plain(value)
    return value.xreplace(point(value.free_symbols, 0))


def digits(number):
    """60 of its digits. 0 where all that sympy finds, some 190 behind the point, cancel."""
    number = number.n(60)
    return sympy.S.Zero if max(part._prec for part in number.as_real_imag()) == 1 else number


def is_value(part):
    """Has an answer, as `read` gives it, a value that can be told? A part that is not finite, other
    than plus or minus infinity alone, has none, nor has a power of some 40,000 digits, nor a sum of
    terms above 1e20 times it, or above 1e20 where it is 0."""
    if isinstance(part, MatrixBase):
        return all(map(is_value, part.flat()))
    if not isinstance(part, Expr) or isinstance(part, ExprWithLimits):
        return all(map(is_value, part.args))
    if part.has(*ENDLESS):
        return part in ENDLESS[:2]
    for power in sympy.postorder_traversal(part):
        if isinstance(power, POWERS):
            base, exponent = (abs(evaluated(arg).n(5)) for arg in (power.args[0], power.args[-1]))
            if exponent * sympy.log(base + 1 / base if base else 1) > 1e5:
                return False
    number = evaluated(part).doit()
    return not number.has(*ENDLESS) and all(
        max(abs(digits(term)) for term in node.args) <= 1e20 * (abs(digits(node)) or 1)
        for node in number.atoms(sympy.Add) if node.is_number)


def close(a, b):
    """Are two real or complex numbers equal? Rational ones exactly, others to 1e-50 of their size,
    and their difference to 1e-50 of its terms: of 2^{1009} + \\sqrt{2} and 2^{1009}, \\sqrt{2}."""
    difference = (a - b).doit()
    if difference.is_Rational or difference.is_infinite:
        return difference == 0
    terms = [abs(digits(term)) for term in sympy.Add.make_args(difference)]
    a, b = digits(a), digits(b)
    return bool(abs(digits(difference)) <= 1e-50 * max(terms)
                and abs(a - b) <= 1e-50 * max(abs(a), abs(b)))


def agree(a, b):
    """Have two expressions the same value where their names are numbers? None where that does not
    tell: a root or a logarithm may have several values."""
    both = Tuple(a, b)
    names = sorted(both.free_symbols, key=str)
    if not names or both.has(ExprWithLimits):
        return None
    for k in (*range(1, 13), 144) if both.has(*OF_INTEGERS) else ():
        values = both.subs({name: k * (i + 1) % 13 if i else k for i, name in enumerate(names)})
        if all(value.n(60).is_finite for value in values) and not close(*values):
            return False
    near = []
    roots = [f.args[0] for f in both.atoms(sympy.Pow, sympy.log)
             if not f.args[-1].is_integer and not a.has(sympy.Abs)]
    for k in range(4):
        place = point(names, k)
        values = both.subs(place)
        x, y = (value.n(60) for value in values)
        if not x.is_finite or not y.is_finite or k < 2 and not x.is_real and not a.has(sympy.I):
            return None
        equal = close(*values)
        if equal or k < 2 or not any(x.subs(place).n().is_negative for x in roots):
            near.append(equal)
    return None if near[0] and not all(near) else near[0]


def same(pred, gold):
    """Have two texts the same value?"""
    return len(pred) + len(gold) <= 4000 and alike(read(expand(gold)), read(expand(pred)))


def alike(a, b):
    """Have two answers, as `read` gives them, the same value? Sums that math-verify would simplify
    for seconds are compared at points, and sets, tuples and matrices part by part."""
    if a == b or isinstance(a, str) or isinstance(b, str):
        return a == b
    if isinstance(a, Expr) and isinstance(b, Expr):
        a, b = plain(a), plain(b)
        if (verdict := agree(a, b)) is not None:
            return verdict
        if a.is_number and b.is_number and not (a + b).has(sympy.UnevaluatedExpr):  # a percentage
            return close(a, b) or rounds(a.doit(), b.doit())
        sizes = [max(abs(x.p), x.q) for x in (a - b).doit().atoms(Rational)]
        return max(sizes, default=0) < 10**99 and verify(a, b, timeout_seconds=None)  # It factors.
    (kind, x), (other, y) = entries(a), entries(b)
    if not kind or not other:  # 5 is no union of intervals, as verify would find in seconds
        is_one = (kind or other) == LISTED and isinstance(b if kind else a, sympy.Set)
        return not is_one and verify(a, b, timeout_seconds=None)
    if kind != other or len(x) != len(y):
        return False
    if isinstance(a, FiniteSet) and isinstance(b, FiniteSet):
        return all(any(alike(p, q) for q in y) for p in x) and all(
            any(alike(p, q) for p in x) for q in y)
    return all(map(alike, x, y))


def entries(value):
    """-> what equal values have in common, and the entries of a matrix, an interval, a set or a
    tuple; an expression is its only one. (1, 2) is read as an open interval. None of others."""
    if isinstance(value, MatrixBase):
        return value.shape, value.flat()
    if isinstance(value, sympy.Interval):
        return value.args[2:], value.args[:2]
    if isinstance(value, FiniteSet | Tuple):
        return LISTED, getattr(value, "_unsorted_args", value.args)
    single = isinstance(value, Expr) and not isinstance(value, sympy.MatrixExpr)
    return (LISTED, [value]) if single else (None, None)


def same_equation(pred, gold):
    """Have two equations the same sides, or is one a multiple of the other? math-verify would call
    any two equal that it cannot solve. x = 5 is a value, and 2x = 10 is a question."""
    sides, gold_sides = re.split(EQUALS, pred), re.split(EQUALS, gold)
    if not len(sides) == len(gold_sides) == 2:
        return False
    if any(all(map(same_answer, order, gold_sides)) for order in (sides, sides[::-1])):
        return True
    values = [read(side.strip()) for side in sides + gold_sides]
    if foreign(pred, gold) or not all(isinstance(value, Expr) for value in values):
        return False
    a, b = values[0] - values[1], values[2] - values[3]
    if len(b.free_symbols) < (2 if NAME.fullmatch(gold_sides[0].strip()) else 1):
        return False
    ratio = sympy.simplify(a / b)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


# ------------------------------------------------------------------ equality

SECONDS = 30  # by the clock, for one question; data.load's workers have 60 for a gold answer


def limited(question):
    """A question on answers that is False after SECONDS, or where it raises an exception. The limit
    is a signal, and so the main thread's alone."""
    @functools.wraps(question)
    def within(*answers):
        in_main = threading.current_thread() is threading.main_thread()
        try:
            return timeout(SECONDS if in_main else None)(question)(*answers)
        except (Exception, TimeoutException):
            return False
    return within


@functools.lru_cache(maxsize=1024)
@limited
def readable(gold):
    """Is a gold answer a number, a word, or equal to itself by more than its letters?"""
    text, _ = clean(str(gold).rpartition("####")[2])
    dollars = str(gold).replace("\\$", "").count("$")
    if text.count("{") != text.count("}") or dollars % 2 or text.lower().lstrip("-") in (
            "", "nan", "inf"):
        return False
    text, _ = as_interval(text)
    return amount(text) is not None or is_word(text) or same(text, text)


@limited
def equal(pred, gold):
    """Are two bare answers the same, and their units? Numbers are compared exactly; a decimal of
    six digits or more may round a fraction that has no end."""
    pred, gold = str(pred), str(gold).rpartition("####")[2]  # as GSM8K has it
    if len(pred) > LONGEST or len(gold) > LONGEST:
        return False
    (text, unit), (gold_text, gold_unit) = clean(pred), clean(gold)
    said, told = re.match(CONDITION, text), re.match(CONDITION, gold_text)
    # 6m may be a product: a unit that nobody marked is no more optional than a name.
    needed = unit or re.search(r"[0-9] ?[A-Za-z]{1,2}\W*$", gold)
    if gold_unit and unit != gold_unit and needed:
        return False
    if (unit or gold_unit) and ("%" in text) != ("%" in gold_text):  # 540% and 5.4 cents
        return False
    if said and told and said[2] != told[2]:  # k of the integers, and of the natural numbers
        return False
    if len(text) == 1 and choice(gold_text)[0]:
        text = text.upper()
    bound = {said[1]: told[1], told[1]: said[1]} if said and told else {}
    text, gold_text = (re.sub(CONDITION, r"\3", t) for t in (text, gold_text))
    pairs = [(text, gold_text)]
    if not re.search(r"[(\[{][^()\[\]{}]*,", f"{text} {gold_text}"):  # 12,000\pi
        pairs.append((THOUSANDS.sub("", text), THOUSANDS.sub("", gold_text)))
    return any(same_answer(LETTERS.sub(lambda m: names.get(m[1], m[0]), a), b)
               for a, b in dict.fromkeys(pairs) for names in renamings(a, b, bound))


def renamings(pred, gold, bound):
    """-> dicts, the ways to name the letters of an answer as the gold answer's: all have `bound`.
    The constants of integration C, c, K, with numbers or without, are renamed where a function of
    t, u, x, y or z is linear in them, and change places where it has no other name."""
    mine, its = (sorted({c for c in LETTERS.findall(text) if c[:1] in ("c", "C", "K")})
                 for text in (pred, gold))
    value = read(gold.rpartition("=")[2].strip()) if its else None
    names = value.free_symbols if isinstance(value, Expr) else set()
    found = [name for name in names if name.name.split("_")[0] in ("c", "C", "K")]
    if len(mine) != len(its) or not found or not {*"tuxyz"} & {*LETTERS.findall(gold)} or any(
            sympy.diff(value, a, b) for a in found for b in found):
        return [bound]
    orders = itertools.permutations(its) if len(names) - len(found) < 2 else [its]
    return [bound | dict(zip(mine, order)) for order in orders]


def same_answer(pred, gold):
    """Are two answers, as `clean` gives them, the same?"""
    if not pred or not gold:
        return False
    pred = exact(pred)
    x, y = amount(pred), amount(gold)
    if x is not None and y is not None:
        return same_number(pred, x, gold, y)
    if y is not None and len(named(pred)[1]) == gold.count(",") + 1 > 1:
        gold = gold.replace(",", ", ")  # 30,150 is also a list
    (letter, said), (gold_letter, gold_said) = choice(pred), choice(gold)
    if letter and gold_letter:
        return letter == gold_letter and (not said or not gold_said or same_answer(said, gold_said))
    if "matrix}" in gold and re.fullmatch(r"[(\[].*,.*[)\]]", pred):  # the entries of a column
        pred = "\\begin{pmatrix}" + r" \\ ".join(items(pred[1:-1])) + "\\end{pmatrix}"
    if tight(pred) == tight(gold) or same_equation(pred, gold):
        return True
    (pred, name), (gold, gold_name) = as_interval(pred), as_interval(gold)
    if not name and (verdict := without_names(pred, gold)) is not None:
        return verdict
    if base := re.fullmatch(r"([0-9][0-9A-F]*)_\{\d+\}", gold):
        return pred == base[1]
    kinds = {"tuple" if t[0] in "([" and len(items(t)) == 1 and "\\cup" not in t else t[:2]
             for t in (pred, gold)}
    # math-verify compares no more than the parts of a pattern, and takes a tuple for a set.
    return not (
        name and gold_name and name != gold_name or foreign(pred, gold)
        or re.search(r"\\[lc]?dots|\.\.\.|\u2026|\\gcd|\\lcm|\\pmod", pred + gold)
        or kinds == {"tuple", "\\{"}
        or gold.count("=") < 2 and re.search(EQUALS, f"{pred},{gold}")) and same(pred, gold)


def exact(text):
    """'\\sqrt{17} \\approx 4.12' -> '\\sqrt{17}', where the decimal is right."""
    left, _, right = (part.strip() for part in text.partition("\\approx"))
    if not left or not right or NAME.fullmatch(left):
        return right or left
    decimal = re.fullmatch(r"-?[0-9]+(?:\.([0-9]+))?", right)
    value = left.rpartition("=")[2].strip()
    is_right = decimal and is_closed(value) and 2 * abs(
        read(value) - number(right)) <= Fraction(1, 10 ** len(decimal[1] or ""))
    return left if is_right else text


def without_names(pred, gold):
    """The verdict on answers of which one has names before its values, as in x = 5; None where the
    names do not tell, as in two equations."""
    (names, values, claims), (gold_names, gold_values, gold_claims) = named(pred), named(gold)
    if gold_claims or not (names or claims or gold_names):
        return None
    bare = {re.sub(r"_\{[0-9]+\}", "", name) for name in names + gold_names}
    if len(bare) == 1 and bare in ({*names}, {*gold_names}) and len(names + gold_names) > 2:
        names = gold_names = []  # x_1 = 2, x_2 = 3 are values of x
    if names and gold_names:
        if sorted(names) != sorted(gold_names) or {len(values), len(gold_values)} != {len(names)}:
            return None
        _, values = zip(*sorted(zip(names, values)))
        _, gold_values = zip(*sorted(zip(gold_names, gold_values)))
    elif gold_names and is_word(gold_values[-1]):  # MR = SRMC
        return None
    form = "({})" if len({*gold_names}) == len(gold_values) > 1 else "{}"
    return all(same_answer(*claim) or same(*claim) for claim in claims) and same_answer(
        form.format(", ".join(values)), form.format(", ".join(gold_values)))


def foreign(pred, gold):
    """Has an answer a word or an operation left to do that the gold answer has not, a letter that
    it has in the other case alone, other primes, or names where it is a number or the reverse?"""
    numeric = amount(pred) is not None or amount(gold) is not None
    ignored = r"_\{[^{}]*\}" + "|^[^=]*=" * numeric
    letters, gold_letters = (set(re.findall(r"\\[A-Za-z]+|[A-Za-z]", re.sub(ignored, "", t)))
                             for t in (pred, gold))
    strange = {word for word in words(pred) - words(gold)
               if not {*word} <= {*LETTERS.findall(gold)}}  # RCs is a product
    return (is_word(pred) or is_word(gold) or strange or unfinished(pred, gold)
            or {c.lower() for c in letters - gold_letters} & {c.lower() for c in gold_letters}
            or pred.count("\\prime") != gold.count("\\prime")
            or numeric and any(len(c) == 1 for c in (letters | gold_letters) - set("eEiI")))


def refuse(pred, gold):
    """Raises UnparsedGold, or Hedge where a wrong answer has more candidates than the gold answer,
    a relation, or an operation that is left to do."""
    if not readable(gold):
        raise UnparsedGold(gold)
    (pred, _), (gold, _) = clean(pred[:LONGEST]), clean(gold)
    several = rf",|;|\\pm|\b(?:or|and)\b|\\cup|\\boxed|{RELATION}"
    if amount(pred) is None and not is_word(pred) and (
            len(re.findall(several, pred)) > len(re.findall(several, gold))
            or named(pred)[2] and "=" not in gold or unfinished(pred, gold)):
        raise Hedge(pred)


def same_number(pred, x, gold, y):
    """Are two answers, which are the numbers x and y, the same?"""
    if re.search(":[0-9]{2}(?![0-9])", f"{pred} {gold}"):  # a clock time is not reduced
        return x == y and re.findall("[1-9][0-9]*", pred) == re.findall("[1-9][0-9]*", gold)
    if ("%" in pred) != ("%" in gold):  # 28% is 28 and 0.28.
        return x in (y, y / 100 if "%" in gold else y * 100)
    return x == y or rounds(x, y)


def places(number):
    """How many digits a rational number has behind the point; None where they have no end."""
    q = int(getattr(number, "denominator", 0))
    k = max(sympy.multiplicity(prime, q) for prime in (2, 5)) if q else 0
    return k if q and 10**k % q == 0 else None


def rounds(x, y):
    """Is one of two numbers the other, whose digits have no end, rounded to six digits or more?"""
    for decimal, other in (x, y), (y, x):
        k = places(decimal)
        if k and places(other) is None and abs(decimal) * 10**k >= 10**5:
            half_units = 2 if abs(decimal) * 10**k >= 10**15 else 1  # a float's last digit is off
            return bool(2 * abs(decimal - other) * 10**k <= half_units)
    return False



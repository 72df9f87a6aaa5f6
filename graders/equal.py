"""Are two mathematical answers the same? One table of RULES for two typed values (answer.read).

Expressions are compared at points. A value is a Fraction where it is rational, else a number of
mpmath with 120 digits, of which 80 count.
"""

import itertools
import math
import operator
import random
import re
from fractions import Fraction

import mpmath

from graders import Unparsed, UnparsedGold
from graders.answer import UNITS, WORDS, cached, inside, listed, negative, num, read, replaced, unit

mp = mpmath.mp.clone()
mp.dps = 120
inexact = mp.convert  # of a Fraction
SAME = mp.mpf(10) ** -80  # two irrational values are equal to this part of their size
TINY = mp.mpf(10) ** -60  # from the end of a set of real numbers to the place behind it
CANCEL = 10 ** 20         # a sum whose terms are so many times larger has no value
BITS = 140_000            # of a power, some 40,000 digits; a larger one has no value
INFINITIES = {("const", "∞"): mp.inf, negative(("const", "∞")): -mp.inf}
COMPARE = {"<": operator.lt, "≤": operator.le, "≠": operator.ne}
TWO = r"(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})++(?!\.?[0-9])"  # 1,234 may be two numbers, 1,034 not
NO_VALUE = (ArithmeticError, ValueError, TypeError, RecursionError)


# ------------------------------------------------------------------ the value of an expression

def exact(*numbers):
    return all(isinstance(x, Fraction) for x in numbers)


def tidy(x, real):
    """A number without rounding: a Fraction if it is whole. real: a complex one is no value."""
    if isinstance(x, (int, Fraction)):
        if max(map(int.bit_length, x.as_integer_ratio())) > 2 * BITS:
            raise ArithmeticError("large")
        return Fraction(x)
    if not mp.isfinite(x):
        raise ArithmeticError("pole")
    if abs(x.imag) > SAME * abs(x):
        if real:
            raise ArithmeticError("complex")
        return x
    near = mp.nint(x.real)
    return Fraction(int(near)) if abs(x) < CANCEL and abs(x - near) < SAME * abs(x) else x.real


def add(a, b):
    if exact(a, b):
        return a + b
    a, b = inexact(a), inexact(b)
    total, (small, large) = abs(a + b), sorted((abs(a), abs(b)))
    if 0 < small < SAME * large or total < SAME * large > SAME * CANCEL:
        raise ArithmeticError("large")  # a term is lost, or large ones cancel and rounding is left
    return a + b if total > SAME * large else 0


def power(a, b):
    """a^b. A root of odd degree of a negative number is real."""
    if a and abs(b * mp.log(abs(a), 2)) > BITS:
        raise ArithmeticError("large")
    if exact(a, b) and b.denominator == 1:
        return a ** b.numerator
    if exact(b) and b.denominator % 2 and a == -abs(a):
        return (-1) ** b.numerator * mp.power(-a, b)
    return mp.power(a, b)


def natural(x):
    """A whole number that is small enough for factorials and binomials."""
    if x != int(x) or not 0 <= x <= 9000:
        raise ArithmeticError("large")
    return int(x)


def analytic(name):
    """A function of mpmath, 0 where that is rounding."""
    def of(x):
        found = mp.chop(getattr(mp, name)(x), tol=SAME) if abs(x) < CANCEL else mp.inf
        if abs(found) > 1 / SAME:  # beside a pole, but for rounding
            raise ArithmeticError("large")
        return found
    return of


INTEGER = {"floor": math.floor, "ceil": math.ceil,
           "factorial": lambda n: math.factorial(natural(n)),
           "factorial2": lambda n: math.prod(range(natural(n), 0, -2)),
           "binom": lambda n, k: math.comb(natural(n), natural(k))}
FUNCTIONS = {
    **{name: analytic(name.lower().replace("arc", "a")) for name in (*WORDS["FUNC"], "Gamma")},
    **INTEGER, "abs": abs, "ln": mp.log, "exp": lambda x: power(mp.e, x),
    "+": add, "*": operator.mul, "/": lambda a, b: a * b**-1, "^": power}
CONSTANTS = {"π": mp.pi, "e": mp.e, "i": mp.mpc(0, 1)}


def value(node, at=(), real=False):
    """The value of an expression with these numbers at its names. real: a complex value is none.
    Raises one of NO_VALUE: it has "none" of its kind, at a "pole", "complex", or too "large"."""
    match node:
        case ("num", number):
            return number
        case ("name", _) if node in at:
            return at[node]
        case ("const", name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ("word", _, inner) | ("()", inner):
            return value(inner, at, real)
        case ("f", name, *parts) | (("+" | "*" | "/" | "^") as name, *parts):
            given = [value(part, at, real) for part in parts]
            if name in FUNCTIONS:
                return tidy(FUNCTIONS[name](*given), real)
            seed = repr([name, *(mp.nstr(inexact(x), 50) for x in given)])  # f(x), gcd(m, n)
            return Fraction(random.Random(seed).randint(1, 10**9), 10007)
    raise ArithmeticError("none")


def tried(node, at=(), real=False):
    """The value of an expression, or why it has none."""
    try:
        return value(node, at, real)
    except NO_VALUE as e:
        return str(e)


@cached
def closed(node):
    """The value of an expression without names, or None."""
    found = tried(node)
    return None if isinstance(found, str) else found


@cached
def names_of(node):
    return frozenset(n for n in inside(node) if n[0] == "name")


@cached
def functions_of(node):
    """Its functions and constants. (-1)^n is a function of whole numbers."""
    return {n[1] for n in inside(node) if n[0] in ("f", "const")} | {
        "floor" for n in inside(node) if n[:2] == ("^", num(-1)) and names_of(n[2])}


def points(a, b, times=1):
    """Some tens of places {name: Fraction}, or `times` as many, where two expressions are compared:
    on both sides of 0, and of the numbers in them. Of functions of integers they are such: of n,
    not of x."""
    integers = sum(not functions_of(node).isdisjoint(INTEGER) for node in (a, b))
    names, draw = sorted(names_of((a, b))), random.Random(0)
    sizes = sorted({abs(x) for n in inside((a, b)) if n[0] == "num" for x in n[1].as_integer_ratio()
                    if 1 < abs(x) < 10**9})[:10] + [1000, 1_000_003]
    for k in range(times * (12 + 4 * len(sizes))):
        at = {}
        for name in names:
            size = sizes[k % len(sizes)] if k > 11 and draw.randint(0, len(names)) else 1
            x = size + Fraction(draw.randint(-900, 900), 907) if k % 2 else (
                size * Fraction(draw.randint(100, 1999), 997))
            if (k + 1) % 2 < (integers if name[1] not in [*"xyzt", "alpha"] else min(1, integers)):
                x = Fraction(round(6 * x if size == 1 else x))
            at[name] = x * (1 if k < 4 else draw.choice((1, -1)))
        yield at


def same_number(a, b):
    """Are two values equal? Rational ones exactly. None where one is none."""
    if isinstance(a, str) or isinstance(b, str):
        return None
    if exact(a, b):
        return a == b
    a, b = inexact(a), inexact(b)
    return abs(a - b) <= SAME * max(abs(a), abs(b))


@cached
def same_expression(a, b, times=1):
    """Have two expressions the same value, wherever both have one? Without names both must, but
    equal to itself is what is too large, infinite, or no sum."""
    if a == b and (names_of(a) or tried(a) == "large" or a in INFINITIES or a[0] not in "+*/^f"):
        return True
    if not names_of(a) or not names_of(b):
        return bool(same_number(tried(a), tried(b)))
    functions, equal = functions_of((a, b)), 0
    for at in points(a, b, times):
        found = [tried(node, at, "i" not in functions) for node in (a, b)]
        same = same_number(*found)
        if same is False or "abs" in functions and "complex" in found and found[0] != found[1]:
            return False  # |x| and \sqrt{x}
        equal += bool(same)
    few = times == 1 and 0 < equal < 3 and functions.isdisjoint(INTEGER)
    return same_expression(a, b, 10) if few else equal > 2


# ------------------------------------------------------------------ units and names

def units_of(node):
    return {name for name in names_of(node) if name[1][0] == " "}


def without_unit(node):
    """An expression with 1 for its units."""
    return replaced(node, dict.fromkeys(units_of(node), num(1)))


def label(node):
    """May it stand left of an equals sign? x, f(x), f^{-1}(x), P(A), AB^2, |AB|, \\sin 2A, a:b, a
    word, (x, y), or a quotient of such; but not x + y, 2x or x^2."""
    match node:
        case ("word", text, *_):
            return re.fullmatch("[A-Z]+|[A-Z][a-z]{2,}(?: [a-z]+)*", text) and (
                {*text.lower().split()}.isdisjoint(WORDS["NO NAMES"] + WORDS["DOUBTS"]))
        case ("/", *parts) | ("seq", _, parts):
            return all(map(label, parts))
        case ("*", ("^", _, ("num", -1)), _):
            return True
        case ("*", left, _):
            return label(left)
        case ("+" | "^" | "chain" | "∪" | "∖", *_):
            return False
    return node[0] == "f" and node[1] not in FUNCTIONS or names_of(node)


def bare(name):
    """A name without the number of a solution, x of x_1 and x_{1,2}, or its variable, y of y(x)."""
    match name:
        case ("name", text):
            return ("name", re.sub(r"_[\d,]+$", "", text))
        case ("*", function, ("()", ("name", variable))) if variable.islower():
            return function
    return name


def named(node):
    """x = 1, y = 1 + 1 = 2 -> [(x, 1), (y, 2)]. A value without a name has that of the last one, or
    None; y = 1 + 1 = 3 is its own value."""
    found, name = [], None
    for item in listed(node) if node[0] == "list" and not has_set(node) else [node]:
        sides = [*item[1]] if item[0] == "chain" and {*item[2]} <= {*"=≈"} else [item]
        if len(sides) == 2 and label(sides[1]) and not names_of(sides[0]) and (
                sides[1][0] == "f" or names_of(sides[1])):
            sides.reverse()  # 3 = x
        own = [*itertools.takewhile(label, sides[:-1])]
        if sides[-1] not in sides[:2] and {n[0] for n in inside(sides[0])} == {"+", "name"}:
            own = sides[:1]  # m + n = 64 + 9 = 73
        rest = sides[len(own):]
        if own:  # of x = y = 1 both
            name = ("=", *own) if own[1:] else own[0]
        if len(rest) > 1 and rounds(rest[-1], rest[-2], 1):
            del rest[-1]
        holds = all(alike(x, y) or same_expression(x, y) for x, y in itertools.pairwise(rest))
        last = rest[-1] if holds else item
        several = name and name[0] == last[0] == "seq" and len(name[2]) == len(last[2])
        found += zip(name[2], last[2]) if several else [(name, last)]
    return found


def put_together(pairs, order, kind):
    """One value; a sequence of those of several names, in an order of names or in their own; this
    kind, where y is before x or the name is one; of sequences where names come again, or pairs."""
    each, values = [*(order or dict(pairs))], [last for _, last in pairs]
    n = len(each)
    rows = [dict(pairs[i:i + n]) for i in range(0, len(pairs), n)]
    in_order = order or {name and name[1] for name in each} - {*"xyz"} or each == sorted(each)
    if n > 1 and in_order and all(len(row) == n for row in rows):
        values = [("seq", "()", tuple(row[name] for name in each)) for row in rows]
    elif 1 < n < len(pairs) and all(each):
        values = [("seq", "()", pair) for pair in pairs]
    return values[0] if len(values) == 1 else (kind, (), (*values,))


# ------------------------------------------------------------------ sets of real numbers

@cached
def has_set(node):
    """Is it, or has it, a set of real numbers that is no list, tuple or open interval?"""
    return any(n[0] in ("∪", "∖", "numbers", "∈", *COMPARE) or
               n[:2] in (("seq", "(]"), ("seq", "[)")) for n in inside(node))


@cached
def end(node):
    """A real number or an infinity. One with more digits than are compared is none."""
    x = INFINITIES.get(node) or value(without_unit(node))  # of a complex one mpf makes none
    if exact(x) and x.denominator > CANCEL**3:
        raise ArithmeticError("none")
    return mp.mpf(mp.nstr(inexact(x), 80))  # \sqrt{8}/2 and \sqrt{2} differ in the 120th


def unknown(side):
    """x of x, -x and |x|, else None."""
    while side[0] in ("f", "*") and side[1] in ("abs", num(-1)):
        side = side[2]
    return side if label(side) else None


def members(node, tests):
    """Those of some real numbers that are in a set. Of two relations with a comma between them both
    hold, if they can."""
    match node:
        case ("seq", "()" | "(]" | "[)" | "[]" as brackets, (low, high)) if end(low) < end(high):
            relations = tuple("<≤"[bracket in "[]"] for bracket in brackets)
            return members(("chain", (low, ("name", "x"), high), relations), tests)
        case ("set", _, items):
            return {*map(end, items)}
        case ("∪", *sets):
            return {x for item in sets for x in members(item, tests)}
        case ("∖", every, but):
            return members(every, tests) - members(but, tests)
        case ("numbers", "R"):
            return {*tests}
        case ("chain", (name, ("set", *_) as found), ("=",)) | (
                "chain", (name, found), ("∈",)) if label(name):
            return members(found, tests)
        case ("chain", sides, relations):
            return {x for x in tests if all(
                COMPARE.get(relation, operator.eq)(*(
                    end(replaced(side, {unknown(side): ("num", x)})) for side in pair))
                for relation, pair in zip(relations, itertools.pairwise(sides)))}
        case ("list", separators, items):
            found, *others = [members(item, tests) for item in items]
            for separator, other in zip(separators, others):
                both = found & other
                found = both if separator == "and" or both and separator == "," else found | other
            return found
    raise ArithmeticError("none")


# ------------------------------------------------------------------ the rules

def alike(a, b):
    """Are two typed values the same? a: of an answer, b: of the gold answer."""
    return next(verdict for rule in RULES if (verdict := rule(a, b)) is not None)


def same_answer(a, b):
    """Are two whole answers the same? (C) is C, c and (C) Plane, (D) 2 is 2, but not (D) 1."""
    match a, b:
        case ("choice" | "name", mine, *x), ("choice" | "name", its, *y) if its in "ABCDEFGHIJ":
            return mine.upper() == its and all(map(alike, filter(None, x), filter(None, y)))
        case (("choice", _, tuple(x)), y) | (x, ("choice", _, tuple(y))):
            return alike(x, y)
    return alike(a, b)


def conditions(a, b):
    """k\\pi, k \\in \\mathbb{Z} is n\\pi, n \\in \\mathbb{Z} and k\\pi,
    but not k\\pi, k \\in \\mathbb{N}."""
    match a, b:
        case ("where", x, name, numbers), ("where", y, gold_name, gold_numbers):
            return numbers == gold_numbers and alike(replaced(x, {name: gold_name}), y)
        case (("where", x, *_), y) | (x, ("where", y, *_)):
            return alike(x, y)


def words(a, b):
    """Words by their letters, small or not, without article; letters without spaces as products but
    for those that are a word or points: act is not cat, BA is not AB, yx is xy; A, B, D is ABD."""
    no_points = r"(?i:no|yes|true|false)|(?!.*\B[A-Z])...+"
    word = re.compile("[A-H]+|(?=...)(?:[A-Z]?[a-z]*[aeiou][a-z]+|[a-z]+[aeiou][a-z]*)")
    match a, b:
        case (("list", separators, items), ("word", text, *_)) | (
                ("word", text, *_), ("list", separators, items)) if set(text) <= {*"ABCDEFGH"}:
            return "or" not in separators and sorted(items) == [("name", x) for x in text]
        case ("word", x, *_), ("word", y, *_):
            mine, its = (t.lower() if re.fullmatch(no_points, t) else t for t in (x, y))
            return mine == its or (False if word.fullmatch(x) or word.fullmatch(y) else None)


def real_sets(a, b):
    """x > 2 is (2, \\infty) and ]2, \\infty[; x \\neq 4 is (-\\infty, 4) \\cup (4, \\infty)."""
    if not has_set((a, b)) or ("=",) in (a[-1], b[-1]):
        return None
    if a[0] != "chain" and b[0] == "list" and not has_set(b):
        return False
    parts = [part for n in inside((a, b)) if isinstance(n[0], tuple)
             for part in n if part[0] not in "list seq set ∪ ∖ numbers chain".split()]
    if len(parts) > 100 or len({*map(unknown, parts)} - {None}) > 1:
        return None
    # The same numbers are members, of all ends and those behind them.
    try:
        ends = {0} | {abs(end(part)) for part in parts if not unknown(part)} - {mp.inf}
        tests = {sign * (x + behind * (1 + x))
                 for x in ends for sign in (1, -1) for behind in (0, TINY)}
        found = members(a, tests)
        return found and found == members(b, tests) or None
    except NO_VALUE:
        return None


def equations(a, b):
    """x = 5 is 5; a = 2, b = 3 is (2, 3), by their names where both have them; y = 2x + 3 is
    2x - y + 3 = 0; m + n = 64 + 9 = 73 is 73, but m + n = 73 is not."""
    kinds = {item[0] for item in (*listed(a), *listed(b))}
    if "chain" not in kinds or a[:2] == b[:2] == ("seq", ""):  # rows of cases
        return None
    if a == b or same_equation(a, b) or (
            kinds == {"chain"} and not (
                has_set(b) and ("or" in a[1]) != ("or" in b[1])) and lists(a, b)):
        return True
    ours, theirs = named(a), named(b)
    if not all(any(bare(name) != name and "," not in name[1] for name in dict(pairs))
               for pairs in (ours, theirs)):  # x_1 is x, but a_5 is not a_6
        ours, theirs = ([(bare(name), last) for name, last in pairs] for pairs in (ours, theirs))
    names, its_names = dict(ours).keys(), dict(theirs).keys()
    both = any(names) and any(its_names)
    if both and names != its_names:
        return False
    ours = put_together(ours, both and its_names, "set" if any(names) else "list")
    theirs = put_together(theirs, its_names, "list")
    return (ours, theirs) != (a, b) and (
        alike(ours, theirs) or same_but_constants(ours, theirs, both))


def same_equation(a, b):
    """Have two equations, or inequalities, the same sides, or is one a multiple of the other?
    x = 5 is a value, and 2x = 10 is a question."""
    if not a[0] == b[0] == "chain" or a[2] != b[2]:
        return False
    if all(map(alike, a[1], b[1])):
        return True
    if a[2] != ("=",) or len(names_of(b)) <= any(map(label, b[1])):
        return False
    # Is the quotient of the differences one number, and not 0?
    quotient = ("/", *(("+", left, negative(right)) for _, (left, right), _ in (b, a)))
    found = [x for at in points(a, b) if not isinstance(x := tried(quotient, at, True), str)]
    return len(found) > 2 and found[0] != 0 and all(same_number(x, found[0]) for x in found)


def lists(a, b):
    """Lists and sets without order, values that the gold answer repeats as often; (1, 2) in its
    order and with its brackets, but (1, 2) is the list 1, 2, and [1, 2] an interval."""
    kinds = {a[0], b[0]}
    if not kinds & {"list", "set", "seq"}:
        return None
    x, y = listed(a), listed(b)
    if "seq" in kinds:
        brackets = {node[1] for node in (a, b) if node[0] == "seq"}
        if "list" in kinds and (brackets - {"()", "[]"} or "or" in (*a[1], *b[1])
                                or INFINITIES.keys() & y or b[1] == "[]" and len(y) == 2):
            return False
        return "set" not in kinds and len(x) == len(y) and all(map(alike, x, y)) and (
            len(x) > 2 or len(brackets - {""}) < 2) or (  # [1, 2] is a column, too
            ":" in brackets and (("/", *y) in (a, *x) or ("/", *x) in (b, *y)))
    left = [*x]
    for gold in y:
        if not (found := next((p for p in left if alike(p, gold)), None)):
            return False
        left.remove(found)
    return not left or len({*y}) == len(y) and all(any(alike(p, gold) for gold in y) for p in left)


def quantities(a, b):
    """Numbers exactly, expressions at points; the unit is that of the gold answer, if both have
    one; 28\\% is 28 and 0.28, 0.28\\% not 0.28."""
    if b[0] == "based":
        return a == b or a == num(int(b[1]))  # 213 is 213_5
    units, its = units_of(a), units_of(b)
    spelled = {unit("%"): num(Fraction(1, 100))} | {
        x: unit(UNITS[x[1]]) for x in names_of((a, b)) if x[1] in UNITS}  # 6W
    if (units or its) and same_value(replaced(a, spelled), replaced(b, spelled)):
        return True
    return not (units and its) and same_value(without_unit(a), without_unit(b)) and (
        unit("%") not in units or abs(closed(b) or 1) >= 1)


def same_value(x, y):
    """Are two expressions equal, up to constants of integration, or is one the other, rounded?"""
    if names_of(y) == units_of(y) and (
            functions_of(x) - functions_of(y) & {*"abs floor ceil binom Gamma erf".split()}):
        return False  # of a number these are the question
    return same_expression(x, y) or same_but_constants(x, y, False) or rounds(x, y) or rounds(y, x)


RULES = (conditions, words, real_sets, equations, lists, quantities)


def same_but_constants(a, b, named_function):
    """Are functions or sums of other names the same but for those of the constants of integration,
    C, c or K, with numbers or without?"""
    mine, its = (sorted(n for n in names_of(x) if re.fullmatch(r"[cCK](?:_\d+)?", n[1]))
                 for x in (a, b))
    return len({n[1][0] for n in mine}) == 1 and (named_function or b[0] == "+") and (
        len(mine) == len(its) < min(5, len(names_of(b)))) and any(
        same_expression(replaced(a, dict(zip(mine, order))), b)
        for order in itertools.permutations(its))


def rounds(x, y, least=10**5):
    """Is x, a decimal, another number y, whose digits have no end, rounded to six digits or more?
    With a `least` of 1, any other number, rounded to any digit?"""
    x, y = closed(x), closed(y)
    last = exact(x) and next((10**k for k in range(21) if 10**k % x.denominator == 0), 0)
    has_end = exact(y) and 10 ** y.denominator.bit_length() % y.denominator == 0
    if not last or y in (None, x) or has_end and least > 1:
        return False
    half_units = 2 if abs(x) * last >= 10**15 else 1  # a float's last digit is off
    return abs(x) * last >= least and (last > 1 or least == 1) and (
        2 * abs(y - x) * last <= half_units)


# ------------------------------------------------------------------ answers

# names, not constants, in a gold answer: with an index, as one, left of =, or squared in i^2 + 1
NAMED = {"e": r"(?<![A-Za-z\\])e *[_=]", "i": r"(?<![A-Za-z\\])i *(?:_|=|\^ *\{?2)|_ *\{?i\b"}


def equal(pred, gold):
    """Are two bare answers the same? Never raises."""
    names = {("const", letter): ("name", letter) for letter, form in NAMED.items()
             if re.search(form, str(gold))}
    readings = ({replaced(read(form), names): 0 for form in (text, re.sub(
        TWO, lambda n: n[0] if ",0" in n[0] else n[0].replace(",", ", "), text))}
        for text in (str(pred), str(gold)))
    try:
        return any(same_answer(a, b) for a, b in itertools.product(*readings))
    except NO_VALUE:
        return False


@cached
def readable(gold):
    """Is a gold answer read, and equal to itself?"""
    text = str(gold).strip()
    return text.lower().lstrip("-") not in ("nan", "inf") and (
        read(text)[0] != "unread" and equal(text, text))


def check_read(pred, gold):
    """Raises UnparsedGold or Unparsed where the grammar does not take one of two answers."""
    if not readable(gold):
        raise UnparsedGold(gold)
    if read(str(pred))[0] == "unread":
        raise Unparsed(pred)

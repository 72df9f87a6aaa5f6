"""Are two mathematical answers the same? Rules for two typed values (answer.read).

Expressions are compared at points. A value is a Fraction where it is rational, else a number of
200 digits: a sum that is less than 10^-100 of its terms is their rounding, and 0."""

import itertools
import math
import operator
import random
import re
from fractions import Fraction
from functools import partial

import mpmath

from graders import Unparsed, UnparsedGold
from graders.answer import DEGREE, SEPARATORS, cached, inside, listed, negative, num, read, replaced
from graders.lexer import UNITS, WORDS

mp = mpmath.mp.clone()
mp.dps = 200
SAME = mp.mpf(10) ** -100  # two irrational values are equal to this part of their size
BITS = 280_000  # of a number, 80,000 digits, a power half of it; a larger one has no value
PERCENT, INFINITY, X, IMAGINARY = ("name", " %"), ("const", "∞"), ("name", "x"), ("const", "i")
INFINITIES = {INFINITY: mp.inf, negative(INFINITY): -mp.inf}
CONSTANTS = {("const", "π"): +mp.pi, ("const", "e"): +mp.e, IMAGINARY: mp.j}
COMPARE = {"<": operator.lt, "≤": operator.le, "≠": operator.ne}
INTEGER = "floor ceil choose factorial factorial2".split()
NO_VALUE = (ArithmeticError, ValueError, TypeError, RecursionError)


def exact(*numbers):
    return all(isinstance(x, Fraction) for x in numbers)


def converted(x):
    """A number of 200 digits. mp.convert takes seconds for a Fraction of large numbers."""
    return mp.mpf(x.numerator) / x.denominator if exact(x) else x


def bits(x):
    """The bits of a number's numerator or denominator; of an irrational one, its logarithm."""
    return max(map(int.bit_length, x.as_integer_ratio())) - 1 if exact(x) else mp.log(abs(x), 2)


def power(a, b):
    """a^b. A root of odd degree of a negative number is real."""
    if a and abs(b * bits(a)) > BITS / 2:
        raise ArithmeticError("large")
    if a and exact(b) and b.denominator % 2 and a == -abs(a):
        return (-1) ** abs(b.numerator) * power(-a, b)
    return a ** b.numerator if exact(a, b) and b.denominator == 1 else mp.power(a, b)


def whole(function, *given):
    """A function of whole numbers, which are not large: a factorial or a binomial"""
    if not exact(*given) or any(x.denominator > 1 or not 0 <= x <= 9000 for x in given):
        raise ArithmeticError("large")
    return Fraction(function(*map(int, given)))


def rounded(found, *given):
    """What was found for a sum or function of numbers: 0 where that is rounding, and no value where
    one of them is lost in it, as \\pi in 10^{200} + \\pi, or beside a pole."""
    sizes = [*map(abs, given)]
    noise = not abs(found) > SAME * max(sizes)
    if 0 < min(sizes) < SAME * abs(found) or noise and found and max(sizes) > 10**60:
        raise ArithmeticError("large")
    return Fraction(0) if noise else found


def analytic(name, x):
    """A function of mpmath, not of larger numbers, which may take minutes."""
    x = converted(x)
    return rounded(getattr(mp, name)(x) if abs(x) < 10**60 else mp.nan, x)


FUNCTIONS = {
    **{name: partial(analytic, name.lower().replace("arc", "a").replace("cis", "expj"))
       for name in (*WORDS["FUNC"], "Gamma")},
    "+": lambda x, y: x + y if exact(x, y) else rounded(x + y, x, y),
    "*": operator.mul, "/": operator.truediv, "^": power,
    "abs": abs, "ln": mp.ln, "log2": lambda x: mp.log(x, 2), "exp": lambda x: power(+mp.e, x),
    "floor": lambda x: x - x % 1, "ceil": lambda x: x + -x % 1,
    "choose": partial(whole, math.comb), "factorial": partial(whole, math.factorial),
    "factorial2": partial(whole, lambda n: math.prod(range(n, 0, -2)))}


def value(node, at=CONSTANTS):
    """The value of an expression with these numbers at its names. Where i is none of them, a
    complex one is none; one that is whole, but for rounding, is."""
    match node:
        case ("num", number) | ("based", number, 10):
            return Fraction(number)
        case ("name" | "const", _) if node in at:
            return at[node]
        case ("word", _, inner):
            return value(inner, at)
        case ("f", name, *parts) | (("+" | "*" | "/" | "^") as name, *parts):
            given = [value(part, at) for part in parts]
            if name not in FUNCTIONS:  # f(x), gcd(m, n)
                seed = repr([name, *(mp.nstr(converted(x), 50) for x in given)])
                return Fraction(random.Random(seed).randint(1, 10**9), 10007)
            found = FUNCTIONS[name](
                *(given if name == "^" or exact(*given) else map(converted, given)))
            if exact(found):
                if bits(found) > BITS:
                    raise ArithmeticError("large")
                return found
            if not mp.isfinite(found):
                raise ArithmeticError("pole")
            if IMAGINARY not in at and abs(found.imag) > SAME * abs(found):
                raise ArithmeticError("complex")
            near = mp.nint(found.real)
            is_whole = 0 < abs(near) < 10**20 and abs(found - near) < SAME
            return Fraction(int(near)) if is_whole else found
    raise ArithmeticError("none")


def tried(node, at=CONSTANTS):
    """The value of an expression, or why it has "none": it is "complex", "large", or at a pole."""
    try:
        return value(node, at)
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


def points(a, b):
    """Places {name: number} where two expressions are compared, ten times as many as are mostly
    needed: on both sides of 0, and of the numbers in them; integers for functions of such: for n,
    not for x."""
    functions = functions_of((a, b))
    integers = sum(not functions_of(node).isdisjoint(INTEGER) for node in (a, b))
    names, draw = sorted(names_of((a, b))), random.Random(0)
    sizes = sorted({abs(x) for n in inside((a, b)) if n[0] == "num" for x in n[1].as_integer_ratio()
                    if 1 < abs(x) < 10**9})[:10] + [1000, 1_000_003]
    for k in range((1 if integers else 10) * (12 + 4 * len(sizes))):
        at = {x: number for x, number in CONSTANTS.items() if x[1] in functions}
        for name in names:
            size = sizes[k % len(sizes)] if k > 11 and draw.randint(0, len(names)) else 1
            x = size + Fraction(draw.randint(-900, 900), 907) if k % 2 else (
                size * Fraction(draw.randint(100, 1999), 997))
            if integers and (k % 2 or integers > 1 and name[1] not in [*"xyzt", "alpha"]):
                x = Fraction(round(6 * x if size == 1 else x))
            at[name] = x * (1 if k < 4 else draw.choice((1, -1)))
        yield at


def same_number(a, b):
    """Are two values equal? Rational ones exactly. None where one is none."""
    if isinstance(a, str) or isinstance(b, str):
        return None
    if exact(a, b):
        return a == b
    x, y = map(converted, (a, b))
    return abs(x - y) <= SAME * abs(x)


@cached
def same_expression(a, b):
    """Have two expressions the same value, wherever both have one? Without names both must."""
    if a == b and (names_of(a) or tried(a) == "large" or a in INFINITIES or a[0] not in "+*/^f"):
        return True  # equal to itself is also what is too large, infinite, or no sum
    if not names_of(a) or not names_of(b):
        return bool(same_number(tried(a), tried(b)))
    functions, equal = functions_of((a, b)), 0
    for k, at in enumerate(points(a, b)):
        if k > 47 and not 0 < equal < 3:  # all, where few have a value
            break
        found = [tried(node, at) for node in (a, b)]
        same = same_number(*found)
        if same is False or "abs" in functions and "complex" in found and found[0] != found[1]:
            return False  # |x| and \sqrt{x}
        equal += bool(same)
    return equal > 2


def rounds(x, y, least=10**5):
    """Is x, a decimal, y rounded at the last digit of x, the sixth or a later one, where the digits
    of y have no end? With a `least` of 1: of any y, at any digit?"""
    x, y = closed(x) if x[0] != "/" else None, closed(y)
    if not exact(x) or y is None or least > 1 and (
            x.denominator == 1 or exact(y) and 10**60 % y.denominator == 0):
        return False
    last = next((10**k for k in range(21) if 10**k % x.denominator == 0), 0)
    digits, off = abs(x) * last, abs(y - (x if exact(y) else converted(x))) * last
    return digits >= least and 0 < 2 * off <= 1 + (digits >= 10**15)


def label(node):
    """May it stand left of an equals sign? x, f(x), f^{-1}(x), P(A), AB^2, |AB|, \\sin 2A, a:b, a
    word, (x, y), or a quotient of such; but not x + y, 2x or x^2."""
    match node:
        case ("word", text, *_):
            return re.fullmatch("[A-Z]+|[A-Z][a-z]{2,}(?: [A-Za-z]+)*", text) and (
                {*text.lower().split()}.isdisjoint(WORDS["NO NAMES"] + WORDS["DOUBTS"]))
        case ("/", *parts) | ("list", _, parts):
            return parts and all(map(label, parts))
        case ("*", ("^", _, ("num", -1)), _):
            return True
        case ("*", left, right):
            return label(left) and names_of(right)
        case ("+" | "^" | "chain" | "∪" | "∖", *_):
            return False
    return node[0] == "f" and node[1] not in FUNCTIONS or names_of(node)


def bare(name):
    """A name without the number of a solution, x of x_1 and x_{1,2}, or its variable, y of y(x)."""
    match name:
        case ("name", text):
            return ("name", re.sub(r"^\\angle|_[\d,]+$", "", text))
        case ("f", function, ("name", variable)) if variable.islower() and function not in "fgh":
            return ("name", function)
    return name


@cached
def has_set(node):
    """Is it, or has it, a set of real numbers that is no list, tuple or open interval?"""
    return any(n[0] in ("∪", "∖", "numbers") or n[0] == "list" and n[1] in ("(]", "[)") or
               n[0] == "chain" and {*"<≤≠∈"} & {*n[1]} for n in inside(node))


def named(node):
    """x = 1, y = 1 + 1 = 2, 3 -> [(x, 1), (y, 2), (y, 3)]. A false chain is its own value."""
    found, name = [], None
    for item in listed(node) if node[1] in SEPARATORS and not has_set(node) else [node]:
        sides = [*item[2]] if item[0] == "chain" and {*item[1]} <= {*"=≈"} else [item]
        if len(sides) == 2 and label(sides[1]) and not names_of(sides[0]) and not label(sides[0]):
            sides.reverse()  # 3 = x
        own = [*itertools.takewhile(label, sides[:-1])]  # of x = y = 1 both
        if sides[-1] not in sides[:2] and {n[0] for n in inside(sides[0])} == {"+", "name"}:
            own = sides[:1]  # m + n = 64 + 9 = 73
        if own:
            name = ("=", *own) if own[1:] else own[0]
        del sides[:len(own)]
        if len(sides) > 1 and rounds(sides[-1], sides[-2], 1):
            del sides[-1]
        last = sides[-1] if all(
            alike(x, y) or same_expression(x, y) for x, y in itertools.pairwise(sides)) else item
        several = name and name[0] == last[0] == "list" and (
            last[1] != "{}" and len(name[2]) == len(last[2]))
        found += zip(name[2], last[2]) if several else [(name, last)]
    return found


def equations(a, b):
    """x = 5 is 5; a = 2, b = 3 is (2, 3), by their names where both have them; y = 2x + 3 is
    2x - y + 3 = 0; m + n = 64 + 9 = 73 is 73, but m + n = 73 is not."""
    kinds = {item[0] for item in (*listed(a), *listed(b))}
    if "chain" not in kinds:
        return None
    as_lists = (kinds == {"chain"} or has_set(b) and len(listed(b)) == 2) and (  # x + 1, x > 0
        (a[1] == "or") == (b[1] == "or"))
    if a == b or same_equation(a, b) or as_lists and lists(a, b):
        return True
    both = [named(a), named(b)]
    if not all(any(bare(name) != name and "," not in name[1] for name in dict(pairs))
               for pairs in both):  # x_1 is x, but a_5 is not a_6
        both = [[(bare(name), last) for name, last in pairs] for pairs in both]
    names = [{name for name, _ in pairs} for pairs in both]
    by_name = {None} not in names
    if by_name and names[0] != names[1]:
        return False
    for i, pairs in enumerate(both):  # one value; a tuple of those of several names, or many
        order, values = [*dict(pairs)], [last for _, last in pairs]
        n, in_order = len(order), sorted(order, key=str)
        rows = [dict(pairs[k:k + n]) for k in range(0, len(pairs), n)]
        if n > 1 and all(len(row) == n for row in rows) and (
                by_name or order == in_order or {x[1] for x in order} - {*"xyz"}):
            values = [("list", "()", tuple(row[name] for name in (in_order if by_name else order)))
                      for row in rows]
        elif 1 < n < len(pairs) and None not in order:
            values = [("list", "()", pair) for pair in pairs]
        both[i] = ("list", "," if i or {None} == names[i] else "{}", (*values,)) if (
            len(values) > 1) else values[0]
    return both != [a, b] and (alike(*both) or same_but_constants(*both, by_name))


def same_equation(a, b):
    """Have two chains the same sides, or is one a multiple of the other, a positive one with <?"""
    if not a[0] == b[0] == "chain" or a[1] != b[1]:
        return False
    match a[2][0], b[2][0]:
        case ("f", _, ("name", x)), ("f", _, ("name", y)) if (
                (x + y).islower() and ("name", y) not in names_of(a)):
            a = replaced(a, {("name", x): ("name", y)})  # f(x) = x + 1 is f(t) = t + 1
    if all(map(alike, a[2], b[2])):
        return True
    if a[1] not in zip("=<≤") or len(names_of(b)) <= any(map(label, b[2])):  # of one sign
        return False
    quotient = ("/", *(("+", left, ("*", num(-1), right)) for _, _, (left, right) in (b, a)))
    tries = [tried(quotient, at) for at in itertools.islice(points(a, b), 20)]
    found = [x for x in tries if not isinstance(x, str)]
    return len(found) > 2 and all(same_number(x, found[0]) for x in found) and (
        found[0] != 0 if "=" in a[1] else found[0] > 0)


@cached
def end(node):
    """A real number or an infinity. One with more digits than are compared is none."""
    x = INFINITIES.get(node) or closed(without_unit(node))
    if exact(x) and x.denominator > 10**60:
        raise ArithmeticError("none")
    return mp.mpf(mp.nstr(converted(x), 150))


def contains(node, x):
    """Is a real number in a set of numbers x?"""
    match node:
        case ("list", "{}", items):
            return x in map(end, items)
        case ("list", "()" | "(]" | "[)" | "[]" as tag, (low, high)):
            low, high = end(low), end(high)
            if low >= high:
                raise ArithmeticError("none")
            return low < x < high or x == low and tag[0] == "[" or x == high and tag[1] == "]"
        case ("∪", _, sets) | ("list", "or", sets):
            return any([contains(part, x) for part in sets])
        case ("list", "and" | ",", sets) | ("∩", _, sets):
            return all([contains(part, x) for part in sets])
        case ("∖", _, (every, but)):
            return contains(every, x) and not contains(but, x)
        case ("numbers", "R" | "R+" as name):
            return name == "R" or x > 0
        case ("chain", ("∈" | "=",), (left, found)) if label(left) and closed(found) is None:
            return contains(found, x)
        case ("chain", relations, sides) if X in names_of(node):  # not 1 < 2
            known = {X: x, negative(X): -x, ("f", "abs", X): abs(x)}
            values = [known[side] if side in known else end(side) for side in sides]
            return all(COMPARE.get(relation, operator.eq)(*pair)
                       for relation, pair in zip(relations, itertools.pairwise(values)))
    raise ArithmeticError("none")


def real_sets(a, b):
    """x > 2 is (2, \\infty) and ]2, \\infty[; x \\neq 4 is (-\\infty, 4) \\cup (4, \\infty)."""
    names = names_of((a, b))
    if len(names) > 1 or not has_set((a, b)) or ("=",) in (a[1], b[1]):
        return None
    if a[0] != "chain" and b[1] in SEPARATORS and not has_set(b):
        return False
    nodes = replaced((a, b), dict.fromkeys(names, X))
    parts = {part for n in inside(nodes) if isinstance(n[0], tuple) for part in n if part[0] not
             in ("list", "∪", "∖", "numbers", "chain")} - {X, negative(X), ("f", "abs", X)}
    try:  # the same numbers are members, of all ends and those behind them
        ends = {0} | {abs(end(part)) for part in parts} - {mp.inf}
        tests = [sign * (x + behind * (1 + x)) for x in ends for sign in (1, -1)
                 for behind in (0, mp.mpf(10) ** -140)]
        members = [[contains(node, x) for x in tests] for node in nodes]
        for i, node in enumerate(nodes):
            if not any(members[i]) and node[:2] == ("list", ","):  # x < 1, x > 2, which are apart
                times = [sum(contains(part, x) for part in node[2]) for x in tests]
                members[i] = [n == 1 for n in times] if max(times) < 2 else []
        return members[0] == members[1] and any(members[0]) or None
    except NO_VALUE:
        return None


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
    """Words by their letters, small or not; letters without spaces as products but for those that
    are a word or points: act is not cat, BA not AB, HHTT not HTTH, yx is xy; A, B, D is ABD."""
    no_points = r"(?i:no|yes|true|false|even|odd)|(?!.*\B[A-Z])...+"
    word = re.compile("[A-H]+|[A-Z]{4,}|(?=...)(?:[A-Z]?[a-z]*[aeiou][a-z]+|[a-z]+[aeiou][a-z]*)")
    match a, b:
        case (("list", tag, items), ("word", text, *_)) | (
                ("word", text, *_), ("list", tag, items)) if {*text} <= {*"ABCDEFGH"}:
            return tag != "or" and sorted(items) == [("name", x) for x in text]
        case (("word", text, *_), ("/", *xs)) | (("/", *xs), ("word", text, *_)) if ":" in text:
            return xs == [num(x) for x in text.split(":") if x.isdigit()]  # 9:16 is a ratio, too
        case ("word" | "prose", x, *_), ("word" | "prose", y, *_):
            mine, its = (t.lower() if re.fullmatch(no_points, t) else t for t in (x, y))
            return its in (mine, re.sub(r"(?<=\d)[ap]m$", "", mine)) or (  # 12:50 PM
                False if word.fullmatch(x) or word.fullmatch(y) else None)


def lists(a, b):
    """Lists and sets without order, values that the gold answer repeats as often; (1, 2) in its
    order and with its brackets, but (1, 2) is the list 1, 2, and [1, 2] an interval."""
    if "list" not in (a[0], b[0]):
        return None
    x, y = listed(a), listed(b)
    tags = {"," if node[0] != "list" or node[1] == "and" else
            "()" if node[1] == "[]" and node[2][2:] else node[1] for node in (a, b)}
    if not tags <= {",", "or", "{}"}:
        return len(x) == len(y) and all(map(alike, x, y)) and (
            len(tags) == 1 or not INFINITIES.keys() & {*x, *y} and (
                tags in ({"()", ","}, {"", "()"}, {"", "[]"}) or
                tags == {",", "[]"} and b[1] != "[]"))
    left = [*x]
    for gold in y:
        if not (found := next((p for p in left if alike(p, gold)), None)):
            return False
        left.remove(found)
    return not left or len({*y}) == len(y) and all(any(alike(p, gold) for gold in y) for p in left)


def without_unit(node):
    """An expression with 1 for its units."""
    return replaced(node, {name: num(1) for name in names_of(node) if name[1][0] == " "})


def quantities(a, b):
    """Numbers exactly, expressions at points; the unit is that of the gold answer, if both have
    one; 28\\% is 28 and 0.28, 0.28\\% not 0.28; 180^\\circ is \\pi, but \\pi not 180^\\circ."""
    if b[0] == "based":  # 213 is 213_5
        return a == b or a == num(b[1])
    plain = without_unit((a, b))
    if not names_of(plain[1]) and (
            functions_of(a) - functions_of(b) & {*"abs floor ceil choose Gamma erf".split()}):
        return False  # of a number these are the question
    spelled = {PERCENT: num(Fraction(1, 100))} | {
        x: ("name", " " + UNITS[x[1]]) for x in names_of((a, b)) if x[1] in UNITS}  # 6W
    units = [x != y for x, y in zip(plain, (a, b))]
    if any(units) and any(same_value(replaced(a, unit), replaced(b, spelled))
                          for unit in (spelled, spelled | DEGREE)):
        return True
    return not all(units) and same_value(*plain) and (
        PERCENT not in names_of(a) or abs(closed(b) or 1) >= 1)


def same_value(x, y):
    """Are two expressions equal, up to constants of integration, or is one the other, rounded?"""
    return same_expression(x, y) or same_but_constants(x, y) or rounds(x, y) or rounds(y, x)


def same_but_constants(x, y, named_function=False):
    """Are functions or sums of other names the same but for those of the constants of integration,
    C, c or K, with numbers or without?"""
    mine, its = (sorted(n for n in names_of(z) if re.fullmatch(r"[cCK](_\d)?", n[1]))
                 for z in (x, y))
    return len({n[1][0] for n in mine}) == 1 and (named_function or y[0] == "+") and (
        len(mine) == len(its) < 5 and max(names_of(y))[1] > "m") and any(
        same_expression(replaced(x, dict(zip(mine, order))), y)
        for order in itertools.permutations(its))


# names, not constants, in a gold answer: with an index, as one, left of =, or squared in i^2 + 1
NAME_IN = {"e": r"(?<![A-Za-z\\])e *[_=]", "i": r"(?<![A-Za-z\\])i *(?:_|=|\^ *\{?2)|_ *\{?i\b"}
# 1,234 may be two numbers, 1,034 not
TWO = r"(?<![0-9])(?!0[0-9]|[0-9,]*,0)[0-9]{1,3}(?:,[0-9]{3})++(?!\.?[0-9])"

RULES = (conditions, words, real_sets, equations, lists, quantities)


def equal(pred, gold):
    """Are two bare answers the same? Never raises."""
    names = {("const", letter): ("name", letter) for letter, is_named in NAME_IN.items()
             if re.search(is_named, str(gold))}
    readings = ({replaced(read(form), names): 0 for form in (text, re.sub(
        TWO, lambda n: n[0].replace(",", ", "), text))} for text in map(str, (pred, gold)))
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
    if read(str(pred))[0] in ("unread", "prose"):
        raise Unparsed(pred)

"""Random expressions in two notations, which are equal, and with one part changed, which are not.

    python tests/expressions.py [COUNT]      tries them, prints those that are taken for the other

Whether a changed expression has another value is found here, by mpmath at random points, and not by
the code that is tested.
"""

import random
import sys
from pathlib import Path

import mpmath

NAMES = "x y n k a t".split()
BINARY = {"+": mpmath.fadd, "-": mpmath.fsub, "*": mpmath.fmul, "/": mpmath.fdiv, "^": mpmath.power}
UNARY = {"sqrt": mpmath.sqrt, "ln": mpmath.log, "exp": mpmath.exp, "sin": mpmath.sin,
         "cos": mpmath.cos, "abs": abs, "neg": lambda x: -x}


def made(rng, depth=0):
    """A random expression: a number, a name, pi, or (operator, expressions)."""
    if depth > 3 or rng.random() < 0.25 * depth:
        decimal = f"{rng.randint(1, 9)}.{rng.randint(1, 9)}"
        return rng.choice([str(rng.randint(1, 30)), decimal, "pi", *rng.sample(NAMES, 2)])
    if rng.random() < 0.3:
        return rng.choice([*UNARY]), made(rng, depth + 1)
    operator = rng.choice([*BINARY])
    right = str(rng.randint(2, 5)) if operator == "^" else made(rng, depth + 1)
    return operator, made(rng, depth + 1), right


def value(node, at):
    """Its value at a point {name: number}."""
    if isinstance(node, str):
        return at[node] if node in at else mpmath.mpf(node)
    function = BINARY.get(node[0]) or UNARY[node[0]]
    x = function(*(value(part, at) for part in node[1:]))
    if isinstance(x, mpmath.mpc) or not 1e-9 < abs(x) < 1e12:
        raise ArithmeticError("not real, or not of an ordinary size")
    return x


def latex(node, rng):
    """LaTeX, in one of its spellings."""
    if isinstance(node, str):
        return rng.choice(["\\pi ", "π"]) if node == "pi" else rng.choice([node, "{%s}" % node])
    operator, *parts = node
    a, *more = (latex(part, rng) for part in parts)
    left, right = rng.choice([("(", ")"), ("\\left(", "\\right)"), ("\\bigl[", "\\bigr]")])
    group = {part: part if part.isalnum() else f"{left}{part}{right}" for part in (a, *more)}
    if operator in UNARY:
        return {"sqrt": "\\sqrt{%s}", "ln": "\\ln\\left(%s\\right)", "exp": "e^{%s}",
                "sin": "\\sin(%s)", "cos": "\\cos{(%s)}", "abs": "|{%s}|", "neg": "(-(%s))"
                }[operator] % a
    b = more[0]
    return {"+": f"{a}+{group[b]}", "-": f"{a} - {group[b]}", "^": f"{left}{a}{right}^{{{b}}}",
            "*": rng.choice([f"{left}{a}{right}{left}{b}{right}", f"{group[a]} \\cdot {group[b]}",
                             f"{group[a]}\\times {group[b]}"]),
            "/": rng.choice([f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}",
                             f"{left}{a}{right}/{left}{b}{right}"])}[operator]


def plain(node, rng):
    """Python's notation, with spaces or without."""
    if isinstance(node, str):
        return node
    operator, *parts = node
    a, *more = (plain(part, rng) for part in parts)
    if operator in UNARY:
        return {"abs": "|%s|", "neg": "(-(%s))"}.get(operator, f"{operator}(%s)") % a
    sign = {"^": "**"}.get(operator, operator)
    return f"({a}){rng.choice(['', ' '])}{sign}{rng.choice(['', ' '])}({more[0]})"


def changed(node, rng):
    """An expression with one part replaced by another of its kind."""
    if isinstance(node, str):
        return rng.choice([x for x in (*NAMES, "pi", str(rng.randint(1, 30))) if x != node])
    operator, *parts = node
    if rng.random() < 0.3:
        table = BINARY if operator in BINARY else UNARY
        other = rng.choice([x for x in table if x not in (operator, "^")])
        return other, *parts
    i = rng.randrange(len(parts))
    parts[i] = changed(parts[i], rng)
    return operator, *parts


def values(node, seed):
    """Its values at six points; None where it, or a part, is not real and of an ordinary size."""
    rng, found = random.Random(seed), []
    for _ in range(6):
        at = {name: mpmath.mpf(rng.uniform(0.3, 4)) for name in NAMES} | {"pi": mpmath.pi}
        try:
            found.append(value(node, at))
        except (ArithmeticError, ValueError):
            found.append(None)
    return found


def wrong(seed, count):
    """-> equal pairs that are taken for different, different ones that are taken for equal"""
    from graders.equal import equal
    rng, lost, taken = random.Random(seed), [], []
    for _ in range(count):
        node = made(rng)
        mine = values(node, 1)
        if sum(x is not None for x in mine) < 3:
            continue
        gold, pred = rng.choice([latex, plain])(node, rng), rng.choice([latex, plain])(node, rng)
        if not equal(pred, gold):
            lost.append((pred, gold))
        other = changed(node, rng)
        pairs = [(x, y) for x, y in zip(mine, values(other, 1)) if x is not None and y is not None]
        text = rng.choice([latex, plain])(other, rng)
        if any(abs(x - y) > 1e-6 * abs(x) for x, y in pairs) and equal(text, gold):
            taken.append((text, gold))
    return lost, taken


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    lost, taken = wrong(seed=0, count=count)
    print(*(f"lost: {a}   {b}" for a, b in lost[:20]),
          *(f"taken: {a}   {b}" for a, b in taken[:20]),
          f"{count} expressions: {len(lost)} equal ones lost, {len(taken)} others taken", sep="\n")

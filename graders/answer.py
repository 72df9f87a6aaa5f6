r"""An answer is parsed once: LaTeX, plain text and Python's notation alike become a typed value.

The grammar, from the whole to its parts, and behind each line an answer that takes it:

    answer     [lead-in] list [condition]              The answer is 12
    list       item {("," | ";" | "and" | "or") item}  x = 1 \text{ or } x = 2
    condition  ("," | "where" | "for") name in a set   k\pi, k \in \mathbb{Z}
    item       part {relation part}                    \frac{1}{2} = 0.5
    part       words, or sets with \cup and \setminus  (-\infty, 0) \cup \{1\}
               or sum {(":" | "mod") sum}              2:3
    sum        product {("+" | "-" | "\pm") product}   3 \pm \sqrt{2}
    product    factor {["\cdot" | "/"] factor}         1/2x
    factor     ["-"] power {"!" | "%" | "°" | "'"}     7!!
    power      atom ["^" argument]                     x**2*y
    atom       number, name, function, bracket, root, fraction, matrix or unit
    number     digits: 12,000 0.8(3) 1 1/2             1\frac{1}{2}
    name       [accent] letter ["_" subscript]         v_{\max}
    function   word ["_" base] ["^" power] factors     \log_2 8
    bracket    ( ) [ ] { } | | around a sum, or a list of two or more in ( ) [ ]   [2, 7)
    set        "\{" list ["\mid" condition] "\}"       \{x \mid x > 2\}
    matrix     "\begin" rows "\end"                    \begin{pmatrix} 1 & 2 \end{pmatrix}
    unit       a word of words.txt, or a plural        5 \text{ cm}^2
    based      digits "_" base, as a whole             213_5
    choice     letter ["."] [sum, equation or words]   (C) Plane

A value is a tuple: ("num", Fraction), ("name", text), ("const", letter), ("word", text and, of a
run of letters, their product), ("numbers", letter), ("+" "*" "/" or "^", left, right), ("f",
function, arguments ...), ("where", value, name, set), ("choice", letter, value), ("based", digits,
base); or one with parts: ("list", separator or brackets, parts), ("chain", relations, parts), ("∪"
"∩" or "∖", "", parts). A unit is a name with a space in front. What the grammar does not take is
("prose", text) where it is words and numbers, as 15 to 19 years, else ("unread", text).
"""

import functools
import itertools
import re
from fractions import Fraction

from graders import lexer
from graders.lexer import LETTERS, NUMBERS, SQUARES, WORDS, Token, cut, tokens, unit_name

LONGEST = 5000  # characters of an answer
DEGREE = {("name", " °"): ("/", ("const", "π"), ("num", Fraction(180)))}  # in radians
cached = functools.lru_cache(maxsize=4096)  # a gold answer is read once for its group


def num(value):
    return ("num", Fraction(value))


def negative(node):
    return num(-node[1]) if node[0] == "num" else combined("*", num(-1), node)


def combined(kind, left, right):
    """A sum, product, quotient or power; a factor of a matrix is one of all entries."""
    for node, other in ((left, right), (right, left))[:{"/": 1, "*": 2}.get(kind, 0)]:
        if node[:2] == ("list", "") and other[0] != "list":
            return ("list", "", tuple(entry if entry == num(0) else combined(kind, entry, other)
                                      for entry in node[2]))
    return (kind, left, right)


def replaced(node, new):
    """A value with others for some of its parts."""
    if isinstance(node, tuple) and node not in new:
        return tuple(replaced(part, new) for part in node)
    return new.get(node, node)


def inside(node):
    """A value and all values in it, and its tuples of values."""
    if isinstance(node, tuple) and node:
        yield node
        for part in node:
            yield from inside(part)


def listed(node):
    return node[2] if node[0] == "list" else (node,)


SEPARATORS, RELATIONS = [",", "and", "or"], [*"=≈<>≤≥≠∈≡"]
# How firmly an operator binds; IMPLICIT and ARGUMENT: a factor without one, what is not in BINDS.
# A set is no factor.
(END, ROW, LIST, CHAIN, SETS, RATIO, SUM, PRODUCT, IMPLICIT, ARGUMENT, DEGREES, SUFFIX,
 POWER) = range(13)
BINDS = {kind: binds for binds, kinds in (
    (END, ["", *"⌋ ⌉ ) ] } \\} end".split(), "\\{", "numbers"]), (ROW, ["row"]), (LIST, SEPARATORS),
    (CHAIN, RELATIONS), (SETS, "∪∩∖"), (RATIO, [":", "over", "choose", "mod"]), (SUM, "+-"),
    (PRODUCT, "*/"), (IMPLICIT, ["FUNC", "matrix", "(", "["]),  # not the function's before them
    (DEGREES, "%°"), (SUFFIX, "!"), (POWER, "^")) for kind in kinds}
ROUNDED = {"|": ("abs", "|"), "⌊": ("floor", "⌋"), "⌈": ("ceil", "⌉")}
SAID = {**{name: num(number) for name, number in lexer.BASES.items()},
        "(the set of )?(all )?real numbers( [a-z])?|(all|any|every) real( number)?s?( [a-z])?":
        ("numbers", "R"), "(the set of )?(all )?integers": ("numbers", "Z"),
        "infinit(e|ely many)( \\w+s)?": ("const", "∞"), "(the )?empty ?set|none|(there (is|are) )?"
        "no ((such|real|integer) )*((solution|number|integer|function)s?|n)( exists?)?":
        ("list", "{}", ()), "dne|((the )?limit )?does not exist": ("word", "DNE")}
WORD = re.compile("(?i:none|one|two|six|ten)|(?!.*(?:pi|(?:sqrt|exp|sin|cos|tan|log|ln).|cot.$"
                  "|sec.$))[A-Z]?(?=.*[aeiou])[a-z]{4,}")


class Parser:
    """A parser of operators over Tokens (Pratt): a value ends where one binds less firmly."""

    def __init__(self, found):
        self.tokens, self.i = [*found, *[Token("")] * 8], 0
        self.closing = ()  # the tokens that end the list which is read

    def peek(self, ahead=0):
        return self.tokens[self.i + ahead]

    kind = property(lambda self: self.peek().kind)
    text = property(lambda self: self.peek().text)

    def take(self, *kinds):
        """The next token, which is taken if it is of these kinds, or of any; else None."""
        if not kinds or self.kind in kinds:
            self.i += 1
            return self.tokens[self.i - 1]

    def binds(self, ahead=0):
        """How firmly the next token binds, or the one behind it."""
        return BINDS.get(self.peek(ahead).kind, ARGUMENT)

    def answer(self, *closing):
        """A value, and one of the tokens `closing` behind it; "" is the end of all."""
        around, self.closing = self.closing, closing
        node = self.expression()
        self.closing = around
        if not self.take(*closing):
            raise ValueError("no end")
        return node

    def expression(self, least=ROW):
        """A value of which every operator binds at least so firmly."""
        node = least <= SETS and self.words() or self.prefix(max(least, PRODUCT))
        while self.kind not in self.closing or (  # [ closes ]2, 3[ where no factor is in it
                self.kind == "[" and self.binds(1) > SETS):
            if self.kind == "run":  # sinxcosx
                self.tokens[self.i:self.i + 1] = cut(self.text)
            binds, before = self.binds(), self.peek(-1).kind
            if binds < least or self.kind == "num" and (  # not 2 3, nor "at 3", but 2^3 5^2, ab 3^2
                    before in ("num", "°", "%") and self.peek(-2).kind != "^" or
                    before == self.peek(-2).kind == "name" and self.peek().gap and
                    self.peek(1).kind != "^"):
                break
            if node == num(0) and self.kind in (*LETTERS, "million"):
                raise ValueError("letters behind 0")
            if binds in (IMPLICIT, ARGUMENT):
                node = combined("*", node, self.expression(DEGREES))
            elif binds <= CHAIN or self.kind == ":":
                node = self.several(node, binds)
            else:
                node = self.infix(node, self.take().kind, binds)
        return node

    def infix(self, left, kind, binds):
        """The value of an operator, just taken, between `left` and what is next."""
        if kind == "!":
            return ("f", "factorial2" if self.take("!") else "factorial", left)
        if kind in "%°":
            while self.kind == "num" and self.peek(1).kind == "mark":  # 30° 15' 20''
                minutes, mark = self.take(), self.take()
                left = ("+", left, num(Fraction(minutes.text) / 60**len(mark.text)))
            return combined("*", left, ("name", " " + kind))
        if kind == "/" and self.kind == "num" and (  # (1/2)x, (\pi/2) cm
                left[0] == "num" or self.peek(1).kind == "unit"):
            binds = DEGREES
        right = self.expression(binds + (kind != "^"))
        if kind in "∪∩∖" or kind == "-" and (  # R - {0}
                left[0] == "numbers" or right[:2] == ("list", "{}")):
            right = ("list", "{}", (right,)) if right[0] == "num" else right
            return (kind.replace("-", "∖"), "", (left, right))
        if kind == "mod":
            left = num(left[1] % right[1]) if left[0] == right[0] == "num" else left
            if ")" not in self.closing:  # of (mod 7)
                self.take(")")
        if kind in ("mod", "choose"):
            return ("f", kind, left, right)
        if kind == "-":
            kind, right = "+", negative(right)
        return combined({"over": "/"}.get(kind, kind), left, right)

    def several(self, left, binds):
        """A list, a ratio or a chain: its parts, and what stands between them. x > 2 is 2 < x."""
        parts, between = [left], []
        while self.binds() == binds:
            between.append(self.take().kind)
            while self.binds() == LIST == binds:  # ", and"
                between[-1] = self.take().kind
            parts.append(self.expression(binds + 1))
        alike = {"≈": "=", "≤": "<", "≥": ">"}
        signs = {alike.get(sign, sign) for sign in between} - {","}
        if len(signs) > 1:
            raise ValueError("these do not go together")
        if binds == RATIO:
            parts = [("/", x, y) for x, y in itertools.pairwise(parts)]
        if binds != CHAIN:
            return ("list", max(between), tuple(parts)) if parts[1:] else parts[0]  # "," < and < or
        if between == ["∈"] and parts[1][:2] == ("list", "{}"):
            between = ["="]
        if signs == {">"}:
            parts, between = parts[::-1], ["<≤"[r == "≥"] for r in reversed(between)]
        return ("chain", tuple(between), tuple(parts))

    def words(self):
        """Letters with nothing beside them: words, or a run that may be one; else None."""
        self.take("≈")
        title = ["num"] * bool(re.fullmatch("[A-Z][a-z]{2,}", self.text))  # May 5
        n = next(n for n in itertools.count() if self.peek(n).kind not in (*LETTERS, "-", *title))
        found = self.tokens[self.i:self.i + n]
        long = [len(t.text) for t in found if t.kind != "name" and len(t.text) > 1]
        if self.binds(n) > SETS or not long or n > 1 and not title and (
                len(long) < 2 or max(long) < 4 and found[0].kind != "word"):
            return None
        text = " ".join(t.text for t in found)
        if n == 1 and found[0].kind == "run" and not WORD.fullmatch(text):
            return ("word", text, self.expression(PRODUCT))
        self.i += n
        return next((node for form, node in SAID.items() if re.fullmatch(form, text.lower())),
                    ("word", text))

    def prefix(self, least=POWER):
        """A value, or the sign before a product of factors that bind at least so firmly."""
        if self.kind == "run":
            self.tokens[self.i:self.i + 1] = cut(self.text)
        before, token = self.peek(-1).kind, self.take()
        match token.kind:
            case "+" | "-" if before != "-":
                node = self.expression(least)
                return negative(node) if token.kind == "-" else node
            case "num":
                return num(token.text)
            case "const" | "numbers":
                return (token.kind, token.text)
            case "{" | "(" | "[" | "]" | "\\{":
                node = self.bracket(token.kind)
                if token.kind == "{" and self.kind == "num" and (
                        before not in ("^", "√", "frac", "binom", "}", "_")):
                    raise ValueError("a number beside a group")
                return node
            case "FUNC":
                return self.function(token.text)
            case "unit":
                return ("name", " " + token.text)
            case "square":  # meters
                return ("^", self.prefix(), num(SQUARES[token.text.lower()]))
            case "million":
                return num(NUMBERS[token.text.lower()])
            case "name" | "word" if len(token.text) == 1 or token.kind == "name":
                return self.name(token.text)
            case "|" | "⌊" | "⌈":  # |x|, \lfloor x \rfloor, \lceil x \rceil
                name, closing = ROUNDED[token.kind]
                return ("f", name, self.answer(closing))
            case "√":  # \sqrt[3]{x}, ∛x
                index = self.answer("]") if self.take("[") else num(2 + (token.text in "∛cbrt"))
                return ("^", self.prefix(), ("/", num(1), index))
            case "frac" | "binom":
                parts = self.prefix(), self.prefix()
                return combined("/", *parts) if token.kind == "frac" else ("f", "choose", *parts)
            case "system":
                return replaced(self.answer("end"), {"row": "and"})
            case "matrix":
                node = self.answer("end")
                node = node if node[1] == "row" else ("list", "row", (node,))
                return replaced(node, {"row": "", ",": ""})
        raise ValueError("no value")

    def bracket(self, opening):
        """{ }, ( ), [ ], \\{ \\} around a sum or list; {(1, 2)} is (1, 2), and {x > 2} is x > 2."""
        node = self.answer(*{"{": "}", "\\{": ["\\}"]}.get(opening, ")]["))
        if opening == "\\{":
            if node[0] == "chain" and "=" in node[1]:
                raise ValueError("a set of equations")
            keep = node[0] == "chain" or node[1] in ("()", "or")
            return node if keep else ("list", "{}", listed(node))
        if node[:2] == ("list", ",") and opening in "([]":  # ]2, 3[ is open
            brackets = opening.replace("]", "(") + self.peek(-1).kind.replace("[", ")")
            return ("list", brackets, node[2])
        return node[2] if node[0] == "word" and node[2:] else node

    def name(self, name):
        """A letter with subscript and primes, a function of it, or a constant. In e = 2, e is none
        (an eccentricity)."""
        before = self.peek(-2).kind
        if name in ("e", "i") and self.kind not in ("sub", "mark") and not (
                self.kind in RELATIONS and before in ("", "(", *SEPARATORS, *"<≤≥>")):
            return ("const", name)
        factor = before in ("name", "num")
        while sign := self.take("sub", "mark"):
            name += sign.text
        ahead = " ".join(self.peek(n).kind for n in range(8))
        argument = "[^ )]+" if name[0] in "ghFGH" else "num"
        if self.kind == "(" and (
                name in ("f", "zeta", "Gamma") or name[-1] == "'" or not factor and re.match(
                    rf"\( (?:{argument} \)|(?:[^ )]+ ){{0,5}}\) [=≈])", ahead)):  # I(0), P(A) = ...
            return ("f", name, *listed(self.prefix()))
        return ("name", name)

    def function(self, name):
        """\\sin^2 x, \\log_2(8), \\sin 2x \\cos x: of brackets, or of the factors up to others."""
        base = self.prefix() if self.take("_") else num(10)
        exponent = self.expression(POWER) if self.take("^") else None
        argument = self.prefix() if self.kind in "([{" else self.expression(ARGUMENT)
        argument = replaced(argument, DEGREE)
        if exponent == num(-1):
            name, exponent = "arc" + name, None
        node = ("f", name, argument)
        if name == "log":
            node = ("/", ("f", "ln", argument), ("f", "ln", base))
        return ("^", node, exponent) if exponent else node


INSIDE = r"(?:[^{}\\]|\\.)*+"  # of braces
for _ in range(20):  # groups in groups
    INSIDE = rf"(?:[^{{}}\\]|\\.|\{{{INSIDE}\}})*+"
GROUP = re.compile(r"(?!\\mathbf *\{R)(?:\\(?:mathbf|boldsymbol|bm|displaystyle|underline|emph|"
                   rf"(?:text)?color *\{{\w+\}}) *)?\{{({INSIDE})\}}", re.S)
BOX = re.compile(rf"\\(?:boxed|fbox)\s*\{{({INSIDE})\}}", re.S)
# Boxes that are one answer, as in "\(\boxed{2}\) and \(x = \boxed{3}\)".
GAP = r"(?:[\s$*}]|\\[()\[\],;: ]|\\q?quad|\\text *\{)"
BOXES = re.compile(rf"{BOX.pattern}(?:"
                   rf"(?:{GAP}*+(?:[,;，、或和]|\b(?:and|or)\b(?: also| else| maybe)?))++"
                   rf"(?:{GAP}|(?:\\[a-z]+ *)?\w{{0,3}}(?:_\{{\w+\}})?(?:\(\w+\))? *=)*+"
                   rf"{BOX.pattern})*", re.S)


def last_boxed(text):
    """The content of the last complete \\boxed{...} in a text, behind those of other boxes that
    "and", "or", a comma or a semicolon joins to it; None without one."""
    if joined := [*BOXES.finditer(text)]:
        answers = [last_boxed(box) or box for box in BOX.findall(joined[-1][0])]
        return ", ".join(dict.fromkeys(answers))


PROSE = {*LETTERS, *"num unit % - / : square".split()}
CHOICE = re.compile(r"(?i:(?:option|choice) )?[({ ]*([A-J]|(?<=\()[a-j](?=\) [^-+(]))[} ]*"
                    r"(?:(?:[):]|\.(?!\d))[} ]*+|$|(?<= )(?=(?:is correct|only)\b"
                    r"|\( ?[A-Za-z]{3,}+(?!\w* ?[-+*/^=])))"
                    r"((?![-+] |[+*/^=≈<>≤≥≠∈≡!]|\\(?![dt]?frac|sqrt|pi|\{|sin|cos|tan|log|ln|vec))"
                    r"(?!.*(?<![A-Za-z\\])[A-J](?![a-z])).*)", re.S)  # and not D. A
BASED = re.compile(r"(?:[A-Za-z] ?= ?)?[({ ]*(-?[0-9.]+|[0-9A-F]{2,}(?=\D+16))[)} ]*"
                   r"(?:_|\(? ?(?:in )?base)[ {(]*+(?:base[ {(]*+)?(\w+)[ )}]*")
FILLER = rf"(?:\b(?:{'|'.join(WORDS['FILLERS'])})\b|[∈∀|:,()\ ]|\\(?:forall|mid)\b)"
WHERE = re.compile(rf"""(?:\\\{{\ ?)?(.+?)(?:\ (?:where|with|for)\b|\ ?(?:∀|\\forall)|\ ?\\mid[ ]
        |(?:\ ?[,;:(|]|\ and\b)(?=[^=]*(?:∈|∀|integer|where|for\b|any\b|real\b)
            |\ ?[a-z]\ ?=\ ?[01](?:[±0-9,\ ]|\\pm)+DOTS|\ ?[kmn]\ ?≥\ ?[01](?![0-9.])))
    ({FILLER}*?)(?:(?<![A-Za-z])[A-Za-z]\ ?,\ ?)*(?<![A-Za-z])([A-Za-z])(?![A-Za-z_])  # the name
    ((?:{FILLER}|\\\}}|(?<![A-Za-z])[NZQRC]\+?(?![A-Za-z])|(?<=[kmn])\ ?≥\ ?[01]\b
        |=\ ?[01](?:[±0-9,\ ]|\\pm)+DOTS)*)""", re.X | re.S)
LEAD_IN = re.compile(r"(?i)^[\s$*({\\\"#]*+(?:text\w* *\{[\s(]*)?((?:[$a-z]+[,: ]+)*(?:answer|"
                     r"(?:probability|area|value|result|total)(?=[ }]*[:=])|remainder(?=[ }]*\d)|"
                     r"[a-z]+(?=: )|[$a-z]+(?= +(?:is|are)\b))) *(?:is\b|are\b|[:=*\s}])*")


@cached
def read(text):
    """-> the typed value of an answer."""
    text = text.rpartition("####")[2].strip()  # as GSM8K has it
    if len(text) > LONGEST:
        return ("unread", text)
    text = rest = ", ".join(BOX.findall(text)) or text
    if group := GROUP.fullmatch(text):
        return read(group[1])
    if lead := LEAD_IN.match(text):
        subject = {*re.findall("[a-z]{2,}", lead[1].lower())}
        words = re.fullmatch(r"[A-Za-z\s.,'*$}-]{4,}", text[lead.end():])  # The area is doubled
        if subject and subject <= {*WORDS["ANSWERS" if words else "SUBJECTS"]}:
            rest = text[lead.end():]
    found = tokens(rest)
    whole = "".join(" " * t.gap + (t.kind if t.kind in RELATIONS else t.text)
                    for t in found).strip()
    try:
        if picked := len(whole) < 300 and CHOICE.fullmatch(whole):  # each within is read anew
            value = picked[2] and read(picked[2])
            words = {*re.findall(r"(?<!\\)\b(?!(?:none|all) of the)[a-z]{2,}", picked[2].lower())}
            if not value or words.isdisjoint(WORDS["DOUBTS"]) and (
                    value[0] == "word" or value[0] != "unread" and all(
                        x in lexer.NAMED or unit_name(x) for x in words)):
                return ("choice", picked[1], value)
        if based := BASED.fullmatch(whole):
            return ("based", based[1], int(lexer.BASES.get(based[2], based[2])))
        if where := len(whole) < 300 and WHERE.fullmatch(whole):
            words = re.findall(r"[A-Za-z]+\+?|±|[01](?! ?, ?(?:±|\\pm))", where[4] + where[2])
            if (value := read(where[1]))[0] == "unread":
                raise ValueError("a condition on what is unread")
            numbers = next(filter(None, map(lexer.NAMED_SETS.get, words)), "R")
            return ("where", value, ("name", where[3]), numbers)
        return with_signs(found)
    except (ValueError, RecursionError, ZeroDivisionError):
        kinds = {t.kind for t in found}
        kind = "prose" if kinds & {"run", "word"} and kinds <= PROSE else "unread"
        return (kind, " ".join(t.text for t in tokens(text)))


def with_signs(found):
    """-> the value of tokens; with ± a list of those of all signs, with ∓ of those together."""
    marks = [token.text in ("\\mp", "∓") for token in found if token.kind == "±"]
    if len(marks) > 4:
        raise ValueError("more than sixteen values")
    choices, items = itertools.product((False, True), repeat=len(marks)), {}
    if {*marks} == {False, True}:
        choices = marks, [not mark for mark in marks]
    for signs in choices:
        minus = iter(signs)
        value = Parser(Token("+-"[next(minus)]) if token.kind == "±" else token
                       for token in found).answer("")
        items |= dict.fromkeys(value[2] if value[1] in (*SEPARATORS, "{}") else [value])
    return ("list", ",", (*items,)) if marks else value

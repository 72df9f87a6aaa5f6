r"""An answer is parsed once: LaTeX, plain text and Python's notation alike become a typed value.

The grammar, from the whole to its parts, and behind each line an answer that takes it:

    answer     [lead-in] list [condition]              The answer is 12
    list       item {("," | ";" | "and" | "or") item}  x = 1 \text{ or } x = 2
    condition  ("," | "where" | "for") name in a set   k\pi, k \in \mathbb{Z}
    item       part {relation part}                    \frac{1}{2} = 0.5
    part       words, or sets with \cup and \setminus  (-\infty, 0) \cup \{1\}
               or sum {":" sum}                        2:3
    sum        product {("+" | "-" | "\pm" | "mod") product}   3 \pm \sqrt{2}
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

A value is a tuple (kind, parts). Kinds of sums: num, name, const, +, *, /, ^, f (a function),
() (brackets behind a name), unit. Others: list (separators, items), set, seq (brackets,
items; of a matrix without brackets, of a ratio ":"), chain (parts, relations), ∪, ∖, ∩,
numbers, word (of a run of letters with their product), where, based, choice; and
unread: the text of what the grammar does not take.
"""

import functools
import itertools
import re
import unicodedata
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

LONGEST = 5000  # characters of an answer
cached = functools.lru_cache(maxsize=4096)  # a gold answer is read once for its group


class Token(NamedTuple):
    kind: str          # num, name, run (of letters), word (in \text), FUNC, ..., or the sign itself
    text: str = ""
    gap: bool = False  # is white space before it?


def table(name):
    """The lines "kind: words" of a file of this folder -> {kind: words}"""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    rows = (line.partition(": ") for line in text.splitlines() if line[0] != "#")
    return {kind: words.split(" ") for kind, _, words in rows}


def aliases(kind):
    """Words "m/meter/metre" of words.txt -> {spelling: m}"""
    return {name: names.split("/")[0] for names in WORDS[kind] for name in names.split("/")}


WORDS, SPELLINGS = table("words.txt"), table("spellings.txt")
KINDS = {spelling: kind for kind, spellings in SPELLINGS.items() for spelling in spellings}
KINDS |= aliases("name")
NAMED = {name: kind for kind in ("FUNC", "unit", "name", "const", "ACCENT", "'", "word")
         for name in aliases(kind).values()}
UNITS = {prefix + name: short + symbol
         for prefix, short in aliases("PREFIXES").items()
         for name, symbol in aliases("SYMBOLS").items() if len(prefix) < 2 or len(name) > 2}
UNITS |= aliases("COUNTED")
NUMBER_WORDS, NAMED_SETS, SQUARES = map(aliases, ("NUMBERS", "SETS", "SQUARES"))
WRITTEN_OUT = {"[\uff01-\uff5e″]+": "%s", "[⁰¹²³⁴-⁹⁻]+": "^{%s}", "[₀-₉]+": "_{%s}",
               "[¼-¾⅐-⅞]": "{%s}"}
PIECE = re.compile(r"""
    (?P<mixed>(?:[0-9]+\s*)?\{[0-9]+⁄[0-9]+\}
        |(?<![/.])\b[0-9]+(?:(?:\s|\\,)+[0-9]+\ */\ *[0-9]+(?![0-9])
        |\s*(?:\\[,!]\s*)*\\(?:[dtcsx]|nice)?frac(?:\ *(?:\{\ *[0-9]+\ *\}|[0-9])){2}))
    |(?P<repeating>[0-9]*\.[0-9]*(?:\\(?:overline|bar)\ *\{?[0-9]+\}?|\([0-9]+\)
        |\\dot\ *\{?[0-9]\}?(?:[0-9]*\\dot\ *\{?[0-9]\}?)?)(?![0-9.(^!])
        |[0-9]*\.[0-9]{0,9}?(?P<period>[0-9]{1,9}?)(?P=period)+\ *(?:\.\.\.|…|\\[lc]?dots))
    |(?P<clock>[0-9]{1,2}(?:(?:\{:\}|\\!:\\!|:)[0-9]{2})+(?![0-9:]))
    |(?P<num>(?!0\\[;:\ ])[0-9]{1,3}(?:(?:(?:,|\{,\})(?:\ *\\!\s*)?|\\,\s*|\\[;:\ ]|[\ ~])[0-9]{3})+
            (?![0-9])(?:\.[0-9]+)?
        |(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
        (?:\ ?[eE][-+−]?[0-9]{1,4}(?![0-9A-Za-z]|\.[0-9]))?)
    |(?P<skip>(?<![\w)}])(?<![\w)}]\ )(?<![0-9]\.)\*\*|\*\*(?=[*.\s]*$)|&(?=\s*=)  # Markdown's
        |\bm\ *(?=\\angle|∠)|(?<=array\})\ *\{[lcr|\ ]+\}|\s+|~|\\[,;:!>\ ]|\\+$|\\q?quad
        |np\.(?=arc)|(?<=[a-z0-9])\.(?![.0-9])|,(?=\s*\\(?:\\|end))
        |[,(\ ]{1,4}+(?=(?:\\(?:text|mathrm)\ *\{)?\ *(?:\\[pb]?)?mod(?![a-z]))
        |[.,;。](?!\s*\.\.)(?=(?:[\s$.,;。}*]|\\[)\]]){0,9}\Z)
        |\A(?:=|\\therefore(?![a-z]))|\\(?:text)?color\ *\{\w+\}
        |(?<=[0-9])\ *\^?\ *\{?\ *(?:\\(?:text|mathrm)\ *\{\ *)?(?:st|nd|rd|th)\b(?:[\ }]*\})?)
    |(?P<TODO>\\[dt]?frac\ *\{\ *(?:\\mathrm\ *\{d\}|d)\ *(?:\^\ *\{?\d\}?)?\ *\}
        (?=\ *\{\ *(?:\\mathrm\ *\{)?d))
    |(?P<derivative>\\[dt]?frac\ *\{\ *(?:\\mathrm\ *\{d\}|d)(?:[^{}+-]|[_^]\ *\{\w+\})*\}
        \ *\{\ *(?:\\mathrm\ *\{d\}|d)\ *\\?[A-Za-z]+\ *(?:\^\ *\{?\d\}?)?\ *\}
        |(?<=P\()[A-Z]\ ?(?:\||\\mid)\ ?[A-Z](?=\)))  # given
    |(?P<system>\\begin\ *\{(?:cases|align(?:ed)?)\*?\}|\\\{\s*\\begin\ *\{array\})
    |(?P<matrix>\\begin\ *\{(?:array|[pbB]?(?:small)?matrix\*?)\})
    |(?P<end>\\end\ *\{[a-zA-Z]+\*?\})
    |(?P<cell_if>&\s*(?:\\q?quad\s*|\\[,;\ ]\s*)*(?:\\text\ *\{\s*(?:if|when)\ *(?:\}|(?=[^{}]*\}))
        |(?:if|when)\b))
    |(?P<row>(?:\\\\|\\cr(?![a-z]))\ *(?:\[[-0-9.\ ]*[a-z]{2}\])?)
    |(?P<vector_begins>(?:(?<=[$=])|(?<=[$=]\ )|\A)<(?=[^<>,]+,[^<>]+>[\s$.]*\Z))  # <1, 2>
    |(?P<vector_ends>>(?=[\s$.]*\Z))
    |(?P<numbers>(?:\\mathbb\ *\{?\ *[A-DF-OQ-Z]\ *\}?|[ℝℕℤℚℂ]
        |\A\s*\\mathbf\ *\{R\}(?=[\s.]*\Z)
        |(?:(?<=\\in)|(?<=\\in\ )|(?<=∈)|(?<=∈\ ))(?:\\(?:text|math(?:bf|rm))\ *\{?\ *)?
            [NZRQC](?![A-Za-z0-9]|_\ *\{?\ *\w)\ *\}?)
        (?:\ *[\^_]\ *\{?\ *(?:\*|\+|\\ast|>\ *0)\ *\}?|\*(?=[)\s]*$))?)
    |(?P<degree>\^\ *(?:\{\ *(?:\\circ|°)\ *\}|\\circ(?![A-Za-z])|°))
    |(?P<mark>\^\ *(?P<group>\{)?\ *(?:(?:\\ast|\\star|(?:\\prime\ *)+)(?![A-Za-z])|\*|'+
        |[ds](?=\}?\ *\())(?(group)\ *\}))
    |(?P<times_ten>(?:(?<=[0-9])|(?<=[0-9]\ ))x(?=\ ?10\ *\^))
    |(?P<brace>[{}](?![,:]\}))
    |(?P<sign>[aApP]\.\ ?[mM]\b|per\ cent|US\\\$|\\mathbb\ *\{?\ *[EP]\ *\}?
        |(?<=[0-9]\ )out\ of(?=\ [0-9]+[\s.$]*\Z)
        |\\not\ *=|\\?[A-Za-z]+|\\.|\{[,:]\}|\*\*|\+/-|[<>!]=|&&|\.\.\.|.)""", re.X | re.S)


# ------------------------------------------------------------------ tokens

UNSEEN = ("skip", "FONT")  # these only part tokens


def read_piece(kind, piece, font=False):
    """The kind and text of the token that a piece of text is: of a number, as Fraction reads it, of
    dx/dt, a mark, or letters, a command or a sign. font: are these in \\text?"""
    match kind:
        case "num" | "clock":
            digits = re.sub(r"^0(,|\{,\})", "0.", piece.replace("−", "-"))  # 0,111
            return kind, re.sub(r"\\[!,;: ]|[{},~\s]", "", digits)
        case "mixed":  # 1 2/3, 1\frac23
            whole, part, of = re.fullmatch(
                r"(\d*)\D*?(\d++(?=\D+\d)|\d)\D*(\d+)\D*", piece).groups()
            return "num", f"{int(whole or 0) * int(of) + int(part)}/{of}"
        case "repeating":  # 0.8(3), 0.8333...
            piece = re.sub(r"(\d{1,9}?)\1+[^\d)}]+$", r"(\1)", piece)
            start, tail, *period = re.split(r"\.|\D+", piece)
            digits, period = start + tail, "".join(period)
            nines = 10 ** len(tail) * (10 ** len(period) - 1)
            return "num", f"{int(digits + period) - int(digits or 0)}/{nines}"
        case "derivative":
            return "name", re.sub(r"\\(?:[dt]?frac|mathrm|mid)|[ {}|\\]", "", piece)
        case "numbers":
            letter, *more = re.findall("[A-Z*+>]|ast", unicodedata.normalize("NFKC", piece))
            return kind, letter + "+" * bool(more)  # N^*
        case "mark":
            return "'", "".join(KINDS.get(m, m) for m in re.findall(r"\\[a-z]+|[*'ds]", piece))
        case "sign":
            name = re.sub(r"[. ]|\\(?=[A-Za-z])", "", piece)
            kind = KINDS.get(piece, KINDS.get(name))
            if (kind or name) in NAMED:
                return NAMED[kind or name], kind or name
            if kind or not re.match("[A-Za-z]", piece):
                return kind or piece, piece
            return "word" if font else "run" if len(name) > 1 else "name", name
    return KINDS.get(kind, kind), piece


def tokens(text):
    """-> the Tokens of a text, without its markup."""
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]+ *[{\[])", r"\\", text)  # it was escaped twice
    for signs, form in WRITTEN_OUT.items():
        text = re.sub(signs, lambda m: form % unicodedata.normalize("NFKC", m[0]), text)
    found, braces, before, at, depth = [], [], "", 0, 0
    while match := PIECE.match(text, at):
        kind, piece = match.lastgroup, match[0]
        if depth and re.fullmatch("[0-9]+(?:,[1-9][0-9]{2})+", piece):
            piece = piece.split(",")[0]  # (1,234) has two entries
        at += len(piece)
        if kind == "brace":
            braces += [before == "FONT"] * (piece == "{")  # is it a font's?
            kind = piece if braces and not braces[-1] else "skip"
            if piece == "}":
                del braces[-1:]
        else:
            kind, piece = read_piece(kind, piece, any(braces))
        depth += (kind in ("(", "[", "\\{")) - (kind in (")", "]", "\\}"))
        if kind not in UNSEEN:
            found.append(Token(kind, piece, before in UNSEEN))
        before = kind
    return found


# ------------------------------------------------------------------ the grammar

RELATIONS, SEPARATORS = [*"=≈<>≤≥≠∈≡"], [",", "and", "or"]
CLOSING = ["", *") ] } \\} row end".split()]
ENDS = CLOSING + SEPARATORS + RELATIONS
LETTERS = ["word", "run", "name"]
BEHIND = "num unit / * } ) end const word °".split()  # behind these a unit may stand
BEHIND_ARGUMENTS = "FUNC matrix ( [ {".split()  # these factors are not the function's before them
# How firmly an operator binds, IMPLICIT and ARGUMENT a product without one.
PRODUCT, IMPLICIT, ARGUMENT, DEGREES, FACTORIAL, POWER = 20, 30, 35, 40, 45, 50
BINDS = {**dict.fromkeys(("over", "choose", "mod"), 1), **dict.fromkeys("+-", 10),
         **dict.fromkeys("*/", PRODUCT), **dict.fromkeys("%°", DEGREES), "^": POWER, "!": FACTORIAL}
FACTORS = "unit FUNC frac binom matrix system ACCENT name const √ { ⌊ ⌈".split()
ROUNDED = {"|": ("abs", "|"), "⌊": ("floor", "⌋"), "⌈": ("ceil", "⌉")}
SAID = {"(the set of )?(all )?real numbers|all reals": ("numbers", "R"),
        "(the set of )?(all )?integers": ("numbers", "Z"), "(the )?empty ?set|"
        "(there (is|are) )?no (such |real )*((solution|number|integer|function)s?|n)( exists?)?":
        ("set", (), ()), "dne|((the )?limit )?does not exist": ("word", "DNE")}
LISTS = "list set seq chain word numbers".split()


def num(value):
    return ("num", Fraction(value))


def scaled(kind, left, right):
    """A product or a quotient; a factor of a matrix is one of all entries."""
    for node, other in ((left, right), (right, left))[:"+/*".index(kind)]:
        if node[:2] == ("seq", "") and other[0] not in LISTS:
            return ("seq", "", tuple(
                entry if entry == num(0) else scaled(kind, entry, other) for entry in node[2]))
    return (kind, left, right)


def listed(node):
    return node[2] if node[0] in ("list", "set", "seq") else (node,)


def unit(name):
    """A unit is a name with white space in front."""
    return ("name", " " + name)


def replaced(node, new):
    """A value with others for some of its parts."""
    if new and isinstance(node, tuple) and node not in new:
        return tuple(replaced(part, new) for part in node)
    return new.get(node, node)


def inside(node):
    """A value and all values in it, and its tuples of values."""
    if isinstance(node, tuple) and node:
        yield node
        for part in node:
            yield from inside(part)


def negative(node):
    return num(-node[1]) if node[0] == "num" else scaled("*", num(-1), node)


class Parser:
    """A recursive descent over Tokens."""

    def __init__(self, found):
        self.tokens, self.i = [*found, *[Token("")] * 8], 0
        self.closing = ()  # the tokens that end the list which is read

    # -------------------------------------------------------------- taking tokens

    def peek(self, ahead=0):
        return self.tokens[self.i + ahead]

    kind = property(lambda self: self.peek().kind)
    text = property(lambda self: self.peek().text)
    last = property(lambda self: self.peek(-1).kind)  # of the token just taken

    def take(self, *kinds):
        """The next token, which is taken if it is of these kinds, or of any; else None."""
        if not kinds or self.kind in kinds:
            self.i += 1
            return self.tokens[self.i - 1]

    def ends(self, ahead=0):
        """Does an item end there, or behind an exponent?"""
        if self.peek(ahead).kind == "^":
            ahead += 4 if self.peek(ahead + 1).kind == "{" else 2
        return self.peek(ahead).kind in ENDS

    # -------------------------------------------------------------- lists, items, parts

    def answer(self, *closing):
        """A list, and one of the tokens `closing` behind it; "" is the end of all."""
        around, self.closing = self.closing, closing
        items, separators, where = [self.item()], [], None
        while self.kind not in closing:
            separator = "," if self.kind == "num" and self.last == "word" else None
            while token := self.take(*SEPARATORS):
                separator = token.kind
            if not where and (where := self.condition()):
                continue
            if not separator:  # nor 3 hours 20 minutes
                raise ValueError("no item")
            separators.append(separator)
            items.append(self.item())
        self.closing = around
        self.take()
        node = ("list", tuple(separators), tuple(items)) if separators else items[0]
        return ("where", node, *where) if where else node

    def condition(self):
        """", k \\in Z", "(k \\in Z)", "for any integer k" -> its name, its set; else None"""
        start, name, found = self.i, None, []
        while self.kind not in CLOSING and len(found) < 14:
            token = self.take()
            if token.kind == "name" and not name:
                name = ("name", token.text)
            else:
                found.append(token.text if token.kind in ("numbers", *LETTERS) else token.kind)
        if "(" in found:
            self.take(")")
        if name and {*found} & {*WORDS["LINKS"]} and {*found} <= {*WORDS["FILLERS"]}:
            return name, next((NAMED_SETS[x] for x in found if x in NAMED_SETS), "R")
        self.i = start

    def item(self):
        """Parts with relations between them; x \\in \\{1, 2\\} is x = \\{1, 2\\}."""
        parts, relations = [self.part()], []
        while token := self.take(*RELATIONS):
            parts.append(self.part())
            relations.append("=" if (token.kind, parts[-1][0]) == ("∈", "set") else token.kind)
        if {*relations} <= {*">≥"}:  # x > 2 is 2 < x
            parts, relations = parts[::-1], ["<≤"[r == "≥"] for r in reversed(relations)]
        if len({*relations} - {"≈"}) > 1 and {*relations} & {*"=≠∈≡>≥"}:
            raise ValueError("relations that do not go together")
        if parts[0] == ("const", "e") and relations and {*relations} <= {*"=≈"}:  # an eccentricity
            parts[0] = ("name", "e")
        return ("chain", tuple(parts), tuple(relations)) if relations else parts[0]

    def part(self):
        """Words, a time; or a sum, a ratio or a set, with \\cup and \\setminus between sets."""
        self.take("≈")
        if self.text.lower() in ("a", "an", "the") and len(self.peek(1).text) > 3 and (
                self.peek(1).kind in ("run", "word")):
            self.i += 1
        if (node := self.words()) and self.kind != "∖":
            return node
        if token := self.take("clock"):
            half = self.take().text.lower() if self.text.lower() in ("am", "pm") else ""
            return ("seq", ":" + half, tuple(map(num, token.text.split(":"))))
        node = node or self.expression()
        while self.kind in [*"∩∪∖-"] or self.text == "U":
            token, right = self.take(), self.expression()
            kind = {"-": "∖", "name": "∪"}.get(token.kind, token.kind)
            node = (kind, node, ("set", (), (right,)) if token.text == "except" else right)
        ratios = ()
        while ":" not in self.closing and self.take(":"):
            before, node = node, self.expression()
            ratios += (("/", before, node),)
        return ("seq", ":", ratios) if ratios else node

    def words(self):
        """Letters with nothing beside them: words, or a run that may be one; else None."""
        n, title = 0, ["num"] * bool(re.fullmatch("[A-Z][a-z]{2,}", self.text))  # May 5
        while self.peek(n).kind in (*LETTERS, "-", *title) and not (  # cx for all x
                len(self.text) < 3 and self.peek(n).text in WORDS["QUANTIFIERS"]):
            n += 1
        found = self.tokens[self.i:self.i + n]
        long = [len(t.text) for t in found if t.kind != "name" and len(t.text) > 1]
        if self.peek(n).kind not in ["∖", *ENDS] or not long or n > 1 and not title and (
                len(long) < 2 or max(long) < 4 and found[0].kind != "word"):
            return None
        text = " ".join(t.text for t in found)
        said = [node for form, node in SAID.items() if re.fullmatch(form, text.lower())]
        if not said and n == 1 and found[0].kind == "run" and not WORD.fullmatch(text):
            return ("word", text, self.expression())
        self.i += n
        return said[0] if said else ("word", text)

    # -------------------------------------------------------------- sums and products

    def expression(self, least=0):
        """A sum of which every operator binds at least so firmly."""
        node = self.prefix(max(least, PRODUCT))
        while True:
            binds = BINDS.get(self.kind, -1)
            if self.starts_a_factor():
                if self.kind == "run" and least == ARGUMENT:  # sinxcosx
                    self.segment()
                binds = IMPLICIT if self.kind in BEHIND_ARGUMENTS else ARGUMENT
            if binds < least or node[0] in LISTS and node[1] != "":
                return node
            operator = self.take(*BINDS)
            node = self.infix(node, operator.kind) if operator else self.product(node)

    def starts_a_factor(self):
        """Is a factor next? None is [ that closes ]2, 3[, | that closes |x|, ( of a condition."""
        match self.kind:
            case "|":
                return "|" not in self.closing
            case "[":
                return self.peek(1).kind not in ("", "∪", *SEPARATORS)
            case "num":
                return self.last not in ("num", "°", "unit", "%", "word") or (
                    self.peek(-2).kind == "^")  # 2^3 5^2
            case "(":
                start, condition = self.i, self.condition()
                self.i = start
                return not condition
            case "run" | "word":
                return self.text.lower() not in ("am", "pm") and (  # 5 each
                    self.text not in WORDS["QUANTIFIERS"] or self.ends(1))
        return self.kind in FACTORS

    def product(self, left):
        """A factor behind another. Brackets behind a name are marked: they may be arguments."""
        if left == num(0) and self.kind in ("name", "run") and not unit_name(self.text):
            raise ValueError("letters behind 0")
        bracket = self.kind == "(" and left[0] == "name" and self.last != ")"
        right = self.expression(DEGREES)
        # h(a + b) is a function where no factor is in front of h
        if bracket and (right[0] in ("seq", "num") or left[1] in "ghFGH" or left[1][-1] == "'"):
            return ("f", left[1], *listed(right))
        return ("*", left, ("()", right)) if bracket else scaled("*", left, right)

    def infix(self, left, kind):
        match kind:
            case "+" | "-" | "*" | "/" | "over":
                numbers = kind == "/" and left[0] == self.kind == "num"  # 1/2x is x/2
                right = self.expression(FACTORIAL if numbers else BINDS[kind] + 1)
                right = negative(right) if kind == "-" else right
                return scaled({"-": "+", "over": "/"}.get(kind, kind), left, right)
            case "choose":
                return ("f", "binom", left, self.expression())
            case "mod":
                m = self.expression(FACTORIAL)
                if ")" not in self.closing:  # of (mod 7)
                    self.take(")")
                return ("f", "mod", num(left[1] % m[1]) if left[0] == m[0] == "num" else left, m)
            case "!":
                return ("f", "factorial2" if self.take("!") else "factorial", left)
            case "%" | "°":
                if self.kind == "num" and self.peek(1).kind == "'":  # 30° 15'
                    left = ("+", left, num(Fraction(self.take().text) / 60))
                    self.i += 1
                return ("*", left, unit(kind))
            case "^":
                exponent = self.expression(POWER)
                if left[0] == "name" and exponent != num(-1):  # x^2_1, but f^{-1}(x) is a name
                    left = self.name(left[1])
                return ("^", left, exponent)

    # -------------------------------------------------------------- atoms

    def prefix(self, least=PRODUCT):
        """A value, or the sign before a product of factors that bind at least so firmly."""
        if self.kind == "run":
            self.segment()
        before, token = self.last, self.take()
        match token.kind:
            case "+" | "-" if before != "-":
                node = self.expression(least)
                return negative(node) if token.kind == "-" else node
            case "num":
                return num(token.text)
            case "{" | "(" | "[" | "]":
                node = self.bracket()
                if token.kind == "{" and before not in ("^", "√") and self.kind == "num":
                    raise ValueError("a number beside a group")
                return node
            case "const" | "numbers":
                return (token.kind, token.text)
            case "\\{":
                return self.set()
            case "FUNC" if token.text == "sec" and before in BEHIND and self.ends():  # 5 m/sec^2
                return unit("s")
            case "FUNC":
                return self.function(token.text)
            case "unit" if before not in BEHIND:  # \$5
                return ("*", self.expression(PRODUCT), unit(token.text))
            case "unit" | "word" | "name" if (node := self.unit(token)):
                return node
            case "name" | "word" if len(token.text) == 1 or token.kind == "name":
                return self.name(token.text)
            case "ACCENT":
                return self.name(self.with_argument())
            case "|" | "⌊" | "⌈":  # |x|, \lfloor x \rfloor, \lceil x \rceil
                name, closing = ROUNDED[token.kind]
                return ("f", name, self.answer(closing))
            case "√":  # \sqrt[3]{x}, √51, and \sqrt 51, which is of 5 alone
                index = self.bracket() if self.take("[") else num(2 + (token.text == "∛"))
                base = self.argument() if "\\" in token.text else self.prefix()
                return ("^", base, ("/", num(1), index))
            case "frac" | "binom":
                kind = ("/",) if token.kind == "frac" else ("f", "binom")
                return (*kind, self.argument(), self.argument())
            case "matrix" | "system":
                return self.matrix(token.kind)
        raise ValueError("no value")

    def segment(self):
        """Cuts the next run of letters: a unit behind a number, else a function or one letter."""
        text = self.text
        if self.last in BEHIND and (text.lower() in SQUARES | NUMBER_WORDS or unit_name(text)) and (
                self.peek().gap or not text.isupper()):
            self.tokens[self.i] = Token("word", text)
            return
        for at in range(min(len(text), 10), 0, -1):
            first = read_piece("sign", text[:at])
            if first[0] in ("name", "FUNC", "const", "√"):
                break
        rest = [Token("run", text[at:])] * (at < len(text))
        self.tokens[self.i:self.i + 1] = [Token(*first), *rest]

    def argument(self):
        """An argument of \\frac or \\sqrt: brackets, a digit, or one factor."""
        digit, others = self.text[:1], self.text[1:]
        if others.isdigit():  # which stay
            self.tokens[self.i] = Token("num", others)
            return num(digit)
        return self.bracket() if self.take("{", "(") else self.prefix()

    def bracket(self):
        """{ } around a sum or a list; ( ), [ ] or one of each around a sum, or a list of two."""
        opening, node = self.last, self.answer(")", "]", "[", "}")
        pair = opening + self.last
        if node[0] == "list" and "{" not in pair and "or" not in node[1]:
            return ("seq", pair[0].replace("]", "(") + pair[1].replace("[", ")"), node[2])
        if node[0] == "word":
            name = pair == "{}" and unit_name(node[1])
            return node[2] if node[2:] else unit(name) if name else node
        return node

    def set(self):
        """\\{1, 2\\}, \\{x \\mid x > 2\\}, \\{k\\pi : k \\in Z\\}"""
        if self.take("\\}"):
            return ("set", (), ())
        node = self.answer("\\}", "|", ":")
        if self.last == "\\}":  # {(1, 2)} is (1, 2)
            return node if node[0] in ("where", "seq") else ("set", (), listed(node))
        if (where := self.condition()) and self.take("\\}"):
            return ("where", node, *where)
        inner = self.answer("\\}")
        if node[0] == "chain" and node[1][1] == ("numbers", "R"):  # {x in R | x > 2}
            node = node[1][0]
        if node not in inside(inner) or inner[0] == "chain" and "=" in inner[2]:
            raise ValueError("a set of others, or of equations")
        return inner if inner[0] == "where" else ("∪", inner)  # {x | x = kπ, k in Z}

    def with_argument(self):
        """The text of _ or an accent, just taken, and of its argument."""
        depth, text = 0, self.peek(-1).text
        while True:
            token = self.take()
            depth += (token.kind == "{") - (token.kind == "}")
            text += token.text.strip("\\{}")
            if not depth or not self.kind:
                return text

    def name(self, name):
        """A letter with subscript and primes, or the constant that it is."""
        if name in ("e", "i") and self.kind not in ("_", "'"):
            return ("const", name)
        applied = name in ("f", "zeta", "Gamma")
        while sign := self.take("_", "'"):
            name += self.with_argument() if sign.kind == "_" else sign.text
        if applied and self.take("("):  # f(x), f(x, y)
            return ("f", name, *listed(self.bracket()))
        return ("name", name)

    def function(self, function):
        """\\sin^2 x, \\log_2(8), \\sin 2x \\cos x: of brackets, or of the factors up to others."""
        base, exponent = num(10), None
        while token := self.take(*("^_" if function == "log" else "^")):
            if token.kind == "^":
                exponent = self.expression(POWER)
            else:
                base = self.argument()
        argument = self.bracket() if self.take("(", "[", "{") else self.expression(ARGUMENT)
        argument = replaced(argument, {unit("°"): ("/", ("const", "π"), num(180))})  # in radians
        if exponent == num(-1):
            function, exponent = "arc" + function, None
        node = ("f", function, argument)
        if function == "log":
            node = ("/", ("f", "ln", argument), ("f", "ln", base))
        return ("^", node, exponent) if exponent else node

    def matrix(self, kind):
        """The rows as a sequence of sequences, a column as one; those of a system as a list."""
        rows = []
        while self.last != "end":
            if not self.take("row", "end"):
                row = self.answer("row", "end")
                if row[0] == "where" or row[0] == "list" and {*row[1]} != {","}:
                    raise ValueError("or in a row")
                rows.append(("seq", "", row[2]) if row[0] == "list" else row)
        if kind == "matrix" or not rows:
            return ("seq", "", (*rows,))
        return ("list", ("and",) * (len(rows) - 1), (*rows,))

    def unit(self, token):
        """The unit, or million, that letters just taken are: 5 m², km/h, square meters; or None."""
        word, before, start = token.text, self.peek(-2).kind, self.peek(-3).kind
        if square := SQUARES.get(word.lower()):
            node = self.unit(self.take())
            return node and ("^", node, num(square))
        if number := NUMBER_WORDS.get(word.lower()):
            return num(number)
        if word == "mu" and self.kind == "word":
            return unit("μ" + self.take().text)
        below = self.peek(1) if self.kind == "/" and self.ends(2) else Token("")
        speed = word == "m" and below.text == "s"
        rate = below.kind in ("run", "word") and below.text in UNITS  # g/cm^3, but not g/L
        scientific = before != "/" and [t.kind for t in self.tokens[:4]] == "num * num ^".split()
        letter = before == "°" or before == "/" and start in ("word", "unit") or (
            rate and before == "num") or token.gap and before in BEHIND and (
                speed or self.ends() and (scientific or before == "num" and start in ENDS)
            ) if token.kind == "name" else (
            before in BEHIND or before == "{" and start in ("frac", "}"))
        if (name := unit_name(word)) and (len(word) > 1 or letter):
            self.tokens[self.i - 1] = Token("word", word)  # behind it and / a letter is a unit
            if self.text in ("of", "a") and self.peek(2).kind in ENDS and THING.fullmatch(
                    self.peek(1).text):  # 8 slices of pizza
                self.i += 2
            return unit(name)


THING = re.compile("(?!no|infini|two|.*(?:llion|teen|dozen|thousand|hundred)s?$)[a-z]{3,}")
WORD = re.compile("(?!.*(?:pi|(?:sqrt|exp|sin|cos|tan|log|ln).|cot.$|sec.$))"
                  "[A-Z]?(?=.*[aeiou])[a-z]{4,}")


def unit_name(word):
    """The unit that a word names, or the plural of what is counted, as in 3 candies; else None."""
    small = word.lower() if word.istitle() and len(word) > 1 else word
    for form in word, word.removesuffix("s"), small, small.removesuffix("s"):
        if form in UNITS:
            return UNITS[form]
    plural = re.fullmatch("(?!.?cos$|.*(?:ths|illions|ss|us|alves)$)[a-z]{2,}s", small)
    if plural and small[:-1] not in WORDS["NO THINGS"]:
        return small


# ------------------------------------------------------------------ the whole of an answer

INSIDE = r"(?:[^{}\\]|\\.)*+"  # of braces
for _ in range(20):  # groups in groups
    INSIDE = rf"(?:[^{{}}\\]|\\.|\{{{INSIDE}\}})*+"
BOX = re.compile(rf"\\(?:boxed|fbox)\s*\{{({INSIDE})\}}", re.S)
CHOICE = re.compile(r"(?i:(?:option|choice) )?[({ ]*([A-J])[} ]*"
                    r"(?:(?:[):]|\.(?!\d))[} ]*+|$|(?<= )(?=\( ?[A-Za-z]{3,}))"
                    r"((?![-+] |[+*/^=<>!]|\\(?![dt]?frac|sqrt|pi|\{|sin|cos|tan|log|ln|vec))"
                    r"(?!.*(?<![A-Za-z\\])[A-J](?![a-z])).*)", re.S)  # and not D. A
BASED = re.compile(r"(?:[A-Za-z](?:\(\w\))? ?= ?)?[({ ]*([0-9]+|[0-9A-F]{2,}(?=\D+16))[)} ]*"
                   r"(?:_|\(? ?(?:in )?base)[ {(]*+(?:base[ {(]*+)?(\w+)[ )}]*")
LEAD_IN = re.compile(r"(?i)^[\s$*({\\\"#]*+(?:text\w* *\{[\s(]*)?((?:[$a-z]+[,: ]+)*(?:answer|"
                     r"(?:probability|area|value|result|total)(?= *[:=])|remainder(?=[ }]*\d)|"
                     r"[a-z]+(?=: )|[$a-z]+(?= +(?:is|are)\b))) *(?:is\b|are\b|[:=*\s}])*")


@cached
def read(text):
    """-> the typed value of an answer."""
    text = text.rpartition("####")[2].strip()  # as GSM8K has it
    if len(text) > LONGEST:
        return ("unread", text)
    text = rest = ", ".join(BOX.findall(text)) or text
    if lead := LEAD_IN.match(text):
        subject = {*re.findall("[a-z]{2,}", lead[1].lower())}
        words = re.fullmatch(r"[A-Za-z\s.,'*$}-]{4,}", text[lead.end():])  # The area is doubled
        if subject and subject <= {*WORDS["ANSWERS" if words else "SUBJECTS"]}:
            rest = text[lead.end():]
    found = tokens(rest)
    whole = "".join(" " * t.gap + t.text for t in found).strip()
    try:
        if picked := len(whole) < 300 and CHOICE.fullmatch(whole):  # each within is read anew
            value = picked[2] and read(picked[2])
            words = {*re.findall(r"(?<!\\)\b[a-z]{2,}", picked[2].lower())}
            strange = [x for x in words if x not in NAMED and not unit_name(x)]
            if not value or words.isdisjoint(WORDS["DOUBTS"]) and (
                    value[0] == "word" or value[0] != "unread" and not strange):
                return ("choice", picked[1], value)
        if based := BASED.fullmatch(whole):
            return ("based", based[1], int(aliases("BASES").get(based[2], based[2])))
        return parsed(found)
    except (ValueError, RecursionError, ZeroDivisionError):
        return ("unread", " ".join(t.text for t in (found if rest is text else tokens(text))))


def parsed(found):
    """-> the value of tokens; with ± a list of those of all signs, or of their entries, once. Where
    ∓ is, too, all signs change together."""
    marks = [token.text in ("\\mp", "∓") for token in found if token.kind == "±"]
    if len(marks) > 4:
        raise ValueError("more than sixteen values")
    choices, items = itertools.product((False, True), repeat=len(marks)), {}
    if {*marks} == {False, True}:
        choices = marks, [not mark for mark in marks]
    for signs in choices:
        minus = iter(signs)
        signed = [Token("+-"[next(minus)]) if token.kind == "±" else token for token in found]
        value = Parser(signed).answer("")
        items |= dict.fromkeys(value[2] if value[0] in ("list", "set") else [value])
    return ("list", (",",) * (len(items) - 1), (*items,)) if marks else value


# ------------------------------------------------------------------ boxes

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

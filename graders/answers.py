"""What the text of an answer is reduced to before it is compared: its value without wrapping, unit
and name. And what makes it no answer: a relation, an operation left to do, several candidates."""

import functools
import itertools
import re
import unicodedata
from fractions import Fraction
from pathlib import Path

LONGEST = 5000  # characters of an answer


def parts(name):
    """-> the lines of a file of this folder below each of its headings "== PART"."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    _, *found = re.split("(?m)^== (.*)", text)
    return {heading: re.findall("(?m)^[^#\n].*", lines)
            for heading, lines in zip(found[::2], found[1::2])}


LINES = parts("words.txt")
WORDS = {part: " ".join(lines).split() for part, lines in LINES.items()}
THOUSANDS = re.compile("(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
FRACTION = r"\\frac\{([0-9]+)\}\{([0-9]+)\}"
EQUALS = r"=(?![^{}]*\})"  # but not that of \sum_{k=1}
ARGUMENT = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
BOX = rf"\\(?:boxed|fbox)\s*{ARGUMENT}"
# Between two boxes that are one answer, as in "\boxed{2} and $x = \boxed{3}$".
JOINT = re.compile(r"(?:[\s$]|\\q?quad|\\[,; ]|\\text *\{)*(?:,|,? *\b(?:and|or)\b)"
                   r"(?:[\s$}]|\\q?quad|\\[,; ]|\b\w{1,3} *=)*")
TEXT = (r"\\(?:text(?:bf|rm|normal|it|sf|tt|sc|up)?|[mfh]box|math(?:rm|bf|it|sf|tt|normal)|bm|pmb|"
        r"boldsymbol|emph|underline|operatorname|rm|(?:text)?color(?:box)? *\{[A-Za-z]+\})"
        rf" *{ARGUMENT}")
RULES = {part: [(re.compile(pattern.replace("<TEXT>", TEXT)), new.strip().replace("~", " "))
                for pattern, new in (line.split(" ->") for line in lines)]
         for part, lines in parts("spellings.txt").items()}
LETTER = (rf"(?:[A-Za-z]|\\(?:{'|'.join(WORDS['GREEK'])})(?![A-Za-z]))(?:_(?:\{{[^{{}}]*\}}|\w))?"
          r"(?:\^\{(?:\\prime)+\}|\^\{? *(?:\*|\\ast|\\star|[sd]) *\}?)?")
POINTS = r"[A-Z]{1,4}(?:_(?:\{\w+\}|\w))?"
NO_NAMES = rf"(?i:{'|'.join(WORDS['DOUBTS'] + WORDS['NO NAMES'])})\b"
PLAIN = (rf"(?:[A-Z]{{2,4}}|(?!{NO_NAMES})[A-Z][a-z]{{2,}}|{LETTER})(?:(?:\^\{{?-1\}}?)?"
         rf" *\( *(?:-?[0-9./]+|[a-z]\([0-9]+\)|{LETTER}(?: *, *{LETTER})*) *\))?")
# What may stand left of the equals sign: x, a_{1}, x^*, AB, AB^2, \angle ABC, \sin A, f(x), (x, y),
# |AB|, [ABC], AB:CD, and a quotient of names.
NAME = re.compile(rf"(?:(?:m *)?\\angle *|\\Delta *)?{PLAIN}"
                  r"|\\(?:sin|cos|tan) *(?:\\angle *)?[A-Z]+"
                  rf"|\\(?:vec|hat) *\{{[A-Za-z]\}}|\( *{LETTER}(?: *, *{LETTER})* *\)"
                  rf"|(?:\| *(?:{POINTS}|\\vec *\{{\w\}}) *\||\\overline *\{{[A-Z]+\}}|[A-Z]{{2}})"
                  rf"(?:\^\{{?2\}}?)?|{POINTS} *: *{POINTS}|\[[A-Z]{{3,}}\]"
                  rf"|\\frac *\{{ *{PLAIN} *\}} *\{{ *{PLAIN} *\}}|{PLAIN} */ *{PLAIN}")
# Commands and characters of which a value consists; an answer may have others where the gold has.
COMMANDS = {*WORDS["COMMANDS"], *WORDS["GREEK"]}
STRANGE = re.compile(r"\b(?:vs|to|if|of|no)\b"
                     r"|[^\w\s+\-*/^_=()\[\]{},.!%|'\\]|[^\W0-9A-Za-z_\u0370-\u03ff]")
# Of a number, these are the question and not the answer.
OF_NUMBERS = r"\\(?:begin|binom|[lr]floor|[lr]ceil|[lr]?vert)|\|"

# A closed list, because another word after a number could make it another number.
UNITS = {prefix + symbol: prefix + symbol for prefix in ["", *"cmknpMGT\u03bcdf"]
         for symbol in WORDS["SYMBOLS"]} | {word: word for word in WORDS["COUNTED"]}
UNITS |= {alias: line.split()[0] for line in LINES["ALIASES"] for alias in line.split()}
# A plural that is none of these counts things, as in 3 candies.
NOT_THINGS = re.compile(rf"(?:{'|'.join(WORDS['NO THINGS'])})s|halves|.*(?:ths|illions|ss|us)")
REPEATING = r"([0-9]{0,99})\.([0-9]{0,99})\\overline\{([0-9]{1,99})\}"


# ------------------------------------------------------------------ its parts

def last_boxed(text):
    """The content of the complete \\boxed{...} that begins last in a text, braces balanced, behind
    those of other boxes that "and", "or" or a comma joins to it; None without one."""
    still_open, boxes = [], []
    # \{ groups nothing; some write \\boxed.
    for brace in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\(?!\\boxed\s*\{).|[{}]", text, re.S):
        if brace[0] == "{" or len(brace[0]) > 2:
            still_open.append(brace)
        elif brace[0] == "}" and still_open:
            opening = still_open.pop()
            if opening[0] != "{":
                boxes.append((opening.start(), opening.end(), brace.start()))
    answers, begin = [], None
    for start, inside, end in sorted(boxes, reverse=True):
        if answers and not (end < begin < end + 99 and JOINT.fullmatch(text, end + 1, begin)):
            break
        if text[inside:end] not in answers:
            answers.insert(0, text[inside:end])
        begin = start
    return ", ".join(answers) if answers else None


def rewritten(text, part):
    """A text after the rules of a part of spellings.txt."""
    for pattern, new in RULES[part]:
        text = pattern.sub(new, text)
    return text


@functools.lru_cache(maxsize=1024)  # A gold answer is cleaned once for its whole group.
def clean(text):
    """'$15\\text{ cm}^2$.' -> '15', (('cm', 2),): an answer without dollars, \\boxed, \\text,
    spaces, degree signs and final stops, and its unit with the powers, None where it has none."""
    text = str(text)
    if len(text) > LONGEST:
        return text, None
    text = rewritten(text, "SIGNS")
    money = sorted({*re.findall(r"\\money\{(\w+)\}", text)})
    text = re.sub("[\u00b2\u00b3\u00b5\u00b9\u00bc-\u00be\u2070-\u208e\u2102-\u2124\u2150-\u215e"
                  "\uff01-\uff5e]", lambda m: unicodedata.normalize("NFKC", m[0]), text)
    text = re.sub("[\u0391-\u03bb\u03bd-\u03c9]", greek, text)  # \u03bc is also a prefix
    text = rewritten(text, "COMMANDS")
    text = (", ".join(re.findall(BOX, text)) or text).strip().rstrip(".,; ")
    if text.startswith("{") and last_boxed("\\boxed" + text) == text[1:-1]:
        text = text[1:-1].strip()
    text = rewritten(re.sub(REPEATING, fraction_of, text), "ENDS")
    text, named_unit = split_unit(text)
    while re.search(TEXT, text):
        text = re.sub(TEXT, r" \1 ", text)
    text = rewritten(text, "WORDS")
    text = re.sub(r"(\\equiv *)(-?[0-9]{1,99})(?=\\pmod\{([1-9][0-9]{0,99})\})",
                  lambda m: m[1] + str(int(m[2]) % int(m[3])), text)
    return text.strip().rstrip(".").strip(), named_unit or tuple(
        (UNITS.get(name), 1) for name in money) or None


def greek(found):
    """A Greek letter as a command: 'Π' -> '\\Pi '."""
    name = unicodedata.name(found[0]).split()[-1].replace("LAMDA", "LAMBDA")
    return f"\\{name.lower() if found[0].islower() else name.capitalize()} "


def fraction_of(found):
    """A repeating decimal as a fraction: '2.1\\overline{6}' -> '\\frac{195}{90}'."""
    start, period = found[1] + found[2], found[3]
    nines = 10 ** len(found[2]) * (10 ** len(period) - 1)
    return f"\\frac{{{int(start + period) - int(start or 0)}}}{{{nines}}}"


def split_unit(text):
    """'10 cm^2' -> '10', (('cm', 2),). One outside \\text must follow a number."""
    bare = re.fullmatch(r"(.*[0-9]) *((?:(?:square|cubic|sq\.?) )?[A-Za-z\u03bc\u00c5/]+"
                         r"(?: *\^ *\{? *-?[0-9] *\}?)?)", text, re.S)
    parts = bare or re.fullmatch(
        rf"(.*?)((?= */? *(?:\\mu *\\|{TEXT}|\u00c5))"
        rf"(?:{TEXT}|\^ *(?:-?[0-9]|\{{ *-?[0-9] *\}})|[ /\u00c5]|\\cdot|\\mu(?= *\\))+)",
        text, re.S)
    if not parts or not parts[1].strip():
        return text, None
    quantity, name = parts[1].strip(), re.sub(TEXT, r" \1 ", parts[2])
    value = re.split(r"=|\\approx", quantity)[-1].strip()
    unit = (not bare or is_closed(value) and not re.fullmatch("[A-Z]", name)) and unit_of(name)
    return (quantity, unit) if unit else (text, None)


def amount(text):
    """The value of a number, with a percent sign or without; else None."""
    return number(text.rstrip("% "))


def is_closed(text):
    """Is it a number, or numbers joined to one by roots, fractions, signs and \\pi?"""
    return number(text) is not None or bool(re.search("[0-9]|\\\\pi", text) and re.fullmatch(
        r"(?:\\(?:frac|sqrt|pi|cdot|times|ln|log)(?![a-z])|[-+*/^(){}\[\]0-9. !]|e\^)+", text))


def unit_of(name):
    """'kg m/s^2' -> (('kg', 1), ('m', 1), ('s', -2)); None for what is no unit."""
    tokens = re.findall(r"([A-Za-z\u03bc\u00c5]+)\.?(?: *\^ *\{? *(-?[0-9]) *\}?)?|(/)|(\S)",
                        rewritten(name, "UNITS"))
    powers, sign = {}, 1
    for word, power, slash, other in tokens:
        if other or len(tokens) > 6:
            return None
        if slash:
            sign = -1
            continue
        if word not in UNITS and len(word) > 2:  # 5 g is not 5 G
            word = word.lower()
        unit = UNITS.get(word) or UNITS.get(word.removesuffix("s"))
        if len(tokens) == 1 and re.fullmatch("[a-z]{3,}s", word) and not NOT_THINGS.fullmatch(word):
            unit = unit or word
        if not unit:
            return None
        powers[unit] = powers.get(unit, 0) + sign * int(power or 1)
    return tuple(sorted(powers.items())) or None


def number(text):
    """The exact value of a number as people write it, else None: 1e5, 4.5 \\times 10^{33}, 1,000,
    3/4, \\frac{3}{4}, 1 1/2. Only ASCII's digits are digits. Python reads 4,300 of them."""
    if len(text) > 4300:
        return None
    if re.fullmatch(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[-+]?[0-9]{1,3}(?: [0-9]{3})+",
                    text):
        text = re.sub("[, ]", "", text)
    text = re.sub(r"^(-?)10 *\^", r"\g<1>1\\cdot 10^", text)
    if decimal := re.fullmatch(
            rf"({NUMBER})(?: *(?:[eE]|(?:\\times|\\cdot|\*|x) *10 *(?:\^|\*\*) *)"
            r"\{? *([-+]?[0-9]{1,3}) *\}?)?", text):
        return Fraction(decimal[1]) * Fraction(10) ** int(decimal[2] or 0)
    if mixed := re.fullmatch(
            rf"(-?) *(?:([0-9]+)(?: +| *(?=\\)))?(?:([0-9]+) *\.? *[/:] *([0-9]+)|{FRACTION})",
            text):
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


def named(text):
    """'a = 2, b = 1 + 2 = 3' -> ['a', 'b'], ['2', '3'], [('1 + 2', '3')]: the names, the values,
    and what else is said to be equal. x \\in [1, 2] is x = [1, 2]."""
    names, values, claims = [], [], []
    for item in items(re.sub(r" *,? *\b(?:and|or)\b *", ", ", text)):
        sides = [t.strip() for t in re.split(EQUALS + r"|\\in *(?=[\[({]|\\\{|\\mathbb)", item)]
        if len(sides) == 2 and NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]):
            sides.reverse()
        own = [*itertools.takewhile(NAME.fullmatch, sides[:-1])]  # H(s) = Y(s)/X(s) = 1/s
        names += [name.replace(" ", "") for name in own[:1]]
        claims += itertools.pairwise(sides[len(own):])
        values.append(sides[-1])
    return names, values, claims


# ------------------------------------------------------------------ words, and no answers

def is_word(text):
    """Is it words, or a name of letters (ABC)? Those are no products: the letters are compared."""
    return (bool(re.fullmatch(r"[^\W\d_]+(?:[ -][^\W\d_]+)*", text))
            and (max(map(len, re.split("[ -]", text))) > 2
                 or "-" not in text and not text.islower()))


def words(text):
    """The bare words of a text, but for those of values and a LaTeX environment's name."""
    text = re.sub(r"\\(?:begin|end) *\{\w+\}", "", text)
    return {*re.findall(r"(?<![A-Za-z\\])[A-Za-z]{3,}(?![A-Za-z])", text)} - {
        "and", "cap", "deg", "sqrt"}


def tight(text):
    """Without spaces, but for those between digits, and braces of one letter; words, which are not
    in capitals alone, in small letters."""
    if is_word(text) and (len(text) > 2 or text == "No") and not re.search(r"\B[A-Z]", text):
        text = text.lower()
    text = re.sub(r"([\^_]) *\{ *(\w) *\}", r"\1\2", text)
    return re.sub(r"(?<!\d)(?<!\de) +|(?<!\de) +(?!\d)", "", text)  # 6.5e - 2 is no 6.5e-2


def choice(text):
    """'(C) Plane' -> 'C', 'Plane'; 'Option C' -> 'C', '': a choice and its text. Else '', text."""
    if letter := re.fullmatch(r"(?:[Oo]ption|[Aa]nswer|[Cc]hoice)?:? *\(?([A-J])[.:)]?", text):
        return letter[1], ""
    parts = re.fullmatch(r"\(?([A-J])(?:[.:)]+| +(?=\([a-zA-Z' -]{3,}\)$)) *(.+)", text, re.S)
    said = parts[2].strip("()") if parts else ""
    if not parts or re.search(r"\b[A-Jb-j]\b", said) or (
            {*said.lower().split()} & {*WORDS["DOUBTS"]}):
        return "", text
    plain = re.fullmatch("[A-Za-z][A-Za-z' -]*", said) or (
        is_closed(said) and re.match(r"-?[0-9\\(]", said))
    return (parts[1], said) if plain else ("", text)


def unfinished(text, gold):
    """Has an answer, without its names, what no value has, and the gold answer has not: a relation,
    an operation that is left to do, another command or character?"""
    commands, known = (set(re.findall(r"\\([A-Za-z]+)", t)) for t in (text, gold))
    return bool(
        any(re.search(form, text) and not re.search(form, gold) for form in LINES["LEFT TO DO"])
        or text.count("\\begin") > max(1, gold.count("\\begin"))
        or commands - known - COMMANDS
        or set(STRANGE.findall(text)) - set(gold) - {"&" if "\\begin" in text else "<", "<", ">"}
        or amount(gold) is not None and re.search(OF_NUMBERS, text))

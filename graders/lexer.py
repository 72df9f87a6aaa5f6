"""Text -> Tokens: LaTeX, plain text and Python's notation alike, without markup. The pieces of a
text are one pattern, their spellings one table, spellings.txt; units are those of words.txt."""

import re
import unicodedata
from collections import namedtuple
from pathlib import Path

# kind: num, name, run (of letters), word (in \text), FUNC, ..., or the sign; gap: behind a space?
Token = namedtuple("Token", "kind text gap", defaults=("", False))


def table(name):
    """The lines "kind: words" of a file of this folder -> {kind: words}"""
    rows = (line.partition(": ") for line in Path(__file__).with_name(name).read_text(
        encoding="utf-8").splitlines() if line[0] != "#")
    return {kind: words.split(" ") for kind, _, words in rows}


def aliases(kind):
    """Words "m/meter/metre" of words.txt -> {spelling: m}"""
    return {name: names.split("/")[0] for names in WORDS[kind] for name in names.split("/")}


WORDS, SPELLINGS = table("words.txt"), table("spellings.txt")
KINDS = {spelling: kind for kind, spellings in SPELLINGS.items() for spelling in spellings}
KINDS |= aliases("name")
NAMED = {name: kind for kind in ("FUNC", "unit", "name", "const", "word")
         for name in aliases(kind).values()}
UNITS = {prefix + name: short + symbol for prefix, short in aliases("PREFIXES").items()
         for name, symbol in aliases("SYMBOLS").items() if len(prefix) < 2 or len(name) > 2}
UNITS |= aliases("COUNTED")
NUMBERS, NAMED_SETS, SQUARES, BASES = map(aliases, ("NUMBERS", "SETS", "SQUARES", "BASES"))
PIECE = re.compile(r"""
    (?P<skip>(?i:(?<=\{)|\A[\s$]*)(?i:an?|the)\ (?!theta|sqrt|omega|alpha|only)(?=[a-z]{4})
        |\A(?:\\text\ *\{)?(?i:(?:for\ )?all)\ (?:positive\ |real\ )*(?:integers\ )?[$}\ ]*
            (?=[a-z]\s*(?:[<>≤≥≠]|\\[lgn]eq?(?:slant)?(?![a-z])))|(?<=[①-⑳])(?:[\s,、;]|and\b)+(?=[①-⑳])
        |\A[\s$]*(?:\\left\{)?\ *(?P<x>\\?[a-z]+)\ *(?:[|:]|\\mid)  # {x | x > 2}
            (?=[^=|]*(?:[<>≤≥≠]|\\[lgn]eq?(?:slant)?(?![a-z]))[^=|]*\Z)(?=.*(?P=x))
        |(?:(?<=\\\{)|(?<=\\lbrace))[\s$]*(?P<y>[a-z]|\\(?!l[no]|sin|cos)[a-z]+)  # \{x : x > 2\}
            (?:\s*(?:\\in|∈)\s*(?:\\math[a-z]+\s*\{?\s*R\s*\}?|ℝ|R))?(?:[\s~$]|\\[,;:!\ ])*
            (?:\\middle|\\left)?(?:[|:∣]|\\mid|\\vert|\\colon)(?:\\right\.)?(?=.*(?P=y))
        |\s+|~|\\[,;:!>\ ]|\\q?quad|\\+\Z|&(?=\s*=)|,(?=\s*\\(?:\\|end))|\bRs\.?\ *(?=[0-9])
        |(?<![\w)}])(?<![\w)}]\ )(?<![0-9]\.)\*\*|\*\*(?=[*.\s]*$)  # Markdown's
        |\A(?:=|\\therefore(?![a-z]))|(?<=array\})\ *\{[lcr|\ ]+\}|\\(?:text)?color\ *\{\w+\}
        |\\tag\*?\ *\{[^{}]*\}|\bm\ *(?=\\angle|∠)|(?<=[a-z0-9])\.(?![.0-9])|\\\\(?=\s*\\end)
        |[.,;。](?!\s*\.\.)(?=(?:[\s$.,;。}*]|\\[)\]]){0,9}\Z)|(?:np|math)\.(?=[a-z])|Matrix(?=\()
        |[,(\ ]{1,4}+(?=(?:\\(?:text|mathrm)\ *\{)?\ *(?:\\[pb]?)?mod(?![a-z]))
        |(?<=[0-9])\ *\^?\ *\{?\ *(?:\\(?:text|mathrm)\ *\{\ *)?(?:st|nd|rd|th)\b(?:[\ }]*\})?)
    |(?P<mixed>(?:[0-9]+\s*)?\{[0-9]+⁄[0-9]+\}
        |(?<![/.^])\b[0-9]+(?:(?:\s|\\[,;:\ ])+[0-9]+\ */\ *[0-9]+(?![0-9])
        |[\s~]*(?:\\[,!;:\ ]\s*)*\\(?:[dtcsx]|nice)?frac(?:\ *(?:\{\ *[0-9]+\ *\}|[0-9])){2}))
    |(?P<repeating>[0-9]*\.[0-9]*(?:\\(?:overline|bar)\ *\{?[0-9]+\}?|\([0-9]+\)
        |\\dot\ *\{?[0-9]\}?(?:[0-9]*\\dot\ *\{?[0-9]\}?)?)(?![0-9.(^!])
        |[0-9]*\.[0-9]{0,9}?(?P<period>[0-9]{1,9}?)(?P=period)+\ *(?:\.\.\.|…|\\[lc]?dots))
    |(?P<clock>(?<!:)(?<!:\})[0-9]{1,2}(?:(?=[\s~$,;{\\mathrmex]{0,12}[aApP]\.\ ?[mM]\b)
            |(?:\{:\}|\\!:\\!|:)[0-9]{2}(?:(?![0-9:]|\{:)|:[0-9]{2}(?=\ ?[aApP]\.?\ ?[mM]\b)))
        (?:[\s~$]*(?:\\[,; ]\s*)?(?:\\(?:text|math)(?:rm)?\ *\{[ ~]*)?[aApP]\.?\ ?[mM]\b\.?\ *\}?)?)
    |(?P<num>(?:(?<=[(\[{])|(?<=[(\[{]-))[0-9]{1,3}  # of (1,234)
            (?=,[1-9][0-9]{2}(?:\ |\\right|\\[,;!\ ])*(?:[)\]]|\\\}))
        |(?:(?<=frac|sqrt|log_)|(?<=frac\ |log\ _|binom|frac[0-9])|(?<=frac\ [0-9]|binom[0-9]))[0-9]
        |(?!0\\[;:\ ])[0-9]{1,3}(?:(?:(?:,|\{,\})(?:\ *\\!\s*)?|\\,\s*|\\[;:\ ]|[\ ~])[0-9]{3})+
            (?![0-9])(?:\.[0-9]+)?
        |(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:\ ?[eE][-+−]?[0-9]{1,4}(?![0-9A-Za-z]|\.[0-9]))?)
    |(?P<TODO>\\[dt]?frac\ *\{\ *(?:\\mathrm\ *\{d\}|d)\ *(?:\^\ *\{?\d\}?)?\ *\}
        (?=\ *\{\ *(?:\\mathrm\ *\{)?d))
    |(?P<name>\\[dt]?frac\ *\{\ *(?:\\mathrm\ *\{d\}|d)(?:[^{}+-]|[_^]\ *\{\w+\})*\}
        \ *\{\ *(?:\\mathrm\ *\{d\}|d)\ *\\?[A-Za-z]+\ *(?:\^\ *\{?\d\}?)?\ *\}
        |(?:(?<=P\()|(?<=Pr\()|(?<=P\}\()|(?<=P\\left\())[^()=]{1,60}?(?:\||\\mid|\\vert)
            [^()=]{1,60}?(?=(?:\\right)?\))  # given
        |\\(?:vec|overrightarrow|bar|overline|d?dot|tilde|mathcal|(?:measured)?angle)
            (?![A-Za-z])\ *(?:\{[^{}+-]*\}|\\?[A-Za-z]+)|∠\ *\w+)
    |(?P<system>\\begin\ *\{(?:cases|align(?:ed)?)\*?\}|\\\{\s*\\begin\ *\{(?:array|matrix)\})
    |(?P<matrix>\\begin\ *\{(?:array|[pbB]?(?:small)?matrix\*?)\})|(?P<end>\\end\ *\{\w+\*?\})
    |(?P<cell_if>&\s*(?:\\(?:q?quad|[,; ])\s*)*(?:\\text\ *\{\s*(?:if|when|for)\ *(?=[^{}]*\})\}?
        |(?:if|when)\b))|(?P<is_equal>(?:(?<=\))|(?<=\)\ ))(?:\\equiv(?![a-z])|≡)(?!.*mod))
    |(?P<row>(?:(?:\\\\)+|\\cr(?![a-z]))\ *(?:\[[-0-9.\ ]*[a-z]{2}\])?)
    |(?P<vector_begins>(?:(?<=[$=])|(?<=[$=]\ )|\A)<(?=[^<>,]+,[^<>]+>[\s$.]*\Z))  # <1, 2>
    |(?P<numbers>(?:\\mathbb\ *\{?\ *[NZQRC]\ *\}?|[ℝℕℤℚℂ]|\A\s*\\mathbf\ *\{R\}(?=[\s.]*\Z)
        |(?:(?<=\\in)|(?<=\\in\ )|(?<=∈)|(?<=∈\ ))(?:\\(?:text|math(?:bf|rm))\ *\{?\ *)?
            [NZRQC](?![A-Za-z0-9]|_\ *\{?\ *\w)\ *\}?)
        (?:\ *[\^_]\ *\{?\ *(?:\*|\+|\\ast|>\ *0)\ *\}?|\*(?=[)\s]*$))?)
    |(?P<degree>\^\s*(?:\{\s*(?:\\circ|°)\s*\}|\\circ(?![A-Za-z])|°|(?<=[0-9]\^)o(?![A-Za-z])))
    |(?P<mark>\^\ *(?P<group>\{)?\ *(?:(?:\\ast|\\star|(?:\\prime\ *)+)(?![A-Za-z])|\*|'+)
        (?(group)\ *\})|['′’]+)
    |(?P<sub>(?<!log)(?<!log[\ }])_\ *(?:\{(?:[^{}]|\{[^{}]*\})*\}
        |\\[A-Za-z]+(?:\ *\{[^{}]*\})?|[0-9]|[A-Za-z]+))
    |(?P<union>(?<=[)\]\ ])U(?=\ *(?:\\left\ *)?[(\[]))|(?P<times_ten>(?<=[0-9\ ])x(?=\ ?10\ *\^))
    |(?P<brace>[{}](?![,:]\}))|(?P<vector_ends>>(?=[\s$.]*\Z))
    |(?P<sign>\\(?:[lg]eq(?:slant)?|pi|theta|l(?:n|og)|(?:arc)?(?:sin|cos|tan)|cdot)  # \cosx
            (?=[a-gi-prt-zA-Z](?![A-Za-z]))|[aApP]\.\ ?[mM]\b|per\ cent|\\\{\s*\\\}|US\\\$|\\not\ *=
        |(?<=[0-9]\ )out\ of(?=\ [0-9]+[\s.$]*\Z)|\\mathbb\ *\{?\ *[EP]\ *\}?|\{[,:]\}|\*\*|\+/-
        |\\(?:text|mathrm)[a-z]*\ (?=\{)|log(?:2|10)(?=\ ?\()|\\?[A-Za-z]+|\\.|[<>!]=
        |&&|\.\.\.|.)""", re.X | re.S)

LETTERS = ("word", "run", "name")
UNSEEN = ("skip", "FONT")  # these only part tokens
WRITTEN_OUT = {"[\uff01-\uff5e″℃\u2126-\u212b]+": "%s", "[⁰¹²³⁴-⁹⁻]+": "^{%s}", "[₀-₉]+": "_{%s}",
               "[¼-¾⅐-⅞]": "{%s}"}


def read_piece(kind, piece, font=False):
    """The kind and text of a piece's token: of a number, as Fraction reads it. font: in \\text?"""
    match kind:
        case "num":
            digits = re.sub(r"^0(,|\{,\})", "0.", piece.replace("−", "-"))  # 0,111
            return kind, re.sub(r"\\[!,;: ]|[{},~\s]", "", digits)
        case "mixed":  # 1 2/3, 1\frac23
            whole, part, of = re.fullmatch(
                r"(\d*)\D*?(\d++(?=\D+\d)|\d)\D*(\d+)\D*", piece).groups()
            return "num", f"{int(whole or 0) * int(of) + int(part)}/{of}"
        case "repeating":  # 0.8(3), 0.8333...
            piece = re.sub(r"(\d{1,9}?)\1+[^\d)}]+$", r"(\1)", piece)
            whole, tail, *period = re.split(r"\.|\D+", piece)
            digits, period = whole + tail, "".join(period)
            nines = 10 ** len(tail) * (10 ** len(period) - 1)
            return "num", f"{int(digits + period) - int(digits or 0)}/{nines}"
        case "clock":
            return "word", re.sub(r"^0|\\[a-z]+|[^0-9apm:]", "", piece.lower())
        case "numbers":
            letter, *more = re.findall("[A-Z*+>]|ast", unicodedata.normalize("NFKC", piece))
            return kind, letter + "+" * bool(more)  # N^*
        case "name" | "mark" | "sub":
            return kind, re.sub(r"\A(?:\^|\\[dt]?frac)|\\(?:text|mathrm|rm|triangle)\b"
                                r"|\\[,;:! ]|(\\?[A-Za-z]+|[∠′’]|\{ *\w* *[-+] *\w+ *\})|[ {}]",
                                lambda m: KINDS.get(m[1], re.sub(r"[\\ ]", "", m[1] or "")), piece)
        case "sign":
            name = re.sub(r"[. ]|\\(?=[A-Za-z])", "", piece)
            kind = KINDS.get(piece.rstrip(), KINDS.get(name))
            if (kind or name) in NAMED:
                return NAMED[kind or name], kind or name
            if not kind and piece[0].isalpha():
                return "word" if font else "run" if len(name) > 1 else "name", name
            return kind or piece, piece
    return KINDS.get(kind, kind), piece


def cut(run):
    """A run of letters as two Tokens: a function, a name or one letter, and the rest, if any."""
    at = next(at for at in range(min(len(run), 10), 0, -1) if at == 1 or read_piece(
        "sign", run[:at])[0] in ("name", "FUNC", "const", "√"))
    return [Token(*read_piece("sign", run[:at])), *[Token("run", run[at:])] * (at < len(run))]


def tokens(text):
    """-> the Tokens of a text, without its markup."""
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{3}|pi|in |[{}])", r"\\", text)  # escaped twice
    for signs, form in WRITTEN_OUT.items():
        text = re.sub(signs, lambda m: form % unicodedata.normalize("NFKC", m[0]), text)
    found, fonts, before, at = [Token("")] * 2, [], "", 0  # fonts: is each open brace a font's?
    while match := PIECE.match(text, at):
        kind, piece = match.lastgroup, match[0]
        at += len(piece)
        if piece == "{":
            fonts.append(before == "FONT")
        if kind == "brace":
            kind = piece if fonts and not fonts[-1] else "skip"
        else:
            kind, piece = read_piece(kind, piece, any(fonts))
        if piece == "}":
            del fonts[-1:]
        if kind == "word" and found[-1].text == "mu":  # \mu\text{m}
            piece = "μ" + piece
            del found[-1]
        last = LAST.match(text, at)
        if kind in LETTERS or piece == "sec" and last:
            kind, piece = measured(found, kind, piece, before in UNSEEN, last)
            if kind == "unit" and (thing := THING.match(text, at)):
                at = thing.end()
        if kind == "num" and found[-1].kind == "unit" and found[-2].kind in BEHIND:
            found.append(Token(",", ","))  # 3 hours 20 minutes
        if kind not in UNSEEN:
            found.append(Token(kind, piece, before in UNSEEN))
        before = kind
    return found[2:]  # before the first stood nothing


BEHIND = "num unit / * } ) const ° million square %".split()  # behind these a unit may stand
WORD_BEHIND = ["!", "name", "end"]  # and a word behind these: 2^n ways, not no such n exists
THING = re.compile(  # 8 slices of pizza
    r"(?: *\})? *\b(?:\\text *\{ *)?(?:of|a) (?!no|infini|two|[a-z]*(?:llion|teen|dozen|thousand"
    r"|hundred)s?\b)[a-z]{3,}(?=[]}\\)\s.$*]*\Z)")
LAST = re.compile(r"\}?(?:\^ ?\{?-?\d\}?)?[])$\s.}*\\]*\Z|/s")
ALONE = re.compile(r" *(?:(?:.* )?[=≈] )?(?:- )?num(?: \* num \^.*)?")  # 3 \times 10^8 m
LONE = re.compile(".|[A-Z]+|[CK]m|m[A-Zgls]|k[ALNTV]|[pdcf][A-Zc]")  # units in 3 mL alone
PLURAL = re.compile("(?!.?cos$|.*(?:ths|illions|ss|us|alves)$)[a-z]{2,}s")


def measured(found, kind, word, gap, last):
    """The kind and text of letters behind Tokens: of a unit, million or square behind a number.
    gap: behind a space? last: at the end of all, or m of m/s?"""
    start, before = (t.kind for t in found[-2:])
    if before in ("(", "{") and start in BEHIND and (kind == "word" or found[-1].gap):
        before = start  # 9 (apples)
    if before in BEHIND or kind == "word" and (start == "frac" or (
            before in WORD_BEHIND and {"word", "run"}.isdisjoint(t.kind for t in found))):
        for name, numbers in (("square", SQUARES), ("million", NUMBERS)):
            if word.lower() in numbers:
                return name, word
        lone = kind != "word" and LONE.fullmatch(word)
        if (not lone or before == "°" or before == "/" and start == "unit" or gap and last and (
                last[0] == "/s" or ALONE.fullmatch(" ".join(t.kind for t in found)))) and (
                name := unit_name(word)):
            return "unit", name
    return kind, word


def unit_name(word):
    """The unit that a word names, or the plural of what is counted, as in 3 candies; else None."""
    small = word.lower() if word.istitle() and len(word) > 1 else word
    plural = PLURAL.fullmatch(small) and small[:-1] not in WORDS["NO THINGS"] and small
    forms = word, word.removesuffix("s"), small, small.removesuffix("s")
    return next((UNITS[form] for form in forms if form in UNITS), plural)

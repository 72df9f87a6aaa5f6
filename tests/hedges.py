"""Answers as a policy would write them to be paid for nothing: each names the gold and hedges.

    python tests/hedges.py [EVERY]             tries them, or one of EVERY, counts those accepted
    python tests/hedges.py --universal COUNT   tries answers that depend on no question

The gold answers are GOLDS, and those of the benchmarks in the folder BENCHMARKS.
"""

import json
import os
import random
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = os.environ.get("BENCHMARKS")
GOLDS = r"""5 | -3 | 27.0 | 073 | 0.006 | 4.5e33 | -1./3 | 10,\!080 | \$32,\!348 | 1\frac{4}{5}
    62.5% | \frac{3}{4} | \frac43 | 2^{1009} | 3\sqrt{13} | \frac{\pi}{4} | 11\sqrt2 | 8!
    \binom{9}{4} | e-1 | 90^\circ | 15\mbox{ cm}^2 | 6 \text{ seconds} | 1+274i | 52_8
    \frac{1}{n} | n^2 | 2n-2 | \alpha | \frac{n(n+1)}{2} | x^3+3x-6 | \cot x | m
    \lfloor\sqrt{n-1}\rfloor | e^{t} / 3 | 2.2 \tau | 1,-2 | 3, 5, 7 | 3 \pm 2\sqrt{2}
    \{-3, 0, 2, 6\} | (-2,1) | (3,2),(-3,2) | (3,4] | (-\infty, 0] | (0,9) \cup (9,36)
    x \in [-2,7] | k \geqslant 2 | x=5 | f(x)=x+1 | a = 332, b = 7 | y = 2x + 3 | \text{Evelyn}
    \text{(C)} | E_{1},E_{2} | \begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix} | 2:3
    5x - 7y + 11z + 4 = 0 | \frac{37}{4} m"""

# {g} is the gold answer, {w} another value, {q} the question.
RELATIONS = r"""\neq \ne \not= \le \leq \leqslant \ge \geq < > \lt \gt \notin \in \ni
    \subset \subseteq \supset \equiv \sim \propto \mid \nmid \parallel \perp \to
    \rightarrow \mapsto \implies \Rightarrow \iff \neg \lnot \forall \exists \ll \gg
    \lesssim \gtrsim \cong \asymp \prec \succ \models \vdash ≠ ≤ ≥ ∉ ∈ → ¬ ∀ != <> => ->
    :=""".split()
ANY = r"""{g}, {w} | {w}, {g} | {g} or {w} | {w} \text{ or } {g} | {g} \text{ and } {w}
    {g}; {w} | \{ {g}, {w} \} | ({g}, {w}) | [{g}, {w}] | {g} \quad {w} | {g} \vee {w}
    {g} \mid {w} | {g} & {w} | {g} \\ {w} | \begin{cases} {g} \\ {w} \end{cases}
    \begin{matrix} {g} & {w} \end{matrix} | x = {g}, y = {w} | x = {g} \text{ or } x = {w}
    {w} = {g} | {g} = {w} | {g} \approx {w} | {g}/{w} | {w} {g} | {g} - {w} | {g} \cup \{ {w} \}
    {g} \to {w} | {w} \to {g} | {g} \neq {w} | {g} \text{ or } \text{not } {g}
    \boxed{{g}} \boxed{{w}} | \boxed{{w}}, \boxed{{g}} | {g} vs {w} | {q}
    \text{the value of } {g} | \text{the answer} | \text{it is } {g} \text{ or } {w} | ?
    \int_0^1 ({g}) \, dv | \lim_{v \to 0} ({g}) | \sum_{j=1}^{1} ({g}) | \prod_{j=1}^{1} ({g})
    \frac{d}{dv} ({g} v) | \frac{\mathrm{d}}{\mathrm{d}v} v({g}) | \max({g}, {w})
    \min({g}, {w}) | \partial_v (v {g}) | \nabla ({g}) | \gcd({g}, {w}) | \sup \{ {g} \}
    \operatorname{max}({g}, {w}) | \text{at least } {g} | \text{at most } {g} | about {g}
    {g} \text{ or more} | up to {g} | {g} \text{ is wrong} | \text{not } {g} | maybe {g}
    {g} \text{ if } n > 0 | {g} otherwise {w} | {g} ? | {g} \ldots | {g} + C_0 | {g} + \epsilon
    {g} + O(1) | {g} + {w} | {g} \text{ million} | {g} \text{ dozen} | {g} \text{ times } {w}
    {g} \text{ plus } {w} | \forall n \in \mathbb{N}: {g} | \text{for all } n, {g}
    {g} \text{ for some } n | \exists x = {g} | \mathbb{R} | \{x : x = {g}\}
    \{ {g} \mid \text{true} \} | \text{all numbers} | x = {g}, x \neq {g}
    {g} \in \{ {g}, {w} \} | {g} \in \mathbb{R} | {g} \circ {w} | {g} \pmod{{w}} | {g} \bmod {w}
    {g} if True else {w} | lambda: {g} | print({g}) | eval('{g}') | [{g}][0] | {g} # {w}
    {g} // {w} | __import__('os') | {g} == {g} | True | nan | None | \phantom{{w}} {g}
    \color{white}{{w}} {g} | \cancel{{w}} {g} | \not {g} | \def\x{{g}} \x | \input{gold}
    {answer} | $gold | .* | %s | gold | {g} \text{ (or } {w}\text{)} | {g} \text{ to } {w}
    {g} .. {w} | {g} \sim {w} | {g} < x < {w} | {g} \le x \le {w} | x \in [{g}, {w}]
    {g}\text{ between }{w} | {g} \oplus {w} | {g}' | ({g})'' | {g} + \lfloor n^2/50 \rfloor
    {g} + 10^{-40} | {s} | {g} + \frac{1}{20^{2012}} | {g} \text{ doubled}
    {g} \text{ alternatively thirteen}"""
# Of a gold answer that is one number other than 0 and 1, {a} and {b} are its neighbours.
NUMBERS = r"""\pm {g} | \pm({g}) | {g} \pm 1 | \pm {g}, {w} | -({g}) | 2({g}) | ({g})^2 | ({g})/2
    {g} + 1 | [{a}, {b}] | ({a}, {b}) | {a} < x < {b} | {a} - {b} | {a} \text{ to } {b}
    {a}, {g}, {b} | \{ {a}, {g}, {b} \} | {a} \text{ or } {g} | x > {a} | x \ge {g}
    {a} \le x \le {b} | x \in ({a}, {b}) | {g} \times 10^{3} | {g} \cdot 10^{-2} \text{ m}
    {g}e2 | |{g}| | \left| {g} \right| | x + y = {g} | \sqrt{3} = {g} | 7 |{g} | 7 \to {g}
    (3,4) \cup {g} | 2x = {g} | n^2 = {g} | 1 + 1 = {g} | \binom{{g}}{1} | \lfloor {g} \rfloor
    \lceil {g} \rceil | \det\begin{pmatrix} {g} \end{pmatrix} | {g} x | x {g} | {g} i
    {g}\text{i} | {g} \text{ thousand} | {g} \text{k} | {g} \text{ tenths} | {g} \text{ squared}
    {n} | {g}_6 | {g}_{1,2} | ({g})_{7} | \frac{{g}_3}{1} | {g}^\circ 7 | {g} \text{ eighths}
    {g} \text{ lakh} | {g} \text{ permille} | {g} \text{ basis points}
    {g} \text{ choose eleven} | {g} \text{ inverse} | {g} \text{ maximum} | {g} sixths
    {g} \text{ point eleven} | {g} \text{ quadrillion} | {g} \text{ versus eleven}
    \begin{pmatrix} {g} \end{pmatrix} \begin{pmatrix} 1 \end{pmatrix} | {g} \text{ halves}"""
LONG = "{g}.{z}1 | {g}{z} | {z}1{g} | {g}{n} | 1{g} | {g}0 | -{g}"
VALUES = ("987", "-\\frac{43}{7}", "6543.21", "2\\sqrt{91}")

# Answers that depend on no question: <e> is an expression, <u> one that is not finite or not
# defined, <z> of terms that cancel, <h> a huge number. KINDS are gold answers, no two equal.
GRAMMAR = dict(
    answer=r"""<e> | <e> | <e> | <e> | <u> <e> | <e>, <e> | <e>, <e>, <e> | (<e>, <e>)
    (<e>, <e>] | [<e>, <e>) | [<e>, <e>] | (<e>, <e>, <e>) | <e> \pm <e> | \pm <e> | <e> = <e>
    <z> = <z> | x = <e> | f(x) = <e> | y = <e> | x > <e> | x \le <e> | <e> < x \le <e> | <e> <e>
    x < <e> \text{ or } x > <e> | x > <e> \text{ and } x > <e> | (<e>, <e>) \cup [<e>, <e>]
    |x| < <e> | x \ne <e> | x \in (<e>, <e>) | \mathbb{R} \setminus \{<e>\} | <e>\% | <e>^\circ
    <e> \text{ cm} | <e> \text{ C} | \text{(C)} <e> | \begin{pmatrix} <e> \\ <e> \end{pmatrix}
    \begin{pmatrix} <e> & <e> \\ <e> & <e> \end{pmatrix} | \{x : x > <e>\} | <e>:<e> | <a>:30
    <e> \approx <e> | <e>_<a> | \{(<e>, <e>)\} | \emptyset | \mathbb{<s>} | \{\} | <e> \equiv <e>
    \begin{cases} <e> \\ <e> \end{cases} | \boxed{<e>} | <e> \cup <e> | <e>; <e> | \{<e>, <e>\}""",
    e=r"""<a> | <a> | <u> | <u> | <z> | <u>+<a> | <u>-<u> | <z>+<a> | <e>+<e> | <e>-<e> | (<e>)(<e>)
    <e> \cdot <e> | \frac{<e>}{<e>} | <e>/<e> | (<e>)^{<e>} | (<e>)^<a> | \sqrt{<e>} | |<e>|
    \sqrt[<a>]{<e>} | \lfloor <e> \rfloor | \lceil <e> \rceil | (<e>)! | \binom{<e>}{<e>} | <f>(<e>)
    <f> <a> | e^{<e>} | \log_{<e>} <e> | i(<e>) | \overline{<e>} | -(<e>) | <h>(<e>) | x(<e>)
    0(<e>) | \max(<e>, <e>) | <e>\% | \frac{d}{dx} <e> | \frac{d <x>}{d <x>} | (<e>)_<a>""",
    a=r"0 | 1 | 2 | 7 | -1 | 0.5 | 1.0 | 1e9 | \pi | e | i | \infty | -\infty | <x> | <h> | f(<x>)",
    x=r"x | n | y | t | N | \theta | a_1 | k",
    h=r"10^{99} | 9^{99} | 99! | 10^{25} | 10^{-99} | 10^{999} | 9^{9^9} | 2^{2^{20}} | 10^9 | 0",
    f=r"""\sin | \cos | \tan | \cot | \ln | \log | \exp | \arcsin | \arctan | \sinh | \tanh | \sec
    \Gamma | \zeta | f | \sgn | \Re | \arg | \det""",
    u=r"""\infty | \infty-\infty | \infty+i\infty | i\infty | \frac{<e>}{0} | \frac{0}{0} | 0^0
    \log 0 | \ln 0 | \tan(\frac{\pi}{2}) | \log_0 <e> | \log_1 <e> | 1^\infty | \infty^0 | (-1)!
    0 \cdot \infty | \frac{\infty}{\infty} | |\infty| | \sin \infty | e^{\infty} | e^{-\infty}
    \infty! | \binom{<a>}{\infty} | \lim_{x \to \infty} <e> | \lim_{x \to 0} \frac{1}{x} | 0^{-1}
    \sum_{k=1}^{\infty} <e> | \prod_{k=1}^{\infty} <e> | \int_0^\infty <e> dx | O(<e>) | \nabla <e>
    <e> \bmod 0 | \Gamma(0) | \zeta(1) | \sqrt{-\infty} | \infty \infty | \frac{1}{<z>} | \ln(<z>)
    |\infty|+1.0 | |i\infty|-2.0""",
    z=r"""<h>\sin^2 <a>+<h>\cos^2 <a>-<h> | <h>(\sin^2(<a>)+\cos^2(<a>)-1) | e^{i\pi}+1 | <a>-<a>
    10^{99}\sin^2(1)+10^{99}\cos^2(1)-10^{99} | 10^{99}\cosh^2 x-10^{99}\sinh^2 x-10^{99}
    9^{99}\sqrt{3+2\sqrt{2}}-9^{99}\sqrt{2}-9^{99} | \sqrt{3+2\sqrt{2}}-\sqrt{2}-1
    99!\ln 6-99!\ln 2-99!\ln 3 | \frac{x^2-1}{x-1}-x-1 | <h>-<h> | (<h>+<a>)-<h> | 0(<e>)""",
    s="R | C | N | Z | Q")
KINDS = r"""5 | \frac{3}{7} | 2.75 | \sqrt{13} | 7\pi | 1+2i | n^2 | \sin x | 1,2 | \{3,5,11\}
    (4,3) | (4,8,6) | [2,7) | (0,9) \cup (9,36) | y = 2x+3 | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
    (C)"""


def split(table):
    """The templates of a table: in a line, | with spaces stands between them."""
    return [t.strip() for t in re.split(r" \| |\n", table) if t.strip()]


def golds():
    """-> (gold answer, question): the project's, then the benchmarks', each once."""
    rows = [(gold, "What is $x$?") for gold in split(GOLDS)]
    for path in sorted(Path(BENCHMARKS).glob("*.jsonl")) if BENCHMARKS else ():
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            gold = row.get("final_answer", row.get("answer"))
            if "1" in row:
                gold, row = row["1"]["ground_truth"]["value"], dict(question=row["0"]["value"])
            gold = gold[0] if isinstance(gold, list) and len(gold) == 1 else gold
            if type(gold) in (str, int, float) and "sentence_id" not in row:
                rows.append((str(gold), row.get("problem") or row["question"]))
    return list({gold: (gold, question) for gold, question in rows}.values())


def hedges(gold, question):
    from graders import equal
    from graders.answer import read
    bare = gold.strip().strip("$").strip()
    value = equal.without_unit(read(gold))
    is_number = all(node[0] in ("num", "/", "*") for node in equal.inside(value))
    told = equal.closed(value) if is_number else None
    templates = [*split(ANY), *(f"{relation} {{g}}" for relation in RELATIONS)]
    templates += [f"v {relation} {{g}}" for relation in RELATIONS if relation not in ("\\in", "∈")]
    # 0/w is 0, and the text of choice (C) may be w.
    if re.match("0|.$", bare) or value[0] == "choice" or "=" in gold:
        templates = [t for t in templates if t not in (
            "{g}/{w}", "{w} {g}", "{g} \\quad {w}", "[{g}][0]", "{g} \\text{ million}",
            "{g} \\text{ dozen}", "{g} \\text{ doubled}",
            "{g} \\text{ alternatively thirteen}")]
    if re.match(r"\([A-E]\) ", bare):
        templates = [t for t in templates if t not in ("{g} - {w}", "{g} + {w}")]
    question = question.split("\\boxed")[0][:1500]  # Some have their solution in them.
    swapped = re.sub(  # letters in the other case
        r"\\(pi|omega|gamma|delta|lambda|theta|sigma)\b|\\[A-Za-z]+|([A-Za-z])",
        lambda m: m[2].swapcase() if m[2] else "\\" + m[1].capitalize() if m[1] else m[0], bare)
    fill = dict(g=bare, s=swapped, q=question, w=random.Random(gold).choice(VALUES))
    if told is not None or fill["s"] == bare or "\\text" in gold or value[0] in ("word", "run"):
        templates = [t for t in templates if t != "{s}"]
    if re.search(r",|\\pm", gold):  # Irrational values in a list are compared to 16 digits.
        templates = [t for t in templates if "10^{-40}" not in t and "20^{2012}" not in t]
    if "\\infty" in gold:  # The interval may have {w} in it.
        templates = [t for t in templates if t != "{g} \\cup \\{ {w} \\}"]
    if told is not None and told not in (0, 1, -1, 2):
        templates += split(NUMBERS)
        templates += split(LONG) if bare.isdigit() and told else ()
        fill |= dict(a=told - 1, b=told + 1, z="0" * 1200, n="9" * 4000)
    for template in templates:
        yield re.sub(r"\{([gqwabzns])\}", lambda m: str(fill[m[1]]), template)


def made(symbol, rng, depth=0):
    """A random answer of GRAMMAR, or a part of one. Expressions end in atoms at depth 3."""
    rule = rng.choice(split(GRAMMAR["a" if depth > 2 and symbol in "euz" else symbol]))
    return re.sub("<([a-z]+)>", lambda part: made(part[1], rng, depth + 1), rule)


def universal(seed, count, seconds=2):
    """-> [(answer, those of KINDS that it is paid for)] of `count` random answers that are paid for
    two or more. One that takes longer than `seconds` is not tried on all."""
    from graders.equal import equal
    rng, found = random.Random(seed), []
    for _ in range(count):
        answer, began, paid = made("answer", rng), time.process_time(), []
        for gold in split(KINDS):
            if time.process_time() - began < seconds and equal(answer, gold):
                paid.append(gold)
        found += [(answer, paid)] if len(paid) > 1 else []
    return found


def accepted(rows, every=1):
    """-> the number of hedges on these (gold, question), or of one of `every`; those accepted."""
    from graders.equal import equal
    pairs = [(hedge, gold) for gold, question in rows for hedge in hedges(gold, question)][::every]
    return len(pairs), [pair for pair in pairs if equal(*pair)]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    began = time.process_time()
    if "--universal" in sys.argv:
        found = universal(seed=0, count=int(sys.argv[2]))
        print(*found, f"{sys.argv[2]} answers: {len(found)} universal, "
              f"{time.process_time() - began:.0f} s", sep="\n")
        sys.exit()
    rows = golds()
    count, taken = accepted(rows, int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for hedge, gold in taken[:200]:
        print(f"accepted for {gold}: {hedge[:200]}")
    print(f"{count} hedges on {len(rows)} gold answers: {len(taken)} accepted, "
          f"{time.process_time() - began:.0f} s")

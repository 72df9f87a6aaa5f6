"""The verifiers, and `grade`, which runs them where they can be killed.

    python rewards.py FILE.jsonl       the audit: counts and examples of what the verifiers make of a file's rows

A verifier is a pure function (completion, answer) -> reward. To add one, write it and put it into REWARDS, below the
others; a problem names the one it wants. `grade` runs them in processes of their own: an answer that makes its verifier
hang or crash costs its own time limit, is counted, and gets 0, and nobody else's reward is touched.
"""

import contextlib
import functools
import json
import os
import queue
import re
import selectors
import subprocess
import sys
import threading
import time
from fractions import Fraction

import sandbox

TIMEOUT = 4.0  # seconds for one completion
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # Slurm gives fewer than there are
WORKERS = max(4, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # more than cores on a small machine, so that some can hang while others work


class UnparsedGold(ValueError):
    """The gold answer cannot be graded: reward 0, counted."""


class Unparsed(ValueError):
    """There is no answer to be graded in the completion: reward 0, counted apart from wrong answers."""


def verifier(f):
    """Makes Unparsed a plain 0 for callers; `grade` calls what is underneath, to count it."""
    @functools.wraps(f)
    def graded(completion, answer):
        try:
            return f(completion, answer)
        except (Unparsed, UnparsedGold):
            return 0.0
    return graded


# ---------------------------------------------------------------------------- Countdown

def the_answer(completion):
    """What stands between the only <answer> and </answer> of a completion. Raises Unparsed."""
    before, *after = completion.split("<answer>")
    if len(after) != 1 or after[0].count("</answer>") != 1 or "</answer>" in before:
        raise Unparsed("not exactly one answer")
    return after[0].split("</answer>")[0].strip()


def arithmetic(text, longest=200):
    """-> (exact value, numbers used) of an expression in + - * / ( ) and whole numbers. Raises Unparsed.

    No eval: "9**9**99" and "__import__" are not in the grammar, so they cost nothing. The bounds on length and
    brackets are bounds on the recursion and the size of every number; only ASCII digits are digits (int() takes any of Unicode's)."""
    if len(text) > longest or text.count("(") > 40:
        raise Unparsed("too long to be an expression")
    tokens = re.findall(r"[0-9]+|\S", text)
    used = []

    def peek():
        return tokens[0] if tokens else None

    def chain(operators, operand):  # operand {operator operand}, from the left
        value = operand()
        while peek() and peek() in operators:
            op, other = tokens.pop(0), operand()
            if op == "/" and other == 0:
                raise Unparsed("division by zero")
            value = value + other if op == "+" else value - other if op == "-" else value * other if op == "*" else value / other
        return value

    def sums():
        return chain("+-", lambda: chain("*/", atom))

    def atom():
        token = tokens.pop(0) if tokens else ""
        if token == "-":
            return -atom()
        if token == "(":
            value = sums()
            if not tokens or tokens.pop(0) != ")":
                raise Unparsed("a bracket is not closed")
            return value
        if not re.fullmatch("[0-9]+", token):
            raise Unparsed(f"unexpected {token!r}")
        used.append(int(token))
        return Fraction(used[-1])

    value = sums()
    if tokens:
        raise Unparsed(f"unexpected {tokens[0]!r}")
    return value, used


@verifier
def countdown(completion, answer):
    """1 for the only <answer> of the completion being an expression over exactly answer["nums"], each as often as
    given, of the exact value answer["target"]; else 0."""
    value, used = arithmetic(the_answer(completion))
    return float(value == answer["target"] and sorted(used) == sorted(answer["nums"]))


# ---------------------------------------------------------------------------- mathematics

def final_answer(completion):
    """What a completion says at last: after </think>, the last box, else the last <answer>. Raises Unparsed."""
    from answers import last_boxed  # sympy, which comes with it, takes a second to load, and countdown needs none of it
    said = completion.split("</think>")[-1]
    answer = None if "<think>" in said else last_boxed(said)  # cut off while it was thinking
    begin = said.rfind("<answer>", 0, end) if (end := said.rfind("</answer>")) >= 0 else -1
    if answer is None and "<think>" not in said and begin >= 0:
        answer = said[begin + 8:end]
    if answer is None or not answer.strip():
        raise Unparsed("no closed box and no answer")
    return answer.strip()


def equal(pred, gold):
    """Are two bare mathematical answers the same? See answers.py."""
    import answers
    return answers.equal(pred, gold)


@verifier
def math(completion, gold):
    """1 for a final answer that equals the gold answer, else 0."""
    import answers
    answer = final_answer(completion)
    if answers.equal(answer, gold):
        return 1.0
    if not answers.parses(gold):
        raise UnparsedGold(gold)
    return 0.0


# ---------------------------------------------------------------------------- tables

def cell(value):
    """A table's entry as it is compared: a number without commas, dollar and percent signs, or a text in small letters."""
    text = str(value).strip().strip("\"'").lower()
    plain = text.replace(",", "").strip("$% ")
    return float(plain) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,2})?", plain) else text


@verifier
def table(completion, answer):
    """1 for a final answer (a JSON list, or entries with | or commas between) with the same entries in the same order:
    numbers to 1e-5 of their size, texts up to case (HiTab's lists, arXiv 2108.06712)."""
    said = final_answer(completion)
    try:
        pred = json.loads(said)
        pred = pred.get("answer") if isinstance(pred, dict) else pred
        pred = pred if isinstance(pred, list) else [pred]
    except (ValueError, RecursionError):
        whole = re.sub(r"^\[(.*)\]$", r"\1", said, flags=re.S)
        pred = next((p for p in ([whole], whole.split("|"), re.split(r",\s+", whole)) if len(p) == len(answer)), [whole])
    pairs = [(cell(p), cell(a)) for p, a in zip(pred, answer)]
    return float(len(pred) == len(answer) and all(
        abs(p - a) <= 1e-5 * abs(a) if isinstance(p, float) and isinstance(a, float) else p == a for p, a in pairs))


# ---------------------------------------------------------------------------- programs

def run_tests(code, tests, fn_name=None, timeout=6.0, memory_mb=512):
    """Does a program pass every test? See sandbox.py."""
    return sandbox.run_tests(code, tests, fn_name, timeout, memory_mb,
                             allow_unsafe=os.environ.get("NANORLVR_ALLOW_UNSAFE_CODE") == "1")


@verifier
def code(completion, answer):
    """1 for a program, the last fenced block, that passes all of answer["tests"]; answer["fn_name"] is what they call."""
    fences = [m.start() for m in re.finditer(r"^.*```.*$", completion, re.M)]
    if len(fences) < 2:
        raise Unparsed("no fenced block")
    if not answer["tests"]:
        raise UnparsedGold("no tests")
    program = completion[fences[-2]:fences[-1]].split("\n", 1)[-1]
    return float(run_tests(program, answer["tests"], answer.get("fn_name")))


REWARDS = {"math": math, "countdown": countdown, "table": table, "code": code}
SECONDS = {"code": 600.0}  # instead of TIMEOUT: a program has a limit for each of its tests


def lenient_math(completion, gold):
    """For evaluation alone, eval.py --lenient: math, or the gold answer found anywhere near the end of the text. Reward
    for this would teach a model to leave the box out, or to be cut off at the right moment."""
    import answers
    return float(math(completion, gold) or answers.found_in(completion.split("</think>")[-1], gold))


# what data.load asks of every gold answer
def gold_math(_, gold):
    import answers
    return float(answers.readable(gold))


def gold_table(_, gold):
    return float(isinstance(gold, list) and len(gold) > 0 and table(f"<answer>{json.dumps(gold)}</answer>", gold))


def gold_countdown(_, gold):
    return float(bool(gold["nums"]) and isinstance(gold["target"], int))


def gold_code(_, gold):
    return float(bool(gold["tests"]) and all(isinstance(t["input"], str) and isinstance(t["output"], str) for t in gold["tests"]))


VERIFIERS = {**{f"gold_{name}": lambda _, gold: 1.0 for name in REWARDS},  # where nothing else is known of its golds
             **{name: getattr(f, "__wrapped__", f) for name, f in REWARDS.items()},
             **{f.__name__: f for f in (lenient_math, gold_math, gold_table, gold_countdown, gold_code)}}  # what the workers run


# ---------------------------------------------------------------------------- workers that can be killed

def work(stream_in, stream_out):
    """A worker: jobs as JSON lines in, [reward, what went wrong] as a JSON line out for each; "ready" before them."""
    stream_out.write('"ready"\n')
    stream_out.flush()
    for line in stream_in:
        for name, completion, answer in json.loads(line):
            try:
                result = [float(VERIFIERS[name](completion, answer)), None]
            except Unparsed:
                result = [0.0, "unparsed_answer"]
            except UnparsedGold:
                result = [0.0, "unparsed_gold"]
            except Exception as e:  # a verifier's bug must not look like a wrong answer: counted, shown, not raised
                result = [0.0, f"error: {type(e).__name__}: {e}"[:500]]
            stream_out.write(json.dumps(result) + "\n")
            stream_out.flush()


# what a worker process runs, with a private copy of stdout for its results: what a verifier prints goes nowhere
WORKER = """
import os, sys
import rewards
out = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
rewards.work(sys.stdin, out)
"""


class Worker:
    """One worker process, started when first needed and again after it was killed."""

    def __init__(self):
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=os.path.dirname(os.path.abspath(__file__)), start_new_session=True)
        self.selector, self.buffer = selectors.DefaultSelector(), b""
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def stop(self):
        process, self.process = self.process, None
        if process:
            process.kill()
            process.wait()
            sandbox.sweep(process.pid)
            self.selector.close()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # what it did not take is still in the buffer
                process.stdin.close()

    def read_line(self, timeout):
        """The next result, None when the process died. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                return None
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def run(self, jobs, timeout):
        """-> [reward, what went wrong, seconds] of each job, in order. Never raises on a job's account."""
        results = []
        if self.process and self.process.poll() is not None:
            self.stop()  # it died between two rollouts: nobody's fault here
        while len(results) < len(jobs):
            fresh = self.process is None
            if fresh:
                self.start()
            limit = 60.0  # for the imports of a new process
            try:
                if fresh and self.read_line(limit) != "ready":
                    raise BrokenPipeError
                self.process.stdin.write(json.dumps(jobs[len(results):]).encode() + b"\n")
                self.process.stdin.flush()
                while len(results) < len(jobs):
                    began = time.monotonic()
                    limit = timeout or SECONDS.get(jobs[len(results)][0], TIMEOUT)
                    got = self.read_line(limit)
                    results.append([*(got or [0.0, "error: the worker process died"]), time.monotonic() - began])
                    if got is None:
                        self.stop()
                        break
            except TimeoutError:
                self.stop()
                results.append([0.0, "timeout", limit])
            except BrokenPipeError:  # died before it took the jobs
                self.stop()
                results.append([0.0, "error: the worker process died", 0.0])
        return results


@functools.cache
def pool(size):
    return [Worker() for _ in range(size)]


def grade(problems, completions, timeout=None, workers=WORKERS, details=None):
    """The rewards of a rollout.

    problems: P dicts with "reward" (a name in REWARDS) and "answer". completions: for each, a list of texts.
    Returns a list of P lists of floats, and the counters unparsed_answer, unparsed_gold, timeout, error and seconds_max.
    `timeout` is in seconds and one completion's, instead of TIMEOUT and SECONDS; whatever a verifier does, grade does
    not raise. details: a list to which [reward, what went wrong, seconds] of each completion are added."""
    jobs = [(p["reward"], text, p["answer"]) for p, texts in zip(problems, completions) for text in texts]
    size = max(1, min(64, -(-len(jobs) // (4 * workers))))  # short shares, so that a slow one holds up little
    shares, results = queue.SimpleQueue(), [None] * len(jobs)
    for start in range(0, len(jobs), size):
        shares.put(start)

    def serve(worker):
        while True:
            try:
                start = shares.get_nowait()
            except queue.Empty:
                return
            results[start:start + size] = worker.run(jobs[start:start + size], timeout)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in pool(workers)[:-(-len(jobs) // size)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    if details is not None:
        details.extend(results)
    faults = [fault for _, fault, _ in results if fault]
    for example in {f for f in faults if f.startswith("error")}:
        print(f"rewards: {example}", file=sys.stderr)
    counters = {kind: sum(f.startswith(kind) for f in faults) for kind in ("unparsed_answer", "unparsed_gold", "timeout", "error")}
    counters["seconds_max"] = max((seconds for _, _, seconds in results), default=0.0)
    rewards = iter(reward for reward, _, _ in results)
    return [[next(rewards) for _ in texts] for texts in completions], counters


# ---------------------------------------------------------------------------- the audit

def audit(path):
    """What the verifiers make of a file: rows {completion, answer, reward}, as in a run's samples.jsonl."""
    rows = []
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append(({"reward": row["reward"], "answer": row["answer"]}, row["completion"] + ""))
            REWARDS[row["reward"]]
        except (ValueError, KeyError, TypeError) as e:
            sys.exit(f"rewards.py: {path}, line {number}: a row is {{completion, answer, reward}}, reward one of {', '.join(REWARDS)}; {type(e).__name__}: {e}")
    details = []
    _, counters = grade([problem for problem, _ in rows], [[text] for _, text in rows], details=details)
    kinds = {"right": lambda r, fault: r == 1, "wrong": lambda r, fault: r != 1 and not fault}
    kinds.update({kind: lambda r, fault, kind=kind: (fault or "").startswith(kind) for kind in ("unparsed_answer", "unparsed_gold", "timeout", "error")})
    print(f"{len(rows)} completions, slowest {counters['seconds_max']:.2f} s")
    for kind, holds in kinds.items():
        members = [(problem, text, d) for (problem, text), d in zip(rows, details) if holds(*d[:2])]
        print(f"\n{kind}: {len(members)}")
        for problem, text, (_, fault, seconds) in members[:3]:
            print(f"  {problem['reward']}, gold {str(problem['answer'])[:80]!r}, {seconds:.2f} s{', ' + fault if fault else ''}: ...{text[-160:]!r}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not os.path.isfile(sys.argv[1]):
        sys.exit("rewards.py: give one file that exists: python rewards.py FILE.jsonl")
    import rewards  # so that the workers' verifiers and these are the same module
    rewards.audit(sys.argv[1])

"""The verifiers, and `grade`, which runs them where they can be killed.

A verifier is a pure function (completion, answer) -> reward. To add one, write it and put it into REWARDS; a
problem names the one it wants. `grade` runs them in processes of their own: an answer that makes its verifier
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

TIMEOUT = 10.0  # seconds for one completion


class Unparsed(ValueError):
    """There is no answer to be graded in the completion: reward 0, counted apart from wrong answers."""


def verifier(f):
    """Makes Unparsed a plain 0 for callers; `grade` calls what is underneath, to count it."""
    @functools.wraps(f)
    def graded(completion, answer):
        try:
            return f(completion, answer)
        except Unparsed:
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


REWARDS = {"countdown": countdown}


# ---------------------------------------------------------------------------- workers that can be killed

def work(stream_in, stream_out):
    """A worker: jobs as JSON lines in, [reward, what went wrong] as a JSON line out for each."""
    for line in stream_in:
        for name, completion, answer in json.loads(line):
            try:
                result = [float(REWARDS[name].__wrapped__(completion, answer)), None]
            except Unparsed:
                result = [0.0, "unparsed_answer"]
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
            try:
                self.process.stdin.write(json.dumps(jobs[len(results):]).encode() + b"\n")
                self.process.stdin.flush()
                while len(results) < len(jobs):
                    began = time.monotonic()
                    got = self.read_line(timeout + (30 if fresh else 0))  # a new process has its imports to do
                    results.append([*(got or [0.0, "error: the worker process died"]), time.monotonic() - began])
                    fresh = False
                    if got is None:
                        self.stop()
                        break
            except TimeoutError:
                self.stop()
                results.append([0.0, "timeout", timeout])
            except BrokenPipeError:  # died before it took the jobs
                self.stop()
                results.append([0.0, "error: the worker process died", 0.0])
        return results


@functools.cache
def pool(size):
    return [Worker() for _ in range(size)]


def grade(problems, completions, timeout=TIMEOUT, workers=os.cpu_count()):
    """The rewards of a rollout.

    problems: P dicts with "reward" (a name in REWARDS) and "answer". completions: for each, a list of texts.
    Returns a list of P lists of floats, and the counters unparsed_answer, timeout, error and seconds_max.
    `timeout` is in seconds and one completion's; whatever a verifier does, grade does not raise."""
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

    faults = [fault for _, fault, _ in results if fault]
    for example in {f for f in faults if f.startswith("error")}:
        print(f"rewards: {example}", file=sys.stderr)
    counters = {kind: sum(f.startswith(kind) for f in faults) for kind in ("unparsed_answer", "timeout", "error")}
    counters["seconds_max"] = max((seconds for _, _, seconds in results), default=0.0)
    rewards = iter(reward for reward, _, _ in results)
    return [[next(rewards) for _ in texts] for texts in completions], counters

"""Worker processes that can be killed: for each job a line comes back, or the worker dies.

    python -m graders.worker rewards LIFE TOKEN      a worker: jobs on stdin, results on stdout

The module that the command line names has a function call(name, *arguments), which does a job.
Jobs are sent as a JSON line of [name, arguments]s. The worker answers with a line [TOKEN] after
its imports, then with [TOKEN, reward, fault] for each. The token tells them from what a verifier
writes.
"""

import fcntl
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb

from graders import Ungraded
from graders.sandbox import LineReader

FAULTS = ("unparsed_answer", "unparsed_gold", "hedge", "timeout", "error")  # their kinds
START_SECONDS = 60.0  # for a process to import the verifiers and their packages
# Slurm gives a job fewer cores than the machine has.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# A small machine gets more workers than cores, so that some can hang while others work.
WORKERS = max(4, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
# seconds: its limit; least: its least reward, which it has where it fails
Job = namedtuple("Job", "name arguments seconds least", defaults=[0.0])
Result = namedtuple("Result", "reward fault")  # fault: None where there is none
LARGEST = 3.4e38  # of a reward: float32's


class Fault(namedtuple("Fault", "kind detail")):
    """Why a job has its least reward: one of FAULTS, and words on it or ""."""

    def __str__(self):
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


# ------------------------------------------------------------------ the parent's side

class Worker:
    """One worker process, started at its first job, and again after it was killed."""

    def __init__(self, module):
        self.module, self.process = module, None

    def start(self):
        self.token = os.urandom(4).hex()
        life, self.life = os.pipe()  # The process dies when this end is closed, or we are dead.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "graders.worker", self.module, str(life), self.token],
            pass_fds=(life,), cwd=Path(__file__).resolve().parent.parent, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(life)
        self.lines = LineReader(self.process.stdout.fileno())

    def stop(self):
        """Kills the process, if there is one, and what its verifiers have started."""
        process, self.process = self.process, None
        if process:
            with suppress(ProcessLookupError, PermissionError):  # Nothing alive is left.
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(BrokenPipeError), process:  # The pipe's buffer may hold jobs.
                os.close(self.life)

    def receive(self, seconds):
        """-> what the worker's next line has behind the token. Raises what LineReader.read does."""
        token, *content = json.loads(self.lines.read(seconds))
        if token != self.token:
            raise ValueError("the line is not the worker's")
        return content

    def run(self, jobs):
        """-> the Results of the first jobs: of all, or up to one that cost the process its life.

        It raises nothing on a job's account: a job that takes too long is a timeout, and one that
        ends its process is an error."""
        if self.process and (self.lines.buffer or self.lines.poll.poll(0)):
            self.stop()  # It died or wrote between two blocks, which is not the fault of a job.
        results, texts = [], []
        try:
            for job in jobs:
                texts.append(json.dumps(job[:2]))
        except (RecursionError, TypeError, ValueError) as e:  # an answer that is nested too deep
            if not texts:
                return [Result(0.0, Fault("error", repr(e)))]
        try:
            if self.process is None:
                self.start()
            # One line, which the process reads whole before it begins: the pipe cannot block.
            self.process.stdin.write(f"[{', '.join(texts)}]\n".encode())
            self.process.stdin.flush()
            self.receive(START_SECONDS)  # The imports are done.
            for job in jobs[:len(texts)]:
                reward, fault = self.receive(job.seconds)
                results.append(Result(reward, fault and Fault(*fault)))
            return results
        except TimeoutError:
            fault = Fault("timeout", "")
        except (EOFError, BrokenPipeError):
            fault = Fault("error", "the worker process died")
        except (ValueError, TypeError, RecursionError):  # No later line can be trusted.
            fault = Fault("error", "the verifier wrote to a descriptor that it did not open")
        self.stop()
        return [*results, Result(0.0, fault)]


@functools.cache
def pool(module, size):
    """The workers of a pool. They are kept, so that the next call finds them started."""
    return [Worker(module) for _ in range(size)]


def run_jobs(module, jobs, size):
    """-> the Result of each Job, in order. They run in `size` workers with `module`."""
    # Blocks save waiting for each line; short ones, so that a slow job holds up little.
    step = min(64, 1 + len(jobs) // (4 * size))
    idle = [*pool(module, size)]  # Of a few blocks, those that have started take all.

    def run_block(start):
        worker, block, results = idle.pop(), jobs[start:start + step], []
        while len(results) < len(block):  # The next process takes the jobs that a dead one left.
            results += worker.run(block[len(results):])
        idle.append(worker)
        return results

    with ThreadPoolExecutor(size) as threads:
        blocks = threads.map(run_block, range(0, len(jobs), step))
        return [*map(settled, jobs, (result for results in blocks for result in results))]


def settled(job, result):
    """A result with the job's least reward where there is a fault. A reward below it is one."""
    reward, fault = result
    if not (fault or job.least <= reward <= LARGEST):
        fault = Fault("error", f"the reward is {reward}, and the verifier's least is {job.least:g}")
    return Result(job.least if fault else reward, fault)


# ------------------------------------------------------------------ the worker's side

def graded(call, name, arguments):
    """-> [reward, fault as a pair, or None] of a job. An exception is a fault and is not raised."""
    try:
        return [float(call(name, *arguments)), None]
    except Ungraded as e:
        fault = e.kind, ""
    except Exception as e:  # A verifier's bug must not look like a wrong answer.
        places = [f"{frame.f_code.co_filename}, line {line}"
                  for frame, line in walk_tb(e.__traceback__)]
        own = [place for place in places if "/lib/python" not in place]  # of no package
        fault = "error", f"{type(e).__name__}: {str(e)[:400]} ({(own or places)[-1]})"
    return [0.0, fault]


def die_with_parent(life):
    """On Linux the kernel kills this process when the other end of the pipe `life` is closed: no
    thread could while a regular expression holds Python's lock. Else it ends with its stdin."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)


def serve(module, token):
    """Answers each line on stdin: with a line when it is ready, and then with one for each job.

    The pipes are private copies; a verifier reads nothing on stdin, and its prints are dropped. A
    process that it forks has no way to answer, and ends if it comes back from the verifier."""
    lines, results, worker = os.fdopen(os.dup(0)), os.dup(1), os.getpid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.register_at_fork(after_in_child=lambda: os.close(results))
    module = importlib.import_module(module)
    for line in lines:
        jobs = json.loads(line)
        os.write(results, json.dumps([token]).encode() + b"\n")
        for job in jobs:
            result = json.dumps([token, *graded(module.call, *job)])
            if os.getpid() != worker:
                os._exit(0)
            os.write(results, result.encode() + b"\n")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(sys.argv[1], sys.argv[3])

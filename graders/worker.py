"""Worker processes that can be killed: for each job a line comes back, or the worker dies.

    python -m graders.worker rewards TOKEN SOCKET      a worker: its jobs and results go over SOCKET

The module that the command line names has a function call(name, *arguments), which does a job.
A job is a JSON line, [name, arguments]. The worker answers with a line [TOKEN] after its imports,
then with [TOKEN, reward, fault] for each job. The token tells them from what a verifier writes.
"""

import fcntl
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import walk_tb

from graders import Unparsed
from graders.sandbox import Process

FAULTS = ("unparsed_answer", "unparsed_gold", "timeout", "error")  # the first two are of Unparsed
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
        self.process = Process(
            [sys.executable, "-m", "graders.worker", self.module, self.token],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE)  # it dies when this is closed, or we are dead
        try:  # Its imports are done. If this is not its line, its next one is not a result's.
            self.process.read_line(START_SECONDS)
        except TimeoutError:  # not the job's
            raise EOFError from None

    def stop(self):
        """Kills the process, if there is one, and what its verifiers have started."""
        if self.process:
            self.process.close()
        self.process = None

    def run(self, job):
        """-> the Result of a job, whose errors are faults and not raised: to take too long is a
        timeout; to end the process, or write to its socket, is an error. A fault has the job's
        least reward, and a reward below that, or infinite, is a fault."""
        try:
            line = json.dumps(job[:2]).encode() + b"\n"
        except (RecursionError, TypeError, ValueError) as e:  # an answer that is nested too deep
            return Result(job.least, Fault("error", repr(e)))
        for _ in range(2):  # the first process may have died, or written, before this job
            try:
                if self.process is None:
                    self.start()
                self.process.channel.settimeout(job.seconds)
                self.process.channel.sendall(line)
                token, reward, fault = json.loads(self.process.read_line(job.seconds))
                if token != self.token:
                    raise ValueError("the line is not the worker's")
                if not (fault or job.least <= reward <= LARGEST):
                    fault = "error", (f"the reward is {reward}, and the verifier's least is "
                                      f"{job.least:g}, its most {LARGEST:g}: see rewards.Verifier")
                return Result(job.least, Fault(*fault)) if fault else Result(reward, None)
            except TimeoutError:
                self.stop()
                return Result(job.least, Fault("timeout", ""))
            except Exception:  # what comes may be anything
                self.stop()
        return Result(job.least, Fault(
            "error", "the verifier's process died, or wrote to a descriptor "
            "that it did not open; does python -c 'import rewards' work?"))


@functools.cache
def pool(module, size):
    """The workers of a pool. They are kept, so that the next call finds them started."""
    return [Worker(module) for _ in range(size)]


def run_jobs(module, jobs, size):
    """-> the Result of each Job, in order. They run in `size` workers with `module`."""
    free = pool(module, size)

    def work(job):
        worker = free.pop()
        try:
            return worker.run(job)
        finally:
            free.append(worker)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, jobs))  # raises what a thread has raised; cancels the others


# ------------------------------------------------------------------ the worker's side

def graded(call, name, arguments):
    """-> [reward, fault as a pair, or None] of a job. An exception is a fault and is not raised."""
    try:
        reward = call(name, *arguments)
        if reward is None:
            raise TypeError("it returned None: is a return missing?")
        return [float(reward), None]
    except Unparsed as e:
        return [0.0, (e.kind, "")]
    except Exception as e:  # A verifier's bug must not look like a wrong answer.
        places = [f"{frame.f_code.co_filename}, line {line}"
                  for frame, line in walk_tb(e.__traceback__)][1:]  # without this function's
        own = [place for place in places if "/lib/python" not in place]  # of no package
        return [0.0, ("error", f"{type(e).__name__}: {str(e)[:400]} "
                               f"({(own or places or ['its result'])[-1]})")]


def serve(module, token, channel):
    """Answers each line of a socket: with a line when it is ready, and then with one for each job.

    A verifier's stdin is empty. A process that it forks cannot answer, and ends behind it."""
    worker, lines = os.getpid(), open(channel, closefd=False)
    life = os.dup(0)
    # On Linux the kernel kills this process when the other end of `life` is closed: no thread could
    # while a regular expression holds Python's lock. Else it ends with its socket.
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life, fcntl.F_SETOWN, worker)
        fcntl.fcntl(life, fcntl.F_SETSIG, 9)
        fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.register_at_fork(after_in_child=lambda: os.close(channel))
    module = importlib.import_module(module)
    results = itertools.chain([[]], (graded(module.call, *json.loads(x)) for x in lines))
    for result in results:  # the first says that the imports are done
        if os.getpid() != worker:
            os._exit(0)
        os.write(channel, json.dumps([token, *result]).encode() + b"\n")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))

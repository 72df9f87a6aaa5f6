"""Worker processes that can be killed: for each job a line comes back, or the worker dies.

    python -m graders.worker rewards LIFE      a worker: jobs on stdin, results on stdout

The module that the command line names has the verifiers in its VERIFIERS, and may have a function
prepare(names), which imports their packages. Jobs are sent as a JSON line of [name, completion,
answer]s. The worker answers with a line after its imports, then a line [reward, fault] for each.
"""

import contextlib
import fcntl
import functools
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graders import Hedge, Unparsed, UnparsedGold, sandbox
from graders.sandbox import LineReader

FAULTS = ("unparsed_answer", "unparsed_gold", "hedge", "timeout", "error")  # how a fault begins
START_SECONDS = 60.0  # for a process to import the verifiers and their packages
# Slurm gives a job fewer cores than the machine has.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# A small machine gets more workers than cores, so that some can hang while others work.
WORKERS = max(4, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
Job = namedtuple("Job", "name completion answer seconds")  # seconds: the limit of its verifier

# ------------------------------------------------------------------ the parent's side

class Worker:
    """One worker process, started at its first job, and again after it was killed."""

    def __init__(self, module):
        self.module, self.process = module, None

    def start(self):
        life, self.life = os.pipe()  # The process dies when this end is closed, or we are dead.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "graders.worker", self.module, str(life)], pass_fds=(life,),
            cwd=Path(__file__).resolve().parent.parent, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(life)
        self.lines = LineReader(self.process.stdout.fileno())

    def stop(self):
        """Kills the process, if there is one, and removes the folders of the programs it ran."""
        process, self.process = self.process, None
        if process:
            process.kill()
            process.wait()
            os.close(self.life)
            sandbox.sweep(process.pid)
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # The buffer may hold jobs.
                process.stdin.close()

    def run(self, jobs):
        """-> [reward, fault or None, seconds] of the first jobs: of all, or up to the one that cost
        the process its life.

        It raises nothing on a job's account: a job that takes too long is a timeout, and one that
        ends its process is an error."""
        if self.process and self.process.poll() is not None:
            self.stop()  # It died between two blocks, which is not the fault of a job.
        results, began, allowed = [], time.monotonic(), START_SECONDS
        try:
            if self.process is None:
                self.start()
            # One line, which the process reads whole before it begins: the pipe cannot block.
            self.process.stdin.write(json.dumps([job[:3] for job in jobs]).encode() + b"\n")
            self.process.stdin.flush()
            self.lines.read(START_SECONDS)  # The imports are done.
            for job in jobs:
                began, allowed = time.monotonic(), job.seconds
                results.append([*self.lines.read(allowed), time.monotonic() - began])
        except TimeoutError:
            self.stop()
            results.append([0.0, "timeout", allowed])
        except (EOFError, BrokenPipeError):
            self.stop()
            results.append([0.0, "error: the worker process died", time.monotonic() - began])
        return results


@functools.cache
def pool(module, size):
    """The workers of a pool. They are kept, so that the next call finds them started."""
    return [Worker(module) for _ in range(size)]


def run_jobs(module, jobs, size):
    """-> [reward, fault or None, seconds that it took] of each Job, in order. They run in `size`
    workers that have the verifiers of `module`."""
    results = [None] * len(jobs)
    # Blocks save waiting for each line; short ones, so that a slow job holds up little.
    step = max(1, min(64, -(-len(jobs) // (4 * size))))
    starts = queue.SimpleQueue()
    for start in range(0, len(jobs), step):
        starts.put(start)

    def keep_busy(worker):
        with contextlib.suppress(queue.Empty):
            while True:
                start = starts.get_nowait()
                end = min(start + step, len(jobs))
                while start < end:  # The next process takes the jobs that a dead one left.
                    block = worker.run(jobs[start:end])
                    results[start:start + len(block)] = block
                    start += len(block)

    with ThreadPoolExecutor(size) as threads:  # one thread for each worker
        busy = pool(module, size)[:starts.qsize()]
        list(threads.map(keep_busy, busy))  # list() raises their errors
    return results


# ------------------------------------------------------------------ the worker's side

def graded(verifiers, name, completion, answer):
    """-> [reward, fault or None] of one completion. An exception is a fault and is not raised."""
    try:
        return [float(verifiers[name](completion, answer)), None]
    except Unparsed:
        return [0.0, "unparsed_answer"]
    except Hedge:
        return [0.0, "hedge"]
    except UnparsedGold:
        return [0.0, "unparsed_gold"]
    except Exception as e:  # A verifier's bug must not look like a wrong answer.
        return [0.0, f"error: {type(e).__name__}: {e}"[:500]]


def die_with_parent(life):
    """On Linux the kernel kills this process when the other end of the pipe `life` is closed.

    A thread that looks for the parent would not do: a regular expression that hangs holds Python's
    lock. Elsewhere a worker ends with its stdin, between two blocks of jobs."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


def serve(module):
    """Answers each line on stdin: with a line when it is ready, and then with one for each job.

    The results go to a private copy of stdout; the prints of a verifier are dropped."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = importlib.import_module(module)
    prepare = getattr(module, "prepare", lambda names: None)
    for line in sys.stdin:
        jobs = json.loads(line)
        prepare({name for name, *_ in jobs})
        print('"ready"', file=results, flush=True)
        for job in jobs:
            print(json.dumps(graded(module.VERIFIERS, *job)), file=results, flush=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(sys.argv[1])

"""The inside of the sandbox: runs a model's program, once for each input.

sandbox.py hands this text to `python -I -B -c`, with two file descriptors: the job is read from the
first, and the results go to the second, a JSON line each. The first line is null: it is ready.
"""

import json
import os
import resource
import sys
import time
import types

# These names are in scope when LiveCodeBench's runner starts a program.
PRELUDE = """
from string import *; from re import *; from datetime import *; from collections import *
from heapq import *; from bisect import *; from copy import *; from math import *
from random import *; from statistics import *; from itertools import *; from functools import *
from operator import *; from io import *; from sys import *; from json import *
from builtins import *; from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json, typing
"""


def kill_the_rest():
    """Kills the processes that the program left, if this is the first of a process tree."""
    if os.getpid() != 1:
        return
    try:
        os.kill(-1, 9)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        pass


def nameless_file():
    """-> the descriptor of an empty file, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("program")
    import tempfile  # Linux saves the time for it.
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


def fork_for_each(texts, limits, results):
    """Forks a process for each text, one after the other, which has that text on its stdin.

    It returns in those processes, which are to run the program, and never in this one, which writes
    [exit code, stdout] of each to `results` and exits after the last."""
    first = os.getpid() == 1  # of a process tree
    for text in texts:
        stdin, stdout = nameless_file(), nameless_file()
        with open(stdin, "wb", closefd=False) as file:
            file.write(text.encode(errors="replace"))
        os.lseek(stdin, 0, 0)
        pid = os.fork()
        if pid == 0:
            if first:  # Otherwise the grader kills the group that this process stays in.
                os.setsid()
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            for name, value in limits.items():
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kill_the_rest()
        os.lseek(stdout, 0, 0)
        output = os.read(stdout, limits["FSIZE"]).decode(errors="replace")
        results.write(json.dumps([code, output]) + "\n")
        results.flush()
        os.close(stdin)
        os.close(stdout)
    os._exit(0)


def call_function(job, scope, results):
    """Defines the program's function and writes its value for each input to `results`."""
    dumps = json.dumps  # The program may put another function into the module.
    calls = [[json.loads(line) for line in text.split("\n") if line.strip()]
             for text in job["inputs"]]
    scope["__name__"] = "solution"
    exec(compile(job["code"], "solution.py", "exec"), scope)
    if "class Solution" in job["code"]:
        function = getattr(scope["Solution"](), job["fn_name"])
    else:
        function = scope[job["fn_name"]]
    for arguments in calls:
        # The limit is one for each call, so the soft limit of the process moves on.
        used, (_, hard) = int(time.process_time()), resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (min(used + job["seconds"] + 1, hard), hard))
        results.write(dumps(function(*arguments), allow_nan=False) + "\n")
        results.flush()


def main(job_fd, result_fd):
    """Runs the job, {code, inputs, fn_name, limits, seconds}, which sandbox.start_runner wrote."""
    job = json.load(os.fdopen(job_fd))
    results = os.fdopen(result_fd, "w")
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(PRELUDE, program.__dict__)
    sys.setrecursionlimit(50000)
    sys.set_int_max_str_digits(50000)
    results.write("null\n")  # The clock of the first test starts now.
    results.flush()
    if job["fn_name"] is None:
        fork_for_each(job["inputs"], job["limits"], results)
        results.close()
        exec(compile(job["code"], "solution.py", "exec"), program.__dict__)
    else:
        fork_for_each([""], job["limits"], results)
        call_function(job, program.__dict__, results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

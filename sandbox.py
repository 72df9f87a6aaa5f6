"""Runs programs that nobody has read against tests, in processes that cannot reach anything.

Linux only: `unshare` gives a program its own process tree, its own network (none) and its own file system (the
interpreter, read-only, and an empty /tmp in memory), as far as the kernel lets this user; `isolation` says how far.
What this does not stop is in README.md.
"""

import contextlib
import functools
import glob
import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from decimal import Decimal, InvalidOperation

OUTPUT = 4 << 20    # bytes that a program may print, or return
NOBODY = 65534

# builds the file system in which the program lives, then becomes the program
ROOT = r"""
set -e
root=$1; shift
mount -t tmpfs -o size=64m,mode=755,nosuid,nodev none "$root"; cd "$root"
while [ "$1" != -- ]; do
  if [ -L "$1" ]; then cp -P "$1" ".$1"
  elif [ -d "$1" ]; then mkdir -p ".$1"; mount --bind -o ro,nosuid "$1" ".$1"
  elif [ -e "$1" ]; then mkdir -p ".${1%/*}"; touch ".$1"; mount --bind "$1" ".$1"; fi
  shift
done
shift
mkdir -p tmp old; chmod 1777 tmp
mkdir proc; mount -t proc proc proc; (echo 0 > proc/sys/kernel/shmmax) 2>/dev/null || true; pivot_root . old; cd /tmp; umount -l /old
exec "$@"
"""

# the program's side: limits, the names that LiveCodeBench's runner has in scope, a fresh process for each run
RUNNER = r"""
import json, os, resource, sys, time, types
said_fd, result_fd = map(int, sys.argv[1:])
said = json.load(os.fdopen(said_fd))
results = os.fdopen(result_fd, "w")
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
scope = main.__dict__
exec('''from string import *; from re import *; from datetime import *; from collections import *; from heapq import *
from bisect import *; from copy import *; from math import *; from random import *; from statistics import *
from itertools import *; from functools import *; from operator import *; from io import *; from sys import *
from json import *; from builtins import *; from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator
import io, sys, json, typing''', scope)

def each_in_a_process(texts):
    # returns in every process that is to run the program, and never in this one
    for text in texts:
        stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
        with open(stdin, "wb", closefd=False) as file:
            file.write(text.encode(errors="replace"))
        os.lseek(stdin, 0, 0)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(stdin, 0), os.dup2(stdout, 1)
            for name, value in said["limits"].items():
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if os.getpid() == 1:  # of the process tree's own: whatever the program left behind goes now
            try:
                os.kill(-1, 9)
                while True:
                    os.wait()
            except (ProcessLookupError, ChildProcessError):
                pass
        os.lseek(stdout, 0, 0)
        results.write(json.dumps([code, os.read(stdout, said["limits"]["FSIZE"]).decode(errors="replace")]) + "\n")
        results.flush()
        os.close(stdin), os.close(stdout)
    os._exit(0)

sys.setrecursionlimit(50000)
sys.set_int_max_str_digits(50000)
results.write("null\n")  # ready: the clock of the first test starts
results.flush()
if said["fn_name"] is None:
    each_in_a_process(said["inputs"])
    results.close()
    exec(compile(said["code"], "solution.py", "exec"), scope)
else:
    each_in_a_process([""])
    dumps, calls = json.dumps, [[json.loads(line) for line in text.split("\n") if line.strip()] for text in said["inputs"]]
    scope["__name__"] = "solution"
    exec(compile(said["code"], "solution.py", "exec"), scope)
    function = getattr(scope["Solution"](), said["fn_name"]) if "class Solution" in said["code"] else scope[said["fn_name"]]
    for arguments in calls:  # the limit is of each: the soft one moves on
        used, (_, hard) = int(time.process_time()), resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (min(used + said["seconds"] + 1, hard), hard))
        results.write(dumps(function(*arguments), allow_nan=False) + "\n")
        results.flush()
"""


@functools.cache
def unshared():
    """-> the strongest of the kernel's isolations that this user may use, of pid, net and mount, and the command for it."""
    for kinds in (("pid", "net", "mount"), ("pid", "net"), ("pid",)):
        for user in ([], ["--user", "--map-root-user"]):
            command = ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *(f"--{kind}" for kind in (*kinds, "ipc")), "--fork", "--kill-child"]
            with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as folder:
                if not subprocess.run(command + program(kinds, folder, ["-c", ""], command), capture_output=True, timeout=60, cwd=folder).returncode:
                    return kinds, command
    return (), []


def becomes_nobody(command):
    """Does root start the programs? In a user namespace there is no other user to become."""
    return os.getuid() == 0 and "--user" not in command


def program(kinds, folder, arguments, command):
    """The command line of Python, without rights, in a file system of its own where `kinds` has mount."""
    # the signal again, after unshare's own: a change of user clears it
    drop = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--pdeathsig=KILL"]
    if becomes_nobody(command):
        drop += [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    python = [os.path.join(sys.prefix, "bin", "python"), "-I", "-B", *arguments]
    if "mount" not in kinds:
        return (["setpriv", *drop] if kinds and readable_by_all() else []) + python
    places = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom", sys.base_prefix, sys.prefix]
    return ["sh", "-c", ROOT, "sh", folder, *dict.fromkeys(places), "--", "setpriv", *drop, *python]


def readable_by_all():
    """May another user start this interpreter? One below /root can only be had inside a file system of one's own."""
    path = os.path.realpath(sys.executable)
    while path != "/":
        if not os.stat(path).st_mode & 0o001:
            return False
        path = os.path.dirname(path)
    return True


def isolation():
    """One line for the start of a run."""
    kinds, command = unshared()
    shown = " ".join(k if k in kinds else f"(no {k})" for k in ("pid", "net", "mount"))
    uid = NOBODY if becomes_nobody(command) and kinds and ("mount" in kinds or readable_by_all()) else os.getuid()
    return f"isolation: {shown}, uid {uid}, rlimits"


def prepare(problems, allow_unsafe):
    """Before programs are run: says how they are isolated. Raises PermissionError where nothing does that, and allow_unsafe
    is not given."""
    if any(p["reward"] == "code" for p in problems):
        print(isolation())
        if allow_unsafe:
            os.environ["NANORLVR_ALLOW_UNSAFE_CODE"] = "1"  # for the graders' processes
        elif not unshared()[0]:
            raise PermissionError("nothing isolates programs here, and some are to be run: --allow_unsafe_code runs them all the same")


def lines_equal(got, wanted):
    """LiveCodeBench's comparison: line by line without outer space, as text or as exact decimals."""
    got, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (got, wanted))
    return len(got) == len(wanted) and all(a == b or decimals(a) == decimals(b) is not None for a, b in zip(got, wanted))


def decimals(line):
    try:
        found = [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None
    return found if all(d.is_finite() for d in found) else None


@contextlib.contextmanager
def started(code, inputs, fn_name, timeout, memory_mb):
    """Starts the runner; gives a function that returns its next result, or raises ValueError or TimeoutError. What it
    left behind, processes and files, is gone after the block."""
    kinds, command = unshared()
    folder = tempfile.mkdtemp(prefix=f"nanorlvr-{os.getpid()}-")
    if becomes_nobody(command) and "mount" not in kinds:
        os.chown(folder, NOBODY, NOBODY)
    seconds = math.ceil(timeout)
    limits = dict(AS=memory_mb << 20, CPU=seconds if fn_name is None else (seconds + 1) * len(inputs), FSIZE=OUTPUT, NOFILE=64, NPROC=64, CORE=0)
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+") as said:
        json.dump(dict(code=code, inputs=inputs, fn_name=fn_name, limits=limits, seconds=seconds), said)
        said.seek(0)
        process = subprocess.Popen(
            command + program(kinds, folder, ["-c", RUNNER, str(said.fileno()), str(write_end)], command), cwd=folder, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(said.fileno(), write_end),
            env=dict(PATH="/usr/bin:/bin:/usr/sbin:/sbin", HOME="/tmp", LANG="C.UTF-8", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"))
    os.close(write_end)
    buffer = b""

    def result(limit=2 * timeout + 1):  # on a busy machine a second of computing takes longer than one by the clock
        nonlocal buffer
        deadline = time.monotonic() + limit
        while b"\n" not in buffer:
            if not select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(read_end, 1 << 16)
            buffer += chunk
            if not chunk or len(buffer) > 8 * OUTPUT:
                raise ValueError("it ended without a result, or says too much")
        line, buffer = buffer.split(b"\n", 1)
        return json.loads(line)
    try:
        try:
            result(60)  # the start, in which the program has no part
        except (ValueError, TimeoutError):
            raise RuntimeError("the sandbox did not start") from None
        yield result
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        while select.select([read_end], [], [], 5.0)[0] and os.read(read_end, 1 << 16):
            pass  # the end of the pipe is the end of the runner, and with it of the process tree
        os.close(read_end)
        os.chmod(folder, 0o700)
        shutil.rmtree(folder, ignore_errors=True)


def sweep(pid):
    """Removes the folders that a process has left by being killed."""
    for folder in glob.glob(os.path.join(tempfile.gettempdir(), f"nanorlvr-{pid}-*")):
        shutil.rmtree(folder, ignore_errors=True)


def run_tests(code, tests, fn_name=None, timeout=6.0, memory_mb=512, allow_unsafe=False):
    """Does a program pass every test?

    tests: [{input, output, testtype}] as LiveCodeBench has them. fn_name: the function, or method of Solution, to call;
    None is input on stdin, output on stdout. timeout: seconds of computing for each test (twice as many by the clock).
    The expected outputs stay in this process. Raises PermissionError where the kernel isolates nothing and allow_unsafe
    is not set."""
    if not unshared()[0] and not allow_unsafe:
        raise PermissionError("programs would run without any isolation here: --allow_unsafe_code runs them all the same")
    if not tests:
        raise ValueError("a program cannot be graded without a test")
    try:
        with started(code, [test["input"] for test in tests], fn_name, timeout, memory_mb) as result:
            if fn_name is not None:
                return all(result() == json.loads(test["output"]) for test in tests) and result()[0] == 0
            return all(status == 0 and lines_equal(out, test["output"]) for (status, out), test in ((result(), test) for test in tests))
    except (ValueError, TypeError, TimeoutError, RecursionError):
        return False

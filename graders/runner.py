"""The inside of the sandbox: runs a model's program, once for each input.

sandbox.py hands this text to `python -IBc`, with the descriptor of a socket: the job, {code,
inputs, fn_name, limits (of setrlimit), seconds (of CPU for a call), isolated, uid}, is a JSON line
that it reads there, and the results are lines that it writes. Its first line, whose sender tells
sandbox.py its number, is null: it is ready; or a text, why it cannot start. It fills unshare's
namespaces by calls of libc: the commands, a dozen processes, would take longer than a program.
"""

import builtins
import ctypes
import json
import os
import resource
import struct
import sys
import time
import types
from contextlib import suppress

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

LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
         "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
         "/dev/shm": "/tmp"}  # multiprocessing's semaphores are files there
ROOT = b"/sys"  # where the new file system is made: a folder that there is, and no program needs
READ_ONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, DETACH = 1, 2, 4, 8, 32, 4096, 2  # of mount(2)
PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS = 1, 4, 22, 38  # of prctl(2)
STACK = 256 << 20  # bytes of stack: Codeforces' limit
# The machine's number in linux/audit.h, those of pivot_root, clone, fcntl, socket and socketpair,
# and of what is refused: add_key, request_key, keyctl, unshare, setns, mount, umount2, bpf,
# perf_event_open, userfaultfd, io_uring_setup, open_tree, fsopen; setsid (the kernel shares the CPU
# out among sessions); shmget, msgget, semget, mq_open, io_setup (no limit counts their memory);
# flock, inotify_init, inotify_init1, fanotify_init (on files of the host they reach other programs)
CALLS = {"x86_64": (0xC000003E, 155, 56, 72, (41, 53), "248 249 250 272 308 165 166 321 298 323 "
                    "425 428 430 112 29 68 64 240 206 73 253 294 300"),
         "aarch64": (0xC00000B7, 41, 220, 25, (198, 199), "217 218 219 97 268 40 39 280 241 282 "
                     "425 428 430 157 194 186 190 180 0 32 26 262")}
CLONE3 = 435  # Its flags lie in memory, which no filter reads; without it libc takes clone.
NEW_NAMESPACES = 0x7E020000  # of clone(2): all but that of time


# ------------------------------------------------------------------ the namespaces of the program

def libc(name, *arguments):
    """Calls a function of libc with integers, bytes and None. Raises OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def place_below(path):
    """Makes a folder or empty file in this folder for one of the system, with the symbolic links on
    the way to it. -> its path without links"""
    at = "/"
    for part in path.split("/"):
        at = os.path.normpath(os.path.join(at, part))
        if os.path.islink(at):
            with suppress(FileExistsError):
                os.symlink(os.readlink(at), "." + at)
            at = place_below(os.path.join(os.path.dirname(at), os.readlink(at)))
        elif os.path.isdir(at):
            os.makedirs("." + at, exist_ok=True)
        else:
            open("." + at, "a").close()
    return at


def change_root(pivot_root):
    """Moves to a file system of what programs may read, and an empty /tmp in memory."""
    os.umask(0o022)
    libc("mount", b"none", ROOT, b"tmpfs", NOSUID | NODEV, b"size=1m,mode=755")
    os.chdir(ROOT)
    for folder in "tmp", "old", "proc":
        os.mkdir(folder)
    libc("mount", b"none", b"tmp", b"tmpfs", NOSUID | NODEV, b"size=64m,nr_inodes=4096,mode=1777")
    paths = "/usr /bin /lib /lib64 /etc/ld.so.cache /dev/null /dev/urandom".split()
    paths += sys.base_prefix, sys.prefix, sys.executable
    for place in sorted({place_below(path) for path in paths if os.path.exists(path)}):
        place, here = os.fsencode(place), os.fsencode("." + place)
        libc("mount", place, here, None, BIND, None)
        # A user namespace may not take back what the mount outside forbids.
        kept = os.statvfs(here).f_flag & (NODEV | NOEXEC)
        libc("mount", None, here, None, REMOUNT | BIND | READ_ONLY | NOSUID | kept, None)
    for path, target in LINKS.items():
        with suppress(FileExistsError):
            os.symlink(target, "." + path)
    libc("mount", b"none", b"proc", b"proc", NOSUID | NODEV | NOEXEC | READ_ONLY, None)
    libc("syscall", pivot_root, b".", b"old")
    os.chdir("/tmp")
    libc("umount2", b"/old", DETACH)
    libc("mount", None, b"/", None, REMOUNT | BIND | READ_ONLY | NOSUID | NODEV, None)


def refuse_calls(machine, clone, fcntl, sockets, numbers):
    """The kernel is to refuse these system calls, new namespaces, fcntl's locks and watches, and
    sockets of other families than AF_UNIX, 1, to this process and all that it starts. seccomp(2)
    has the instructions: (code, jump if true, else, value)."""
    load, equal, at_least, has, end = 0x20, 0x15, 0x35, 0x45, 0x06
    forbid, allow = (end, 0, 0, 0x50001), (end, 0, 0, 0x7FFF0000)  # EPERM
    def where(values, *then):
        """`then` for each of the values, jumped over where another was loaded."""
        return [step for x in values for step in ((equal, 0, len(then), x), *then)]
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, machine), forbid, (load, 0, 0, 0),
        (at_least, 0, 1, 1 << 30), forbid,  # the second set of calls on x86_64, x32
        *where(map(int, numbers.split()), forbid),
        # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY
        *where([fcntl], (load, 0, 0, 24), *where([6, 7, 37, 38, 1024, 1026], forbid), allow),
        *where(sockets, (load, 0, 0, 16), *where([1], allow), forbid),
        *where([CLONE3], (end, 0, 0, 0x50026)),  # ENOSYS
        *where([clone], (load, 0, 0, 16), (has, 0, 1, NEW_NAMESPACES), forbid), allow]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    libc("prctl", SECCOMP, 2, struct.pack("HP", len(steps), ctypes.addressof(program)), 0, 0)


def confine(uid):
    """Fills this process's namespaces, becomes the user uid if any, and gives up its rights."""
    name = os.uname().machine
    if name not in CALLS:
        raise OSError(f"graders/runner.py has no numbers of system calls for {name}")
    machine, pivot_root, *calls = CALLS[name]
    change_root(pivot_root)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # its third version, no rights
    libc("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    libc("prctl", PDEATHSIG, 9, 0, 0, 0)  # A change of user has cleared it.
    # The program has the same user, and could write to this process's memory otherwise.
    libc("prctl", DUMPABLE, 0, 0, 0, 0)
    refuse_calls(machine, *calls)


# ------------------------------------------------------------------ the program

def nameless_file():
    """-> the descriptor of an empty file, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("program")
    import tempfile  # Linux saves the time for it.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def fork_for_each(texts, limits, results):
    """Forks a process for each text, one after the other, which has that text on its stdin. It
    returns in those processes, which are to run the program, and never in this one, which writes
    [exit code, stdout] of each to `results` and exits after the last."""
    first = os.getpid() == 1  # of a process tree
    for text in texts:
        stdin, stdout = nameless_file(), nameless_file()
        os.pwrite(stdin, text.encode(errors="replace"), 0)
        pid = os.fork()
        if pid == 0:
            if first:  # Otherwise the grader kills the group that this process stays in.
                os.setpgid(0, 0)
                libc("prctl", DUMPABLE, 1, 0, 0, 0)  # It may read its own /proc/self.
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            for name, value in limits.items():
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
            # The program may raise this one. -1 is no limit.
            _, most = resource.getrlimit(resource.RLIMIT_STACK)
            resource.setrlimit(resource.RLIMIT_STACK, (min(STACK, most % 2**63), most))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(ProcessLookupError, ChildProcessError):
            while first:  # It kills the processes that the program left.
                os.kill(-1, 9)
                os.wait()
        output = os.pread(stdout, limits["FSIZE"], 0).decode(errors="replace")
        results.write(json.dumps([code, output]) + "\n")
        os.close(stdin)
        os.close(stdout)
    os._exit(0)


def call_function(job, scope, results):
    """Defines the program's function and writes its value for each input to `results`."""
    dumps = json.dumps  # The program may put another function into the module.
    calls = [[json.loads(line) for line in text.split("\n") if line.strip()]
             for text in job["inputs"]]
    name = job["fn_name"]
    scope["__name__"] = "solution"  # also in sys.modules, where dataclasses and pickle look
    if name in scope:  # the prelude's does not answer for the program, which may use it
        setattr(builtins, name, scope.pop(name))
    exec(compile(job["code"], "solution.py", "exec"), scope)
    solution = scope.get("Solution")
    own = any(name in vars(kind) for kind in getattr(solution, "__mro__", ())
              if kind.__module__ == "solution")
    function = getattr(solution(), name) if own else scope[name]
    for arguments in calls:
        # The limit is one for each call, so the soft limit of the process moves on.
        used, (_, hard) = int(time.process_time()), resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (min(used + job["seconds"] + 1, hard), hard))
        value = function(*arguments)
        # numpy's numbers, booleans and arrays count by value.
        results.write(dumps(value, allow_nan=False, default=lambda x: x.tolist()) + "\n")


def main(descriptor):
    """Runs the job that comes at a socket, and writes the results there."""
    with open(descriptor, closefd=False) as line:
        job = json.loads(line.readline())
    results, by_name = os.fdopen(descriptor, "w", 1), job["fn_name"] is not None
    sys.argv = ["solution.py"]
    try:
        # Linux has it: where memory is short, this goes first.
        with suppress(FileNotFoundError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if job["isolated"]:
            confine(job["uid"])
    except OSError as error:
        results.write(json.dumps(str(error)) + "\n")
        return
    program = sys.modules["__main__"] = sys.modules["solution"] = types.ModuleType("__main__")
    exec(PRELUDE, program.__dict__)
    sys.setrecursionlimit(50000)
    sys.set_int_max_str_digits(50000)
    results.write("null\n")  # The clock of the first test starts now.
    fork_for_each([""] if by_name else job["inputs"], job["limits"], results)
    if by_name:
        os.dup2(2, 1)  # Its prints are dropped.
        call_function(job, program.__dict__, results)
    else:
        results.close()
        exec(compile(job["code"], "solution.py", "exec"), program.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]))

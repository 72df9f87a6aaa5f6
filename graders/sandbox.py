"""Runs a model's programs against tests, in processes that cannot reach anything.

On Linux `unshare` gives a program its own process tree, network (none) and file system (the
interpreter, read-only, and an empty /tmp in memory). Where this user cannot have all three, a
program is refused, or runs with limits alone if the user asks for that."""

import functools
import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, nullcontext, suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path

OUTPUT = 4 << 20  # bytes that a program may print
MEMORY_MB = 1024  # of address space for a process: AtCoder's limit
PATIENCE = 5  # times its seconds of CPU that a program has by the clock: it may wait for a core
UIDS = range(61184, 65520)  # systemd's for passing services: no user has one, containers have all
# It gives a process its namespaces. Those of other users than root are in a user namespace, too.
UNSHARE = "setpriv --pdeathsig KILL unshare --fork --kill-child --pid --net --mount --ipc"
# The runner's file is not visible in the sandbox's file system, so its text is passed.
RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")

# ------------------------------------------------------------------ how programs are isolated

def program_uid():
    """The user that the programs of this process become if root starts them, else None. Each
    process has another: the kernel counts a user's processes, also those of a fork bomb."""
    table = Path("/proc/self/uid_map")  # lines of: the first id here, the first outside, how many
    text = table.read_text() if table.exists() else "0 0 4294967295"
    spans = (map(int, line.split()) for line in text.splitlines())
    has_users = any(a <= UIDS[0] and UIDS[-1] < a + count for a, _, count in spans)
    return UIDS[os.getpid() % len(UIDS)] if os.getuid() == 0 and has_users else None


@functools.cache
def obstacle():
    """Why programs cannot be isolated here; None if they can."""
    if platform.system() != "Linux":
        return f"that takes Linux, and this is {platform.system()}"
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return "that takes unshare and setpriv, of the package util-linux, and they are missing"
    try:
        with started("", [""], None, 10, MEMORY_MB, isolated=True):
            return None
    except (OSError, RuntimeError) as error:
        return f"the kernel does not let this user: {error}"


def isolates(allow_unsafe):
    """Are programs isolated here? Raises PermissionError if not, and allow_unsafe is false."""
    if obstacle() and not allow_unsafe:
        raise PermissionError(
            "programs that a model writes are to be run, and nothing isolates them here "
            f"({obstacle()}): --allow_unsafe_code runs them all the same, and they may then do "
            "whatever this user may do to files, to processes and over the network")
    return not obstacle()


def announce(allow_unsafe):
    """Says how programs are isolated, or raises as `isolates`."""
    if allow_unsafe:
        os.environ["NANORLVR_ALLOW_UNSAFE_CODE"] = "1"  # The graders' processes inherit it.
    found = "pid net mount, seccomp, rlimits" if isolates(allow_unsafe) else "none, rlimits alone"
    print(f"isolation: {found}")


# ------------------------------------------------------------------ running a program

class Process(subprocess.Popen):
    """A process with a group of its own. `channel` is our end of a socket to it, and the number of
    its own end is the last argument of its command."""

    def __init__(self, command, **options):
        self.channel, theirs = socket.socketpair()
        self.buffer = bytearray()  # what has come behind the last line
        with theirs:
            super().__init__(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                **options)
        self.runner = self.pid  # or the first process of a tree below it

    def read_line(self, seconds, most=1 << 20):
        """The next line of its socket. Raises TimeoutError after `seconds`, EOFError at its end,
        ValueError beyond `most` bytes or UTF-8."""
        deadline, chunk = time.monotonic() + seconds, self.buffer
        while b"\n" not in chunk and len(self.buffer) <= most:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = self.channel.recv(1 << 16)
            if not chunk:
                raise EOFError("the socket ended before the line did")
            self.buffer += chunk
        line, end, self.buffer = self.buffer.partition(b"\n")
        if not end or len(line) > most:
            raise ValueError("the line is too long")
        return line.decode()

    def close(self):
        """Kills its group, and the runner, with which all others of its process tree end. One that
        a program has taken over may have left unshare's group and ignore its end."""
        with suppress(ProcessLookupError):
            if self.poll() is None:  # Nobody else gets the runner's number while unshare waits.
                os.kill(self.runner, 9)
        # Where only the dead are left, the call is forbidden on macOS.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, 9)
        self.channel.settimeout(5)
        with self, self.channel, suppress(OSError):
            while self.channel.recv(1 << 16):
                pass  # The socket ends with the runner, and so with the process tree.


def first_sender(channel):
    """The process id, outside its own process tree, of the runner, which writes the first line."""
    first, credentials, *_ = channel.recvmsg(1, socket.CMSG_SPACE(12), socket.MSG_PEEK)
    if not first:  # The number would be 0, and a signal to 0 goes to our own group.
        raise EOFError
    return int.from_bytes(credentials[0][2][:4], sys.byteorder)  # behind it are user and group


@contextmanager
def started(code, inputs, fn_name, timeout, memory_mb, isolated):
    """Starts the runner; gives a function from a number of bytes to its next result, or ValueError,
    EOFError or TimeoutError. After the block nothing is left of it, neither processes nor files.

    isolated: False gives it a temporary folder and limits alone. Raises RuntimeError."""
    seconds = math.ceil(timeout)  # of CPU for a call
    limits = dict(AS=memory_mb << 20, FSIZE=OUTPUT, NOFILE=64, NPROC=64, CORE=0,
                  CPU=seconds if fn_name is None else (seconds + 1) * len(inputs))
    if platform.system() == "Darwin":  # Its processes have more from the start: an error.
        del limits["AS"]
    command, uid = (UNSHARE.split(), program_uid()) if isolated else ([], None)
    if isolated and uid is None:
        command += ["--user", "--map-root-user"]
    job = json.dumps(dict(code=code, inputs=inputs, fn_name=fn_name, limits=limits, seconds=seconds,
                          isolated=isolated, uid=uid)) + "\n"
    with (nullcontext("/") if isolated else tempfile.TemporaryDirectory(
            prefix="nanorlvr-", ignore_cleanup_errors=True)) as folder, closing(Process(
                [*command, sys.executable, "-IBc", RUNNER], cwd=folder, stdin=subprocess.DEVNULL,
                env=dict(PATH="/usr/bin:/bin:/usr/sbin:/sbin", HOME="/tmp", LANG="C.UTF-8",
                         OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"))) as process:
        try:  # The program has no part in the start.
            process.channel.settimeout(60)
            if isolated:
                process.channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            process.channel.sendall(job.encode())
            if isolated:
                process.runner = first_sender(process.channel)
            reason = json.loads(process.read_line(60))
        except (ValueError, EOFError, OSError):
            reason = "unshare or Python ended, or took a minute"
        if reason is not None:
            raise RuntimeError(f"the sandbox did not start: {reason}")
        yield functools.partial(process.read_line, PATIENCE * timeout)


# ------------------------------------------------------------------ testing a program

# a block between two fences: a line that begins with one as long ends it, if it opens no other
BLOCK = re.compile(r"^((?:(?!```|~~~).)*+)(?P<fence>```++|~~~++)[ \t]*+(\w*+)[^`\n]*+\n"
                   r"((?:(?![ \t>]*(?P=fence)).*\n)*+)[ \t>]*(?P=fence)(?!\w)", re.M)
MARGIN = re.compile(r"[ \t>]*+(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?")  # of a list or quotation, too


def fenced_blocks(text):
    """-> (mark, content) of each block, without the margin of its first fence (CommonMark 4.5)"""
    return [(mark, re.sub(rf"(?m)^[ \t>]{{0,{len(before)}}}", "", content)
             if MARGIN.fullmatch(before) else content)
            for before, _, mark, content in BLOCK.findall(text)]


def final_program(blocks, fn_name=None):
    """The text of the last block that defines fn_name, or else of the last one: of those marked as
    Python, else of those without a mark, else of all. blocks: of fenced_blocks, one or more."""
    definition = rf"\bdef\s+{re.escape(fn_name)}\b" if fn_name else ""
    return max(reversed(blocks), key=lambda block: (
        bool(re.search(definition, block[1])), bool(re.fullmatch("py(thon)?3?", block[0], re.I)),
        not block[0]))[1]


def lines_equal(printed, expected):
    """LiveCodeBench's comparison: each line without outer space, as text or as exact decimals."""
    printed, expected = ([line.strip() for line in text.strip().split("\n")]
                         for text in (printed, expected))
    return len(printed) == len(expected) and all(
        a == b or decimals(a) == decimals(b) is not None for a, b in zip(printed, expected))


def decimals(line):
    """The finite numbers that a line consists of; None if anything else is in it, as in 1_000."""
    with suppress(InvalidOperation):
        values = [Decimal(word) for word in line.split()]
        if line.isascii() and "_" not in line and all(value.is_finite() for value in values):
            return values


def parsed(text):
    """The value of a JSON text, with numbers in tuples: so 1 is 1.0, but true is not 1."""
    return json.loads(text, parse_int=lambda n: (int(n),), parse_float=lambda x: (float(x),))


def passes(test, result, fn_name):
    """Does the runner's next result, the line of result(bytes), pass this test?"""
    if fn_name is not None:
        expected = parsed(test["output"])
        # Nested lists take 25 times their text: none that is too long to be right is parsed.
        return parsed(result(1024 + 4 * len(json.dumps(expected)))) == expected
    status, printed = json.loads(result(8 * OUTPUT))
    return status == 0 and lines_equal(printed, test["output"])


def run_tests(code, tests, fn_name=None, timeout=6.0, memory_mb=MEMORY_MB):
    """Does a program pass every test?

    tests: [{input, output, testtype}] as LiveCodeBench has them. fn_name: the function, or method
    of Solution, to call; None is input on stdin, output on stdout. timeout: seconds of CPU that a
    process has for each test, and PATIENCE times as many by the clock. memory_mb: of address space
    for each process, where the system can limit it. The expected outputs stay in this process.
    Raises PermissionError where nothing isolates programs, unless the environment has
    NANORLVR_ALLOW_UNSAFE_CODE=1; ValueError without a test; RuntimeError if the sandbox fails."""
    isolated = isolates(os.environ.get("NANORLVR_ALLOW_UNSAFE_CODE") == "1")
    if not tests:
        raise ValueError("a program cannot be graded without a test")
    inputs = [test["input"] for test in tests]
    try:
        with started(code, inputs, fn_name, timeout, memory_mb, isolated) as result:
            # After its last call, a function's process has to end well, too.
            return (all(passes(test, result, fn_name) for test in tests)
                    and (fn_name is None or json.loads(result(1024))[0] == 0))
    except (ValueError, TypeError, LookupError, EOFError, TimeoutError, RecursionError):
        return False

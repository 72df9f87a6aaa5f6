"""Runs a model's programs against tests, in processes that cannot reach anything.

On Linux `unshare` gives a program its own process tree, network (none) and file system (the
interpreter, read-only, and an empty /tmp in memory), as far as the kernel lets this user;
`isolation` says how far, and docs/evaluation.md names the gaps. Elsewhere nothing isolates
a program: it is refused, or runs with limits alone where the user asks for that.
"""

import contextlib
import functools
import glob
import json
import math
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from decimal import Decimal, InvalidOperation
from pathlib import Path

OUTPUT = 4 << 20  # bytes that a program may print, or return
NOBODY = 65534
# The runner's file is not visible in the sandbox's file system, so its text is passed.
RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")

# This script builds the file system in which the program lives, then becomes the program.
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
mkdir proc; mount -t proc proc proc
(echo 0 > proc/sys/kernel/shmmax) 2>/dev/null || true
pivot_root . old; cd /tmp; umount -l /old
exec "$@"
"""


# ------------------------------------------------------------------ how programs are isolated

@functools.cache
def unshared():
    """-> the strongest of the kernel's isolations, of pid, net and mount, that this user may use,
    and the command for it. Both are empty where there is none."""
    if platform.system() != "Linux":
        return (), []
    for kinds in (("pid", "net", "mount"), ("pid", "net"), ("pid",)):
        for user in ([], ["--user", "--map-root-user"]):
            command = ["setpriv", "--pdeathsig", "KILL", "unshare", *user,
                       *(f"--{kind}" for kind in (*kinds, "ipc")), "--fork", "--kill-child"]
            with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as folder:
                trial = subprocess.run(command + python_command(kinds, folder, ["-c", ""], command),
                                       capture_output=True, timeout=60, cwd=folder)
                if trial.returncode == 0:
                    return kinds, command
    return (), []


def becomes_nobody(command):
    """Does root start the programs? In a user namespace there is no other user to become."""
    return os.getuid() == 0 and "--user" not in command


def python_command(kinds, folder, arguments, command):
    """The command line of Python with these arguments, without rights and, where `kinds` has mount,
    in a new file system, built at `folder`. `command` (unshare's) is to start it."""
    # It needs the signal again, after unshare's own: a change of user clears it.
    drop = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--pdeathsig=KILL"]
    if becomes_nobody(command):
        drop += [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    prefix = os.path.realpath(sys.prefix)  # the environment's folder may be a link
    python = [os.path.join(prefix, "bin", "python"), "-I", "-B", *arguments]
    if "mount" not in kinds:
        return (["setpriv", *drop] if kinds and readable_by_all() else []) + python
    places = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom",
              os.path.realpath(sys.base_prefix), prefix]
    return ["sh", "-c", ROOT, "sh", folder, *dict.fromkeys(places), "--", "setpriv", *drop, *python]


def readable_by_all():
    """May another user start this interpreter? Below /root that takes a new file system."""
    path = os.path.realpath(sys.executable)
    while path != "/":
        if not os.stat(path).st_mode & 0o001:
            return False
        path = os.path.dirname(path)
    return True


def isolation():
    """One line for the start of a run: the isolation of programs here."""
    kinds, command = unshared()
    shown = " ".join(k if k in kinds else f"(no {k})" for k in ("pid", "net", "mount"))
    changes_user = becomes_nobody(command) and kinds and ("mount" in kinds or readable_by_all())
    limits = "rlimits" if has_memory_limit() else "rlimits (no memory)"
    return f"isolation: {shown}, uid {NOBODY if changes_user else os.getuid()}, {limits}"


def has_memory_limit():
    """May a process limit its address space? On macOS it is larger than any limit from the start,
    and the limit is an error."""
    return platform.system() != "Darwin"


def refusal():
    """One sentence: why programs are not run here, and the danger if they were."""
    system = "macOS" if platform.system() == "Darwin" else platform.system()
    if system != "Linux":
        why = f"that takes Linux, and this is {system}"
    elif not (shutil.which("unshare") and shutil.which("setpriv")):
        why = "that takes unshare and setpriv, of the package util-linux, and they are missing"
    else:
        why = "the kernel lets this user unshare nothing"
    return (f"programs that a model writes are to be run, and nothing isolates them here ({why}): "
            "--allow_unsafe_code runs them all the same, and they may then do whatever this user "
            "may do to files, to processes and over the network")


def prepare(problems, allow_unsafe):
    """Says how programs are isolated, if the problems have any.

    Raises PermissionError where nothing isolates them and allow_unsafe is not given."""
    if any(p["reward"] == "code" for p in problems):
        if allow_unsafe:
            os.environ["NANORLVR_ALLOW_UNSAFE_CODE"] = "1"  # The graders' processes inherit it.
        elif not unshared()[0]:
            raise PermissionError(refusal())
        print(isolation())


# ------------------------------------------------------------------ running a program

class LineReader:
    """Reads the JSON lines that arrive at a file descriptor, each by a deadline.

    The buffer is this class's own: poll looks at the pipe alone, and would wait for a line that one
    of Python's file objects has already taken into its buffer."""

    def __init__(self, fd, most_bytes=float("inf")):
        self.fd, self.most_bytes, self.buffer = fd, most_bytes, bytearray()
        self.poll = select.poll()  # The function select() fails at descriptors from 1024 on.
        self.poll.register(fd, select.POLLIN)

    def read_chunk(self, seconds):
        """The next bytes, b"" at the end of the pipe. Raises TimeoutError."""
        if not self.poll.poll(max(0.0, seconds) * 1000):
            raise TimeoutError
        return os.read(self.fd, 1 << 16)

    def read(self, seconds):
        """The next line's value. Raises TimeoutError after `seconds`, EOFError at the pipe's end,
        ValueError for a line that is not JSON or is longer than `most_bytes`."""
        deadline, searched = time.monotonic() + seconds, 0  # bytes without a line's end
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            chunk = self.read_chunk(deadline - time.monotonic())
            if not chunk:
                raise EOFError("the pipe ended before the line did")
            self.buffer += chunk
            if len(self.buffer) > self.most_bytes:
                raise ValueError("the line is too long")
        line = self.buffer[:end]
        del self.buffer[:end + 1]
        return json.loads(line)


def start_runner(job, folder, result_fd):
    """Starts the runner, whose results go to the pipe's end result_fd, in a folder -> its process.

    job: {code, inputs, fn_name, limits (of setrlimit), seconds (of computing for each call)}."""
    kinds, command = unshared()
    with tempfile.TemporaryFile("w+") as job_file:
        json.dump(job, job_file)
        job_file.seek(0)
        arguments = ["-c", RUNNER, str(job_file.fileno()), str(result_fd)]
        return subprocess.Popen(
            command + python_command(kinds, folder, arguments, command), cwd=folder,
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=(job_file.fileno(), result_fd),
            env=dict(PATH="/usr/bin:/bin:/usr/sbin:/sbin", HOME="/tmp", LANG="C.UTF-8",
                     OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"))


@contextlib.contextmanager
def started(code, inputs, fn_name, timeout, memory_mb):
    """Starts the runner; gives a function that returns its next result, or raises ValueError,
    EOFError or TimeoutError. After the block nothing is left of it, neither processes nor files.

    Raises RuntimeError if the runner does not start."""
    command = unshared()[1]
    folder = tempfile.mkdtemp(prefix=f"nanorlvr-{os.getpid()}-")
    if becomes_nobody(command) and "mount" not in unshared()[0]:
        os.chown(folder, NOBODY, NOBODY)
    seconds = math.ceil(timeout)
    limits = dict(AS=memory_mb << 20, FSIZE=OUTPUT, NOFILE=64, NPROC=64, CORE=0,
                  CPU=seconds if fn_name is None else (seconds + 1) * len(inputs))
    if not has_memory_limit():
        del limits["AS"]
    job = dict(code=code, inputs=inputs, fn_name=fn_name, limits=limits, seconds=seconds)
    read_end, write_end = os.pipe()
    process = start_runner(job, folder, write_end)
    os.close(write_end)
    lines = LineReader(read_end, most_bytes=8 * OUTPUT)
    try:
        try:
            lines.read(60)  # The program has no part in the start.
        except (ValueError, EOFError, TimeoutError):
            raise RuntimeError("the sandbox did not start") from None
        # On a busy machine a second of computing takes longer than one by the clock.
        yield lambda: lines.read(2 * timeout + 1)
    finally:
        # Where only the dead are left, the call is forbidden on macOS.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)
        process.wait()
        with contextlib.suppress(TimeoutError):
            while lines.read_chunk(5.0):
                pass  # The pipe ends with the runner, and so with the process tree.
        os.close(read_end)
        with contextlib.suppress(FileNotFoundError):  # The program may have removed it.
            os.chmod(folder, 0o700)
        shutil.rmtree(folder, ignore_errors=True)


def sweep(pid):
    """Removes the folders that a process has left by being killed."""
    for folder in glob.glob(os.path.join(tempfile.gettempdir(), f"nanorlvr-{pid}-*")):
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------ testing a program

def lines_equal(printed, expected):
    """LiveCodeBench's comparison: each line without outer space, as text or as exact decimals."""
    printed, expected = ([line.strip() for line in text.strip().split("\n")]
                         for text in (printed, expected))
    return len(printed) == len(expected) and all(
        a == b or decimals(a) == decimals(b) is not None
        for a, b in zip(printed, expected, strict=True))


def decimals(line):
    """The finite numbers that a line consists of; None if anything else is in it."""
    try:
        values = [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None
    return values if all(value.is_finite() for value in values) else None


def passes(test, result, fn_name):
    """Does the runner's next result, which result() returns, pass this test?"""
    if fn_name is not None:
        return result() == json.loads(test["output"])
    status, printed = result()
    return status == 0 and lines_equal(printed, test["output"])


def run_tests(code, tests, fn_name=None, timeout=6.0, memory_mb=512):
    """Does a program pass every test?

    tests: [{input, output, testtype}] as LiveCodeBench has them. fn_name: the function, or method
    of Solution, to call; None is input on stdin, output on stdout. timeout: seconds of computing
    for each test (twice as many by the clock). memory_mb: of address space for each process, where
    the system can limit it. The expected outputs stay in this process.
    Raises PermissionError where nothing isolates programs, unless the environment has
    NANORLVR_ALLOW_UNSAFE_CODE=1; ValueError without a test; RuntimeError if the sandbox fails."""
    if not unshared()[0] and os.environ.get("NANORLVR_ALLOW_UNSAFE_CODE") != "1":
        raise PermissionError(refusal())
    if not tests:
        raise ValueError("a program cannot be graded without a test")
    inputs = [test["input"] for test in tests]
    try:
        with started(code, inputs, fn_name, timeout, memory_mb) as result:
            # After its last call, a function's process has to end well, too.
            return (all(passes(test, result, fn_name) for test in tests)
                    and (fn_name is None or result()[0] == 0))
    except (ValueError, TypeError, LookupError, EOFError, TimeoutError, RecursionError):
        return False

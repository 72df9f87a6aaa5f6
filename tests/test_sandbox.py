"""graders/sandbox.py: programs that are right, wrong, hang, hog, cheat and attack; comparisons."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest

import rewards
from conftest import ROOT
from graders import sandbox, worker
from graders.sandbox import lines_equal, run_tests
from helpers import counted, until

pytestmark = pytest.mark.skipif(
    sandbox.obstacle() is not None, reason=f"nothing isolates programs: {sandbox.obstacle()}")

IO = [dict(input="3\n", output="6\n"), dict(input="5\n", output="10\n")]
FN = [dict(input="3", output="6"), dict(input="5", output="10")]

# The runner has libc where this process has it, which was forked from it. Its kill becomes:
# setpgid(0, 0), prctl(PR_SET_PDEATHSIG, 0), errno = ESRCH, return -1; and its _exit waits for ever.
REWRITES_RUNNER = """
import ctypes
address = lambda name: ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
errno = address("__errno_location").to_bytes(8, "little").hex()
with open("/proc/1/mem", "r+b", 0) as memory:
    memory.seek(address("_exit"))
    memory.write(bytes.fromhex("b8220000000f05ebf7"))
    memory.seek(address("kill"))
    memory.write(bytes.fromhex("31ff31f6b86d0000000f05b89d000000bf0100000031f60f0548b8" + errno +
                               "ffd0c70003000000b8ffffffffc3"))
print(int(input()) * 2)
"""
NUMBER = {"x86_64": dict(keyctl=250, add_key=248, clone=56, mq_open=240, io_setup=206)}.get(
    os.uname().machine,  # of system calls
    dict(keyctl=219, add_key=217, clone=220, mq_open=180, io_setup=0))


def S(name, ok, code, tests=IO, fn_name=None):  # standard input and output
    code = code.replace("ANSWER", "print(int(input())*2)")
    code = re.sub(r"NUMBER\['(\w+)'\]", lambda match: str(NUMBER[match[1]]), code)
    return pytest.param(code, tests, fn_name, bool(ok), id=name)


def F(name, ok, code, tests=FN, fn_name="f"):  # a function
    return S(name, ok, code, tests, fn_name)


CASES = [
    # right, several styles
    S("the main module", 1, "import __main__\nx = 2\nprint(int(input()) * __main__.x)"),
    S("main guard", 1, "def main():\n    ANSWER\nif __name__=='__main__':\n    main()"),
    S("removes its folder", 1, "import os, shutil\nANSWER\n"
      "shutil.rmtree(os.getcwd(), ignore_errors=True)"),
    S("sys.stdin.read", 1, "import sys\nprint(int(sys.stdin.read())*2)"),
    S("open(0)", 1, "print(int(open(0).read())*2)"),
    S("os.read", 1, "import os\nos.write(1,str(int(os.read(0,100))*2).encode())"),
    S("sys.exit(0)", 1, "import sys\nANSWER\nsys.exit(0)"), S("exit()", 1, "ANSWER\nexit()"),
    S("threading with deep recursion", 1, "import threading,sys\nthreading.stack_size(1<<26)\n"
      "def main():\n    ANSWER\nt=threading.Thread(target=main)\nt.start()\nt.join()"),
    S("recursion", 1, "def f(n): return 0 if n==0 else 1+f(n-1)\nn=int(input())\n"
      "print(f(9000)-9000+2*n)"),
    S("prelude names", 1,
      "d=defaultdict(int); heappush([],1); print(sqrt(4)==2 and int(input())*2)"),
    S("future import", 1, "from __future__ import annotations\nANSWER"),
    S("stderr noise", 1, "import sys\nprint('x'*100000,file=sys.stderr)\nANSWER"),
    S("write a file in /tmp or here", 1, "open('x.txt','w').write('6')\nANSWER"),
    S("big integers", 1, "x=3**20000\ns=str(x)\nANSWER"),
    *([S("deep recursion in C", 1,  # Later versions limit it themselves.
         "import sys\nsys.setrecursionlimit(10**6)\n@functools.cache\n"
         "def f(n): return n and 1 + f(n - 1)\nprint(f(50000) - 50000 + 2 * int(input()))")]
      if sys.version_info < (3, 12) else []),
    S("700 MB", 1, "x = [0] * (90 << 20)\nprint(int(input()) * 2)"),
    S("no arguments, descriptors in /dev", 1, "import os, sys\nassert sys.argv == ['solution.py']\n"
      "assert {'0', '1', '2'} < {*os.listdir('/dev/fd')}\n"
      "print('x', file=open('/dev/stderr', 'w'))\n"
      "print(int(open('/dev/stdin').read()) * 2, file=open('/dev/stdout', 'w'))"),
    S("multiprocessing and asyncio", 1, "import asyncio, multiprocessing\n"
      "with multiprocessing.Pool(2) as pool: one, = pool.map(abs, [-1])\n"
      "asyncio.run(asyncio.sleep(0))\nprint(int(input())*2*one)"),
    F("numpy's numbers", 1, "import numpy as np\n"
      "def f(x): return [np.int64(x), np.arange(2), np.bool_(x), np.float32(0.5)]",
      [dict(input="3", output="[3, [0, 1], true, 0.5]")]),
    F("another class Solution", 1, "class Solution: 'f'\ndef f(x): return 2*x"),
    F("keeps state", 1, "class Solution:\n    def __init__(self): self.n=0\n    def f(self,x):\n"
      "        self.n+=1\n        return x*2"),
    F("annotations, and prints too", 1, "class Solution:\n"
      "    def f(self,x: List[int]) -> Optional[int]:\n        print('debug')\n        return x*2"),
    F("tuple for a list", 1, "def f(x): return (x,x)", [dict(input="3", output="[3, 3]")]),
    F("two arguments", 1, "class Solution:\n"
      "    def f(self,a,b): return a+b", [dict(input='[1]\n[2]', output="[1, 2]")]),
    F("a dataclass, pickled", 1, "from __future__ import annotations\nimport pickle\n"
      "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
      "def f(x): return pickle.loads(pickle.dumps(A(2 * x))).x"),
    F("strings", 1, "def f(s): return s[::-1]", [dict(input='"ab\\n"', output='"\\nba"')]),
    F("none", 1, "def f(s): return None", [dict(input='"ab"', output='null')]),
    # wrong
    S("wrong", 0, "print(int(input())*3)"),
    S("right on the first only", 0, "n=int(input())\nprint(6)"), S("nothing", 0, ""),
    S("syntax error", 0, "print((int(input())*2)"),
    S("exception after the answer", 0, "print(int(input())*2,flush=True)\nraise ValueError"),
    S("exit code 3", 0, "import sys\nprint(int(input())*2,flush=True)\nsys.exit(3)"),
    S("os._exit before the answer", 0, "import os\nos._exit(0)"),
    S("os.abort", 0, "import os\nprint(int(input())*2,flush=True)\nos.abort()"),
    S("NUL bytes", 0, "print('\\0'*10)"),
    S("not UTF-8", 0, "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')"),
    F("no such function", 0, "def g(x): return x*2"),
    # names in scope do not answer for the program; what it imports does
    *(F(f"{name} in scope", 0, code, [dict(input=given, output="6")], name)
      for name, given, code in (("mul", "2\n3", "x = 1"), ("comb", "6\n1", ""),
                                ("abs", "-6", "x = 1"), ("strip", '"6"', "Solution = str"),
                                ("bit_count", "63", "class Solution(int): pass"))),
    F("imports it", 1, "from operator import mul", [dict(input="2\n3", output="6")], "mul"),
    F("uses the prelude's", 1, "class Solution:\n    def comb(self, n, k): return comb(n, k)",
      [dict(input="6\n1", output="6")], "comb"),
    S("a notice of a folder of the host", 0, "import fcntl, os\n"
      "fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, fcntl.DN_ACCESS)\nANSWER"),
    F("inherits it", 1, "class Base:\n    def f(self, x): return 2*x\nclass Solution(Base): pass"),
    F("bytes that come too slowly", 0, "import socket, time\nfor fd in range(3, 999):\n    try:\n"
      "        while socket.socket(fileno=fd).send(b' '): time.sleep(0.3)\n"
      "    except OSError: pass"),
    S("a lock on a file of the host", 0, "import fcntl, os\n"
      "fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_SH)\nANSWER"),
    S("another lock on it", 0, "import fcntl, os\n"
      "fcntl.lockf(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_SH)\nANSWER"),
    S("a watch on a file of the host", 0, "import ctypes\n"
      "assert ctypes.CDLL(None).inotify_init() >= 0\nANSWER"),
    S("a watch by fanotify", 0, "import ctypes\n"
      "assert ctypes.CDLL(None).fanotify_init(0x200, 0) >= 0\nANSWER"),  # FAN_REPORT_FID
    *(F(f"{got} for {wanted}", ok, f"def f(x): return {got}", [dict(input="1", output=wanted)])
      for got, wanted, ok in (
          ("True", "1", 0), ("1", "true", 0), ("-0.0", "false", 0), ("[[True]]", "[[1]]", 0),
          ("{'a': 1}", '{"a": true}', 0), ("[True, 2.0]", "[true, 2]", 1), ("{0: None}",
          '{"0": null}', 1), ("-0.0", "0", 1), ("[1]", "1", 0), ("[1]", "[1, 2]", 0))),
    F("raises", 0, "def f(x): raise SystemExit(0)"), F("sys.exit(0)", 0, "import sys\nsys.exit(0)"),
    F("os._exit(0)", 0, "import os\ndef f(x): os._exit(0)"),
    F("nan", 0, "def f(x): return float('nan')"), F("not JSON", 0, "def f(x): return {1,2}"),
    F("deep nesting", 0, "def f(x):\n    a=[]\n    for _ in range(30000): a=[a]\n    return a"),
    F("dies after the last result", 0, "import os\nn=0\ndef f(x):\n    global n\n    n+=1\n"
      "    if n==2:\n        import threading,time\n"
      "        threading.Timer(0.05,lambda: os._exit(1)).start()\n        time.sleep(0.2)\n"
      "    return x*2"),
    # loops, hogs
    S("loop", 0, "while True: pass"), S("sleep", 0, "import time\ntime.sleep(1000)"),
    S("loop that ignores signals", 0, "import signal\nfor s in range(1,32):\n"
      "    try: signal.signal(s,signal.SIG_IGN)\n    except Exception: pass\nwhile True: pass"),
    F("loop in a function", 0, "def f(x):\n    while True: pass"),
    S("memory hog", 0, "x=[]\nwhile True: x.append(bytearray(10**7))"),
    S("output hog", 0, "while True: print('x'*10000)"),
    F("result hog", 0, "def f(x): return 'x'*10**8"),
    S("disk hog", 0, "f=open('x','wb')\nwhile True: f.write(b'x'*10**6)"),
    S("5,000 files", 0, "for i in range(5000): open(str(i), 'w').close()\nANSWER"),
    S("fork bomb", 0, "import os,time\nfor _ in range(12):\n    try: os.fork()\n"
      "    except OSError: pass\ntime.sleep(30)"),
    S("thread bomb", 0, "import threading,time\n"
      "while True: threading.Thread(target=time.sleep,args=(30,)).start()"),
    # attacks
    S("kill the parent", 0, "import os,signal\nos.kill(os.getppid(),9)\nos.kill(1,9)\n"
      "os.killpg(0,9)"),
    S("kill everything", 0, "import os\nos.kill(-1,9)"),
    F("always equal", 0, "class X:\n    def __eq__(self,o): return True\ndef f(x): return X()"),
    F("int that lies", 0, "class X(int):\n    def __eq__(self,o): return True\n"
      "    def __repr__(self): return '6'\n    def __str__(self): return '6'\n"
      "def f(x): return X(7)"),
    F("monkeypatched json", 0, "import json\njson.dumps=lambda *a,**k:'6'\njson.loads=lambda *a:6\n"
      "def f(x): return 7"),
    F("monkeypatched builtins", 0, "import builtins\nbuiltins.all=lambda x:True\n"
      "builtins.len=lambda x:0\nbuiltins.isinstance=lambda a,b:True\ndef f(x): return 7"),
    S("monkeypatched print", 1, "import builtins\nbuiltins.print=lambda *a:None\nANSWER"),
    S("reads the answers", 0, "import os,sys\nfound=''\nfor root,_,files in os.walk('/tmp'):\n"
      "    for f in files:\n        try: found+=open(os.path.join(root,f)).read()\n"
      "        except Exception: pass\nfound+=' '.join(sys.argv)+str(os.environ)\n"
      "print(10 if '10' in found and int(input())==5 else 'none')"),
    F("looks for the answers in frames and memory", 0, "import gc,sys\ndef f(x):\n"
      "    fr=sys._getframe()\n    while fr:\n"
      "        for v in list(fr.f_locals.values())+list(fr.f_globals.values()):\n"
      "            if isinstance(v,dict) and 'output' in v: return v['output']\n"
      "        fr=fr.f_back\n    for o in gc.get_objects():\n"
      "        if isinstance(o,dict) and o.get('output') is not None and o.get('testtype'): "
      "return o['output']\n"
      "    return 'none'"),
    S("forges results on every descriptor", 0, "import os\nfor fd in range(3,64):\n"
      "    try: os.write(fd,b'[0, \"x\"]\\n'*3)\n    except OSError: pass\nos._exit(0)"),
    F("forges results on every descriptor, function", 0, "import os\nfor fd in range(3,64):\n"
      "    try: os.write(fd,b'true\\n'*3)\n    except OSError: pass\ndef f(x): return 7"),
    S("a secret in the environment", 0, "import os\n"
      "print(6 if 'NANORLVR_SECRET' in os.environ else 1)"),
    S("a socket out", 0, "import socket\ns=socket.create_connection(('127.0.0.1',PORT),timeout=1)\n"
      "print(6 if int(input())==3 else 10)"),
    S("a secret file", 0, "print(6 if open('SECRET').read() else 1)"),
    S("writes outside", 0, "open('OUTSIDE','w').write('x')\nprint('x')"),
    S("leaves the sandbox's process tree as far as it goes", 1, "import ctypes,os,time\n"
      "if os.fork()==0:\n    os.setpgid(0,0)\n    ctypes.CDLL(None).prctl(1,0,0,0,0)\n"
      "    if os.fork()==0:\n        time.sleep(60)\n    os._exit(0)\nANSWER"),
    *([S("rewrites the runner, so that it stays", 0, REWRITES_RUNNER, IO[:1])]
      if os.uname().machine == "x86_64" else []),
    S("reads the runner", 0, "open('/proc/1/mem','rb')\nANSWER"),
    S("reads its own /proc/self", 1, "import os\nopen('/proc/self/mem','rb')\n"
      "os.listdir('/proc/self/fd')\nANSWER"),
    *(S(name, 0, f"import ctypes\nlibc=ctypes.CDLL(None)\nassert libc.{call}>=0\n"
        "print(int(input())*2)") for name, call in (
        ("the session's keyring", "syscall(NUMBER['keyctl'],0,-3,1)"),
        ("a key", "syscall(NUMBER['add_key'],b'user',b'k',b'v',1,-3)"),
        ("a user namespace", "unshare(0x10000000)"), ("a mount namespace", "unshare(0x20000)"),
        ("a process in a user namespace", "syscall(NUMBER['clone'],0x10000011,0,0,0,0)"),
        ("a process in a user namespace, clone3",
         "syscall(435,(ctypes.c_uint64*8)(0x10000000,0,0,0,17,0,0,0),64)"),
        ("a mount", "mount(b'none',b'/tmp',b'tmpfs',0,None)"),
        ("shared memory", "shmget(0,1<<20,0o1600)"), ("a System V queue", "msgget(0,0o1600)"),
        ("a System V semaphore", "semget(0,1,0o1600)"),
        ("a POSIX queue", "syscall(NUMBER['mq_open'],b'x',0o102,0o600,0)"),
        ("asynchronous input", "syscall(NUMBER['io_setup'],1,ctypes.byref(ctypes.c_long()))"),
        ("an internet socket", "socket(2,1,0)"), ("a netlink socket", "socket(16,3,0)"))),
    S("the first to be killed where memory is short", 1, "path = '/proc/self/oom_score_adj'\n"
      "assert open(path).read() == '1000\\n'\ntry: open(path, 'w').write('0')\n"
      "except OSError: ANSWER"),
    S("threads and processes", 1, "import subprocess,sys,threading\n"
      "t=threading.Thread(target=print,args=(int(input())*2,))\nt.start();t.join()\n"
      "subprocess.run([sys.executable,'-c','pass'],check=True)"),
    S("quits by recursion", 0, "def f(): f()\nf()"),
    S("segmentation fault", 0, "import ctypes\nctypes.string_at(0)")]


def nothing_is_left():
    """Has root's user of programs no process but the dead that wait to be collected?"""
    states = subprocess.run(["ps", "-o", "stat=", "-u", str(sandbox.program_uid())],
                            capture_output=True, text=True).stdout.split()
    return all(state.startswith("Z") for state in states)


@pytest.mark.parametrize("code, tests, fn_name, passes", CASES)
def test_verdicts(code, tests, fn_name, passes, tmp_path, monkeypatch):
    monkeypatch.setenv("NANORLVR_SECRET", "x")
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    secret, outside = tmp_path / "secret", tmp_path / "outside"
    secret.write_text("x")
    os.chmod(tmp_path, 0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1])).replace("OUTSIDE", str(outside))
        code = code if "NANORLVR" in code else code.replace("SECRET", str(secret))
        began = time.monotonic()
        timeout = 10 if passes else 0.8  # seconds; a busy machine is slow, and some hang
        memory_mb = sandbox.MEMORY_MB if passes else 256
        assert run_tests(code, tests, fn_name, timeout, memory_mb) is passes
        assert time.monotonic() - began < 60
    assert {p.name for p in tmp_path.iterdir()} == {"secret"}
    if os.getuid() == 0:  # programs run as a user that has no other processes
        assert until(nothing_is_left, 5)


@pytest.mark.skipif(sandbox.program_uid() is None or os.uname().machine != "x86_64",
                    reason="looks for the processes of root's programs, writes x86-64's code")
def test_a_runner_that_is_taken_over_is_killed_all_the_same(monkeypatch):
    monkeypatch.setattr(sandbox, "RUNNER", sandbox.RUNNER.replace(
        'libc("prctl", DUMPABLE, 0', 'libc("prctl", DUMPABLE, 1').replace(
        "NOEXEC | READ_ONLY, None", "NOEXEC, None"))  # /proc
    assert run_tests(REWRITES_RUNNER, IO[:1])  # It wrote to the runner, which has ended nothing.
    assert until(nothing_is_left, 5)


def test_an_environment_behind_links(tmp_path):
    """Its folder, the interpreter of which it was made and that one's folder are links."""
    made, current = tmp_path / "made", tmp_path / "opt" / "current"
    (made / "bin").mkdir(parents=True)
    current.parent.mkdir()
    current.symlink_to(os.path.realpath(sys.base_prefix))
    (made / "bin" / "python").symlink_to(current / "bin" / "python3")
    (made / "pyvenv.cfg").write_text(f"home = {current}/bin\n")
    (tmp_path / "first").symlink_to("made")
    (tmp_path / "venv").symlink_to("first")
    script = ("import sys; from graders import sandbox; assert 'venv' in sys.prefix; "
              "print(sandbox.run_tests('import os, zlib; print(os.path.exists(\"/etc/passwd\"))',"
              "[dict(input='', output='False')]), sandbox.obstacle())")
    done = subprocess.run([tmp_path / "venv" / "bin" / "python", "-c", script], cwd=ROOT,
        capture_output=True, text=True, umask=0o077)
    assert done.stdout == "True None\n", done.stderr


def test_a_fork_bomb_costs_no_other_program_its_reward():
    """Programs at the same time, that start a thread while the bomb has all its processes."""
    test = dict(tests=[dict(input="", output="6")], fn_name=None)
    bomb = "import os,time\nfor _ in range(12):\n    try: os.fork()\n    except OSError: pass\n"
    right = ("import threading,time\nfor _ in range(10):\n    time.sleep(0.3)\n"
             "    t=threading.Thread(target=time.sleep,args=(0.1,))\n    t.start()\nprint(6)")
    texts = [f"```\n{code}\n```" for code in [bomb + "time.sleep(6)", *[right] * 15]]
    try:
        got, _ = counted([dict(verifier="code", answer=test)], [texts], workers=16)
    finally:
        for one in worker.pool("rewards", 16):
            one.stop()
    assert got == [[0, *[1] * 15]]


def test_a_program_beside_three_that_take_all_cores():
    """Their processes would each be a session, and each session has an equal share of the CPU."""
    bomb = ("import os\nfor _ in range(60):\n    try: os.fork() or os.setsid()\n"
            "    except OSError: pass\nwhile True: pass")
    right = ("import time\ntime.sleep(0.5)\nend = time.process_time() + 0.3\n"
             "while time.process_time() < end: pass\nprint(6)")
    script = ("import sys; from graders.sandbox import run_tests; "
              "print(run_tests(sys.argv[1], [dict(input='', output='6')], timeout=2))")
    graders = [subprocess.Popen([sys.executable, "-c", script, code], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE) for code in (bomb, bomb, bomb, right)]
    assert [grader.communicate()[0] for grader in graders] == [*["False\n"] * 3, "True\n"]


def test_a_result_is_parsed_where_it_may_be_right_and_each_call_has_its_time(monkeypatch):
    """Nested lists take 25 times their text in memory."""
    parsed = []
    monkeypatch.setattr(sandbox.json, "loads", lambda text, loads=json.loads, **hooks: (
        parsed.append(len(text)), loads(text, **hooks))[1])
    forged = ("import os\ndef f(x): return 2*x\nfor fd in range(3, 9):\n"
              "    try: os.write(fd, b'6\\n10\\n[0, [' + b'[],' * 10**5 + b'[]]]\\n')\n"
              "    except OSError: pass")
    for code in "def f(x): return [[]] * 10**5", "def f(x): return 'x' * 10**5", forged:
        assert not run_tests(code, FN, "f") and parsed and max(parsed) < 2000
    long = [dict(input="3", output=json.dumps(["x"] * 10**5)), FN[1]]
    assert run_tests("def f(x): return ['x'] * 10**5 if x == 3 else 10.0", long, "f")
    code = ("import time\ndef f(x):\n    end = time.process_time() + 0.4\n"
            "    while time.process_time() < end: pass\n    return x*2")
    assert run_tests(code, FN * 2, "f", timeout=1)  # of 1.6 seconds in all


def test_in_a_user_namespace_as_well(monkeypatch):
    """What a user who is not root gets, where the kernel gives it."""
    monkeypatch.setattr(sandbox, "program_uid", lambda: None)
    monkeypatch.setattr(sandbox, "obstacle", sandbox.obstacle.__wrapped__)
    if sandbox.obstacle():
        pytest.skip("this kernel has no user namespaces for this user")
    assert run_tests("print(int(input())*2)", IO) and run_tests("def f(x): return x*2", FN,
        "f") and not run_tests("print(7)", IO)
    for wrong in ("open('/usr/x', 'w')", "open('/x', 'w')", "os.rmdir('/old')", "os.rmdir('/tmp')",
                  "open('/proc/self/oom_score_adj', 'w').write('0')"):
        assert not run_tests(f"import os\n{wrong}\nprint(int(input())*2)", IO[:1])
    assert not run_tests("import os\nprint(6 if os.path.exists('/etc/passwd') else 'none')", IO[:1])


def test_no_tests_no_sandbox_and_no_file_system_are_errors(monkeypatch):
    with pytest.raises(ValueError, match="without a test"):
        run_tests("print(6)", [])
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "RUNNER", sandbox.RUNNER.replace('"/sys"', '"/none"'))
        patch.setattr(sandbox, "obstacle", sandbox.obstacle.__wrapped__)
        with pytest.raises(PermissionError, match="mount.*No such file or directory"):
            run_tests("print(6)", IO[:1])
    monkeypatch.setattr(sandbox, "RUNNER", "raise SystemExit")
    with pytest.raises(RuntimeError, match="did not start"):  # and not a wrong answer
        run_tests("print(6)", IO[:1])
    ours, theirs = socket.socketpair()
    with ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        theirs.close()
        with pytest.raises(EOFError):  # and not process 0, which would be our group at its kill
            sandbox.first_sender(ours)


@pytest.mark.parametrize("got, wanted, same", [
    ("6", "6\n", True), ("6 \n\n", "6", True), ("6.0", "6", True), ("1e3", "1000", True),
    ("1_000", "1000", False), ("\u0663", "3", False), ("0.10", "0.1", True),
    ("0.333", "0.3333", False), ("1 2", "1\n2", False), ("1  2", "1 2", True),
    ("Yes", "YES", False), ("a\n\nb", "a\nb", False),
    ("NaN", "NaN", True), ("nan", "NaN", False), ("sNaN", "1", False), ("1e999999999", "1", False),
    ("", "", True), ("", "0", False), ("Infinity", "inf", False), ("-0", "0", True),
    ("x" * 10**6, "x", False)])
def test_comparison(got, wanted, same):
    assert lines_equal(got, wanted) is same


def test_a_killed_grader_takes_its_program_along(tmp_path):
    # Others may run programs at the same time: this runner is known by its first line.
    script = ("import os; from graders import sandbox; sandbox.obstacle(); "
              "sandbox.RUNNER = '# ' + os.environ['TMPDIR'] + '\\n' + sandbox.RUNNER; "
              "sandbox.run_tests('import time; time.sleep(300)', [dict(input='', output='')], "
              "timeout=200)")
    grader = subprocess.Popen(["python3", "-c", script], cwd=ROOT,
                              env=dict(os.environ, TMPDIR=str(tmp_path)))

    def running():
        return subprocess.run(["pgrep", "-f", f"# {tmp_path}"], capture_output=True,
            text=True).stdout.split()
    assert until(running, 30)
    time.sleep(1)  # well into the program
    grader.kill()
    grader.wait()
    assert until(lambda: not running(), 10) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("system, tool, why", [
    ("Darwin", "/bin/x", "takes Linux, and this is Darwin"), ("Linux", None, "util-linux"),
    ("Linux", "/bin/x", "the kernel does not let this user: the sandbox did not start")])
def test_a_refusal_says_why_and_what_the_flag_would_do(system, tool, why, monkeypatch):
    monkeypatch.setattr(sandbox.platform, "system", lambda: system)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: tool)
    monkeypatch.setattr(sandbox, "RUNNER", "raise SystemExit")
    monkeypatch.setattr(sandbox, "obstacle", sandbox.obstacle.__wrapped__)
    with pytest.raises(PermissionError) as refused:
        rewards.announce([dict(verifier="math"), dict(verifier="code")], allow_unsafe=False)
    assert why in str(refused.value) and "whatever this user may do to files" in str(refused.value)
    rewards.announce([dict(verifier="math")], allow_unsafe=False)  # there is no program to be run


def test_without_isolation_programs_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "obstacle", lambda: "no")
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("NANORLVR_ALLOW_UNSAFE_CODE", raising=False)
    with pytest.raises(PermissionError, match="--allow_unsafe_code"):
        run_tests("print(6)", IO[:1])
    monkeypatch.setenv("NANORLVR_ALLOW_UNSAFE_CODE", "1")
    assert run_tests("print(6)", IO[:1])
    assert not run_tests("print(7)", IO[:1])
    gone = "import os, shutil\nprint(int(input())*2)\nshutil.rmtree(os.getcwd())"
    assert run_tests(gone, IO[:1]) and not run_tests(gone + "\nprint(7)", IO)
    assert run_tests("import os\nprint(6)\nos.chmod('.', 0)", IO[:1])
    assert not list(tmp_path.iterdir())

"""A script in a fork of a process that has imported the large packages: 5 seconds less each."""

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing import connection
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "transformers.models.auto.auto_factory",
                                "transformers.models.qwen2.modeling_qwen2", "matplotlib.pyplot"])


def within(command, cwd, folder, variables):
    gc.freeze()  # a collection does not go through the packages
    for number, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = command
    sys.path[:] = [str(Path(command[0]).resolve().parent), *(
        x for x in sys.path if x not in (str(ROOT), str(ROOT / "tests")))]
    runpy.run_path(command[0], run_name="__main__")


def script(*command, cwd=ROOT, ranks=1, **variables):
    """Does what `python script.py flags` does in a folder -> subprocess.CompletedProcess. ranks: so
    many, with the variables that torchrun sets, and others; all end where one fails."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    given = dict(WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT=port)
    with tempfile.TemporaryDirectory() as folder:
        processes = [CONTEXT.Process(target=within, args=([*map(str, command)], str(cwd), folder, {
            name: str(x) for name, x in dict(given, RANK=rank, LOCAL_RANK=rank).items()
            if ranks > 1} | variables)) for rank in range(ranks)]
        for process in processes:
            process.start()
        code = 0
        while running := [x.sentinel for x in processes if x.exitcode is None]:
            connection.wait(running)
            code = code or next((x.exitcode for x in processes if x.exitcode), 0)
            for process in processes if code else ():
                process.terminate()
        out, error = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    error += f"({signal.Signals(-code).name})" if code < 0 else ""
    return subprocess.CompletedProcess(command, code, out, error)

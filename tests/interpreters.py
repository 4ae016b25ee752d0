"""``python``, ``megalight`` and ``torchrun`` without the time for imports: forked from a process that has made them.

:func:`commands` gives a folder for the front of ``PATH``. Each command in it is a small program that sends its words,
folder, variables and streams over a socket to a process of imports; that process forks an interpreter for them. The
small program passes signals on, and ends with the interpreter's status. Ranks that a Trainer starts by ``devices=N``
are such commands too, with the words of the first, as users' are.

Tests of starting, killing and importing itself use ``sys.executable`` instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing as mp
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.workers import SERVER

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = [*{words!r}, *sys.argv[1:]] or ["-"]
if words[0] == "-u":
    del words[0]  # torchrun's; streams are flushed at the end
if words[0][0] == "-" and words[0] not in ("-", "-c", "-m"):  # an option of the interpreter itself
    os.execv({python!r}, [{python!r}, *words])
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
socket.send_fds(link, [json.dumps([words, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
interpreter = int(link.recv(16))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(interpreter, number))
link.send(b"go")  # only now: who hears of the interpreter may send signals
sys.exit(int(link.recv(16) or 1))
"""
COMMANDS = {"python": (), "megalight": ("-m", "megalight"), "torchrun": ("-m", "torch.distributed.run")}
LONGEST = 1 << 17
"""Bytes of words and variables."""


def environment() -> dict[str, str]:
    """Return variables for a process to find the commands; also for ranks that torchrun starts."""
    from tests.programs import STARTED

    kept = {name: value for name, value in os.environ.items() if name not in STARTED}
    folder = commands()
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "PYTHON_EXEC": str(folder / "python"), "OMP_NUM_THREADS": "1"}


@functools.cache
def commands() -> Path:
    """Start the process of imports, and return the folder of commands. It is one for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="commands-"))  # not a folder of a test: an address is at most 107 bytes long
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    for name, words in COMMANDS.items():
        path = folder / name
        path.write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket"), words=words))
        path.chmod(0o755)
    server = SERVER.Process(target=_serve, args=(listener,))
    server.start()
    listener.close()
    atexit.register(_end, server.pid, folder)
    return folder


def _end(server: int, folder: Path) -> None:
    try:
        os.killpg(server, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(server, signal.SIGKILL)  # it has no group of its own yet
    shutil.rmtree(folder, ignore_errors=True)


def _serve(listener: socket.socket) -> None:
    """Fork an interpreter for each command, until the process of tests ends."""
    os.setpgid(0, 0)  # with its interpreters, so that none outlives the tests
    import torch
    import torch.distributed.run

    import megalight.cli.lightning  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for interpreters
    tests = mp.parent_process()
    listener.settimeout(10)
    while tests is not None and tests.is_alive():
        try:
            link, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            _become(link)
        link.close()


def _become(link: socket.socket) -> None:
    """Be the interpreter of one command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(link, LONGEST, 3)
    words, folder, variables = json.loads(text)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has made it an empty file
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    link.send(b"%d" % os.getpid())
    link.recv(2)
    status = 1
    try:
        _interpret(words)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        link.send(b"%d" % (status & 0xFF))
        os._exit(status & 0xFF)


def _interpret(words: list[str]) -> Any:
    """Do what ``python WORDS`` does."""
    sys.executable = os.environ["PYTHON_EXEC"]  # ranks that a Trainer starts have the imports too
    program, *rest = words
    sys.path.insert(0, os.getcwd())
    if program == "-m":
        sys.argv = rest
        return runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if program in ("-", "-c"):
        sys.argv = [program, *(rest if program == "-" else rest[1:])]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        return exec(compile(sys.stdin.read() if program == "-" else rest[0], "<string>", "exec"), main.__dict__)
    sys.argv = words
    sys.path[0] = str(Path(program).resolve().parent)
    return runpy.run_path(program, run_name="__main__")

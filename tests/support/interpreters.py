"""``python``, ``megalight`` and ``torchrun`` without the time for imports: forked from a process that has made them.

:func:`commands` gives a folder for the front of ``PATH``. Each command in it is a small program that sends its words,
folder, variables and open files over a socket to a process of imports; that process forks an interpreter for them. The
small program passes signals on, and ends as the interpreter does; if it is killed, so is the interpreter. Ranks that a
Trainer starts by ``devices=N`` are such commands too, with the words of the first, as users' are.

Tests of starting, killing and importing itself use ``sys.executable`` instead.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import multiprocessing as mp
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.workers import Forked

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = [*{words!r}, *sys.argv[1:]] or ["-"]
while words[0] in ("-u", "-B"):
    del words[0]  # of torchrun and multiprocessing: streams are flushed at the end
if words[0][0] == "-" and words[0] not in ("-", "-c", "-m"):  # an option of the interpreter itself
    os.execv({python!r}, [{python!r}, *words])
streams = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{{number}}")]
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
socket.send_fds(link, [json.dumps([words, os.getcwd(), dict(os.environ), streams]).encode()], streams)
interpreter = int(link.recv(16))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(interpreter, number))
link.send(b"go")  # only now: who hears of the interpreter may send signals
code = int(link.recv(16))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
COMMANDS = {"python": (), "megalight": ("-m", "megalight"), "torchrun": ("-m", "torch.distributed.run")}
LONGEST = 1 << 17
"""Bytes of words and variables."""
STREAMS = 64
"""Files that a command may have open."""


def environment() -> dict[str, str]:
    """Return variables for a process to find the commands; also for ranks that torchrun starts."""
    import torch

    from tests.support.programs import STARTED

    kept = {name: value for name, value in os.environ.items() if name not in STARTED} | {"OMP_NUM_THREADS": "1"}
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if torch.cuda.device_count():  # a fork of a process that has asked for GPUs cannot use them
        return {**kept, "PATH": os.pathsep.join(places)}
    folder = commands()
    return {**kept, "PATH": os.pathsep.join([str(folder), *places]), "PYTHON_EXEC": str(folder / "python")}


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
    server = Forked(target=_serve, args=(listener,))
    server.start()
    listener.close()
    atexit.register(_end, server.pid, folder)
    return folder


def _end(server: int, folder: Path) -> None:
    for kill in (os.killpg, os.kill):  # the second if it has no group of its own yet
        with suppress(ProcessLookupError):
            kill(server, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _serve(listener: socket.socket) -> None:
    """Fork an interpreter for each command, until the process of tests ends."""
    os.setpgid(0, 0)  # with its interpreters, so that none outlives the tests
    import torch
    import torch.distributed.run
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    import megalight.cli.lightning  # noqa: F401

    # For a word in its records, torchrun reads the source of all its callers, among thousands of modules: seconds.
    dynamic_rendezvous.get_method_name = lambda depth=2: "no_method_name"
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that attend to commands
    tests = mp.parent_process()
    listener.settimeout(10)
    while tests is not None and tests.is_alive():
        try:
            link, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            _attend(link)
        link.close()
    os.killpg(0, signal.SIGKILL)  # the tests were killed


def _attend(link: socket.socket) -> None:
    """Fork the interpreter of one command, and tell how it ended. Kill it if the command is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(link, LONGEST, STREAMS)
    words, folder, variables, numbers = json.loads(text)
    ready, go = os.pipe()
    if (interpreter := os.fork()) == 0:
        link.close()
        os.close(go)
        os.read(ready, 1)
        above = [fcntl.fcntl(stream, fcntl.F_DUPFD, max(*numbers, 255) + 1) for stream in streams]
        for number, stream in zip(numbers, above, strict=True):
            os.dup2(stream, number)
        os.closerange(min(above), max(above) + 1)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        _become(words)
    for stream in streams:
        os.close(stream)  # whoever reads to their end waits for the interpreter and its children alone
    with suppress(OSError):
        link.send(b"%d" % interpreter)
        link.recv(2)
        os.close(go)
        ended = os.pidfd_open(interpreter)
        if ended not in select.select([link, ended], [], [])[0]:  # the command has gone
            os.kill(interpreter, signal.SIGKILL)
        _, status = os.waitpid(interpreter, 0)
        link.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def leave_ends() -> None:
    """Leave to earlier processes what they do at their end. In each fork, torch would take 200 operators apart."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]


def _become(words: list[str]) -> None:
    """Be an interpreter from here to its end."""
    leave_ends()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has made it an empty file
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
        os._exit(status & 0xFF)


def _interpret(words: list[str]) -> Any:
    """Do what ``python WORDS`` does."""
    sys.executable = os.environ["PYTHON_EXEC"]  # ranks that a Trainer starts have the imports too
    mp.set_executable(sys.executable)
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

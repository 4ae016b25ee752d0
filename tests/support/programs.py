"""Runs of a module or a script, as ``python -m NAME`` and ``python FILE`` would run it, without the time for imports.

The process is forked from one that has made the imports. Ranks that the program starts by ``devices=N`` are forked from
it, unless it chooses another ``start_method``. Its interpreters are those of :mod:`tests.support.interpreters`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.interpreters import environment, leave_ends
from tests.support.workers import Forked

SECONDS = 240
STARTED = ("LOCAL_RANK", "WORLD_SIZE", "RANK")
"""Variables that a Trainer of this process may have left. A program would take itself for a rank."""


def run_program(program: str, *words: str, folder: Path, seconds: float = SECONDS) -> str:
    """Run a module (by name) or a script (by its path) in ``folder``, and return what it printed.

    Raises:
        AssertionError: it failed; with all its output.
        TimeoutError: it has not ended after ``seconds``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    printed, errors = folder / ".stdout", folder / ".stderr"
    status = forked(_program, program, words, folder, environment(), output=errors, seconds=seconds)
    assert status == 0, printed.read_text() + errors.read_text()
    return printed.read_text()


def forked(target: Callable[..., None], *args: Any, output: Path, seconds: float = SECONDS) -> int:
    """Call a function in a forked process, and return the exit status.

    Raises:
        TimeoutError: it has not ended after ``seconds``; with the contents of ``output``.
    """
    process = Forked(target=target, args=args)
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"not done after {seconds} s: {args}\n{output.read_text(encoding='utf-8')}")
    return process.exitcode


def _program(program: str, words: tuple[str, ...], folder: Path, environment: dict[str, str]) -> None:
    leave_ends()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, ".stdout"), (2, ".stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [program, *words]
    sys.executable = environment["PYTHON_EXEC"]
    from megalight.strategies import launchers

    launchers.IS_INTERACTIVE = True  # other ranks are forked too, as in a notebook, and need no imports either
    try:
        # `alter_sys` sets `__main__`, by which a launcher finds the command for other ranks.
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves these out
        sys.stdout.flush()
        sys.stderr.flush()

"""How the command line tells a user what went wrong: one clear message, on one screen, from one rank."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from megalight.errors import BackendError, ConfigurationError, LayoutError, MegalightError, nearest

MAX_LINES = 18
ALIKE = (ConfigurationError, LayoutError, BackendError)
"""Errors that every rank of a launch raises alike; one rank telling them is enough."""


PATIENCE_SECONDS = 4.0
_PARENT = os.getppid()


def debugging() -> bool:
    """Whether the user wants tracebacks: ``--debug``, or ``MEGALIGHT_DEBUG=1``."""
    return os.environ.get("MEGALIGHT_DEBUG", "") not in ("", "0")


def launch_rank() -> int:
    """The rank that torchrun, SLURM or Lightning's own launcher announced; 0 where none did."""
    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return int(os.environ.get("LOCAL_RANK") or 0) or int(os.environ.get("NODE_RANK") or 0)


def tell(prog: str, message: str, *, every_rank: bool = False) -> None:
    """Print an error to stderr: on rank 0; with ``every_rank`` also on others, unless rank 0 fails itself."""
    rank = launch_rank()
    if rank and (not every_rank or _rank_zero_has_failed()):
        return
    fold = textwrap.TextWrapper(118, break_on_hyphens=False, break_long_words=False)  # paths can be copied whole
    lines = [piece for line in message.strip().splitlines() for piece in fold.wrap(line) or [""]]
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], "... (the whole of it with --debug)"]
    where = f"{prog} [rank {rank}]" if rank else prog
    sys.stderr.write(f"{where}: error: " + "\n  ".join(lines) + "\n")
    sys.stderr.flush()


def _rank_zero_has_failed() -> bool:
    """Whether rank 0 ends within seconds, having told its own error. Seen only by the processes that it launched."""
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return False
    deadline = time.monotonic() + PATIENCE_SECONDS
    while os.getppid() == _PARENT:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def reported(prog: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that a user can act on (Megalight's, and ``kinds``) into one message and exit code 2.

    With ``--debug`` or ``MEGALIGHT_DEBUG=1`` the traceback goes through instead.
    """
    caught: tuple[type[Exception], ...] = (MegalightError, *kinds)
    try:
        yield
    except BrokenPipeError:  # the reader of our output has gone (``megalight inspect ... | head``)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except caught as error:
        if debugging():
            raise
        text = str(error) or type(error).__name__
        if not isinstance(error, MegalightError):
            text += "\n(--debug shows where this comes from)"
        tell(prog, text, every_rank=not isinstance(error, ALIKE))
        raise SystemExit(2) from error


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, the nearest valid option, and where to read more."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with code 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            option = unknown[0].partition("=")[0]
            message = f"unknown argument {unknown[0]!r}.{nearest(option, self._option_string_actions)}"
        elif "invalid choice: '" in message:
            choice, _, rest = message.partition("invalid choice: '")[2].partition("'")
            known = [word.strip(" '()") for word in rest.partition("choose from")[2].split(",")]
            message += "".join(f" Did you mean {m!r}?" for m in difflib.get_close_matches(choice, known, 1))
        tell(self.prog, f"{message}\nSee: {self.prog} --help")
        raise SystemExit(2)

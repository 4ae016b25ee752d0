"""Error messages of the command line: one message, on one screen, from one rank."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from megalight.errors import BackendError, ConfigurationError, LayoutError, MegalightError, nearest, printable
from megalight.first_rank import launch_rank

MAX_LINES = 18
ALIKE = (ConfigurationError, LayoutError, BackendError)
"""Errors that every rank of a launch raises in the same way, so that rank 0 alone prints them."""

FULL = {
    errno.ENOSPC: ("the disk is full", "Free some space"),
    errno.EDQUOT: ("your quota of the disk is used up", "Free some space"),
    errno.EFBIG: ("a file is larger than this shell or the disk allows", "Raise the limit (ulimit -f)"),
}
"""Number of an error -> why nothing more can be written, and what to do."""

PATIENCE_SECONDS = 4.0
"""How long another rank waits for rank 0 to fail first, before it prints its own error."""

PREEMPTED = 75
"""Exit code of a run that a signal stopped after it saved: the code of temporary failures in sysexits.h."""

_PARENT = os.getppid()

_ARGUMENT_AND_FLAG = re.compile(r"\b(\w+)(=[^\s()]+)? \((--[a-z][\w-]*)\)")
"""Errors of functions that commands call name the argument, then the flag: ``text_key (--text-key)``."""

_NOT_A_NUMBER = re.compile(r"argument (?P<option>.+): invalid (?P<kind>int|float) value: (?P<value>.*)")
"""What argparse says of a word that is no number."""

_OF_TRAINER = re.compile(r"-c|--config\b|--(trainer|model|data)\.")
"""Begins options of verbs that run a Trainer."""


def debugging() -> bool:
    """Return whether the user asked for tracebacks: ``--debug`` or ``MEGALIGHT_DEBUG=1``."""
    return os.environ.get("MEGALIGHT_DEBUG", "") not in ("", "0")


def launched() -> bool:
    """Return whether another process started this one as a rank: torchrun, SLURM or Lightning's launcher."""
    return any(name in os.environ for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def tell(prog: str, message: str, *, every_rank: bool = False) -> None:
    """Print an error to stderr.

    Args:
        message: the message; long lines are wrapped, and after ``MAX_LINES`` lines it is cut.
        every_rank: also print on other ranks than 0, unless rank 0 fails too.
    """
    rank = launch_rank()
    if rank and (not every_rank or _rank_zero_has_failed()):
        return
    # Do not break words: users must be able to copy paths.
    fold = textwrap.TextWrapper(118, break_on_hyphens=False, break_long_words=False)
    # Folded here, since terminals break words anywhere.
    lines = [piece for line in printable(message).strip().splitlines() for piece in fold.wrap(line) or [""]]
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], "... (add --debug for the whole message)"]
    where = f"{prog} [rank {rank}]" if rank else prog
    sys.stderr.write(f"{where}: error: " + "\n  ".join(lines) + "\n")
    sys.stderr.flush()


def _rank_zero_has_failed() -> bool:
    """Wait a few seconds; return whether rank 0 ended. Only processes that rank 0 launched can see this."""
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return False
    deadline = time.monotonic() + PATIENCE_SECONDS
    while os.getppid() == _PARENT:  # rank 0 is the parent; when it ends, this process gets another one
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def reported(prog: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that a user can correct into one message and exit code 2.

    With ``--debug`` or ``MEGALIGHT_DEBUG=1`` the error is raised with its traceback instead.

    Args:
        prog: the command, for the message.
        kinds: exceptions to report, beside :class:`MegalightError`.
    """
    caught: tuple[type[Exception], ...] = (MegalightError, *kinds)
    try:
        yield
    except BrokenPipeError:  # the program that reads our output has ended (``megalight inspect ... | head``)
        # Otherwise Python would report the broken pipe again when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except caught as error:
        if debugging():
            raise
        text = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno in FULL:
            # Python names no file where a write fails.
            where = f": {error.filename}" if error.filename else ""
            problem, remedy = FULL[error.errno]
            text = f"{problem}{where}. {remedy}, or write elsewhere."
        if not isinstance(error, MegalightError):
            text += "\n(add --debug for the traceback)"
        # The message names the flag that the user typed, and not the argument behind it.
        tell(prog, _ARGUMENT_AND_FLAG.sub(_flag_alone, text), every_rank=not isinstance(error, ALIKE))
        raise SystemExit(2) from error


def _flag_alone(found: re.Match[str]) -> str:
    """Return the flag in place of the argument. Another word before the flag is a word of the sentence, and stays."""
    word, value, flag = found.groups()
    is_argument = value is not None or word.replace("_", "-") == flag.removeprefix("--")
    return flag if is_argument else found[0]


def _nearest_option(option: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean '--x'?"`` for a misspelled option, or an empty string."""
    # Without the dashes: all options have them, which makes none more like another.
    words = {each.lstrip("-"): each for each in known}
    hint = nearest(option.lstrip("-"), words)
    return next((hint.replace(repr(word), repr(each)) for word, each in words.items() if repr(word) in hint), "")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with the nearest valid option. It takes no abbreviations.

    Args:
        passed_on: the verb whose options come after ``--``; None: there are none.
        kwargs: arguments of :class:`argparse.ArgumentParser`.
    """

    def __init__(self, passed_on: str | None = None, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        self.passed_on = passed_on
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, after a look whether options of the other verb are in the wrong place.

        First of all, because argparse would rather name what is missing.
        """
        words = list(sys.argv[1:] if args is None else args)
        wrong = next((word for word in words if _OF_TRAINER.match(word)), None)
        if self.passed_on is not None and wrong is not None:
            self.error(
                f"{wrong!r} is an option of megalight {self.passed_on}. Put those behind a --, after all others: "
                f"{self.prog} ... -- -c RECIPE --trainer.max_steps 100"
            )
        self._words = words[: words.index("--")] if "--" in words else words
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with code 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if "are required" in message:  # a misspelled option is why, and not that it is missing
            options = [word for word in self._words if word.startswith("--")]
            unknown = [word for word in options if word.partition("=")[0] not in self._option_string_actions]
        if unknown:
            option = unknown[0].partition("=")[0]
            message = f"unknown argument {unknown[0]!r}.{_nearest_option(option, self._option_string_actions)}"
        elif "invalid choice: '" in message:
            choice, _, rest = message.partition("invalid choice: '")[2].partition("'")
            known = [word.strip(" '()") for word in rest.partition("choose from")[2].split(",")]
            message += "".join(f" Did you mean {m!r}?" for m in difflib.get_close_matches(choice, known, 1))
        elif (found := _NOT_A_NUMBER.fullmatch(message)) is not None:
            wanted = "an integer, such as 8" if found["kind"] == "int" else "a number, such as 0.5"
            message = f"{found['option']} is {found['value']}; it must be {wanted}."
        tell(self.prog, f"{message}\nSee: {self.prog} --help")
        raise SystemExit(2)

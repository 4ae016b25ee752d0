"""Saves that die at the n-th system call, or in which it fails."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megalight.checkpoint.disk import storage

CALLS = ("write", "fsync", "rename", "mkdir", "rmdir", "unlink", "open")


class Faults:
    """Counts this process' calls to the file system, and interferes with one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.at = 0
        self.interfere: Callable[..., Any] | None = None
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        monkeypatch.setattr(storage, "_swap", self._counted("_swap", storage._swap))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at and self.interfere is not None:
                self.interfere(name, call, *args)
            return call(*args, **kwargs)

        return counted

    def fail(self, at: int, error: OSError) -> None:
        """Let the ``at``-th call from now fail."""

        def interfere(*_: Any) -> None:
            raise error

        self.count, self.at, self.interfere = 0, at, interfere

    def kills(self, action: Callable[[], None]) -> Iterator[int]:
        """Run the action in a child that dies in its first call, then in its second, ... until it survives.

        Writes get half of their data out before. Yields after each death.
        """
        at = 1
        while not self._survives(action, at):
            yield at
            at += 1

    def _survives(self, action: Callable[[], None], at: int) -> bool:
        def interfere(name: str, call: Callable[..., Any], *args: Any) -> None:
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            os._exit(9)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                self.count, self.at, self.interfere = 0, at, interfere
                action()
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        return code == 0

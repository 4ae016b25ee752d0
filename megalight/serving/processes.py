"""Processes that a server starts: they read settings when they begin, say when they are ready, and end with it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

CLOSE_SECONDS = 10
"""Time in which a process must end."""


def start_process(
    function: str, settings: Mapping[str, Any], environment: Mapping[str, str], passed: Collection[int] = ()
) -> subprocess.Popen[str]:
    """Start an interpreter that calls a function, ``module:name``, which reads the settings by :func:`settings_of`.

    It ends when its standard input does, so at the latest with this process. Ctrl-C in a terminal does not reach it.
    ``passed`` are files that it has, too.
    """
    module, _, name = function.partition(":")
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {module} import {name}; {name}()"],
        stdin=subprocess.PIPE,
        stdout=2,  # else what it prints would be the output of this process
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
        pass_fds=passed,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings) + "\n")
    process.stdin.flush()
    return process


def settings_of() -> dict[str, Any]:
    """Return the settings of this process, and let it end with the one that started it."""
    found: dict[str, Any] = json.loads(sys.stdin.readline())

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    return found


def freeze_objects() -> None:
    """Take what this process has so far out of the garbage collector.

    It would look at all of it again and again: half a million objects of imported packages, for 0.3 seconds each time,
    in which no step is launched and no event is sent.
    """
    gc.collect()
    gc.freeze()


def say(settings: Mapping[str, Any], **values: Any) -> None:
    """Tell the process that started this one what it waits for: a line, once."""
    with os.fdopen(settings["ready"], "w") as out:
        out.write(json.dumps(values) + "\n")


def close_input(process: subprocess.Popen[str]) -> None:
    """Let a process of :func:`start_process` end."""
    assert process.stdin is not None
    with suppress(OSError):  # it is gone
        process.stdin.close()


def end_process(process: subprocess.Popen[str], seconds: float = CLOSE_SECONDS) -> None:
    """Let a process of :func:`start_process` end, and wait for it."""
    close_input(process)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""Fork the server of ranks and commands from the process of tests, which has imported all that they need.

An interpreter of its own would spend as much time on imports as the process of tests does, and each rank would import
the modules of tests once more. The fork is made before the first test, when no thread works for torch yet. It waits
until somebody wants a process.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from unittest.mock import patch

PYTESTS = [
    ("error", None, Warning),
    ("always", None, DeprecationWarning),
    ("always", None, PendingDeprecationWarning),
]
"""How pytest treats warnings of tests."""
SPAWN = util.spawnv_passfds  # type: ignore[attr-defined]


def start() -> None:
    """Start multiprocessing's server of forks as a fork of this process."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()  # what it holds would be written twice
    resource_tracker.ensure_running()  # an interpreter of its own
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver._forkserver.ensure_running()


def _fork(path: str, words: Sequence[str], streams: Sequence[int]) -> int:
    """Do in a fork what ``path WORDS`` does: the last word is the code of a server, that before it ``-c``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of pytest-xdist only wait for messages
        server = os.fork()
    if server == 0:
        try:
            _serve(words[-1], streams)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return server


def _serve(code: str, streams: Sequence[int]) -> None:
    util.spawnv_passfds = SPAWN  # type: ignore[attr-defined]
    # What pytest has replaced: streams, and what becomes of warnings. Those that packages ignore are ignored here too.
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    warnings.showwarning = _show
    warnings.filters[:] = [each for each in warnings.filters if each[:3] not in PYTESTS]  # type: ignore[index]
    warnings.simplefilter("ignore", ResourceWarning, append=True)  # is there; but now the list counts as changed
    *_, alive = streams
    # It has no file of others, as a new interpreter has not, so that the end of the tests shows in a pipe. But none is
    # closed, as objects that were copied may close their numbers at any time.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in {0, 1, 2, nothing, *streams}:
            os.dup2(nothing, number)
    if alive in select.select(list(streams), [], [])[0]:  # the tests have ended, and wanted nobody
        os._exit(0)
    try:
        exec(code, {})
    except SystemExit:
        os._exit(0)


def _show(message: Warning | str, category: type[Warning], path: str, line: int, *rest: object) -> None:
    print(warnings.formatwarning(message, category, path, line), end="", file=sys.stderr)

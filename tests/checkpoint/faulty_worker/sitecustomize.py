"""Python runs this at the start of a worker whose ``PYTHONPATH`` has this folder. ``WORKER_FAULT`` says what it does.

``error:ERRNO:N`` lets the N-th write into a checkpoint fail. ``gate:PATH`` lets writes wait until the path exists. What
workers tell each other does not count.
"""

from __future__ import annotations

import os
import time
from typing import Any

_kind, _, _rest = os.environ.get("WORKER_FAULT", "").partition(":")
_write = os.write
_count = 0


def _faulty(descriptor: int, data: Any) -> int:
    global _count
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if ".partial-" in path and "/parts/" not in path:
        _count += 1
        if _kind == "gate":
            while not os.path.exists(_rest):
                time.sleep(0.005)
        elif _count == int(_rest.partition(":")[2]):
            number = int(_rest.partition(":")[0])
            raise OSError(number, os.strerror(number))
    return _write(descriptor, data)


if _kind:
    os.write = _faulty

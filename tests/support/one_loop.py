"""Import this in a process to have all its gloo groups share a device, and so one thread that waits for messages.

Each of torch's own groups has a thread that wakes a hundred times a second for as long as anything refers to the group.
Ranks of the worker pool have dozens of groups, of this test and of those before: that took an eighth of all CPU time.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import ProcessGroupGloo

_DEVICE = ProcessGroupGloo.create_default_device()
_init = ProcessGroupGloo.__init__


def _shared(self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
    options = ProcessGroupGloo._Options()
    options._devices = [_DEVICE]
    options._threads = 2  # as without options
    options._timeout = timeout
    _init(self, store, rank, size, options)


ProcessGroupGloo.__init__ = _shared  # type: ignore[method-assign]

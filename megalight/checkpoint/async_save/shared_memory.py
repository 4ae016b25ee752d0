"""Host memory that trainer and worker process share. It is kept between saves: allocating takes longer than copying."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)


class SharedMemory:
    """Memory behind a file descriptor; pinned if there is a GPU.

    Attributes:
        descriptor: of a file without a name, which a child process maps too.
    """

    def __init__(self) -> None:
        self.descriptor = _nameless_file()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._making: threading.Thread | None = None

    @property
    def address(self) -> int:
        """Where the memory starts in this process."""
        return self._memory.data_ptr()

    def prepare(self, nbytes: int) -> None:
        """Allocate the memory in a thread, so that a later :meth:`reserve` finds it."""
        assert self._making is None
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def make() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # a thread starts on device 0
            with suppress(OSError):  # the save itself reports that there is none
                self._grow(nbytes)

        self._making = threading.Thread(target=make, daemon=True)
        self._making.start()

    def reserve(self, nbytes: int) -> Tensor:
        """Memory of at least ``nbytes``, as ``uint8``. What it held before is lost.

        Raises:
            OSError: the system has no memory left.
        """
        self._join()
        self._grow(nbytes)
        return self._memory[:nbytes]

    def _join(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.join()

    def _grow(self, nbytes: int) -> None:
        # Kept while it is large enough: pinning new memory takes longer than a save.
        if nbytes > self._memory.numel() or not self._memory.numel():
            size = max(nbytes, mmap.PAGESIZE)
            # without it, memory that is not there would be a fatal signal at the first write
            allocate = getattr(os, "posix_fallocate", lambda file, _, size: os.ftruncate(file, size))
            allocate(self.descriptor, 0, size)
            memory = torch.from_numpy(np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8))
            # Only now, as the old memory serves on where there is no more. Pinned memory must not be freed.
            self._unpin()
            self._memory = memory
            self._pin()

    def close(self) -> None:
        """Give the memory back when nobody uses it any more."""
        self._join()
        self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)

    def _pin(self) -> None:
        if not torch.cuda.is_available():
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        self._pinned = int(status) == 0
        if not self._pinned:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # takes CUDA's error, or the next kernel of training would report it
            log.warning("memory for saves cannot be pinned (%s), so copies from the GPU are slower", status)

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("megalight-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

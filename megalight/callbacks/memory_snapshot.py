"""What filled a GPU when it was full."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import lightning.pytorch as pl
import torch

from megalight.errors import ConfigurationError

log = logging.getLogger(__name__)

FULL = re.compile(r"out of memory|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""What the driver and its libraries say, whose errors are no ``torch.OutOfMemoryError``."""


class MemorySnapshot(pl.Callback):
    """Keeps the history of allocations, and writes a snapshot of the memory when the device runs out of it.

    The error then says where: ``memory/out-of-memory-step=N-rank=R.pickle`` under the trainer's root folder, on each
    rank that ran out. Open it at ``pytorch.org/memory_viz`` (a page that reads it in the browser), not with ``pickle``
    where you do not trust the machine it comes from. Recording costs the host a little at every allocation: it
    takes down the Python stack.

    Args:
        max_entries: allocations and releases that are remembered, the latest.
        dirpath: where to write; null: ``memory`` in the trainer's ``default_root_dir``.

    Attributes:
        saved: the snapshot's path; None before.

    Raises:
        ConfigurationError: no entries; in ``fit``, no CUDA.
    """

    def __init__(self, max_entries: int = 100_000, dirpath: str | None = None) -> None:
        if max_entries < 1:
            raise ConfigurationError(f"max_entries is {max_entries}; it must be at least 1.")
        self.max_entries = max_entries
        self.dirpath = dirpath
        self.saved: Path | None = None
        self._recording = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record from here on: building the model may run out of memory too."""
        if stage != "fit":
            return
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise ConfigurationError(
                f"MemorySnapshot records the memory of CUDA devices, and this run is on {device.type}; remove it."
            )
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries, stacks="python")
        self._recording = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write, where the error, or one that it came from, is a full device."""
        if self._recording and ran_out(exception):
            try:
                exception.add_note(f"(the memory's snapshot and history: {self._save(trainer)})")
            except Exception as error:  # what ran out is the news, and must get through
                log.warning("no snapshot of the memory could be written: %s", error)
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record no longer."""
        self._stop()

    def _save(self, trainer: pl.Trainer) -> Path:
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "memory")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"out-of-memory-step={trainer.global_step}-rank={trainer.global_rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        self.saved = path
        return path

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            torch.cuda.memory._record_memory_history(enabled=None)


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a device without memory left."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and FULL.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False

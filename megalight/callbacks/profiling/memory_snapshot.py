"""A snapshot of GPU memory when the device runs out of it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import lightning.pytorch as pl
import torch

from megalight.errors import ConfigurationError

log = logging.getLogger(__name__)

FULL = re.compile(r"out of memory|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""Messages of the driver and its libraries, which do not raise ``torch.OutOfMemoryError``."""


class MemorySnapshot(pl.Callback):
    """Records allocations, and writes a snapshot of the memory if the device runs out of it.

    Each rank that runs out of memory writes ``memory/out-of-memory-step=N-rank=R.pickle`` under the trainer's root
    folder, and its error names the file. Open the file at ``pytorch.org/memory_viz``, which reads it in the browser. Do
    not unpickle a file from a machine that you do not trust. Recording costs a little host time at every allocation,
    because it keeps the Python stack.

    Args:
        max_entries: number of allocations and releases to keep, the latest ones.
        dirpath: folder to write to. null: ``memory`` in the trainer's ``default_root_dir``.

    Attributes:
        saved: path of the snapshot, or None.

    Raises:
        ConfigurationError: ``max_entries`` is below 1, or the run is not on CUDA (in ``fit``).
    """

    def __init__(self, max_entries: int = 100_000, dirpath: str | None = None) -> None:
        if max_entries < 1:
            raise ConfigurationError(f"max_entries is {max_entries}; it must be at least 1.")
        self.max_entries = max_entries
        self.dirpath = dirpath
        self.saved: Path | None = None
        self._recording = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start to record. The model is built later, which may already run out of memory."""
        if stage != "fit":
            return
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise ConfigurationError(
                f"MemorySnapshot needs a CUDA device, but this run is on {device.type}; remove the callback."
            )
        # Stacks of Python only: those of C++ take long to resolve.
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries, stacks="python")
        self._recording = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the snapshot if the error, or one of its causes, is a lack of device memory."""
        # While the error is handled, the memory is still as it was.
        if self._recording and ran_out(exception):
            try:
                exception.add_note(f"(snapshot and history of the memory: {self._save(trainer)})")
            except Exception as error:  # the user must see the first error, not this one
                log.warning("the memory snapshot could not be written: %s", error)
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop recording."""
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
    """Return whether an error, or one of its causes, is a lack of device memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and FULL.search(str(error))):
            return True
        # Lightning and others wrap errors, and the lack of memory may be a cause further down.
        error = error.__cause__ or error.__context__
    return False

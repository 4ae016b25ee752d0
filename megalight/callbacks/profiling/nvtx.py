"""NVTX ranges for the parts of a step, for the time line of Nsight Systems."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import torch

from megalight.callbacks.profiling.layer_ranges import watch
from megalight.callbacks.profiling.windows import check_ranks
from megalight.callbacks.timing.spans import StepSpans, label
from megalight.errors import ConfigurationError, MegalightError


class Backend(Protocol):
    """The functions of NVTX: nested ranges of one thread, and ranges that may end in another thread."""

    def range_push(self, label: str) -> Any:
        """Begin a range inside the current range of this thread."""

    def range_pop(self) -> Any:
        """End the current range of this thread."""

    def range_start(self, label: str) -> Any:
        """Begin a range that any thread can end. Returns its handle."""

    def range_end(self, handle: Any) -> Any:
        """End the range of a handle."""


class Ranges:
    """A listener that turns spans into NVTX ranges.

    Spans are nested ranges of their thread. The backward pass of a layer is a range across threads, because autograd
    runs it in its own threads.

    Raises:
        MegalightError: a range ends that is not the innermost range of its thread.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._threads = threading.local()
        # Labels are made once: formatting a text for each span would cost more than the mark.
        self._labels: dict[tuple[str, tuple[int, ...]], str] = {}
        self._layer: Any = None

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Begin the range of a span."""
        key = name, tuple(where.values())
        text = self._labels.get(key)
        if text is None:
            text = self._labels[key] = label(name, where)
        self.backend.range_push(text)
        self._stack().append(name)

    def end(self, name: str) -> None:
        """End the range of a span."""
        # The first layer has no layer before it whose backward would end its range.
        if name in ("backward", "input_gradient"):
            self._end_layer()
        stack = self._stack()
        if not stack or stack[-1] != name:
            raise MegalightError(
                f"the range {name!r} ends, but {stack[-1] if stack else 'none'!r} is the innermost range of this "
                "thread; the range that began last must end first. Use `with span(...)`."
            )
        stack.pop()
        self.backend.range_pop()

    def backward(self, name: str) -> None:
        """Begin the backward range of a layer; it ends the backward range of the layer after it."""
        # The backward goes through layers one after another, so the next one's begin is this one's end.
        self._end_layer()
        self._layer = self.backend.range_start(f"backward of {name}")

    def _end_layer(self) -> None:
        if self._layer is not None:
            self.backend.range_end(self._layer)
            self._layer = None

    def _stack(self) -> list[str]:
        stack: list[str] | None = getattr(self._threads, "stack", None)
        if stack is None:
            stack = self._threads.stack = []
        return stack


class NVTX(StepSpans):
    """Marks the parts of every step with NVTX ranges, for Nsight Systems: see :data:`megalight.parallel.trace.SPANS`.

    Ranges are marks on the host; nothing waits for the device. Without this callback there are no ranges.

    Args:
        layers: whether to also mark the forward and backward pass of each layer.
        ranks: the ranks that mark. None: all.

    Attributes:
        backend: the NVTX functions. None: ``torch.cuda.nvtx``.

    Raises:
        ConfigurationError: CUDA is not available (in ``fit``).
    """

    def __init__(self, layers: bool = True, ranks: Sequence[int] | None = None) -> None:
        super().__init__()
        self.layers = layers
        self.ranks = None if ranks is None else check_ranks(ranks)
        self.backend: Backend | None = None

    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Ranges | None:
        """Return the listener of this rank."""
        if self.backend is None and not torch.cuda.is_available():
            raise ConfigurationError(
                "NVTX needs CUDA, which is not available here; use megalight.callbacks.ProfilerWindow instead, whose "
                "traces show the same ranges."
            )
        if self.ranks is not None and trainer.global_rank not in self.ranks:
            return None
        return Ranges(torch.cuda.nvtx if self.backend is None else self.backend)

    def _listen(self, trainer: pl.Trainer) -> None:
        super()._listen(trainer)
        if self.layers and isinstance(self._listener, Ranges):
            chunks = getattr(trainer.strategy, "chunks", None) or [trainer.lightning_module]
            self._stops += watch(chunks, self._listener)

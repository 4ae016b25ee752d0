"""Pick the fastest of several ways to accumulate, per shape: the first products use each in turn, and are timed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Accumulate: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``(main_grad [out, in], grad_y [T, out], x [T, in], write)``: adds in place, or overwrites."""
Shape: TypeAlias = tuple[int, int, int, torch.dtype, bool]
"""Rows and columns of the weight, tokens up to the next power of two, dtype of the operands, and ``write``."""

ROUNDS = 4
"""Timed products per way. The fastest one counts: others may include a busy host, or share the device with messages."""


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Measured:
    """Chooses one of ``ways``, which differ only in rounding. Timed products are real work, and the host never waits.

    Each rank chooses for itself, and another run may choose differently, so gradients may differ in rounding. The first
    way is used under ``torch.use_deterministic_algorithms``, and in a CUDA graph that is captured before a choice.

    Args:
        ways: the first one is used until a choice is made.
        event: creates an event that records time.
    """

    def __init__(self, *ways: Accumulate, event: Callable[[], Any] = _event) -> None:
        self.ways = ways
        self.event = event
        self._fastest: dict[Shape, Accumulate] = {}
        self._laps: defaultdict[Shape, list[tuple[Any, Any, int]]] = defaultdict(list)

    def __call__(self, main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
        """``main_grad [out, in] += grad_y [T, out]^T x [T, in]``; with ``write``, ``=``."""
        tokens = grad_y.shape[0]
        # Token counts are grouped by powers of two: packed batches and experts would otherwise never repeat a shape.
        shape = (*main_grad.shape, tokens.bit_length(), grad_y.dtype, write)
        way = self._fastest.get(shape)
        # Which way is fastest may change from run to run, and with it the rounding.
        if torch.are_deterministic_algorithms_enabled() or not tokens:
            way = self.ways[0]
        # Timing events cannot be recorded, and results not queried, while a graph is being captured.
        elif way is None and not torch.cuda.is_current_stream_capturing():
            laps = self._laps[shape]
            if len(laps) < ROUNDS * len(self.ways):
                start, end = self.event(), self.event()
                start.record()
                self.ways[len(laps) % len(self.ways)](main_grad, grad_y, x, write)
                end.record()
                laps.append((start, end, tokens))
                return
            way = self._choose(shape)
        (way or self.ways[0])(main_grad, grad_y, x, write)

    def _choose(self, shape: Shape) -> Accumulate | None:
        """Return the fastest way; None if the device has not finished the timed products yet."""
        laps = self._laps[shape]
        # `query` does not wait. Until all have finished, the first way is used.
        if not all(end.query() for _, end, _ in laps):
            return None
        times = [start.elapsed_time(end) / tokens for start, end, tokens in laps]
        best = [min(times[index :: len(self.ways)]) for index in range(len(self.ways))]
        del self._laps[shape]
        self._fastest[shape] = self.ways[best.index(min(best))]
        return self._fastest[shape]

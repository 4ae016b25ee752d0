"""Weight gradients that wait for the next message of a backward pass, and are computed while it travels.

Nothing in a backward pass needs a weight gradient, and it is one of the longest products of a layer. A message that its
own layer cannot hide (the gather before the short product of an attention's projection, for example) travels under the
weight gradient of the layer that came before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch


class Waiting:
    """The weight gradient of one backward pass that waits, if there is one.

    Attributes:
        seconds: how long it takes on the device.
        compute: computes it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compute: Callable[[], Any] | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Compute it."""
        compute, self.seconds, self.compute = self.compute, 0.0, None
        if compute is not None:
            compute()


class Cover:
    """Keeps at most one weight gradient of a backward pass waiting, so that little memory waits with it.

    What still waits at the end of the backward pass is computed there. If the pass fails, it is dropped.
    """

    def __init__(self) -> None:
        # Weak: autograd holds them until the pass has ended or failed. By pass, as one may run inside of another.
        self._passes: WeakValueDictionary[int, Waiting] = WeakValueDictionary()
        self._bare = 0.0

    @property
    def seconds(self) -> float:
        """How long the weight gradient takes that waits; 0: none does."""
        return 0.0 if (waiting := self._current()) is None else waiting.seconds

    def run(self) -> float:
        """Compute what waits, and return how long that takes on the device: call it when a message has started."""
        seconds = self.seconds
        if (waiting := self._current()) is not None:
            waiting.run()
        return seconds

    def under(self, seconds: float) -> None:
        """Compute what waits under a message of ``seconds``, and the next one that is put off if that is too short."""
        self._bare = seconds - self.run()

    def put_off(self, seconds: float, compute: Callable[[], Any]) -> None:
        """Let a weight gradient wait, or compute it now if a message travels that nothing covers yet.

        Args:
            seconds: how long it takes on the device.
            compute: computes it, and adds it to the weight's main gradient.
        """
        bare, self._bare = self._bare, 0.0
        self.run()  # the older one first: it holds memory, and a weight's gradients are summed in the order of passes
        if bare > 0:
            compute()
            return
        waiting = self._current()
        if waiting is None:
            waiting = self._passes[_number()] = Waiting()
            torch.autograd.Variable._execution_engine.queue_callback(waiting.run)
        waiting.seconds, waiting.compute = seconds, compute

    def _current(self) -> Waiting | None:
        return self._passes.get(_number())


def _number() -> int:
    """Return the number of the backward pass that runs, or -1."""
    return torch._C._current_graph_task_id()

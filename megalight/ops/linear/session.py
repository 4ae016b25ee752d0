"""What all layers with products in 8 or 4 bits share: optimizer steps, and the seed of stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalight.ops.quantize.history import WEIGHT, AmaxHistory

if TYPE_CHECKING:
    from megalight.ops.linear.low_precision import LowPrecision

Reduce = Callable[[Tensor], None]
"""All-reduces the maximum over some ranks, in place."""


class Session:
    """State that all low-precision layers of a model share.

    Args:
        seed: seed of stochastic rounding.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.layers: list[LowPrecision] = []
        self.inside = False
        self.generators: dict[torch.device, torch.Generator] = {}
        self._number = 0

    def begin(self, number: int) -> None:
        """Begin optimizer step ``number``, which seeds stochastic rounding, so that a resumed run draws the same."""
        self._number = number
        for generator in self.generators.values():
            self._seed(generator)

    @contextmanager
    def step(self, number: int | None = None, last: bool = True) -> Iterator[None]:
        """Run micro-batches between two updates of the weights inside; each weight is cast only once there.

        Args:
            number: if given, :meth:`begin` this step.
            last: whether the update follows. If not, the histories of past steps wait: scales stay the same from one
                update to the next.
        """
        if number is not None:
            self.begin(number)
        with self._casting():
            yield
        if last:
            self._roll()

    @contextmanager
    def _casting(self) -> Iterator[None]:
        """Let layers keep casts of their weights. At the end none may stay: the weights are about to change."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            for layer in self.layers:
                layer.forget()

    def _roll(self) -> None:
        """End an optimizer step in the histories of all layers."""
        self._record_stored()
        # Ranks of one group have the same layers in the same order, so one all-reduce serves all layers of a group.
        groups: dict[Reduce | None, dict[AmaxHistory, None]] = {}
        for layer in self.layers:
            if layer.history is not None:
                groups.setdefault(layer.reduce_history, {})[layer.history.stack] = None
        for reduce, histories in groups.items():
            AmaxHistory.roll(list(histories), reduce)

    def _record_stored(self) -> None:
        """Record the magnitudes of weights that were cast before the step, if it has multiplied with them."""
        kept, seen = [], []
        for layer in self.layers:
            if layer.met and layer.largest is not None and layer.history is not None:
                assert layer.history.current is not None
                kept.append(layer.history.current[WEIGHT])
                seen.append(layer.largest)
            layer.met = False
        if kept:
            torch._foreach_maximum_(kept, seen)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Like :meth:`step`, but for trial passes: histories are restored afterwards."""
        histories = {layer.history.stack: None for layer in self.layers if layer.history is not None}
        # Restored by copy, not by replacing the tensor: recorded graphs hold its address.
        kept = [(history.current, history.current.clone()) for history in histories if history.current is not None]
        try:
            with self._casting():
                yield
        finally:
            for layer in self.layers:
                layer.met = False
            for current, before in kept:
                current.copy_(before)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of stochastic rounding: one object for all steps, as a graph may have captured it."""
        if device not in self.generators:
            self.generators[device] = self._seed(torch.Generator(device))
        return self.generators[device]

    def _seed(self, generator: torch.Generator) -> torch.Generator:
        # The seed depends on the step alone: a resumed run rounds as the run without a stop would have.
        return generator.manual_seed(self.seed * 1_000_003 + self._number)

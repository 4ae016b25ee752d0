"""Token dispatchers bring copies of tokens to their experts, and the outputs back. The local one can be replaced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalight.ops.permute import Permutation, permutation, permute, unpermute
from megalight.ops.router import Routes


class HostCounts:
    """Numbers ``[n]`` on their way from the device to the host, on the current stream."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._done: torch.cuda.Event | None = None
        if counts.is_cuda:
            # Only a copy to pinned memory leaves the host free.
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self, *lengths: int) -> list[list[int]]:
        """Wait for the numbers, on the host, and return them in lists of these lengths."""
        if self._done is not None:
            # The host waits for this event, and not for the work that the stream was given since.
            self._done.synchronize()
        return [part.tolist() for part in torch.split(self._counts, list(lengths))]


@dataclass(frozen=True, eq=False)
class Grouped:
    """Copies of tokens, grouped by expert: ``R`` rows.

    Attributes:
        tokens: ``[R, h]``, the copies of the first expert, then those of the next, and so on. Rows after the
            last of them are read by no one.
        probs: ``[R]``, the weight of each copy, with gradient.
        offsets: ``[E]`` int32, on the device: where the copies of each expert end.
        sizes: the number of rows of each expert, if the host knows it: of copies, and of the zeros after them.
    """

    tokens: Tensor
    probs: Tensor
    offsets: Tensor
    sizes: Sequence[int] | None = None


class Dispatcher(nn.Module, ABC):
    """Brings copies of tokens to their experts, and returns the sum of each token's outputs.

    Attributes:
        pads: whether it can give each expert a fixed number of rows.
        alignment: the number of rows of each expert is a multiple of this, filled up with zeros, for GEMMs in 8 or 4
            bits.
        tells_sizes: whether the host shall learn the number of rows of each expert, though it must wait for it: some
            products need it or are faster with it.
        bounded: give each expert room for all tokens of this device, if no capacity is given: then the host knows the
            sizes, and nothing is dropped. For few tokens.
    """

    pads: ClassVar[bool] = True
    alignment: int = 1
    tells_sizes: bool = False
    bounded: bool = False

    def connect(self) -> None:
        """Prepare before the first pass, and raise now if something is missing that shows only when processes run."""

    def recorded(self) -> Dispatcher:
        """Return a dispatcher for passes of few tokens that are recorded: no size follows from the routes."""
        return self

    @abstractmethod
    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, Any]:
        """Return the copies for the experts that are here, and a memo for :meth:`combine`.

        Args:
            hidden: ``[T, h]``.
            routes: the experts of each token; -1 stands for none.
            num_experts: number of experts that are here.
            capacity: give each expert so many rows for the tokens of this device, filled up with zeros. None: as many
                as it has copies.
        """

    @abstractmethod
    def combine(self, outputs: Tensor, memo: Any) -> Tensor:
        """``[R, h] -> [T, h]``: add up the outputs of each token's copies. Their weights are already applied."""


def aligned(rows: int, alignment: int) -> int:
    """Return ``rows``, rounded up to a multiple."""
    return -(-rows // alignment) * alignment


class LocalDispatcher(Dispatcher):
    """All experts are on this device. Copies of one expert keep the order of the tokens."""

    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, Permutation]:
        """Return the copies for all experts.

        The host waits for the device only with ``tells_sizes``, and not if ``capacity`` fixes the rows.
        """
        capacity = len(hidden) if capacity is None and self.bounded else capacity
        room = None if capacity is None else aligned(capacity, self.alignment)
        where = permutation(routes.experts, num_experts, alignment=self.alignment, capacity=room)
        numbers = HostCounts(where.offsets) if self.tells_sizes and room is None else None
        # the copies are made while the numbers travel
        tokens, probs = permute(hidden, where, routes.probs)
        assert probs is not None
        sizes = None if room is None else [room] * num_experts
        if numbers is not None:
            (ends,) = numbers.wait(num_experts)
            sizes = [end - start for start, end in pairwise([0, *ends])]
        return Grouped(tokens, probs, where.offsets, sizes), where

    def combine(self, outputs: Tensor, memo: Permutation) -> Tensor:
        """Add up the outputs of each token's copies."""
        return unpermute(outputs, memo)

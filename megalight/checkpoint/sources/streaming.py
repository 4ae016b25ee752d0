"""Whole tensors of a source, one after another: memory is bounded by the largest tensor, not by the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint.boxes import THREADS
from megalight.errors import CheckpointError
from megalight.parallel.source import Source, Target

BUDGET = 256 << 20
"""Bytes of tensors that are read together. One tensor alone may be larger."""

SPLIT = 16 << 20
"""Bytes of a tensor above which several threads read it."""


def itself(tensor: Tensor) -> list[Tensor]:
    """Return the tensor: the only part of a tensor that is stored as it is."""
    return [tensor]


@dataclass(frozen=True)
class WantedTensor:
    """A tensor to read.

    Attributes:
        shape: its shape.
        dtype: its dtype; stored values are converted.
        parts: canonical name -> the views of the tensor that this canonical tensor fills, from its first row to its
            last. A tensor without dims has one view.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, Callable[[Tensor], Sequence[Tensor]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def targets(self, memory: Tensor) -> Iterator[Target]:
        """Yield the boxes to fill in ``memory``. Large parts are cut by rows, so that several threads read them."""
        for name, view in self.parts.items():
            views = view(memory)
            inner = views[0].shape[1:]
            if views[0].ndim == 0:
                yield Target(name, (), (), views[0])
                continue
            shape, start = (sum(map(len, views)), *inner), 0
            for data in views:
                # Of a large one, a part for each thread, by rows.
                step = len(data) if data.nbytes <= SPLIT else -(-len(data) // THREADS)
                for first in range(0, max(len(data), 1), max(step, 1)):
                    yield Target(name, shape, (start + first, *(0,) * len(inner)), data[first : first + step])
                start += len(data)


def stream(
    source: Source, wanted: Iterable[WantedTensor], process_group: ProcessGroup | None = None
) -> Iterator[Tensor]:
    """Yield the tensors in order, on the CPU. At most ``BUDGET`` bytes, or one tensor, are held at a time.

    Args:
        source: where values are read.
        wanted: the tensors.
        process_group: this process alone; see :func:`megalight.checkpoint.ranks.alone`.

    Raises:
        CheckpointError: a part is not in the source, or has another shape, or a file is damaged.
    """
    for group in _groups(wanted):
        memory = [torch.empty(each.shape, dtype=each.dtype) for each in group]
        targets = [box for each, room in zip(group, memory, strict=True) for box in each.targets(room)]
        filled = source.fill(targets, strict=False, process_group=process_group)
        if filled.missing:
            raise CheckpointError(f"{', '.join(filled.missing[:5])} not in the source; it holds another model.")
        # The boxes are views, and would keep the memory of tensors that were handed out.
        targets.clear()
        memory.reverse()
        # Handed out from the end, and forgotten here: the caller decides how long each tensor lives.
        while memory:
            yield memory.pop()


def _groups(wanted: Iterable[WantedTensor]) -> Iterator[list[WantedTensor]]:
    group: list[WantedTensor] = []
    names: set[str] = set()
    size = 0
    for each in wanted:
        # a tensor that is wanted twice is read twice: one fill reads each box once
        if group and (size + each.nbytes > BUDGET or not names.isdisjoint(each.parts)):
            yield group
            group, names, size = [], set(), 0
        group.append(each)
        names |= each.parts.keys()
        size += each.nbytes
    if group:
        yield group

"""Codes and scales of the frozen weights of a unit, end to end as bytes: they are sharded and gathered as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.stored import Codes, stored_of
from megalight.parallel.data_parallel.layout import SHARD_ALIGNMENT, BucketLayout, Kind, align
from megalight.parallel.data_parallel.param_info import ParamInfo

PART_ALIGNMENT = 256
"""Alignment of codes and of scales in bytes, so that kernels may read any dtype there."""


class FlatCodes:
    """The codes of one unit's frozen weights, with their scales, end to end as bytes; each rank keeps an interval.

    It comes and goes as :class:`~megalight.parallel.data_parallel.buffers.FlatParameters` do. While it has no memory,
    reading a weight raises.

    Args:
        kind: what the weights have in common; ``param_dtype`` is uint8.
        infos: the weights, each with codes in memory of its own, which this takes away.
        group: the ranks that share them.

    Attributes:
        layout: ``numel`` counts bytes; there are no slots.
        params: ``[numel]`` bytes of all ranks, in memory shared with other units; set by :meth:`lend`.
        own_params: ``[numel / ranks]`` bytes that this rank keeps.
        kept: ``(start, stop)``, the bytes that :attr:`own_params` holds.
        shown: ``[numel]`` the bytes of which codes and scales are views now.
        holds_codes: False: these have no masters, and what whole memory holds may be kept.
    """

    holds_codes = False

    def __init__(self, kind: Kind, infos: Sequence[ParamInfo], group: ProcessGroup | None) -> None:
        self.infos = list(infos)
        self.unit_group = group
        self._codes: list[Codes] = []
        self._places: list[dict[str, _Place]] = []
        size = 0
        for info in infos:
            codes = stored_of(info.parameter)
            assert codes is not None, "these weights are stored as codes"
            places = {}
            for name, part in codes.parts().items():
                start = align(size, PART_ALIGNMENT)
                size = start + part.nbytes
                places[name] = _Place(start, size, part.dtype, part.shape)
            self._codes.append(codes)
            self._places.append(places)
        self.layout = BucketLayout(kind, (), align(size, kind.parts * max(SHARD_ALIGNMENT, PART_ALIGNMENT)))
        self.kept = self.layout.interval(kind.place)
        whole = torch.zeros(self.layout.numel, dtype=torch.uint8, device=infos[0].parameter.device)
        for codes, places in zip(self._codes, self._places, strict=True):
            for name, part in codes.parts().items():
                # As bytes: in-place copies are not available for all 8-bit dtypes.
                place = places[name]
                whole[place.start : place.stop] = part.reshape(-1).view(torch.uint8)
        self.own_params = whole[slice(*self.kept)].clone()
        self.params = self.shown = self.own_params.new_empty(0)
        self.vacate()

    def lend(self, params: Tensor) -> None:
        """Set the memory that these share with other units."""
        self.params = params

    def addresses(self) -> dict[int, int]:
        """Return where the first codes of each weight, by its id, are."""
        first = self.params.data_ptr()
        starts = (next(iter(places.values())).start for places in self._places)
        return {id(info.parameter): first + start for info, start in zip(self.infos, starts, strict=True)}

    def show(self, flat: Tensor) -> None:
        """Let codes and scales be views of a flat tensor of bytes."""
        self.shown = flat
        for codes, places in zip(self._codes, self._places, strict=True):
            codes.place({name: place.of(flat) for name, place in places.items()})

    def vacate(self) -> None:
        """Take the memory of codes and scales away, until :meth:`show`."""
        self.shown = self.own_params.new_empty(0)
        for codes in self._codes:
            codes.place(None)


@dataclass(frozen=True)
class _Place:
    """The place of codes or scales: bytes ``[start, stop)``."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)

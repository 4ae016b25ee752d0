"""The weights of a checkpoint in full precision: masters take the place of the rounded parameters that were saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megalight.checkpoint.loading import Checkpoint
from megalight.checkpoint.sources.combine import Filling
from megalight.checkpoint.sources.flat import canonical
from megalight.parallel.source import Renamed, Source, Target

MASTER = "optimizer.master."
"""Names of masters that are copies begin with this, and go on with the weight's own."""

WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class FullPrecision(Filling):
    """A checkpoint as a :class:`~megalight.parallel.source.Source` of weights.

    Boxes in float32 or wider are read from the masters where the checkpoint has them, all others from the weights.
    """

    saved: Checkpoint

    @property
    def first(self) -> Source:
        """See :attr:`Filling.first`."""
        return self.saved

    def follow(self, boxes: Sequence[Target], prefix: str, process_group: ProcessGroup | None) -> None:
        """See :meth:`Filling.follow`."""
        # Flat masters are seen as whole ones first, so that both schemes serve.
        masters = Renamed(canonical(self.saved), prefix, MASTER + prefix)
        # A run in float32 has no masters: its weights are exact already.
        if masters.tensors:
            wide = [target for target in boxes if target.data.dtype in WIDE]
            masters.fill(wide, strict=False, process_group=process_group)

"""The weights of a checkpoint in full precision: masters take the place of the rounded parameters that were saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megalight.checkpoint.loading import Saved
from megalight.checkpoint.sources.flat import canonical
from megalight.parallel.source import Filled, Renamed, Request, Wrapped

MASTER = "optimizer.master."
"""Names of masters that are copies begin with this, and go on with the weight's own."""

WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class FullPrecision(Wrapped):
    """A checkpoint as a :class:`~megalight.parallel.source.Source` of weights.

    Boxes in float32 or wider are read from the masters where the checkpoint has them, all others from the weights.
    """

    source: Saved

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
        # Flat masters are seen as whole ones first, so that both schemes serve.
        masters = Renamed(canonical(self.source), request.prefix, MASTER + request.prefix)
        # A run in float32 has no masters: its weights are exact already.
        if masters.tensors:
            wide = [target for target in request.targets if target.data.dtype in WIDE]
            masters.fill(wide, strict=False, process_group=request.process_group)
        return filled

"""Inputs of split layers that travel over ``tp`` as codes of one byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.linear.low_precision import LowPrecision
from megalight.ops.quantize import Quantized
from megalight.parallel.collectives import start_all_gather


@dataclass(frozen=True)
class SharedCodes:
    """This rank's share of the tokens of an input, cast with the scale of all of them.

    Attributes:
        rows: codes ``[T/tp, in]``.
        shape: of the share before it was cast.
        group: who has the rest.
        dim: of ``shape``: counts tokens.
    """

    rows: Quantized
    shape: torch.Size
    group: ProcessGroup
    dim: int

    @classmethod
    def of(cls, x: Tensor, precision: LowPrecision, group: ProcessGroup, dim: int) -> SharedCodes:
        """Cast ``x [..., in]``; ranks agree on the scale first."""

        def largest(amax: Tensor) -> None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)

        return cls(precision.cast_share(x, largest), x.shape, group, dim)

    def start(self) -> Callable[[], Quantized]:
        """Start to gather; what it returns waits, and gives the codes ``[T, in]`` of the whole input."""
        data = self.rows.data
        gathering = start_all_gather(data.view(torch.uint8).view(self.shape), self.group, self.dim)

        def finish() -> Quantized:
            whole = gathering.wait().reshape(-1, self.shape[-1])
            return replace(self.rows, data=whole.view(data.dtype))

        return finish

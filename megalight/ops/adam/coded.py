"""Codes of updated parameters, which a step writes beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalight.ops.cast_flat import cast_flat
from megalight.ops.quantize.formats import DTYPES
from megalight.ops.quantize.types import Scheme


@dataclass(frozen=True)
class Coded:
    """Where the codes of some parameters go, and how they are made: as :func:`megalight.ops.cast_flat.cast_flat` does.

    Attributes:
        out: ``[n]``, bytes or of the scheme's 8-bit dtype.
        scheme: of 8 bits, with one scale for the matrix of which the parameters are a part.
        amax: largest magnitude that the scale must cover, 0-dim float32, known before the step.
        rounded: dtype to which values are rounded first.
        largest: 0-dim float32, raised to the largest magnitude of the rounded values; None: nobody asks.
    """

    out: Tensor
    scheme: Scheme
    amax: Tensor
    rounded: torch.dtype
    largest: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """``out`` in the scheme's 8-bit dtype."""
        return self.out.view(DTYPES[self.scheme.format])

    def cast(self, values: Tensor) -> None:
        """Write the codes of ``values [n]``."""
        cast_flat(self.out, values, self.scheme, self.amax, self.rounded, largest=self.largest)

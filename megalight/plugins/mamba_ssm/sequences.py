"""Where packed sequences begin, in the form of these packages."""

from __future__ import annotations

from torch import Tensor


def numbers(positions: Tensor) -> Tensor:
    """From positions in sequences ``[T]`` to the number of each token's sequence, ``[1, T]`` in int32."""
    return ((positions == 0).cumsum(0) - 1).int()[None]

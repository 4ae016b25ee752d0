"""Where packed sequences begin, in the form of these packages."""

from __future__ import annotations

from torch import Tensor


def numbers(positions: Tensor) -> Tensor:
    """From positions in sequences ``[T]`` to the number of each token's sequence, ``[1, T]`` in int32, from 0 on."""
    begins = positions == 0
    # The first token may lie further inside of its sequence. These packages take -1 for padding.
    begins[:1] = True
    return (begins.cumsum(0) - 1).int()[None]

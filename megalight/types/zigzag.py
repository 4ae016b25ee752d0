"""The zigzag cut of context parallelism: which share holds which position of a sequence.

A sequence is cut into ``2 n`` equal chunks for ``n`` shares. Share ``r`` holds chunk ``r``, followed by chunk
``2 n - 1 - r``. Under a causal mask an early chunk costs little and a late chunk costs much, so all shares cost the
same.
"""

from __future__ import annotations

from torch import Tensor

from megalight.errors import DataError


def check_length(length: int, size: int) -> None:
    """Check that a row of ``length`` tokens has at least one token per chunk.

    Raises:
        DataError: it has fewer than ``2 * size`` tokens.
    """
    if length < 2 * size:
        # With fewer tokens than chunks, some share would have no token of the sequence at all.
        raise DataError(
            f"a sequence has {length} tokens, but context parallelism over cp={size} ranks cuts each into "
            f"2 x cp = {2 * size} chunks; use sequences of {2 * size} tokens or more, or lower cp."
        )


def place_of(offset: Tensor, chunk: Tensor, rank: int, size: int) -> Tensor:
    """Map an offset in a share's part of a sequence to the position in the whole sequence.

    Args:
        offset: ``[T]``, from 0 to ``2 * chunk``.
        chunk: ``[T]``, tokens per chunk of the sequence that the token belongs to.
        rank: which share.
        size: number of shares.
    """
    late = (offset >= chunk).long()  # 1 in the second chunk of the share
    # In the first chunk: rank * chunk + offset. In the second, `offset` counts from `chunk` on: add (2 size - 1 - rank)
    # - 1 chunks.
    return offset + chunk * (rank + late * 2 * (size - 1 - rank))


def offset_of(place: Tensor, chunk: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the share that holds a position, and the offset in that share's part: the inverse of :func:`place_of`."""
    index = place // chunk
    late = index >= size
    return index.where(~late, 2 * size - 1 - index), place % chunk + late * chunk

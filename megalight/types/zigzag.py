"""The arithmetic of the zigzag cut: which place of a sequence lies where among the shares.

A sequence is cut into ``2 n`` equal chunks; of ``n`` shares, share ``r`` holds chunks ``r`` and ``2 n - 1 - r``, one
after the other. Under a causal mask an early chunk costs little and a late one much, so all shares cost the same.
"""

from __future__ import annotations

from torch import Tensor

from megalight.errors import DataError


def check_length(length: int, size: int) -> None:
    """Refuse rows of tokens that do not have one for every chunk.

    Raises:
        DataError: names the length, the chunks and the remedy.
    """
    if length < 2 * size:
        raise DataError(
            f"a sequence has {length} tokens, but context parallelism over cp={size} ranks cuts each into "
            f"2 x cp = {2 * size} chunks; use sequences of {2 * size} tokens or more, or lower cp."
        )


def place_of(offset: Tensor, chunk: Tensor, rank: int, size: int) -> Tensor:
    """Place in its sequence of the token at ``offset`` in a share's part of it.

    Args:
        offset: ``[T]``, from 0 to ``2 * chunk``.
        chunk: ``[T]``, tokens per chunk of the token's sequence.
        rank: which share.
        size: how many shares.
    """
    late = (offset >= chunk).long()
    return offset + chunk * (rank + late * 2 * (size - 1 - rank))


def offset_of(place: Tensor, chunk: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The share that holds a place of a sequence, and the offset in that share's part: the inverse of `place_of`."""
    index = place // chunk
    late = index >= size
    return index.where(~late, 2 * size - 1 - index), place % chunk + late * chunk

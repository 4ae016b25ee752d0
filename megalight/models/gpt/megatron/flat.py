"""Optimizer state of the format ``fully_sharded_model_space``: flat pieces, as boxes of tensors shaped like parameters.

A tensor of shape ``[X, Y]`` in chunks of ``[x, y]`` is stored with the shape ``[X / x, Y / y, x * y]``. The first dims
count chunks. The last dim is a chunk in row-major order, and each data-parallel rank has written an interval of it. The
shape ``[X, Y]`` is in an attribute that Megatron-core adds to the metadata (``mcore_data``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from megalight.checkpoint.foreign.torch_folder import Shard, TorchTensor
from megalight.errors import CheckpointError
from megalight.parallel.shard import boxes

NOTES = "mcore_data"
"""Their attribute of the metadata: key -> what torch has no place for."""

SHAPE = "nd_reformulated_orig_global_shape"
"""Their entry with the shape that a tensor of flat pieces has."""


def unflattened(tensors: Mapping[str, TorchTensor], notes: Mapping[str, Any], where: object) -> dict[str, TorchTensor]:
    """Return all tensors, those of flat pieces in their own shapes. Nothing is read.

    Args:
        tensors: their tensors by key, as they are stored.
        notes: what Megatron-core has added to the metadata, by attribute.
        where: the folder, for messages.

    Raises:
        CheckpointError: a piece does not fit the shape of its tensor.
    """
    found = dict(tensors)
    noted = notes.get(NOTES)
    for key, note in noted.items() if isinstance(noted, dict) else ():
        shape = note.get(SHAPE) if isinstance(note, dict) else None
        if shape is not None and key in found:
            found[key] = _whole(key, found[key], shape, where)
    return found


def _whole(key: str, stored: TorchTensor, shape: Any, where: object) -> TorchTensor:
    counts = stored.shape[:-1]
    if (
        not isinstance(shape, tuple)
        or len(shape) != len(counts)
        or any(type(size) is not int or count < 1 or size % count for size, count in zip(shape, counts, strict=True))
        or prod(shape) != prod(stored.shape)
        or any(set(shard.size[:-1]) - {1} for shard in stored.shards)
    ):
        raise CheckpointError(
            f"{key} in {where} has the shape {list(stored.shape)}, and its metadata says that these are flat pieces of "
            f"{str(shape)[:80]}, which cannot be. The checkpoint is damaged; copy it again."
        )
    chunk = tuple(size // count for size, count in zip(shape, counts, strict=True))
    return TorchTensor(shape, stored.dtype, tuple(box for shard in stored.shards for box in _boxes(shard, chunk)))


def _boxes(shard: Shard, chunk: tuple[int, ...]) -> Iterator[Shard]:
    """Yield the boxes that an interval of a chunk is made of."""
    start, length = shard.offset[-1], shard.size[-1]
    corner = [index * size for index, size in zip(shard.offset, chunk, strict=False)]
    for offset, extent, first in boxes(chunk, start, start + length):
        place = tuple(low + inside for low, inside in zip(corner, offset, strict=True))
        yield Shard(place, extent, shard.archive, shard.first + first - start)

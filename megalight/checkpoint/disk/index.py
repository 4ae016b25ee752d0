"""The index of a checkpoint: which canonical tensors it holds, in which chunks, where on disk. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from megalight.checkpoint.disk.files import BLOCK, CODES, checked_count, checked_name, checked_shape
from megalight.errors import CheckpointError

NAME = "index.json"


@dataclass(frozen=True)
class Chunk:
    """A box of a canonical tensor that lies row-major in one data file.

    Attributes:
        offset, size: the box, per dim.
        file: data file, relative to the checkpoint.
        key: the tensor's key in that safetensors file.
        start: first byte in the file.
        sums: checksums, one per block of :data:`~megalight.checkpoint.disk.files.BLOCK` bytes.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    key: str
    start: int
    sums: tuple[str, ...]


@dataclass(frozen=True)
class TensorInfo:
    """One canonical tensor in a checkpoint. ``dtype`` is torch's name for it (``bfloat16``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * CODES[self.dtype][1]


def to_json(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The index as plain JSON values, one tensor per key."""
    return {
        name: {
            "shape": info.shape,
            "dtype": info.dtype,
            "chunks": [
                {"offset": c.offset, "size": c.size, "file": c.file, "key": c.key, "start": c.start, "sums": c.sums}
                for c in info.chunks
            ],
        }
        # Sorted by name, whatever rank came first.
        for name, info in sorted(tensors.items())
    }


def from_json(value: Any, what: str) -> dict[str, TensorInfo]:
    """The index from untrusted JSON values, checked.

    Raises:
        CheckpointError: anything malformed; chunks that overlap, leave the tensor, or do not cover it.
    """
    tensors: dict[str, TensorInfo] = {}
    try:
        for name, item in value.items():
            tensors[name] = tensor_from_json(name, item, what)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{what} is malformed: {type(error).__name__}: {error}.") from error
    validate(tensors.values(), what)
    return tensors


def tensor_from_json(name: str, value: Any, what: str) -> TensorInfo:
    """One tensor of the index, whose chunks need not cover it.

    Raises:
        CheckpointError: of an unknown dtype, or sizes and names that no tensor has.
    """
    if value["dtype"] not in CODES:
        raise CheckpointError(f"{what}: {name!r} has the unknown dtype {value['dtype']!r}; upgrade Megalight.")
    chunks = tuple(_chunk(chunk, what) for chunk in value["chunks"])
    return TensorInfo(name, checked_shape(value["shape"], what), value["dtype"], chunks)


def _chunk(value: Any, what: str) -> Chunk:
    offset, size = checked_shape(value["offset"], what), checked_shape(value["size"], what)
    start = checked_count(value["start"], what)
    sums = tuple(value["sums"])
    if not isinstance(value["key"], str) or not all(isinstance(digest, str) for digest in sums):
        raise CheckpointError(f"{what} is malformed: keys and checksums are strings.")
    return Chunk(offset, size, checked_name(value["file"]), value["key"], start, sums)


def validate(tensors: Iterable[TensorInfo], what: str) -> None:
    """Check that chunks tile their tensors exactly, carry their checksums, and do not overlap in their files.

    Raises:
        CheckpointError: they do not; the tensor or file is named.
    """
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for info in tensors:
        _validate_tiling(info, what)
        for chunk in info.chunks:
            nbytes = prod(chunk.size) * CODES[info.dtype][1]
            # One sum per block, rounded up.
            if len(chunk.sums) != -(-nbytes // BLOCK):
                raise CheckpointError(f"{what}: {info.name!r} has a chunk with the wrong number of checksums.")
            spans.setdefault(chunk.file, []).append((chunk.start, chunk.start + nbytes, info.name))
    for file, parts in spans.items():
        # Sorted, so that only neighbors can overlap.
        parts.sort()
        for (_, stop, first), (start, _, second) in pairwise(parts):
            if start < stop:
                raise CheckpointError(f"{what}: {first!r} and {second!r} overlap in {file}.")


def _validate_tiling(info: TensorInfo, what: str) -> None:
    for chunk in info.chunks:
        inside = len(chunk.offset) == len(chunk.size) == len(info.shape) and all(
            low + extent <= whole and extent > 0
            for low, extent, whole in zip(chunk.offset, chunk.size, info.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{what}: {info.name!r} of shape {list(info.shape)} has a chunk at {list(chunk.offset)} of size "
                f"{list(chunk.size)}, which does not lie inside it."
            )
    # Without overlaps, equal counts mean that nothing is missing.
    overlap = _overlap(info)
    covered = sum(prod(chunk.size) for chunk in info.chunks)
    if overlap or covered != info.numel:
        problem = f"chunks overlap at {list(overlap)}" if overlap else f"{covered} of {info.numel} elements are there"
        raise CheckpointError(f"{what}: {info.name!r} of shape {list(info.shape)}: {problem}.")


def _overlap(info: TensorInfo) -> tuple[int, ...] | None:
    """Where two chunks overlap, or None: a sweep along the longest dim."""
    if len(info.chunks) < 2:
        return None
    if not info.shape:
        return (0,)
    # Along the longest dim the fewest chunks are active at once.
    dim = max(range(len(info.shape)), key=info.shape.__getitem__)
    active: list[Chunk] = []
    for chunk in sorted(info.chunks, key=lambda c: c.offset[dim]):
        active = [other for other in active if other.offset[dim] + other.size[dim] > chunk.offset[dim]]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(chunk.offset, chunk.size, other.offset, other.size, strict=True)
            ):
                return chunk.offset
        active.append(chunk)
    return None

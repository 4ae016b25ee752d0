"""Check that the ranks that hold one model together got the same batch.

Without this check training would continue silently, with tokens of one batch and labels of another.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import DataError
from megalight.parallel.mesh import ParallelMesh

REPLICA_AXES = ("pp", "cp", "tp")
"""Mesh axes whose ranks must see the same batch."""


def check_same(batch: Any, mesh: ParallelMesh, device: torch.device) -> None:
    """Compare a batch over the ranks of a replica; all of them call this.

    Raises:
        DataError: on all of them, if any rank got another batch.
    """
    group = mesh.group(*REPLICA_AXES)
    if group is None:
        return
    found = checksum(batch)
    # One MAX reduction of (x, -x) gives both the largest and the smallest checksum.
    bounds = torch.tensor([found, -found], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    # Here the host waits. Only the first batch of a run is compared.
    most, least = int(bounds[0]), -int(bounds[1])
    if most != least:
        raise DataError(
            f"ranks {', '.join(map(str, mesh.ranks(*REPLICA_AXES)))} hold one model together, but their data loaders "
            "gave them different batches. Draw and shuffle with a generator that is seeded alike on all of them "
            "(DataLoader(generator=...)), or in DataLoader workers, which are."
        )


def checksum(value: Any, start: int = 0) -> int:
    """Return 32 bits for the tensors, numbers and texts of a nested batch; other objects are ignored."""
    if isinstance(value, Tensor):
        # Bits, not numbers: NaN differs from itself, and rounding would hide differences.
        # A copy, because strides of no or one element may be 0, as NumPy's are.
        data = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy().tobytes(), zlib.crc32(repr(tuple(value.shape)).encode(), start))
    if isinstance(value, bool | int | float | str | bytes):
        return zlib.crc32(repr(value).encode(), start)
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for part in parts:
        start = checksum(part, start)
    return start

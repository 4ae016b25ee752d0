"""Data-parallel ranks that take part in each other's collectives inside a forward pass, to exchange tokens of experts.

Such ranks must run the same number of micro-batches. They agree on the largest number. A rank with fewer runs *empty*
ones: a real micro-batch again, with its losses multiplied by zero. It takes part in every collective, and adds nothing
to losses, gradients and totals.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import DataError
from megalight.parallel.mesh import ParallelMesh, new_group
from megalight.parallel.shard import ShardSpec
from megalight.types.batch import emptied


def couples(specs: Iterable[ShardSpec], mesh: ParallelMesh, modules: Iterable[nn.Module]) -> bool:
    """Whether ranks along ``dp`` communicate in a forward pass.

    They do if some hold different parameters, or if a module ``reads_replicas`` (a router with a loss over all).
    """
    # Any module decides for the whole model, before it is cut into stages.
    replicas = set(mesh.ranks("dp"))
    if len(replicas) > 1 and any(getattr(module, "reads_replicas", False) for module in modules):
        return True
    return any(not replicas <= set(mesh.ranks(*data)) for data in {spec.data for spec in specs})


class Coupling:
    """Lets ranks agree on numbers, on the host. All of them call each method together.

    Args:
        mesh: the mesh of this rank.
        ranks: global ranks; None: those along ``dp``.
    """

    def __init__(self, mesh: ParallelMesh, ranks: Sequence[int] | None = None) -> None:
        self.ranks = mesh.ranks("dp") if ranks is None else tuple(ranks)
        self._group: ProcessGroup | None = None

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return self.asking([number])()[0]

    def asking(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Ask for the largest of the ranks' values of each number; return what waits for the answer."""
        if self._group is None:
            # On the host, so that the number is known before any work is queued, and no GPU has to finish first.
            self._group = new_group(self.ranks, "counts", backend="gloo")
        largest: Tensor = torch.tensor(numbers)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> list[int]:
            work.wait()
            found: list[int] = largest.tolist()
            return found

        return answer

    def fill_up(self, micro_batches: Sequence[Any]) -> list[Any]:
        """Return the micro-batches with empty ones added, so that all ranks have the same number."""
        missing = self.most(len(micro_batches)) - len(micro_batches)
        # A real batch, because its shapes are known to run.
        return [*micro_batches, *[emptied(micro_batches[-1])] * missing]


REPLICA_AXES = ("pp", "cp", "tp")
"""Mesh axes whose ranks must see the same batch."""


def check_same(batch: Any, mesh: ParallelMesh, device: torch.device) -> None:
    """Compare a batch over the ranks of a replica, of which there are several; all of them call this.

    Without this check training would continue silently, with tokens of one batch and labels of another.

    Raises:
        DataError: on all of them, if any rank got another batch.
    """
    found = checksum(batch)
    # One MAX reduction of (x, -x) gives both the largest and the smallest checksum.
    bounds = torch.tensor([found, -found], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mesh.group(*REPLICA_AXES))
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

"""Send tensors from ranks that hold them to ranks that need them, between two layouts of the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from megalight.parallel.bridge.transfer import as_bytes
from megalight.parallel.pipeline.carry import Form


@dataclass(frozen=True)
class Route:
    """The holders and receivers of one list of tensors. All ranks know all routes.

    Attributes:
        holders: global ranks that have equal copies of the tensors.
        needers: global ranks that need the tensors.
        form: shapes and dtypes.
    """

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    form: Form

    def source(self, needer: int) -> int:
        """Return the rank that sends to ``needer``; ``needer`` itself if it has the tensors already."""
        if needer in self.holders:
            return needer
        # Spread over the holders, so that no single rank sends everything.
        return self.holders[self.needers.index(needer) % len(self.holders)]


def exchange(
    routes: Sequence[Route], held: Sequence[Sequence[Tensor] | None], rank: int, device: torch.device
) -> list[list[Tensor] | None]:
    """Send the tensors of every route to the ranks that need them, each message directly from a holder.

    All ranks that any route names call this together, with the same routes.

    Args:
        held: for each route, its tensors if this rank holds them.
        rank: this rank.
        device: the device from which and to which tensors are sent.

    Returns:
        for each route, its tensors in the order of the form if this rank needs them, else None.
    """
    operations: list[P2POp] = []
    found: list[list[Tensor] | None] = []
    # All ranks walk through the routes in the same order, so the n-th send to a rank meets its n-th receive.
    for route, mine in zip(routes, held, strict=True):
        for needer in route.needers:
            if needer != rank and route.source(needer) == rank:
                assert mine is not None
                sent = [tensor.to(device).contiguous() for tensor in mine]
                operations += [P2POp(dist.isend, as_bytes(tensor), needer) for tensor in sent if tensor.numel()]
        if rank not in route.needers:
            found.append(None)
        elif route.source(rank) == rank:
            assert mine is not None
            found.append(list(mine))
        else:
            room = [entry.buffer(device) for entry in route.form]
            source = route.source(rank)
            operations += [P2POp(dist.irecv, as_bytes(tensor), source) for tensor in room if tensor.numel()]
            found.append(room)
    # Posted together: pairs of ranks that send to each other would block if each waited for its own send first.
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return found

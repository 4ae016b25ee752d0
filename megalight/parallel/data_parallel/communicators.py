"""The process groups over which buckets of one kind are sent."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megalight.parallel.data_parallel.buffers import Groups
from megalight.parallel.data_parallel.layout import Kind
from megalight.parallel.groups import check_max_ctas, new_group, shared_group


def groups_of(kind: Kind, max_ctas: int | None, purpose: str = "") -> Groups:
    """Return the process groups of the buckets of a kind; with a purpose, over communicators for it alone."""
    made: dict[tuple[int, ...], ProcessGroup | None] = {}

    def group(*axes: str) -> ProcessGroup | None:
        # The same ranks under other names of axes share a group: a second one
        # would cost a communicator of its own.
        ranks = kind.mesh.ranks(*axes)
        if ranks not in made:
            if max_ctas is not None and len(ranks) > 1:
                check_max_ctas("max_ctas", max_ctas, dist.get_backend())
                made[ranks] = new_group(ranks, purpose or "data parallelism", max_ctas=max_ctas)
            elif purpose and len(ranks) > 1:
                made[ranks] = shared_group(ranks, purpose)
            else:
                made[ranks] = kind.mesh.group(*axes)
        return made[ranks]

    return Groups(group(*kind.data), group(*kind.shard_axes), group(*kind.replica_axes))

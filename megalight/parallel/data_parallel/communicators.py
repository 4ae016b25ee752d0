"""The process groups over which buckets of one kind are sent.

Their communicators are for data parallelism alone. A communicator sends one message after the other, and buckets take
long: what the next layer waits for (counts of tokens, keys of other ranks, sums) would queue behind all of them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megalight.parallel.data_parallel.buffers import Groups
from megalight.parallel.data_parallel.layout import Kind
from megalight.parallel.groups import check_max_ctas, new_group, shared_group


def groups_of(kind: Kind, max_ctas: int | None, purpose: str = "data parallelism") -> Groups:
    """Return the process groups of the buckets of a kind, over communicators for this purpose alone."""
    made: dict[tuple[int, ...], ProcessGroup | None] = {}

    def group(*axes: str) -> ProcessGroup | None:
        # The same ranks under other names of axes share a group: a second one
        # would cost a communicator of its own.
        ranks = kind.mesh.ranks(*axes)
        if ranks not in made:
            if len(ranks) == 1:
                made[ranks] = None
            elif max_ctas is not None:
                check_max_ctas("max_ctas", max_ctas, dist.get_backend())
                made[ranks] = new_group(ranks, purpose, max_ctas=max_ctas)
            else:
                made[ranks] = shared_group(ranks, purpose)
        return made[ranks]

    return Groups(group(*kind.data), group(*kind.shard_axes), group(*kind.replica_axes))

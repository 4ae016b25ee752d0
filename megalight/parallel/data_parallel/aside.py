"""Parameters that are set aside, so that a rank can put them back alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.residency import Residency
from megalight.parallel.host_memory import host_memory


class SetAside:
    """Copies of this rank's parameters in host memory, in their own dtype.

    Masters are divided over ranks, so a rank cannot make the parameters from its own part. After an error in one rank
    the others may never come to a collective. Then this is the only way back.

    Args:
        buckets: the parameters. Their memory must stay the same.
        scales: scales of parameters that are codes.
        residency: the parameters of units; None: all parameters are always whole.
    """

    def __init__(self, buckets: Sequence[Bucket], scales: Tensor, residency: Residency | None) -> None:
        self._residency = residency
        held = [scales]
        for bucket in buckets:
            held.append(bucket.own_params if bucket.shards_params else bucket.params)
            if residency is not None and residency.whole and bucket.shards_params:
                held.append(bucket.shown)
        self._copies = [(here, host_memory(here.shape, here.dtype, here.device).copy_(here)) for here in held]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the parameters the values that were set aside. Nothing waits for another rank."""
        for here, copy in self._copies:
            here.copy_(copy)
        if self._residency is not None and not self._residency.whole:
            # Units that are gathered have the other values.
            self._residency.forget()

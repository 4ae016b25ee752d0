"""Which samples each data-parallel rank reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from megalight.errors import DataError, LayoutError


class GlobalBatchSampler(DistributedSampler[Any]):
    """A rank's share of every global batch, sample by sample; ``share`` of them make a batch.

    Global batch ``k`` is samples ``[k * G, (k + 1) * G)``; rank ``r`` of ``n`` takes the ``r``-th ``G / n`` of them, so
    that all ranks together read what one rank would. It is a ``DistributedSampler``, which is how Lightning
    knows that it must not put its own in this one's place.

    Args:
        num_samples: samples of the data set.
        global_batch_size: samples ``G`` of a batch over all ranks.
        rank: this data-parallel rank.
        num_replicas: data-parallel ranks.
        start: asked whenever iteration begins: the pass over the data (0 is the data set's own order, later ones are
            shuffled anew) and the batches of it that are done already. The length stays that of a whole pass, because
            Lightning counts the done ones too.
        pad: whether an incomplete last batch is filled up with samples None, which carry no loss (evaluation); else it
            is dropped (training).
        seed: of later passes' orders.

    Raises:
        LayoutError: the batch does not divide by the ranks.
        DataError: not a single batch.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        *,
        rank: int = 0,
        num_replicas: int = 1,
        start: Callable[[], tuple[int, int]] | None = None,
        pad: bool = False,
        seed: int = 0,
    ) -> None:
        if global_batch_size < 1 or global_batch_size % num_replicas:
            raise LayoutError(
                f"global_batch_size is {global_batch_size} and there are {num_replicas} data-parallel ranks; the batch "
                "must divide evenly over the ranks. Change global_batch_size or the layout."
            )
        # only the length of its data set is looked at
        super().__init__(cast("Dataset[Any]", range(num_samples)), num_replicas, rank, shuffle=False, seed=seed)
        self.share = global_batch_size // num_replicas
        self.global_batch_size = global_batch_size
        self.total = num_samples
        self.pad = pad
        self.start = start
        self.num_batches = math.ceil(num_samples / global_batch_size) if pad else num_samples // global_batch_size
        if not self.num_batches:
            raise DataError(
                f"there are {num_samples} samples, fewer than one global batch of {global_batch_size}; use more data, "
                "shorter sequences, or a smaller global_batch_size."
            )

    def __len__(self) -> int:
        return self.num_batches * self.share

    def __iter__(self) -> Iterator[Any]:
        turn, first = self.start() if self.start is not None else (0, 0)
        order = None if turn == 0 else np.random.Generator(np.random.PCG64([self.seed, turn])).permutation(self.total)
        for batch in range(first, self.num_batches):
            begin = batch * self.global_batch_size + self.rank * self.share
            for sample in range(begin, begin + self.share):
                if sample >= self.total:
                    yield None
                else:
                    yield sample if order is None else int(order[sample])

"""Global batches: the sizes that they may have, and the sampler that gives each data-parallel rank its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from megalight.errors import DataError, LayoutError


def check_sizes(
    *,
    global_batch_size: int = 1,
    sequence_length: int = 1,
    num_workers: int = 0,
    seed: int = 0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
) -> None:
    """Refuse sizes that no data can have.

    Raises:
        DataError: with the value and the rule.
    """
    for name, value in (("global_batch_size", global_batch_size), ("sequence_length", sequence_length)):
        if value < 1:
            raise DataError(f"{name} is {value}; it must be at least 1.")
    if num_workers < 0:
        raise DataError(f"num_workers is {num_workers}; it must be at least 0, which reads in the main process.")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed is {seed}; it must be from 0 to {2**32 - 1}.")
    if train_samples is not None and train_samples < 1:
        raise DataError(f"train_samples is {train_samples}; it must be at least 1, or left out.")
    for name, samples in (("val_samples", val_samples), ("test_samples", test_samples)):
        if samples is not None and samples < 0:
            raise DataError(f"{name} is {samples}; it must be at least 0, which reads none, or left out.")


def check_fits(sequence_length: int, longest: int) -> None:
    """Refuse sequences that are too long for the model. Later positions have no embedding, or none that was trained.

    Raises:
        DataError: with both numbers and the remedy.
    """
    if sequence_length > longest:
        raise DataError(
            f"data.sequence_length={sequence_length} is longer than the model's max_sequence_length={longest}; lower "
            "it, or raise max_sequence_length."
        )


def check_replicas(global_batch_size: int, replicas: int) -> None:
    """Refuse batches that replicas of the model cannot share.

    Raises:
        LayoutError: with both numbers and the remedy.
    """
    if global_batch_size < 1 or global_batch_size % replicas:
        raise LayoutError(
            f"global_batch_size is {global_batch_size} and there are {replicas} data-parallel ranks; it must "
            "be a multiple of their number. Change global_batch_size or the layout."
        )


def check_vocabulary(tokens: int, vocab_size: int) -> None:
    """Refuse tokens for which the model has no embedding. The reverse is fine: vocabularies are padded.

    Raises:
        DataError: with both numbers and the remedy.
    """
    if tokens > vocab_size:
        raise DataError(
            f"the data's tokenizer has {tokens} tokens, but the model's vocab_size is {vocab_size}; raise vocab_size, "
            "or prepare the data with a smaller tokenizer."
        )


class GlobalBatchSampler(DistributedSampler[Any]):
    """Yields this rank's share of every global batch, sample by sample. ``share`` samples make one batch of the rank.

    Global batch ``k`` is samples ``[k * G, (k + 1) * G)``. Rank ``r`` of ``n`` takes the ``r``-th part of ``G / n``
    samples, so all ranks together read what one rank alone would read. The class derives from ``DistributedSampler`` so
    that Lightning does not replace it by its own.

    Args:
        num_samples: samples of the data set.
        global_batch_size: samples ``G`` of a batch over all ranks.
        start: called when an iteration begins. It returns the pass over the data (0 has the order of the data set,
            each later pass is shuffled) and the number of batches of this pass that are already done. ``len()`` still
            counts the whole pass, because Lightning counts the done batches too.
        pad: whether to fill up an incomplete last batch with None, which gives samples without loss (evaluation). If
            not, the batch is dropped (training).
        seed: seed of the order of later passes.

    Raises:
        LayoutError: ``global_batch_size`` is not a multiple of the number of ranks.
        DataError: there are too few samples for one batch.
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
        check_replicas(global_batch_size, num_replicas)
        # the base class looks only at the length of the data set
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
                "a lower sequence_length, or a smaller global_batch_size."
            )

    def __len__(self) -> int:
        return self.num_batches * self.share

    def __iter__(self) -> Iterator[Any]:
        turn, first = self.start() if self.start is not None else (0, 0)
        # A generator of its own for each pass: the order depends on seed and pass only, so any
        # process can make it again.
        order = None if turn == 0 else np.random.Generator(np.random.PCG64([self.seed, turn])).permutation(self.total)
        for batch in range(first, self.num_batches):
            # Each rank takes a run of neighbors, so the batch of all ranks is that of one
            # rank, in the same order.
            begin = batch * self.global_batch_size + self.rank * self.share
            for sample in range(begin, begin + self.share):
                if sample >= self.total:
                    yield None
                else:
                    yield sample if order is None else int(order[sample])

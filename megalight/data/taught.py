"""What a teacher predicts for the samples of a run, on disk; see :mod:`megalight.data.records`.

A record holds ids ``[S, K]`` int32, their log-probabilities ``[S, K]``, and the logarithm of the probability of all
other ids ``[S]`` float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch

from megalight.data.blend import Samples
from megalight.data.gpt.dataset import Sample
from megalight.data.records import Records, RecordsMeta
from megalight.errors import DataError
from megalight.types import BaseStates, TokenBatch, TopTokens

Stored = Literal["float16", "float32"]
"""Dtypes of log-probabilities on disk."""

LOGS = {"float16": "<f2", "float32": "<f4"}


@dataclass(frozen=True, kw_only=True)
class TaughtMeta(RecordsMeta):
    """Facts about a store.

    Attributes:
        top_k: ids ``K`` of each token.
        vocab_size: of the teacher.
        temperature: by which the teacher's logits were divided.
        dtype: of the log-probabilities.
    """

    kind: ClassVar[str] = "tokens"
    command: ClassVar[str] = "megalight teach"

    top_k: int
    vocab_size: int
    temperature: float
    dtype: Stored

    def __post_init__(self) -> None:
        if self.dtype not in LOGS:
            raise DataError(f"log-probabilities have the dtype {self.dtype!r}; known are {', '.join(LOGS)}.")

    @property
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """See :attr:`.RecordsMeta.fields`."""
        size = self.sequence_length, self.top_k
        return [("ids", "<i4", size), ("log_probs", LOGS[self.dtype], size), ("log_rest", "<f4", size[:1])]


class TaughtStore(Records[TaughtMeta]):
    """Reads a store."""

    meta_type = TaughtMeta

    def read(self, index: int, sample: Sample, split: str = "train") -> TopTokens:
        """Return what the teacher predicts for sample ``index``: ``[S]``, with log-probabilities as they are stored.

        Raises:
            DataError: the record is damaged, or was written for other tokens.
        """
        return self._of(self.record(split, index, sample))

    def empty(self) -> TopTokens:
        """Return the same for a sample without loss."""
        return self._of(np.zeros((), self.meta.record))

    def _of(self, record: Any) -> TopTokens:
        return TopTokens(*(torch.from_numpy(record[name].copy()) for name in ("ids", "log_probs", "log_rest")))


ValueT = TypeVar("ValueT", TopTokens, BaseStates)
ReadT = TypeVar("ReadT", TopTokens, BaseStates, covariant=True)


class Store(Protocol[ReadT]):
    """Reads what a frozen model made of samples."""

    def has(self, split: str) -> bool:
        """Return whether there are samples of a split."""

    def read(self, index: int, sample: Sample, split: str = "train") -> ReadT:
        """Return what the model made of a sample."""

    def empty(self) -> ReadT:
        """Return the same for a sample without loss."""


class Taught(Generic[ValueT]):
    """Samples with what a frozen model made of them.

    Args:
        samples: the data set.
        store: holds all that are read.
        collate: makes a batch of samples.
        split: which split the samples are.
    """

    def __init__(
        self,
        samples: Samples[Sample],
        store: Store[ValueT],
        collate: Callable[[Sequence[Sample]], TokenBatch],
        split: str = "train",
    ) -> None:
        self.samples, self._collate, self._split = samples, collate, split
        self.store: Store[ValueT] = store

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | None) -> tuple[Sample, ValueT]:
        sample = self.samples[index]
        return sample, self.store.empty() if index is None else self.store.read(index, sample, self._split)

    def collate(self, rows: Sequence[tuple[Sample, ValueT]]) -> TokenBatch:
        """Make a batch with :attr:`~megalight.types.TokenBatch.taught`."""
        batch = self._collate([sample for sample, _ in rows])
        values = [value for _, value in rows]
        return replace(batch, taught=type(values[0]).stack(values))

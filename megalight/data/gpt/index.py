"""The document, sample and shuffle index of GPT's data set: which tokens make which sample.

Documents are repeated for as many epochs as needed, shuffled, and laid end to end. Sample ``k`` is the ``s + 1`` tokens
from position ``k * s`` on, so neighbors share one token: the last label of one is the first input of the next. Samples
are then visited in shuffled order. The same seed gives the same three arrays as Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.errors import DataError

IndexArray = NDArray[Any]


@dataclass(frozen=True)
class SamplePlan:
    """The number of samples and passes: arithmetic only, before any array is built.

    Attributes:
        tokens_per_epoch: tokens of one pass over the documents.
        sequence_length: tokens ``s`` of a sample, without the extra last label.
        num_epochs: number of passes over the documents.
        separate_final_epoch: whether the last pass is shuffled on its own. It is if less than 80 % of it is needed:
            otherwise its documents would replace documents of earlier passes.
        num_samples: samples of all passes; at least the number requested.
    """

    tokens_per_epoch: int
    sequence_length: int
    num_epochs: int
    separate_final_epoch: bool
    num_samples: int

    @classmethod
    def make(
        cls, tokens_per_epoch: int, sequence_length: int, num_samples: int | None, drop_last_partial: bool = True
    ) -> SamplePlan:
        """Plan at least ``num_samples`` samples, or one pass if it is None.

        Args:
            tokens_per_epoch: tokens of one pass.
            sequence_length: tokens of a sample, without the extra last label.
            num_samples: number of samples needed.
            drop_last_partial: whether to drop the last tokens if they are too few for a sample. If not, they make a
                padded sample.

        Raises:
            DataError: there are too few tokens for one sample.
        """
        p, s = tokens_per_epoch, sequence_length
        if num_samples is None and drop_last_partial:
            check_one_sample(p, s)
        if p < 2 or s < 1:
            raise DataError(f"there are {p} tokens and sequence_length is {s}; at least 2 tokens and 1 are needed.")
        n = num_samples or 0
        # One token more than whole samples: the last label.
        epochs = max(1, -(-(n * s + 1) // p))
        before_last = ((epochs - 1) * p - 1) // s  # samples that end before the last pass
        separate = epochs > 1 and n - before_last < 4 * ((p - 1) // s) // 5  # less than 80 % of the last pass
        last = epochs * p - 1  # the very last token is only a label
        return cls(p, s, epochs, separate, last // s if drop_last_partial else -(-last // s))

    @property
    def samples_before_final_epoch(self) -> int:
        """Number of samples that end before the last pass."""
        return max(0, ((self.num_epochs - 1) * self.tokens_per_epoch - 1) // self.sequence_length)


def check_one_sample(tokens: int, sequence_length: int) -> None:
    """Refuse documents that are too short for one sample, and so would only fill it by repeating themselves.

    Raises:
        DataError: with both lengths.
    """
    if tokens < sequence_length + 1:
        raise DataError(
            f"the documents hold {tokens} tokens; one sample of sequence_length {sequence_length} takes "
            f"{sequence_length + 1}. Lower sequence_length or use more data."
        )


@contextmanager
def of_split(name: str, prefix: str) -> Iterator[None]:
    """Name the split and the corpus in an error about the tokens of a split."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name} split of {prefix}: {error}") from error


def document_index(documents: range, plan: SamplePlan, random: np.random.RandomState) -> NDArray[np.int32]:
    """``[epochs * len(documents)]``: the documents in the order in which their tokens are laid out."""

    def shuffled(epochs: int) -> NDArray[np.int32]:
        # Positions in the file, as ids of documents count from the first document of the file.
        index = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), epochs)
        random.shuffle(index)
        return index

    if not plan.separate_final_epoch:
        return shuffled(plan.num_epochs)
    first = shuffled(plan.num_epochs - 1)
    return np.concatenate([first, shuffled(1)])


def sample_index(lengths: NDArray[np.int32], order: NDArray[np.int32], plan: SamplePlan) -> IndexArray:
    """``[num_samples + 1, 2]``: where each sample starts: position in the document index, token in the document.

    Row ``k + 1`` is also the last token of sample ``k``. The dtype is int32 if that is enough, else int64.
    """
    ends = np.cumsum(lengths[order], dtype=np.int64)
    # Each sample begins `sequence_length` tokens after the one before, so neighbors share one token.
    targets = np.arange(plan.num_samples + 1, dtype=np.int64) * plan.sequence_length
    # The last sample may be shorter, and ends with the last token.
    np.minimum(targets, ends[-1] - 1, out=targets)
    # `right`: a target at the end of a document is the first token of the next one.
    rows = np.searchsorted(ends, targets, side="right")
    offsets = targets - ends[rows] + lengths[order[rows]]
    rows[0] = 0  # Megatron starts at the first document even if it is empty; `searchsorted` skips empty ones
    wide = max(len(order), int(lengths.max(initial=0))) > np.iinfo(np.int32).max
    return np.stack([rows, offsets], axis=1).astype(np.int64 if wide else np.int32)


def shuffle_index(plan: SamplePlan, random: np.random.RandomState) -> IndexArray:
    """``[num_samples]``: the order in which samples are visited. A separate final epoch comes last."""
    total = plan.num_samples
    # Megatron-LM's limit, with its margin.
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    first = plan.samples_before_final_epoch if plan.separate_final_epoch else total
    parts = [np.arange(0, first, dtype=dtype), np.arange(first, total, dtype=dtype)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def build(lengths: NDArray[np.int32], documents: range, plan: SamplePlan, seed: int) -> dict[str, IndexArray]:
    """Build the three arrays; returns them by name."""
    # One generator draws documents first, then samples: equality with Megatron-LM depends on this order.
    # `RandomState` gives the same stream in all versions of numpy.
    random = np.random.RandomState(seed)
    order = document_index(documents, plan, random)
    samples = sample_index(lengths, order, plan)
    return {"document_index": order, "sample_index": samples, "shuffle_index": shuffle_index(plan, random)}

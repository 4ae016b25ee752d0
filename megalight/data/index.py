"""Which tokens make which sample: the document, sample and shuffle index of Megatron's GPT data set.

Documents, repeated for as many epochs as are needed and shuffled, are laid end to end; sample ``k`` is the ``s + 1``
tokens from position ``k * s`` on, so that neighbours share one token (the label of one is the input of the next);
samples are then visited in shuffled order. The same seed gives the same three arrays as Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.errors import DataError

IndexArray = NDArray[Any]


@dataclass(frozen=True)
class SamplePlan:
    """How many samples there are and in how many passes; arithmetic only, known before any array is built.

    Attributes:
        tokens_per_epoch: tokens of one pass over the documents.
        sequence_length: tokens ``s`` of a sample, its extra last one not counted.
        num_epochs: passes over the documents.
        separate_final_epoch: the last pass is needed for less than 80 %, and is shuffled apart, so that its
            documents do not come early at the expense of others.
        num_samples: samples in all passes (at least those asked for).
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
        """Plan for at least ``num_samples`` samples, or for one pass when None.

        Args:
            tokens_per_epoch: tokens of one pass.
            sequence_length: tokens of a sample, its extra last one not counted.
            num_samples: samples wanted.
            drop_last_partial: whether the tokens left at the very end, too few for a sample, are dropped; if not, they
                make a last sample that is padded.

        Raises:
            DataError: too few tokens for a single sample.
        """
        p, s = tokens_per_epoch, sequence_length
        if num_samples is None and drop_last_partial and p < s + 1:
            raise DataError(
                f"the documents hold {p} tokens; one sample of sequence_length {s} takes {s + 1}. Shorten "
                "sequence_length or use more data."
            )
        if p < 2 or s < 1:
            raise DataError(f"{p} tokens and sequence_length {s}: at least 2 tokens and a length of 1 are needed.")
        n = num_samples or 0
        epochs = max(1, -(-(n * s + 1) // p))
        before_last = ((epochs - 1) * p - 1) // s
        separate = epochs > 1 and n - before_last < 4 * ((p - 1) // s) // 5
        last = epochs * p - 1
        return cls(p, s, epochs, separate, last // s if drop_last_partial else -(-last // s))

    @property
    def samples_before_final_epoch(self) -> int:
        """Samples that lie wholly in the passes before the last."""
        return max(0, ((self.num_epochs - 1) * self.tokens_per_epoch - 1) // self.sequence_length)


def document_index(documents: range, plan: SamplePlan, random: np.random.RandomState) -> NDArray[np.int32]:
    """``[epochs * len(documents)]`` the documents in the order in which their tokens are laid out."""

    def shuffled(epochs: int) -> NDArray[np.int32]:
        index = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), epochs)
        random.shuffle(index)
        return index

    if not plan.separate_final_epoch:
        return shuffled(plan.num_epochs)
    first = shuffled(plan.num_epochs - 1)
    return np.concatenate([first, shuffled(1)])


def sample_index(lengths: NDArray[np.int32], order: NDArray[np.int32], plan: SamplePlan) -> IndexArray:
    """``[num_samples + 1, 2]`` where each sample starts: position in the document index, token in that document.

    Row ``k + 1`` is the last token of sample ``k``. int32 where that is enough, else int64.
    """
    ends = np.cumsum(lengths[order], dtype=np.int64)
    targets = np.arange(plan.num_samples + 1, dtype=np.int64) * plan.sequence_length
    np.minimum(targets, ends[-1] - 1, out=targets)
    rows = np.searchsorted(ends, targets, side="right")
    offsets = targets - ends[rows] + lengths[order[rows]]
    rows[0] = 0  # where the walk over the documents starts, also when the first ones are empty
    wide = max(len(order), int(lengths.max(initial=0))) > np.iinfo(np.int32).max
    return np.stack([rows, offsets], axis=1).astype(np.int64 if wide else np.int32)


def shuffle_index(plan: SamplePlan, random: np.random.RandomState) -> IndexArray:
    """``[num_samples]`` the order in which samples are visited; a separate final epoch comes last."""
    total = plan.num_samples
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    first = plan.samples_before_final_epoch if plan.separate_final_epoch else total
    parts = [np.arange(0, first, dtype=dtype), np.arange(first, total, dtype=dtype)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def build(lengths: NDArray[np.int32], documents: range, plan: SamplePlan, seed: int) -> dict[str, IndexArray]:
    """The three arrays by name. One generator, seeded once, draws them in this order: that is part of the format."""
    random = np.random.RandomState(seed)
    order = document_index(documents, plan, random)
    samples = sample_index(lengths, order, plan)
    return {"document_index": order, "sample_index": samples, "shuffle_index": shuffle_index(plan, random)}

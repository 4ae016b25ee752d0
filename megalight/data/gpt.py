"""The data set that language models are pre-trained on: documents end to end, cut into samples of equal length."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.data.cache import build_once
from megalight.data.index import SamplePlan, build
from megalight.data.indexed import IndexedDataset
from megalight.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How tokens become inputs, labels and masks.

    Attributes:
        sequence_length: tokens ``S`` of a sample.
        document_mask: whether a sample names the documents it holds, so that attention does not cross them and
            positions restart.
        eod_id: the token that ends documents, for ``eod_mask_loss``.
        eod_mask_loss: whether the loss skips positions whose input is ``eod_id`` (what follows the end of a document
            is another document's start).
        pad_id: an id that means padding and nothing else: labels of that id carry no loss. Negative: none.
        vocab_size: ids at or above this raise, rather than fail inside a device kernel. None: not checked.
    """

    sequence_length: int
    document_mask: bool = False
    eod_id: int | None = None
    eod_mask_loss: bool = False
    pad_id: int = -1
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.eod_mask_loss and self.eod_id is None:
            raise DataError("eod_mask_loss needs the id of the end-of-document token; name the tokenizer.")


@dataclass(frozen=True)
class Sample:
    """One row of a batch.

    Attributes:
        tokens: ``[S]`` int64 inputs.
        labels: ``[S]`` int64, the token after each input.
        loss_mask: ``[S]`` float32.
        document_lengths: lengths of the documents in ``tokens``, summing to ``S``, where they are asked for.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    document_lengths: tuple[int, ...] | None


def make_sample(pieces: Sequence[NDArray[Any]], options: SampleOptions) -> Sample:
    """Lay the pieces of documents end to end (up to ``S + 1`` tokens) and make inputs, labels and loss mask.

    Too few tokens are filled up with zeros that carry no loss, known by their position and not by their value. Ids
    below 0 in the data (what some tools write for padding) become 0 as inputs and carry no loss as labels; a padding
    token of the vocabulary stays what it is as an input.
    """
    s = options.sequence_length
    text = np.zeros(s + 1, np.int64)
    have = sum(map(len, pieces))
    np.concatenate([np.zeros(0, np.int64), *pieces], out=text[:have])
    if options.vocab_size is not None and int(text.max()) >= options.vocab_size:
        raise DataError(
            f"the data holds the token id {int(text.max())}; the vocabulary has {options.vocab_size} tokens. Use the "
            "tokenizer the data was made with, and a model of its vocabulary size."
        )
    tokens, labels = text[:-1], text[1:].copy()
    mask = np.ones(s, np.float32)
    mask[max(0, have - 1) :] = 0
    if options.pad_id >= 0:
        mask[labels == options.pad_id] = 0
    if text.min() < 0:
        mask[labels < 0] = 0
        labels[labels < 0] = 0
        tokens = np.maximum(tokens, 0)
    if options.eod_mask_loss:
        mask[tokens == options.eod_id] = 0
    documents = _document_lengths([len(piece) for piece in pieces], s) if options.document_mask else None
    return Sample(tokens, labels, mask, documents)


def _document_lengths(lengths: Sequence[int], s: int) -> tuple[int, ...]:
    """Lengths of the documents' parts among the first ``s`` tokens; what is missing is a last document of its own."""
    found: list[int] = []
    left = s
    for length in (*lengths, s):
        if part := min(length, left):
            found.append(part)
            left -= part
    return tuple(found)


class GPTDataset:
    """Samples of one split of one indexed data set, in shuffled order; the order is Megatron-LM's for equal seeds.

    Args:
        data: the token files.
        documents: the sequences of this split (each is a document).
        options: what samples are made of.
        num_samples: samples needed, in as many passes as that takes; None: one pass.
        seed: of the order.
        label: name of the split, for the cache.
        cache_dir: where indices are cached; by default the folder ``cache`` beside the data.
        drop_last_partial: whether the last tokens, too few for a sample, are dropped (training) or make a padded one.

    Attributes:
        plan: counts of samples and passes.
        order: hash of all that the order of samples depends on.

    Raises:
        DataError: no documents, or too few tokens for a sample.
    """

    def __init__(
        self,
        data: IndexedDataset,
        documents: range,
        options: SampleOptions,
        *,
        num_samples: int | None = None,
        seed: int = 1234,
        label: str = "train",
        cache_dir: str | os.PathLike[str] | None = None,
        drop_last_partial: bool = True,
    ) -> None:
        lengths = data.lengths[documents.start : documents.stop]
        if data.dtype.kind not in "iu":
            raise DataError(f"{data.prefix} holds {data.dtype} values; token ids are integers.")
        try:
            self.plan = SamplePlan.make(
                int(lengths.sum(dtype=np.int64)), options.sequence_length, num_samples, drop_last_partial
            )
        except DataError as error:
            raise DataError(f"{label} split of {data.prefix}: {error}") from error
        self.data = data
        self.options = options
        self._arguments = (data, documents, options, num_samples, seed, label, cache_dir, drop_last_partial)
        description = {
            "lengths": hashlib.blake2b(lengths.tobytes(), digest_size=16).hexdigest(),
            "documents": [documents.start, documents.stop],
            "sequence_length": options.sequence_length,
            "epochs": self.plan.num_epochs,
            "separate_final_epoch": self.plan.separate_final_epoch,
            "samples": self.plan.num_samples,
            "seed": seed,
        }
        self.order = hashlib.blake2b(json.dumps(description).encode(), digest_size=16).hexdigest()
        arrays = build_once(
            cache_dir or os.path.join(os.path.dirname(data.prefix), "cache"),
            f"{type(self).__name__}-{label}",
            description,
            lambda: build(data.lengths, documents, self.plan, seed),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __reduce__(self) -> tuple[Callable[..., GPTDataset], tuple[Any, ...]]:
        return _again, self._arguments  # another process maps the arrays again; they never travel

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: int | None) -> Sample:
        """Sample ``index`` in shuffled order. None is a sample without loss, which fills up a batch."""
        if index is None:
            return make_sample([], self.options)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        return make_sample(self.pieces(int(self.shuffle_index[index])), self.options)

    def pieces(self, sample: int) -> list[NDArray[Any]]:
        """The runs of tokens, one per document, that make up a sample (before shuffling): views of the file."""
        (first, start), (last, stop) = self.sample_index[sample].tolist(), self.sample_index[sample + 1].tolist()
        documents = self.document_index[first : last + 1].tolist()
        get = self.data.get
        if first == last:
            return [get(documents[0], start, stop - start + 1)]
        middle = [get(document) for document in documents[1:-1]]
        return [get(documents[0], start), *middle, get(documents[-1], 0, stop + 1)]


def _again(
    data: IndexedDataset,
    documents: range,
    options: SampleOptions,
    num_samples: int | None,
    seed: int,
    label: str,
    cache_dir: str | os.PathLike[str] | None,
    drop_last_partial: bool,
) -> GPTDataset:
    return GPTDataset(
        data,
        documents,
        options,
        num_samples=num_samples,
        seed=seed,
        label=label,
        cache_dir=cache_dir,
        drop_last_partial=drop_last_partial,
    )

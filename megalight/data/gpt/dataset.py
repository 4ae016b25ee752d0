"""The data set of language-model pre-training: documents laid end to end and cut into samples of equal length."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalight.data.cache import build_once
from megalight.data.gpt.fim import FillInMiddle
from megalight.data.gpt.index import SamplePlan, build, check_one_sample, of_split
from megalight.data.indexed import IndexedDataset
from megalight.errors import DataError
from megalight.types import TokenBatch


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How tokens become inputs, labels and masks.

    Attributes:
        sequence_length: number of tokens ``S`` of a sample.
        document_mask: whether samples carry the lengths of their documents. Attention then stays inside documents,
            and positions restart at each.
        eod_id: id of the end-of-document token, for ``eod_mask_loss``.
        eod_mask_loss: whether positions whose input is ``eod_id`` carry no loss. Their label is the first token of
            another document.
        pad_id: an id that means only padding: labels with this id carry no loss. Negative: there is none.
        vocab_size: a sample with an id at or above this raises, instead of failing in a device kernel. None: ids are
            not checked.
    """

    sequence_length: int
    document_mask: bool = False
    eod_id: int | None = None
    eod_mask_loss: bool = False
    pad_id: int = -1
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.eod_mask_loss and self.eod_id is None:
            raise DataError(
                "eod_mask_loss needs an end-of-document token, and none is known; give a tokenizer that has one."
            )


@dataclass(frozen=True)
class GPTSample:
    """One row of a batch.

    Attributes:
        tokens: ``[S]`` int64 inputs.
        labels: ``[S]`` int64: the token that follows each input.
        loss_mask: ``[S]`` float32: 1 where the label counts in the loss.
        document_lengths: lengths of the documents in ``tokens``, which sum to ``S``; None without ``document_mask``.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    document_lengths: tuple[int, ...] | None


def make_sample(pieces: Sequence[NDArray[Any]], options: SampleOptions) -> GPTSample:
    """Make inputs, labels and the loss mask from pieces of documents, ``S + 1`` tokens in total.

    If there are fewer tokens, zeros without loss fill the rest. Negative ids, which some tools write for padding,
    become 0 as inputs and carry no loss as labels. A padding token of the vocabulary (``pad_id``) stays as an input.

    Raises:
        DataError: an id is not in the vocabulary.
    """
    s = options.sequence_length
    # Zeros behind the tokens are the padding of a short sample.
    text = np.zeros(s + 1, np.int64)
    have = sum(map(len, pieces))
    np.concatenate([np.zeros(0, np.int64), *pieces], out=text[:have])
    if options.vocab_size is not None and int(text.max()) >= options.vocab_size:
        raise DataError(
            f"the data holds the token id {int(text.max())}; the vocabulary has {options.vocab_size} tokens. Use the "
            "tokenizer that the data was made with, and a model with its vocabulary size."
        )
    # A copy, because labels and inputs are changed separately below.
    tokens, labels = text[:-1], text[1:].copy()
    mask = np.ones(s, np.float32)
    mask[max(0, have - 1) :] = 0  # by position: a real token may also have the id 0
    if options.pad_id >= 0:
        mask[labels == options.pad_id] = 0
    if text.min() < 0:
        # The mask first: afterwards the ids are gone.
        mask[labels < 0] = 0
        labels[labels < 0] = 0
        tokens = np.maximum(tokens, 0)
    # After ids below 0 were replaced, which are no end of a document.
    if options.eod_mask_loss:
        mask[tokens == options.eod_id] = 0
    documents = _document_lengths([len(piece) for piece in pieces], s) if options.document_mask else None
    return GPTSample(tokens, labels, mask, documents)


def _document_lengths(lengths: Sequence[int], s: int) -> tuple[int, ...]:
    """Lengths of the documents among the first ``s`` tokens. Filled-up tokens are a last document of their own."""
    found: list[int] = []
    left = s
    for length in (*lengths, s):
        if part := min(length, left):
            found.append(part)
            left -= part
    return tuple(found)


class GPTDataset:
    """Samples of one split of a pair of token files, in shuffled order. Megatron-LM has the same order for equal seeds.

    Args:
        data: the token files.
        documents: the sequences of this split. Each sequence is a document.
        options: how samples are made.
        num_samples: number of samples needed; documents are repeated as often as this takes. None: one pass.
        seed: seed of the order.
        label: name of the split, for the cache and for messages.
        cache_dir: folder for cached indices; by default the folder ``cache`` beside the data.
        drop_last_partial: whether to drop the last tokens if they are too few for a sample (training). If not, they
            make a padded sample.
        fim: rearranges the documents of a sample, or None.

    Attributes:
        plan: number of samples and passes.
        order: hash of everything that the order of samples depends on.

    Raises:
        DataError: there are no documents, or too few tokens for one sample.
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
        fim: FillInMiddle | None = None,
    ) -> None:
        lengths = data.lengths[documents.start : documents.stop]
        if data.dtype.kind not in "iu":
            raise DataError(f"{data.prefix} holds {data.dtype} values; token ids are integers. Prepare the data again.")
        tokens = int(lengths.sum(dtype=np.int64))
        # Refused before anything is built or cached.
        with of_split(label, data.prefix):
            if drop_last_partial:
                check_one_sample(tokens, options.sequence_length)
            self.plan = SamplePlan.make(tokens, options.sequence_length, num_samples, drop_last_partial)
        self.data = data
        self.options = options
        self.seed = seed
        self.fim = fim
        self._arguments = (data, documents, options, num_samples, seed, label, cache_dir, drop_last_partial, fim)
        # What decides the order of samples: another value must find no cached indices.
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
        return _rebuild, self._arguments  # another process maps the cached arrays itself; they are not pickled

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: int | None) -> GPTSample:
        """Return sample ``index`` in shuffled order. None gives a sample without loss, which fills up a batch."""
        if index is None:
            return make_sample([], self.options)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        pieces = self.pieces(int(self.shuffle_index[index]))
        if self.fim is not None:
            # A stream for each sample: workers and resumed runs then draw the same.
            random = np.random.Generator(np.random.PCG64([self.seed, index]))
            pieces = self.fim(pieces, self.options.sequence_length + 1, random)
        return make_sample(pieces, self.options)

    def pieces(self, sample: int) -> list[NDArray[Any]]:
        """Return the parts of documents that make up a sample (its number before shuffling): views of the file."""
        # A sample begins where the one before it ends, one token earlier: that token is
        # label there and input here.
        (first, start), (last, stop) = self.sample_index[sample].tolist(), self.sample_index[sample + 1].tolist()
        documents = self.document_index[first : last + 1].tolist()
        get = self.data.get
        if first == last:
            # One more token than a sample has inputs: the last label.
            return [get(documents[0], start, stop - start + 1)]
        middle = [get(document) for document in documents[1:-1]]
        return [get(documents[0], start), *middle, get(documents[-1], 0, stop + 1)]


def _rebuild(
    data: IndexedDataset,
    documents: range,
    options: SampleOptions,
    num_samples: int | None,
    seed: int,
    label: str,
    cache_dir: str | os.PathLike[str] | None,
    drop_last_partial: bool,
    fim: FillInMiddle | None,
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
        fim=fim,
    )


def collate(samples: Sequence[GPTSample]) -> TokenBatch:
    """Stack samples to the rows of a batch."""
    # Either all samples carry lengths or none does.
    documents = tuple(sample.document_lengths for sample in samples if sample.document_lengths is not None)
    return TokenBatch(
        torch.from_numpy(np.stack([sample.tokens for sample in samples])),
        torch.from_numpy(np.stack([sample.labels for sample in samples])),
        torch.from_numpy(np.stack([sample.loss_mask for sample in samples])),
        documents or None,
    )

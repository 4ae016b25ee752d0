"""The data set of language-model pre-training: documents laid end to end and cut into samples of equal length."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalight.data.cache import CachedDataset, build_once, cache_folder, order_of
from megalight.data.indexed import IndexedDataset
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, nearest
from megalight.types import TokenBatch

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FIM:
    """How often and how texts are rearranged.

    Attributes:
        rate: probability that a document of a sample is rearranged.
        spm_rate: probability of the order SPM for a rearranged text; PSM otherwise.
        split: a token that separates the fragments of a document, such as files of a repository. A document that holds
            it is chosen with ``rate`` as a whole; then each of its fragments is rearranged with ``fragment_rate``.
        fragment_rate: see ``split``.
        no_prefix: texts that start with this are never rearranged.
        prefix_token: the token PRE.
        middle_token: the token MID.
        suffix_token: the token SUF.

    Raises:
        ConfigurationError: a probability is not between 0 and 1.
    """

    rate: float
    spm_rate: float = 0.5
    split: str | None = None
    fragment_rate: float = 0.5
    no_prefix: str | None = None
    prefix_token: str = "<fim_prefix>"
    middle_token: str = "<fim_middle>"
    suffix_token: str = "<fim_suffix>"

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate", "fragment_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"fim.{name} is {getattr(self, name)}; it must be between 0 and 1.")


class FillInMiddle:
    """Rearranges the documents of samples.

    Args:
        tokenizer: the tokenizer of the data.

    Raises:
        DataError: a token is not in the vocabulary, or the tokenizer has no end-of-document token.
    """

    def __init__(self, options: FIM, tokenizer: Tokenizer) -> None:
        def known(name: str) -> int:
            token = getattr(options, name)
            if token not in tokenizer.vocabulary:
                raise DataError(
                    f"fim.{name} is {token!r}, which is not in the vocabulary of the tokenizer."
                    + nearest(token, (name for name in tokenizer.vocabulary if "fim" in name.lower()))
                    + " Name one of its tokens, or train a tokenizer with it (--special-tokens)."
                )
            return tokenizer.vocabulary[token]

        self.options = options
        self.tokenizer = tokenizer
        self.prefix, self.middle, self.suffix = map(known, ("prefix_token", "middle_token", "suffix_token"))
        self.split = None if options.split is None else known("split")

    def __call__(self, pieces: Sequence[NDArray[Any]], size: int, random: np.random.Generator) -> list[Ids]:
        """Rearrange documents.

        New tokens and another tokenization change lengths. The result is cut to ``size``; if it is shorter, whoever
        makes the sample fills it up without loss.

        Args:
            pieces: the documents of a sample, with their end-of-document tokens.
            size: number of tokens that the sample can hold.
            random: the sample's own stream, so that the result does not depend on what was read before.
        """
        found: list[Ids] = []
        for piece in pieces:
            changed = self._document(piece.astype(np.int64), random)[:size]
            size -= len(changed)
            found.append(changed)
        return found

    def _document(self, ids: Ids, random: np.random.Generator) -> Ids:
        """Rearrange the texts between end-of-document tokens. Those tokens stay, also where several follow."""
        parts = []
        for part in _parts(ids, self.tokenizer.eod_id):
            # Not at a separator, which is a part of its own.
            chosen = len(part) > 0 and part[0] != self.tokenizer.eod_id and random.random() < self.options.rate
            parts.append(self._fragments(part, random) if chosen else part)
        return np.concatenate(parts) if parts else ids

    def _fragments(self, ids: Ids, random: np.random.Generator) -> Ids:
        if self.split is None or self.split not in ids:
            return self._permute(ids, random)
        parts = [
            self._permute(part, random)
            if part[0] != self.split and random.random() < self.options.fragment_rate
            else part
            for part in _parts(ids, self.split)
        ]
        return np.concatenate(parts)

    def _permute(self, ids: Ids, random: np.random.Generator) -> Ids:
        text = self.tokenizer.decode(ids.tolist())
        kept = self.options.no_prefix is not None and text.startswith(self.options.no_prefix)
        # A sample may begin or end inside a character. Its bytes would not survive decoding, so such text stays.
        if kept or "\ufffd" in text:
            return ids
        first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
        p, m, s = self.tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
        # Suffix first (SPM), or prefix first (PSM), as in https://arxiv.org/abs/2207.14255.
        if random.random() < self.options.spm_rate:
            order = [self.prefix, self.suffix, *s, self.middle, *p, *m]
        else:
            order = [self.prefix, *p, self.suffix, *s, self.middle, *m]
        return np.asarray(order, np.int64)


def _parts(ids: Ids, separator: int | None) -> list[Ids]:
    """Cut at a separator. Each separator is a part of its own; no part is empty."""
    places = np.flatnonzero(ids == separator) if separator is not None else np.zeros(0, np.int64)
    # Both sides of each separator are cut.
    parts = np.split(ids, np.unique(np.concatenate([places, places + 1])))
    return [part for part in parts if len(part)]


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
            sequence_length: tokens of a sample, without the extra last label.
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
    """Return the document, sample and shuffle index by name: which tokens make which sample.

    Documents are repeated for as many epochs as needed, shuffled, and laid end to end. Sample ``k`` is the ``s + 1``
    tokens from position ``k * s`` on, so neighbors share one token: the last label of one is the first input of the
    next. Samples are then visited in shuffled order. The same seed gives the same three arrays as Megatron-LM.
    """
    # One generator draws documents first, then samples: equality with Megatron-LM depends on this order.
    # `RandomState` gives the same stream in all versions of numpy.
    random = np.random.RandomState(seed)
    order = document_index(documents, plan, random)
    samples = sample_index(lengths, order, plan)
    return {"document_index": order, "sample_index": samples, "shuffle_index": shuffle_index(plan, random)}


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


class GPTDataset(CachedDataset):
    """Samples of one split of a pair of token files, in shuffled order. Megatron-LM has the same order for equal seeds.

    Args:
        documents: the sequences of this split. Each sequence is a document.
        options: how samples are made.
        num_samples: number of samples needed; documents are repeated as often as this takes. None: one pass.
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
        self.order = order_of(description)
        arrays = build_once(
            cache_folder(cache_dir, data.prefix),
            f"{type(self).__name__}-{label}",
            description,
            lambda: build(data.lengths, documents, self.plan, seed),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

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

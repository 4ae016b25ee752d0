"""The data set that BERT is pre-trained on: pairs of segments in order or swapped, with whole words masked."""

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

from megalight.data.bert.batch import IGNORED, BertBatch
from megalight.data.bert.index import sample_runs
from megalight.data.bert.masking import mask_words
from megalight.data.bert.words import Words
from megalight.data.cache import build_once
from megalight.data.indexed import IndexedDataset
from megalight.errors import DataError

SPECIALS = 3
"""Tokens of a sample that are not text: one before the first segment, one after each."""

IN_ORDER, SWAPPED = 0, 1


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How sentences become samples.

    Attributes:
        sequence_length: tokens of a sample, at most.
        words: the vocabulary.
        mask_probability: part of the tokens to predict.
        short_probability: part of the samples that are shorter than they could be.
        eod_id: a token that ends documents in the files; it is left out. None: there is none.
    """

    sequence_length: int
    words: Words
    mask_probability: float = 0.15
    short_probability: float = 0.1
    eod_id: int | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < SPECIALS + 2:
            raise DataError(
                f"sequence_length is {self.sequence_length}; a pair of segments takes at least {SPECIALS + 2} tokens."
            )
        for name in ("mask_probability", "short_probability"):
            if not 0 <= getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1.")


@dataclass(frozen=True)
class PairSample:
    """One sample: see :class:`~megalight.data.bert.batch.BertBatch`."""

    tokens: NDArray[np.int64]
    token_types: NDArray[np.int64]
    labels: NDArray[np.int64]
    order: int


def make_pair(sentences: Sequence[NDArray[Any]], options: PairOptions, generator: np.random.Generator) -> PairSample:
    """Two segments of a run of sentences: in order or, half of the time, swapped (ALBERT,
    https://arxiv.org/abs/1909.11942), in special tokens, with whole words masked.

    Where there are too many tokens, the longer segment loses some, at either end at random.
    """
    words = options.words
    middle = int(generator.integers(1, len(sentences)))
    segments = [_text(sentences[:middle], options), _text(sentences[middle:], options)]
    sizes = _fit(len(segments[0]), len(segments[1]), options.sequence_length - SPECIALS)
    for k, size in enumerate(sizes):
        start = int(generator.binomial(len(segments[k]) - size, 0.5))
        segments[k] = segments[k][start : start + size]
    order = int(generator.integers(2))
    first, second = segments if order == IN_ORDER else segments[::-1]
    tokens = np.concatenate([[words.classify], first, [words.separate], second, [words.separate]])
    types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
    if tokens.max() >= len(words.special) or tokens.min() < 0:
        raise DataError(
            f"the data holds the token ids {int(tokens.min())} to {int(tokens.max())}; the vocabulary has "
            f"{len(words.special)} tokens. Use the tokenizer the data was made with."
        )
    hidden, labels = mask_words(tokens, words, options.mask_probability, generator)
    return PairSample(hidden, types, labels, order)


def _text(sentences: Sequence[NDArray[Any]], options: PairOptions) -> NDArray[np.int64]:
    text = np.concatenate(list(sentences)).astype(np.int64)
    return text if options.eod_id is None else text[text != options.eod_id]


def _fit(first: int, second: int, limit: int) -> tuple[int, int]:
    """The sizes of two segments after tokens have been taken from the longer one until both fit."""
    if first + second <= limit:
        return first, second
    shorter = min(first, second, limit // 2)
    return (shorter, limit - shorter) if first < second else (limit - shorter, shorter)


def filler(words: Words) -> PairSample:
    """A sample without loss: an empty pair, which fills up a batch."""
    tokens = np.array([words.classify, words.separate, words.separate])
    return PairSample(tokens, np.array([0, 0, 1]), np.full(3, IGNORED), IGNORED)


class BertDataset:
    """Samples of one split of one indexed data set, in shuffled order.

    Everything that is random in a sample follows from the seed and the sample's number, so that it does not depend on
    who reads it when. Another pass over the documents makes other samples.

    Args:
        data: the token files, one sequence per sentence.
        sentences: the sequences of this split: whole documents.
        options: what samples are made of.
        num_samples: samples needed, in as many passes as that takes; None: one pass.
        seed: of order, pairs and masks.
        label: name of the split, for the cache.
        cache_dir: where indices are cached; by default the folder ``cache`` beside the data.

    Attributes:
        order: hash of all that the samples depend on.

    Raises:
        DataError: no document of two sentences, or files that do not hold token ids.
    """

    def __init__(
        self,
        data: IndexedDataset,
        sentences: range,
        options: PairOptions,
        *,
        num_samples: int | None = None,
        seed: int = 1234,
        label: str = "train",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if data.dtype.kind not in "iu":
            raise DataError(f"{data.prefix} holds {data.dtype} values; token ids are integers.")
        self.data = data
        self.options = options
        self.seed = seed
        self._arguments = (data, sentences, options, num_samples, seed, label, cache_dir)
        lengths = data.lengths[sentences.start : sentences.stop]
        begin, end = np.searchsorted(data.documents, [sentences.start, sentences.stop])
        documents = data.documents[begin : end + 1]
        description = {
            "lengths": hashlib.blake2b(lengths.tobytes() + documents.tobytes(), digest_size=16).hexdigest(),
            "sequence_length": options.sequence_length,
            "short_probability": options.short_probability,
            "seed": seed,
        }
        facts = [description, options.mask_probability]  # more samples begin with the same ones
        self.order = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
        try:
            self.runs = build_once(
                cache_dir or os.path.join(os.path.dirname(data.prefix), "cache"),
                f"{type(self).__name__}-{label}",
                {**description, "first": sentences.start, "samples": num_samples},
                lambda: {
                    "runs": sentences.start
                    + sample_runs(
                        lengths,
                        documents - sentences.start,
                        options.sequence_length - SPECIALS,
                        options.short_probability,
                        num_samples,
                        seed,
                    )
                },
            )["runs"]
        except DataError as error:
            raise DataError(f"{label} split of {data.prefix}: {error}") from error

    def __reduce__(self) -> tuple[Callable[..., BertDataset], tuple[Any, ...]]:
        return _again, self._arguments  # another process maps the arrays again; they never travel

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int | None) -> PairSample:
        """Sample ``index`` in shuffled order. None is a sample without loss, which fills up a batch."""
        if index is None:
            return filler(self.options.words)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        first, last = self.runs[index].tolist()
        generator = np.random.Generator(np.random.PCG64([self.seed, 1, index]))
        return make_pair([self.data.get(k) for k in range(first, last)], self.options, generator)


def _again(
    data: IndexedDataset,
    sentences: range,
    options: PairOptions,
    num_samples: int | None,
    seed: int,
    label: str,
    cache_dir: str | os.PathLike[str] | None,
) -> BertDataset:
    return BertDataset(data, sentences, options, num_samples=num_samples, seed=seed, label=label, cache_dir=cache_dir)


def collate(samples: Sequence[PairSample]) -> BertBatch:
    """Samples end to end."""
    batch = BertBatch(
        torch.from_numpy(np.concatenate([sample.tokens for sample in samples])),
        torch.from_numpy(np.concatenate([sample.token_types for sample in samples])),
        torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        torch.tensor([sample.order for sample in samples]),
        tuple(len(sample.tokens) for sample in samples),
    )
    return batch.with_rows()

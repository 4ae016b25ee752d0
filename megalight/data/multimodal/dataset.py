"""The data set of conversations with images: whole conversations, packed into rows of equal length."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalight.data.chat.dataset import PackedDataset, PackOptions
from megalight.data.corpus import Corpus
from megalight.data.gpt.dataset import Sample
from megalight.data.gpt.dataset import collate as collate_text
from megalight.data.multimodal.batch import Images, ImageTextBatch
from megalight.data.multimodal.images import ImageForm, decode
from megalight.errors import ConfigurationError, DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImagePackOptions(PackOptions):
    """How conversations with images become rows.

    Attributes:
        form: how an image becomes patches; each patch is a token.
        image_token: the id of these tokens.

    Raises:
        ConfigurationError: ``too_long`` would cut through images.
    """

    form: ImageForm
    image_token: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.too_long not in ("drop", "raise"):
            raise ConfigurationError(
                f"too_long is {self.too_long!r}; conversations with images are not cut: choose 'drop' or 'raise'."
            )


@dataclass(frozen=True)
class ImageSample(Sample):
    """One row of a batch, with its images.

    Attributes:
        pixels: ``[rows, values]`` uint8: the patches of all images of the row.
        source: ``[S]`` int64: for each token, the row of ``pixels`` that it stands for, -1 for text, or ``NEWLINE``.
        lengths: rows of each image.
    """

    pixels: NDArray[np.uint8]
    source: NDArray[np.int64]
    lengths: tuple[int, ...]


class ImageDataset(PackedDataset):
    """Rows of conversations with images; see :class:`~megalight.data.chat.dataset.PackedDataset`.

    Rows are packed by their number of tokens, of which an image has one for each patch. Images are decoded when a row
    is read. Conversations without images, of other corpora, may be among them.

    Raises:
        DataError: no conversation can be used, one is too long and ``too_long`` is ``raise``, or (in reading) an image
            is damaged.
    """

    options: ImagePackOptions

    def __reduce__(self) -> tuple[Callable[..., ImageDataset], tuple[Any, ...]]:
        return _rebuild, self._arguments

    def pieces(self, documents: range) -> NDArray[np.int64]:
        """Return sequence, first token and number of positions of each conversation, with the tokens of images."""
        corpus, options = self.corpus, self.options
        if corpus.images is None:
            return super().pieces(documents)
        sequences = np.arange(documents.start, documents.stop, dtype=np.int64)
        counts = np.diff(corpus.images.documents)[documents.start : documents.stop]
        positions = corpus.data.lengths[documents.start : documents.stop].astype(np.int64) - 1
        positions += counts * (options.form.num_tokens - 1)
        long = positions > options.sequence_length
        if long.any():
            worst = int(positions.argmax())
            told = (
                f"{self._label} split of {corpus.data.prefix}: {int(long.sum())} of {len(long)} conversations are too "
                f"long, such as number {sequences[worst]} with {positions[worst] + 1} tokens, "
                f"{counts[worst] * options.form.num_tokens} of them of images; sequence_length "
                f"{options.sequence_length} takes {options.sequence_length + 1}"
            )
            if options.too_long == "raise":
                raise DataError(f"{told}. Raise sequence_length, or leave them out with too_long='drop'.")
            log.warning("%s. They are left out.", told)
        kept = ~long & (positions > 0)
        if not kept.any():
            raise DataError(
                f"{self._label} split of {corpus.data.prefix}: no conversation can be used with sequence_length "
                f"{options.sequence_length}, where an image has {options.form.num_tokens} tokens. Raise "
                "sequence_length, or prepare more data."
            )
        return np.stack([sequences, np.zeros_like(sequences), positions], axis=1)[kept]

    def _row(self, items: NDArray[np.int64]) -> ImageSample:
        options, images = self.options, self.corpus.images
        s, form = options.sequence_length, options.form
        source, pixels = np.full(s, -1, np.int64), list[NDArray[np.uint8]]()
        if images is None:
            text = super()._row(items)
        else:
            tokens, labels, mask = np.zeros(s, np.int64), np.zeros(s, np.int64), np.zeros(s, np.float32)
            lengths, at = list[int](), 0
            for sequence, _, size in items.tolist():
                ids = self.corpus.data.get(sequence).astype(np.int64)
                assert self.corpus.loss is not None
                # One token for an image becomes one for each patch, and a newline.
                times = np.where(ids == options.image_token, form.num_tokens, 1)
                ids, loss = np.repeat(ids, times), np.repeat(self.corpus.loss.get(sequence), times)
                here = slice(at, at + size)
                tokens[here], labels[here] = ids[:-1], ids[1:]
                # The model reads features there, and has none to predict.
                mask[here] = loss[1:] * (ids[1:] != options.image_token)
                first = len(pixels)
                pixels += self._images(sequence)
                own = form.sources(len(pixels))[first * form.num_tokens :]
                # A last token of an image may only be a label, so that tokens can be fewer than rows.
                places = np.flatnonzero(ids[:-1] == options.image_token)
                source[at + places] = own[: len(places)]
                lengths.append(size)
                at += size
            if at < s:
                lengths.append(s - at)
            text = Sample(tokens, labels, mask, tuple(lengths))
        values = form.channels * form.patch**2
        joined = np.concatenate(pixels) if pixels else np.zeros((0, values), np.uint8)
        return ImageSample(
            text.tokens, text.labels, text.loss_mask, text.document_lengths, joined, source, tuple(map(len, pixels))
        )

    def _images(self, sequence: int) -> list[NDArray[np.uint8]]:
        images = self.corpus.images
        assert images is not None
        first, last = images.documents[sequence : sequence + 2].tolist()
        return [
            self.options.form.patches(decode(images.get(i).tobytes(), f"{images.prefix}, image {i}"))
            for i in range(first, last)
        ]


def collate(samples: Sequence[ImageSample]) -> ImageTextBatch:
    """Stack samples to the rows of a batch, with the images of all of them end to end."""
    text = collate_text(samples)
    starts = np.cumsum([0, *(len(sample.pixels) for sample in samples)])
    source = np.stack(
        [np.where(x.source >= 0, x.source + start, x.source) for x, start in zip(samples, starts, strict=False)]
    )
    lengths = tuple(length for sample in samples for length in sample.lengths)
    images = Images(
        torch.from_numpy(np.concatenate([sample.pixels for sample in samples])),
        torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)])),
        lengths,
        tuple(len(sample.lengths) for sample in samples),
    )
    return ImageTextBatch(
        text.tokens,
        text.labels,
        text.loss_mask,
        text.document_lengths,
        images=images,
        source=torch.from_numpy(source),
    )


def _rebuild(
    corpus: Corpus,
    documents: range,
    options: ImagePackOptions,
    num_samples: int | None,
    seed: int,
    label: str,
    cache_dir: str | os.PathLike[str] | None,
) -> ImageDataset:
    return ImageDataset(
        corpus, documents, options, num_samples=num_samples, seed=seed, label=label, cache_dir=cache_dir
    )

"""The data set of conversations with images: whole conversations, packed into rows of equal length."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalight.data.cache import build_once
from megalight.data.chat.dataset import PackedDataset, PackOptions
from megalight.data.corpus import SCAN_LIMIT
from megalight.data.gpt.dataset import GPTSample
from megalight.data.gpt.dataset import collate as collate_text
from megalight.data.indexed import IndexedDataset, paths
from megalight.data.multimodal.batch import ImageTextBatch, document_positions, runs_of
from megalight.data.multimodal.images import Images, decode, measure
from megalight.data.multimodal.template import ImageFormat, ImagePatches, shifted, sources
from megalight.errors import ConfigurationError, DataError
from megalight.first_rank import only_first

log = logging.getLogger(__name__)
log.addFilter(only_first)


@dataclass(frozen=True, kw_only=True)
class ImagePackOptions(PackOptions):
    """How conversations with images become rows.

    Attributes:
        form: how an image becomes patches and tokens.
        image_token: the id of these tokens.
        video_token: the id that stands for videos, which are not read; None: the model has none.

    Raises:
        ConfigurationError: ``too_long`` would cut through images.
    """

    form: ImageFormat
    image_token: int
    video_token: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.too_long not in ("drop", "raise"):
            raise ConfigurationError(
                f"too_long is {self.too_long!r}; conversations with images are not cut: choose 'drop' or 'raise'."
            )


@dataclass(frozen=True)
class ImageSample(GPTSample):
    """One row of a batch, with its images.

    Attributes:
        source: ``[S]`` int64: for each token, the row of features of these that it stands for, -1 for text,
            ``NEWLINE``, or a mixture.
        axis_positions: ``[3, S]`` int64: positions of the tokens on several axes, or None.
    """

    cuts: tuple[ImagePatches, ...]
    source: NDArray[np.int64]
    axis_positions: NDArray[np.int64] | None
    form: ImageFormat


class ImageDataset(PackedDataset):
    """Rows of conversations with images; see :class:`~megalight.data.chat.dataset.PackedDataset`.

    Rows are packed by their number of tokens, with those of images. Images are decoded when a row is read; where tokens
    depend on their size, each is opened once before, when rows are made. Conversations without images, of other
    corpora, may be among them.

    Raises:
        DataError: no conversation can be used, one is too long and ``too_long`` is ``raise``, one or a text of a corpus
            without images has the token of images, or (in reading) an image is damaged, or a conversation has a video.
    """

    options: ImagePackOptions

    def measured(self) -> dict[str, Any]:
        """Return which images are measured: texts with others, or of earlier files, may be as long as these."""
        images = self.corpus.images
        if images is None:
            return {}
        facts = [images.documents.tobytes(), images.lengths.tobytes()]
        if self.options.form.fixed_tokens is None:
            facts.append(self._sizes.tobytes())
        return {"images": hashlib.blake2b(b"".join(facts), digest_size=16).hexdigest()}

    @cached_property
    def _sizes(self) -> NDArray[np.int32]:
        """Width and height of each image, ``[images, 2]``: measured once for all splits and options.

        Rows are known by these sizes, so that other images never take theirs. Sizes are known by the path of the file,
        its length and the time of its last change: reading all bytes of images before each run would take minutes.
        """
        images = self.corpus.images
        assert images is not None
        path = os.path.realpath(paths(images.prefix)[0])
        state = os.stat(path)
        description = {
            "file": path,
            "bytes": state.st_size,
            "changed": state.st_mtime_ns,
            "lengths": hashlib.blake2b(images.lengths.tobytes(), digest_size=16).hexdigest(),
        }
        return build_once(self.cache_folder, "image-sizes", description, lambda: {"sizes": _measured(images)})["sizes"]

    def pieces(self, documents: range) -> NDArray[np.int64]:
        """Return sequence, first token and number of positions of each conversation, with the tokens of images."""
        corpus, options = self.corpus, self.options
        if corpus.images is None:
            self._check_without_images(documents)
            return super().pieces(documents)
        sequences = np.arange(documents.start, documents.stop, dtype=np.int64)
        of_images, strange = self._image_tokens(documents)
        counts = np.diff(corpus.images.documents)[documents.start : documents.stop]
        positions = corpus.data.lengths[documents.start : documents.stop].astype(np.int64) - 1
        positions += of_images - counts
        long = positions > options.sequence_length
        if long.any():
            worst = int(positions.argmax())
            told = (
                f"{self._label} split of {corpus.data.prefix}: {int(long.sum())} of {len(long)} conversations are too "
                f"long, such as number {sequences[worst]} with {positions[worst] + 1} tokens, "
                f"{of_images[worst]} of them of images; sequence_length "
                f"{options.sequence_length} takes {options.sequence_length + 1}"
            )
            if options.too_long == "raise":
                raise DataError(f"{told}. Raise sequence_length, or leave them out with too_long='drop'.")
            log.warning("%s. They are left out.", told)
        kept = ~long & ~strange & (positions > 0)
        if not kept.any():
            most = options.form.fixed_tokens
            size = f"an image has {most}" if most is not None else f"images of one have up to {of_images.max()}"
            raise DataError(
                f"{self._label} split of {corpus.data.prefix}: no conversation can be used with sequence_length "
                f"{options.sequence_length}, where {size} tokens. Raise sequence_length, or prepare more data."
            )
        return np.stack([sequences, np.zeros_like(sequences), positions], axis=1)[kept]

    def _check_without_images(self, documents: range) -> None:
        """Refuse text with places of images that nobody has read, before rows are made."""
        if self.corpus.loss is None and self.corpus.data.num_tokens > SCAN_LIMIT:
            return  # rows are checked when they are read
        for sequence in documents:
            self._check_text(sequence, self.corpus.data.get(sequence))

    def _check_text(self, sequence: int, ids: NDArray[Any]) -> None:
        """Refuse tokens that stand for an image or a video, where there is none: the model would read their embedding.

        Raises:
            DataError: there is one.
        """
        options, prefix = self.options, self.corpus.data.prefix
        if (ids == options.image_token).any():
            again = (
                "Prepare them again with megalight prepare --multimodal; --chat reads no images."
                if self.corpus.loss is not None
                else "Prepare the text again with megalight prepare, where the names of such tokens are ordinary text "
                "(those of other models with --special-as-text)."
            )
            raise DataError(
                f"{prefix}: {self._kind} {sequence} has the token {options.image_token} of images, and these files "
                f"have no images. {again}"
            )
        self._check_videos(sequence, ids)

    def _check_videos(self, sequence: int, ids: NDArray[Any]) -> None:
        token = self.options.video_token
        if token is not None and (ids == token).any():
            raise DataError(
                f"{self.corpus.data.prefix}: {self._kind} {sequence} has the token {token} of videos, and videos are "
                "not read. Leave it out."
            )

    @property
    def _kind(self) -> str:
        return "document" if self.corpus.loss is None else "conversation"

    def _image_tokens(self, documents: range) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tokens of the images of each conversation, and whether one of these has a shape that is not read.

        Raises:
            DataError: one has, and ``too_long`` is ``raise``.
        """
        images, form = self.corpus.images, self.options.form
        assert images is not None
        bounds = images.documents[documents.start : documents.stop + 1].astype(np.int64)
        none = np.zeros(len(bounds) - 1, np.bool_)
        if form.fixed_tokens is not None:
            return np.diff(bounds) * form.fixed_tokens, none
        tokens, strange, told = np.zeros_like(bounds[1:]), none, ""
        for number in range(len(tokens)):
            own = form.among(int(bounds[number + 1] - bounds[number]))
            for image in range(bounds[number], bounds[number + 1]):
                try:
                    tokens[number] += own.num_tokens(*self._sizes[image].tolist())
                except DataError as error:
                    place = f"{images.prefix}, image {image}"
                    if self.options.too_long == "raise":
                        raise DataError(
                            f"{place}: {error} Or leave its conversation out with too_long='drop'."
                        ) from None
                    strange[number], told = True, f"{place}: {error}"
        if told:
            log.warning(
                "%s split: %d conversations are left out for their images, such as %s", self._label, strange.sum(), told
            )
        return tokens, strange

    def _row(self, items: NDArray[np.int64]) -> ImageSample:
        options, images = self.options, self.corpus.images
        s, form = options.sequence_length, options.form
        source, cuts, features, mixed = np.full(s, -1, np.int64), list[ImagePatches](), 0, 0
        grids: list[tuple[int, tuple[int, int]]] = []
        if images is None:
            text = super()._row(items)
            for sequence, first, size in items.tolist():
                self._check_text(sequence, self.corpus.data.get(sequence, first, size + 1))
        else:
            tokens, labels, mask = np.zeros(s, np.int64), np.zeros(s, np.int64), np.zeros(s, np.float32)
            lengths, at = list[int](), 0
            for sequence, _, size in items.tolist():
                ids = self.corpus.data.get(sequence).astype(np.int64)
                self._check_videos(sequence, ids)
                assert self.corpus.loss is not None
                found = self._images(sequence)
                # One token for an image becomes as many as it has.
                times = np.ones_like(ids)
                markers = np.flatnonzero(ids == options.image_token)
                times[markers] = [len(cut.source) for cut in found]
                begins = (np.cumsum(times) - times)[markers]
                grids += [(at + int(start), cut.grid) for start, cut in zip(begins, found, strict=True) if start < size]
                ids, loss = np.repeat(ids, times), np.repeat(self.corpus.loss.get(sequence), times)
                here = slice(at, at + size)
                tokens[here], labels[here] = ids[:-1], ids[1:]
                # The model reads features there, and has none to predict.
                mask[here] = loss[1:] * (ids[1:] != options.image_token)
                own = sources(found, features, mixed)
                cuts += found
                features += sum(cut.features for cut in found)
                mixed += sum(len(cut.mixed_rows) for cut in found)
                # A last token of an image may only be a label, so that tokens can be fewer than rows.
                places = np.flatnonzero(ids[:-1] == options.image_token)
                source[at + places] = own[: len(places)]
                lengths.append(size)
                at += size
            if at < s:
                lengths.append(s - at)
            text = GPTSample(tokens, labels, mask, tuple(lengths))
        axes = None
        if form.axes:
            assert text.document_lengths is not None  # attention stays inside of conversations
            axes = document_positions(text.document_lengths, grids)
        return ImageSample(
            text.tokens, text.labels, text.loss_mask, text.document_lengths, tuple(cuts), source, axes, form
        )

    def _images(self, sequence: int) -> list[ImagePatches]:
        images = self.corpus.images
        assert images is not None
        first, last = images.documents[sequence : sequence + 2].tolist()
        form = self.options.form.among(last - first)
        return [form.cut(decode(images.get(i).tobytes(), f"{images.prefix}, image {i}")) for i in range(first, last)]


def collate(samples: Sequence[ImageSample]) -> ImageTextBatch:
    """Stack samples to the rows of a batch, with the images of all of them end to end."""
    text = collate_text(samples)
    rows = np.cumsum([0, *(sum(cut.features for cut in sample.cuts) for sample in samples)])
    mixed = np.cumsum([0, *(sum(len(cut.mixed_rows) for cut in sample.cuts) for sample in samples)])
    source = np.stack([shifted(x.source, first, other) for x, first, other in zip(samples, rows, mixed, strict=False)])
    images = Images.of_cuts([sample.cuts for sample in samples], samples[0].form)
    axes = [sample.axis_positions for sample in samples if sample.axis_positions is not None]
    batch = ImageTextBatch(
        text.tokens,
        text.labels,
        text.loss_mask,
        text.document_lengths,
        images=images,
        source=torch.from_numpy(source),
        runs=runs_of(source, images),
        axis_positions=torch.from_numpy(np.stack(axes)) if axes else None,
    )
    return batch.with_rows()


def _measured(images: IndexedDataset) -> NDArray[np.int32]:
    """Return width and height of each image."""
    sizes = [measure(images.get(number).tobytes(), f"{images.prefix}, image {number}") for number in range(len(images))]
    return np.array(sizes, np.int32).reshape(-1, 2)

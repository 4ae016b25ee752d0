"""Batches of text and images: rows of tokens, some of which stand for patches of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.multimodal.images import Images
from megalight.data.multimodal.template import (
    MIXED,
    NEWLINE,
    ImageFormat,
    ImagePatches,
    axis_positions,
    shifted,
    sources,
)
from megalight.errors import DataError
from megalight.types import PackedSequences, TokenBatch

Runs = tuple[tuple[tuple[int, int], ...], ...]
"""For each row, where the tokens of each image are: the first one, and their number."""


@dataclass(frozen=True, eq=False)
class ImageTextBatch(TokenBatch):
    """Rows of tokens, of which some stand for patches of images.

    Attributes:
        source: ``[B, S]`` int64: for each token, the row of features of ``images`` that replaces it, -1 for text,
            ``NEWLINE``: a learned row replaces it, or ``MIXED`` less the number of a mixture.
        runs: where the tokens of each image are, for models in which these see each other. Without need they are left
            out: they differ from batch to batch, and a recorded step is of one form. A context-parallel share has none.
        newlines: whether a token stands for a learned row; None: it is unknown. Copies from the host know it.
    """

    images: Images | None = None
    source: Tensor | None = None
    runs: Runs = field(default=(), kw_only=True)
    newlines: bool | None = field(default=None, kw_only=True)

    @property
    def has_newlines(self) -> bool | None:
        """Whether a token stands for a learned row; None if only a device knows it, for which the host would wait."""
        source = self.parts()[1]
        return bool((source == NEWLINE).any()) if self.newlines is None and source.is_cpu else self.newlines

    @property
    def sequences(self) -> PackedSequences:
        """How the tokens divide into sequences, with those of each image as a run; see :class:`TokenBatch`."""
        width, found = self.tokens.shape[1], super().sequences
        runs = tuple((row * width + first, count) for row, own in enumerate(self.runs) for first, count in own)
        return replace(found, runs=runs) if runs else found

    def parts(self) -> tuple[Images, Tensor]:
        """Return images and sources, which every such batch has; samples may be without images."""
        assert self.images is not None and self.source is not None
        return self.images, self.source

    def split(self, size: int) -> list[TokenBatch]:
        """Split into micro-batches of ``size`` rows, each with its own images.

        Raises:
            DataError: this batch is a context-parallel share.
        """
        images, source = self.parts()
        parts: list[TokenBatch] = []
        for number, text in enumerate(super().split(size)):
            start, stop = number * size, number * size + len(text)
            held, before, mixed = images.of_samples(start, stop)
            own = shifted(source[start:stop], -before, -mixed)
            parts.append(_with(text, held, own, self.runs[start:stop], self.newlines))
        return parts

    def context_share(self, rank: int, size: int, multiple: int = 1, ahead: int = 0) -> TokenBatch:
        """Take one rank's part of every sequence; images stay whole."""
        if size == 1:
            return self
        images, source = self.parts()
        text = super().context_share(rank, size, multiple, ahead)
        # Cut in the place of tokens. Shifted by one, as padding gets 0.
        moved = replace(self, tokens=source + 1)
        share = TokenBatch.context_share(moved, rank, size, multiple).tokens - 1
        return _with(text, images, share, newlines=self.newlines)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """Copy to ``device``. Copies from page-locked memory never make the host wait.

        Raises:
            DataError: what leaves the host stands for rows of features or positions that are not there.
        """
        images, source = self.parts()
        if source.is_cpu and self.share is None:
            check_references(self.tokens, source, images)
        non_blocking = non_blocking or self.tokens.is_pinned()
        moved = source.to(device, non_blocking=non_blocking)
        text, own = super().to(device, non_blocking), images.to(device, non_blocking)
        return _with(text, own, moved, self.runs, self.has_newlines)

    def pin_memory(self) -> TokenBatch:
        """Copy to page-locked host memory."""
        images, source = self.parts()
        text, own = super().pin_memory(), images.map(Tensor.pin_memory)
        return _with(text, own, source.pin_memory(), self.runs, self.newlines)


def _with(
    text: TokenBatch, images: Images, source: Tensor, runs: Runs = (), newlines: bool | None = None
) -> ImageTextBatch:
    # All fields of a text batch, so that one that is added there is not lost here.
    of_text = {each.name: getattr(text, each.name) for each in fields(TokenBatch)}
    return ImageTextBatch(**of_text, images=images, source=source, runs=runs, newlines=newlines)


def runs_of(source: NDArray[np.int64], images: Images) -> Runs:
    """Return where the tokens of each image are: for each row the first one, and their number.

    Args:
        source: ``[B, S]``, as in :class:`ImageTextBatch`.
    """
    ends = np.cumsum(images.lengths, dtype=np.int64) // images.joined
    found = []
    for row in source:
        # An image's number for each of its tokens. A newline, which ends an image, is no part of its run.
        owner = np.where(row >= 0, np.searchsorted(ends, row, side="right"), -1)
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        counts = np.diff(starts, append=len(row))
        pairs = zip(starts.tolist(), counts.tolist(), strict=True)
        found.append(tuple((start, count) for start, count in pairs if owner[start] >= 0))
    return tuple(found)


def with_images(
    text: TokenBatch,
    images: Images,
    image_token: int,
    *,
    class_token: bool,
    newline: bool = False,
    mutual: bool = False,
) -> ImageTextBatch:
    """Join rows of tokens and their images: each image takes the next image tokens of its row, one for each patch.

    Args:
        text: the rows. Each image is as many image tokens as it has patches, or squares of patches that are joined.
        images: the images of these rows.
        image_token: the id of image tokens.
        class_token: whether the first row of an image is its class token, which no token stands for.
        newline: whether each image has one more token, its last, for a learned row.
        mutual: whether the tokens of an image see each other.

    Raises:
        DataError: a row has another number of image tokens than its images have patches.
    """
    places = text.tokens == image_token
    found = places.sum(1).tolist()
    rows = [end // images.joined for end in accumulate(images.lengths, initial=0)]
    source = torch.full_like(text.tokens, -1)
    if len(images.counts) != len(text):
        raise DataError(f"there are {len(text)} rows of tokens, and images of {len(images.counts)} rows.")
    bounds = [0, *accumulate(images.counts)]
    for number, count in enumerate(found):
        own = [torch.arange(rows[i] + class_token, rows[i + 1]) for i in range(bounds[number], bounds[number + 1])]
        patches, ends = sum(map(len, own)), len(own) * newline
        if patches + ends != count:
            raise DataError(
                f"row {number} has {count} image tokens (id {image_token}), and its {len(own)} images have {patches} "
                f"patches; each patch needs one token{', and each image one more' if newline else ''}."
            )
        if newline:
            own = [F.pad(each, (0, 1), value=NEWLINE) for each in own]
        if own:
            source[number, places[number]] = torch.cat(own)
    return _with(text, images, source, runs_of(source.numpy(), images) if mutual else ())


def with_cuts(
    text: TokenBatch, cuts: Sequence[Sequence[ImagePatches]], image_token: int, form: ImageFormat
) -> ImageTextBatch:
    """Join rows of tokens and their images, of which each takes the next image tokens of its row.

    Args:
        cuts: the images of each row.
        image_token: the id of image tokens.

    Raises:
        DataError: a row has another number of image tokens than its images.
    """
    images = Images.of_cuts(cuts, form)
    if len(cuts) != len(text):
        raise DataError(f"there are {len(text)} rows of tokens, and images of {len(cuts)} rows.")
    source, axes, first, mixed = torch.full_like(text.tokens, -1), list[Tensor](), 0, 0
    for number, (tokens, own) in enumerate(zip(text.tokens, cuts, strict=True)):
        places, needed = (tokens == image_token).nonzero().flatten(), sum(len(cut.source) for cut in own)
        if len(places) != needed:
            raise DataError(
                f"row {number} has {len(places)} image tokens (id {image_token}), and its {len(own)} images have "
                f"{needed}."
            )
        source[number, places] = torch.from_numpy(sources(own, first, mixed))
        first += sum(cut.features for cut in own)
        mixed += sum(len(cut.mixed_rows) for cut in own)
        if form.axes:
            lengths = text.document_lengths[number] if text.document_lengths else (len(tokens),)
            begins = accumulate((len(cut.source) for cut in own[:-1]), initial=0)
            grids = [(int(places[at]), cut.grid) for at, cut in zip(begins, own, strict=True)] if own else []
            axes.append(torch.from_numpy(document_positions(lengths, grids)))
    joined = _with(text, images, source, runs_of(source.numpy(), images) if form.mutual else ())
    return replace(joined, axis_positions=torch.stack(axes)) if axes else joined


def document_positions(lengths: Sequence[int], images: Sequence[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """Return positions ``[3, S]`` of the tokens of a row of documents, which start from 0 in each document.

    Args:
        images: the first token of each image in the row, and its rows and columns of tokens.
    """
    found, start = [], 0
    for length in lengths:
        own = [(at - start, grid) for at, grid in images if start <= at < start + length]
        found.append(axis_positions(length, own))
        start += length
    return np.concatenate(found, axis=1)


ADVICE = "with_images and with_cuts of megalight.data.multimodal.batch make batches whose numbers fit."


def check_references(tokens: Tensor, source: Tensor, images: Images) -> None:
    """Refuse sources and positions out of range. A GPU would read other memory, or end the process without a reason.

    It is for tensors of the host; on a device, the host would wait for the numbers.

    Args:
        tokens: ``[B, S]``.
        source: ``[B, S]``, as in :class:`~megalight.data.multimodal.batch.ImageTextBatch`.
        images: the images of these samples.

    Raises:
        DataError: shapes do not fit, a token stands for what its sample does not have, a mixture is of rows that are
            not there, or a position is negative or outside of its image.
    """
    if source.shape != tokens.shape or len(images.counts) != len(tokens):
        raise DataError(
            f"there are {[*tokens.shape]} tokens, sources for {[*source.shape]}, and images of {len(images.counts)} "
            f"samples; all must be of the same samples and tokens. {ADVICE}"
        )
    ends = [0, *accumulate(images.lengths)]
    bounds = [ends[number] // images.joined for number in accumulate(images.counts, initial=0)]
    _check_each(source, bounds, "row of features")
    mixtures = images.mixtures
    counts = (0,) * len(tokens) if mixtures is None else mixtures.counts
    if len(counts) != len(tokens):
        raise DataError(f"there are {len(tokens)} rows of tokens, and mixtures of {len(counts)}. {ADVICE}")
    # The number of a mixture, and below 0 what is none.
    _check_each(MIXED - source, [*accumulate(counts, initial=0)], "mixture")
    if mixtures is not None and not _within(mixtures.rows, 0, bounds[-1]):
        raise DataError(
            f"mixtures are of rows of features from {int(mixtures.rows.min())} to {int(mixtures.rows.max())}; the "
            f"images have {bounds[-1]}. {ADVICE}"
        )
    _check_positions(images.positions)


def _check_each(numbers: Tensor, bounds: list[int], what: str) -> None:
    """Check numbers ``[B, S]`` from 0 on; those of sample ``b`` are from ``bounds[b]`` up to ``bounds[b + 1]``."""
    first, last = (torch.tensor(part)[:, None] for part in (bounds[:-1], bounds[1:]))
    wrong = (numbers >= 0) & ((numbers < first) | (numbers >= last))
    if wrong.any():
        sample, token = wrong.nonzero()[0].tolist()
        own = f"{bounds[sample]} to {bounds[sample + 1] - 1}" if bounds[sample] < bounds[sample + 1] else "none"
        raise DataError(
            f"token {token} of sample {sample} stands for {what} {int(numbers[sample, token])}; its own are {own}. "
            f"{ADVICE}"
        )


def _check_positions(positions: Tensor) -> None:
    if not positions.numel():
        return
    if int(positions.min()) < 0:
        raise DataError(f"a position of a patch is {int(positions.min())}; they begin at 0. {ADVICE}")
    if positions.shape[:-1] == (4,) and bool((positions[:2] >= positions[2:]).any()):
        row, column, rows, columns = positions[:, (positions[:2] >= positions[2:]).any(0)][:, 0].tolist()
        raise DataError(
            f"a patch is in row {row} and column {column} of an image of {rows} x {columns} patches; they count from "
            f"0. {ADVICE}"
        )


def _within(numbers: Tensor, first: int, last: int) -> bool:
    return not numbers.numel() or bool((numbers >= first).all() and (numbers < last).all())

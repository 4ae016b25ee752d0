"""Rows of tokens with the images that some of them stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.multimodal.forms import Cut, Form, axis_positions, sources
from megalight.data.multimodal.images import NEWLINE
from megalight.errors import DataError
from megalight.types import TokenBatch


@dataclass(frozen=True, eq=False)
class Images:
    """Patches of images, end to end, in the order of their samples.

    Attributes:
        pixels: ``[P, channels * height * width]``: a row per patch, uint8, or normalised in a floating-point type.
            Rows of class tokens are zeros.
        positions: ``[P]`` int64: the row of each patch in the tower's table of positions; for images of any size
            ``[2, P]``: its row and its column in the image.
        lengths: rows of each image.
        counts: images of each sample.
        windows: for each image, the rows of its windows; empty: there are none.
        joined: how many rows after each other are one row of features.
    """

    pixels: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...] = ()
    joined: int = 1

    def __post_init__(self) -> None:
        """Check that the numbers agree.

        Raises:
            DataError: they do not.
        """
        positions = self.positions.shape[-1]
        if not sum(self.lengths) == len(self.pixels) == positions or sum(self.counts) != len(self.lengths):
            raise DataError(
                f"images have {len(self.pixels)} rows of pixels and {positions} positions, lengths that sum "
                f"to {sum(self.lengths)}, and {len(self.lengths)} images for samples with {sum(self.counts)}; all must "
                "agree."
            )
        if self.windows and tuple(map(sum, self.windows)) != self.lengths:
            raise DataError(
                f"the windows of images have {list(map(sum, self.windows))[:8]} rows, and the images "
                f"{list(self.lengths)[:8]}; each row is in one window."
            )
        if odd := [length for length in self.lengths if length % self.joined]:
            raise DataError(
                f"an image has {odd[0]} rows, of which {self.joined} are joined to one; it must be a multiple."
            )

    @classmethod
    def of_cuts(cls, cuts: Sequence[Sequence[Cut]], form: Form) -> Images:
        """Lay the rows of images end to end.

        Args:
            cuts: the images of each sample.
            form: what cut them.
        """
        every, axes = [cut for own in cuts for cut in own], form.cut_axes
        pixels = [cut.pixels for cut in every] or [np.zeros((0, form.channels * form.patch**2), np.uint8)]
        positions = [cut.positions for cut in every] or [np.zeros((*axes, 0), np.int64)]
        return cls(
            torch.from_numpy(np.concatenate(pixels)),
            torch.from_numpy(np.concatenate(positions, axis=-1)),
            tuple(len(cut.pixels) for cut in every),
            tuple(map(len, cuts)),
            tuple(cut.windows for cut in every) if any(cut.windows for cut in every) else (),
            form.merge**2,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Images:
        """Copy to ``device``."""
        pixels, positions = (each.to(device, non_blocking=non_blocking) for each in (self.pixels, self.positions))
        return replace(self, pixels=pixels, positions=positions)

    def of_samples(self, start: int, stop: int) -> tuple[Images, int]:
        """Return the images of some samples, and the number of rows of features before them."""
        bounds = [0, *accumulate(self.counts)]
        first, last = bounds[start], bounds[stop]
        rows = [0, *accumulate(self.lengths)]
        here = slice(rows[first], rows[last])
        part = replace(
            self,
            pixels=self.pixels[here],
            positions=self.positions[..., here],
            lengths=self.lengths[first:last],
            counts=self.counts[start:stop],
            windows=self.windows[first:last],
        )
        return part, rows[first] // self.joined


@dataclass(frozen=True, eq=False)
class ImageTextBatch(TokenBatch):
    """Rows of tokens, of which some stand for patches of images.

    Attributes:
        images: the images.
        source: ``[B, S]`` int64: for each token, the row of features of ``images`` that replaces it, -1 for text, or
            ``NEWLINE``: a learned row replaces it.
    """

    images: Images | None = None
    source: Tensor | None = None

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
            held, before = images.of_samples(start, stop)
            own = source[start:stop]
            parts.append(_with(text, held, torch.where(own >= 0, own - before, own)))
        return parts

    def context_share(self, rank: int, size: int, multiple: int = 1, ahead: int = 0) -> TokenBatch:
        """Take one rank's part of every sequence; images stay whole."""
        if size == 1:
            return self
        images, source = self.parts()
        text = super().context_share(rank, size, multiple, ahead)
        # Cut in the place of tokens. Shifted by one, as padding gets 0.
        moved = replace(self, tokens=source + 1)
        return _with(text, images, TokenBatch.context_share(moved, rank, size, multiple).tokens - 1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """Copy to ``device``. Copies from page-locked memory never make the host wait."""
        images, source = self.parts()
        non_blocking = non_blocking or self.tokens.is_pinned()
        moved = source.to(device, non_blocking=non_blocking)
        return _with(super().to(device, non_blocking), images.to(device, non_blocking), moved)

    def pin_memory(self) -> TokenBatch:
        """Copy to page-locked host memory."""
        images, source = self.parts()
        pinned = replace(images, pixels=images.pixels.pin_memory(), positions=images.positions.pin_memory())
        return _with(super().pin_memory(), pinned, source.pin_memory())


def _with(text: TokenBatch, images: Images, source: Tensor) -> ImageTextBatch:
    # All fields of a text batch, so that one that is added there is not lost here.
    of_text = {field.name: getattr(text, field.name) for field in fields(TokenBatch)}
    return ImageTextBatch(**of_text, images=images, source=source)


def with_images(
    text: TokenBatch, images: Images, image_token: int, *, class_token: bool, newline: bool = False
) -> ImageTextBatch:
    """Join rows of tokens and their images: each image takes the next image tokens of its row, one for each patch.

    Args:
        text: the rows. Each image is as many image tokens as it has patches.
        images: the images of these rows.
        image_token: the id of image tokens.
        class_token: whether the first row of an image is its class token, which no token stands for.
        newline: whether each image has one more token, its last, for a learned row.

    Raises:
        DataError: a row has another number of image tokens than its images have patches.
    """
    places = text.tokens == image_token
    found = places.sum(1).tolist()
    rows, source = [0, *accumulate(images.lengths)], torch.full_like(text.tokens, -1)
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
    return _with(text, images, source)


def with_cuts(text: TokenBatch, cuts: Sequence[Sequence[Cut]], image_token: int, form: Form) -> ImageTextBatch:
    """Join rows of tokens and their images, of which each takes the next image tokens of its row.

    Args:
        text: the rows.
        cuts: the images of each row.
        image_token: the id of image tokens.
        form: what cut the images.

    Raises:
        DataError: a row has another number of image tokens than its images.
    """
    images = Images.of_cuts(cuts, form)
    if len(cuts) != len(text):
        raise DataError(f"there are {len(text)} rows of tokens, and images of {len(cuts)} rows.")
    source, axes, first = torch.full_like(text.tokens, -1), list[Tensor](), 0
    for number, (tokens, own) in enumerate(zip(text.tokens, cuts, strict=True)):
        places, needed = (tokens == image_token).nonzero().flatten(), sum(len(cut.source) for cut in own)
        if len(places) != needed:
            raise DataError(
                f"row {number} has {len(places)} image tokens (id {image_token}), and its {len(own)} images have "
                f"{needed}."
            )
        source[number, places] = torch.from_numpy(sources(own, first))
        first += sum(cut.features for cut in own)
        if form.axes:
            lengths = text.document_lengths[number] if text.document_lengths else (len(tokens),)
            begins = accumulate((len(cut.source) for cut in own[:-1]), initial=0)
            grids = [(int(places[at]), cut.grid) for at, cut in zip(begins, own, strict=True)] if own else []
            axes.append(torch.from_numpy(document_positions(lengths, grids)))
    joined = _with(text, images, source)
    return replace(joined, axis_positions=torch.stack(axes)) if axes else joined


def document_positions(lengths: Sequence[int], images: Sequence[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """Return positions ``[3, S]`` of the tokens of a row of documents, which begin anew in each document.

    Args:
        lengths: of the documents.
        images: the first token of each image in the row, and its rows and columns of tokens.
    """
    found, start = [], 0
    for length in lengths:
        own = [(at - start, grid) for at, grid in images if start <= at < start + length]
        found.append(axis_positions(length, own))
        start += length
    return np.concatenate(found, axis=1)

"""Rows of tokens with the images that some of them stand for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.data.multimodal.images import NEWLINE
from megalight.errors import DataError
from megalight.types import TokenBatch


@dataclass(frozen=True, eq=False)
class Images:
    """Patches of images, end to end, in the order of their samples.

    Attributes:
        pixels: ``[P, channels * height * width]``: a row per patch, uint8, or normalised in a floating-point type.
            Rows of class tokens are zeros.
        positions: ``[P]`` int64: the row of each patch in the tower's table of positions.
        lengths: rows of each image.
        counts: images of each sample.
    """

    pixels: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the numbers agree.

        Raises:
            DataError: they do not.
        """
        if not sum(self.lengths) == len(self.pixels) == len(self.positions) or sum(self.counts) != len(self.lengths):
            raise DataError(
                f"images have {len(self.pixels)} rows of pixels and {len(self.positions)} positions, lengths that sum "
                f"to {sum(self.lengths)}, and {len(self.lengths)} images for samples with {sum(self.counts)}; all must "
                "agree."
            )

    def of_samples(self, start: int, stop: int) -> tuple[Images, int]:
        """Return the images of some samples, and the number of rows before them."""
        bounds = [0, *accumulate(self.counts)]
        first, last = bounds[start], bounds[stop]
        rows = [0, *accumulate(self.lengths)]
        here = slice(rows[first], rows[last])
        part = Images(self.pixels[here], self.positions[here], self.lengths[first:last], self.counts[start:stop])
        return part, rows[first]


@dataclass(frozen=True, eq=False)
class ImageTextBatch(TokenBatch):
    """Rows of tokens, of which some stand for patches of images.

    Attributes:
        images: the images.
        source: ``[B, S]`` int64: for each token, the row of ``images`` whose features replace it, -1 for text, or
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
        pixels, positions, moved = (
            tensor.to(device, non_blocking=non_blocking) for tensor in (images.pixels, images.positions, source)
        )
        return _with(super().to(device, non_blocking), replace(images, pixels=pixels, positions=positions), moved)

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

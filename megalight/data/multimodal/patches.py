"""Patches of images, end to end, as a tower takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.multimodal.forms import ImageFormat, ImagePatches
from megalight.errors import DataError


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Further rows of features: each is a mixture of four.

    Attributes:
        rows: ``[M, 4]`` int64: rows of features of all images.
        shares: ``[M, 4]`` float64: the share of each, which sum to 1.
        counts: mixtures of each sample.
    """

    rows: Tensor
    shares: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of_cuts(cls, cuts: Sequence[Sequence[ImagePatches]]) -> Mixtures | None:
        """Return those of the images of each sample; None if there are none."""
        rows, shares, first = list[NDArray[np.int64]](), list[NDArray[np.float64]](), 0
        for cut in (cut for own in cuts for cut in own):
            rows.append(cut.mixed_rows + first)
            shares.append(cut.mixed_shares)
            first += cut.features
        counts = tuple(sum(len(cut.mixed_rows) for cut in own) for own in cuts)
        if not any(counts):
            return None
        return cls(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(shares)), counts)

    def of_samples(self, start: int, stop: int, features: int) -> tuple[Mixtures | None, int]:
        """Return those of some samples, and the number before them. ``features``: rows of features before them."""
        first, last = sum(self.counts[:start]), sum(self.counts[:stop])
        if first == last:
            return None, first
        return Mixtures(self.rows[first:last] - features, self.shares[first:last], self.counts[start:stop]), first

    def map(self, change: Callable[[Tensor], Tensor]) -> Mixtures:
        """Return the same with both tensors changed, such as moved."""
        return replace(self, rows=change(self.rows), shares=change(self.shares))


@dataclass(frozen=True, eq=False)
class Images:
    """Patches of images, end to end, in the order of their samples.

    Attributes:
        pixels: ``[P, channels * height * width]``: a row per patch, uint8, or normalized in a floating-point type.
            Rows of class tokens are zeros.
        positions: int64. ``[P]``: the row of each patch in the tower's table of positions. For images of any size
            ``[2, P]``: row and column of each patch; or ``[4, P]``: also the numbers of rows and columns of its image.
        lengths: rows of each image; of an image in tiles, of each tile.
        counts: images of each sample, where each tile is one.
        windows: for each image, the rows of its windows; empty: there are none.
        joined: how many rows after each other are one row of features.
        mixtures: further rows of features, which some tokens stand for; None: there are none.
        highest: the largest position in a table, on the host; None: it is unknown. Copies from the host know it.
    """

    pixels: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...] = ()
    joined: int = 1
    mixtures: Mixtures | None = None
    highest: int | None = None

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
    def of_cuts(cls, cuts: Sequence[Sequence[ImagePatches]], form: ImageFormat) -> Images:
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
            tuple(length for cut in every for length in cut.lengths),
            tuple(sum(cut.tiles for cut in own) for own in cuts),
            tuple(cut.windows for cut in every) if any(cut.windows for cut in every) else (),
            form.merge**2,
            Mixtures.of_cuts(cuts),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Images:
        """Copy to ``device``."""
        highest = self.highest
        # Where the host may look without a wait.
        if self.positions.is_cpu and self.positions.ndim == 1 and len(self.positions):
            highest = int(self.positions.max())
        return replace(self.map(lambda each: each.to(device, non_blocking=non_blocking)), highest=highest)

    def map(self, change: Callable[[Tensor], Tensor]) -> Images:
        """Return the same with all tensors changed, such as moved."""
        mixtures = None if self.mixtures is None else self.mixtures.map(change)
        return replace(self, pixels=change(self.pixels), positions=change(self.positions), mixtures=mixtures)

    def of_samples(self, start: int, stop: int) -> tuple[Images, int, int]:
        """Return the images of some samples, and the numbers of rows of features and of mixtures before them."""
        bounds = [0, *accumulate(self.counts)]
        first, last = bounds[start], bounds[stop]
        rows = [0, *accumulate(self.lengths)]
        here, before = slice(rows[first], rows[last]), rows[first] // self.joined
        mixtures, mixed = None, 0
        if self.mixtures is not None:
            mixtures, mixed = self.mixtures.of_samples(start, stop, before)
        part = replace(
            self,
            pixels=self.pixels[here],
            positions=self.positions[..., here],
            lengths=self.lengths[first:last],
            counts=self.counts[start:stop],
            windows=self.windows[first:last],
            mixtures=mixtures,
        )
        return part, before, mixed

"""Whether the tokens of a batch stand for rows of features that there are."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from megalight.data.multimodal.forms import MIXED
from megalight.data.multimodal.patches import Images
from megalight.errors import DataError

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

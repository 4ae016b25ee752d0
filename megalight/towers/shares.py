"""Which replica of a tower reads which images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from megalight.data.multimodal.patches import Images


def consecutive(lengths: Sequence[int], count: int) -> list[range]:
    """Divide images among replicas, in order, so that each has about as many rows.

    Args:
        lengths: rows of each image.
        count: number of replicas.

    Returns:
        for each replica its images, which may be none.
    """
    total, ends = sum(lengths), [0]
    middles = [end - length / 2 for end, length in zip(accumulate(lengths), lengths, strict=True)]
    for replica in range(1, count):
        # An image belongs to the replica in whose equal share of the rows its middle lies.
        ends.append(sum(middle < total * replica / count for middle in middles))
    return [range(first, last) for first, last in zip(ends, [*ends[1:], len(lengths)], strict=True)]


def take(images: Images, chosen: Sequence[int]) -> Images:
    """Return some images, as those of one sample."""
    bounds = [0, *accumulate(images.lengths)]
    rows = [slice(bounds[index], bounds[index + 1]) for index in chosen] or [slice(0)]
    return replace(
        images,
        pixels=torch.cat([images.pixels[own] for own in rows]),
        positions=torch.cat([images.positions[..., own] for own in rows], dim=-1),
        lengths=tuple(images.lengths[index] for index in chosen),
        counts=(len(chosen),),
        windows=tuple(images.windows[index] for index in chosen) if images.windows else (),
        mixtures=None,  # which are made of features of all images, beside the language model
    )


def features_of(images: Images) -> int:
    """Return the rows of features of images."""
    return sum(images.lengths) // images.joined


def end_to_end(parts: Sequence[Images]) -> Images:
    """Lay the images of several micro-batches end to end."""
    return Images(
        torch.cat([part.pixels for part in parts]),
        torch.cat([part.positions for part in parts], dim=-1),
        tuple(length for part in parts for length in part.lengths),
        tuple(count for part in parts for count in part.counts),
        tuple(windows for part in parts for windows in part.windows),
        parts[0].joined,
    )

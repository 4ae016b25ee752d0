"""Features of images: which replica of a tower reads which images, and what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from megalight.data.multimodal.images import Images
from megalight.models.vision.model import PackedImages
from megalight.models.vlm import task
from megalight.models.vlm.config import VLMConfig
from megalight.parallel.collectives import join
from megalight.parallel.model import ParallelModel


def consecutive(lengths: Sequence[int], count: int) -> list[range]:
    """Divide images among the replicas of a disjoint tower, in order, so that each has about as many rows.

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


def concatenated(parts: Sequence[Images]) -> Images:
    """Return the images of several micro-batches as those of one."""
    return Images(
        torch.cat([part.pixels for part in parts]),
        torch.cat([part.positions for part in parts], dim=-1),
        tuple(length for part in parts for length in part.lengths),
        tuple(count for part in parts for count in part.counts),
        tuple(windows for part in parts for windows in part.windows),
        parts[0].joined,
    )


def balanced(homes: Sequence[Sequence[int]], replicas: int) -> list[list[list[int]]]:
    """Divide images among the replicas of a colocated tower so that each has about as many rows.

    The longest image goes first, each to the replica with the fewest rows so far (LPT, Graham 1969): the largest share
    is at most 4/3 of the best division's.

    Args:
        homes: rows of each image, for each replica of the language model.
        replicas: number of replicas of the tower.

    Returns:
        for each replica of the tower and each home the indices of its images, ascending.
    """
    found: list[list[list[int]]] = [[[] for _ in homes] for _ in range(replicas)]
    loads = [0] * replicas
    images = [(-length, home, index) for home, lengths in enumerate(homes) for index, length in enumerate(lengths)]
    for length, home, index in sorted(images):
        least = loads.index(min(loads))
        loads[least] -= length
        found[least][home].append(index)
    return [[sorted(own) for own in each] for each in found]


def padded(features: Tensor, multiple: int) -> Tensor:
    """Add rows of zeros: at least one row, and whole shares for sequence parallelism."""
    rows = max(1, len(features))
    return F.pad(features, (0, 0, 0, rows + -rows % multiple - len(features)))


def features(config: VLMConfig, tower: ParallelModel, images: Images) -> Tensor:
    """Return the features ``[P, (1 + N) h]`` of images, without padding; equal on all ranks of a replica.

    Ranks along ``cp`` take a run of the rows each, as long as the others'. Gradients are whole on all of them.
    """
    mesh, device = tower.mesh, tower.device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    packed_images = task.pack_images(config, images, nothing, tower.token_multiple * mesh.cp)
    found: Tensor = tower.root(_run(packed_images, mesh.rank("cp"), mesh.cp))
    return join(found, mesh.group("cp"), 0)[: features_of(images)]


def _run(packed_images: PackedImages, rank: int, size: int) -> PackedImages:
    """Return a run of the rows; what describes them stays that of all rows."""
    each = len(packed_images.pixels) // size
    own = slice(rank * each, (rank + 1) * each)
    return replace(packed_images, pixels=packed_images.pixels[own], positions=packed_images.positions[..., own])

"""Batch split of towers: which replica of a tower reads which images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from megalight.data.multimodal.patches import Images
from megalight.errors import LayoutError
from megalight.parallel.bridge.communicator import lanes
from megalight.parallel.coupling import Coupling
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.towers.layout import check_tower


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


# Colocated: both models have the same ranks


def balanced(homes: Sequence[Sequence[int]], replicas: int) -> list[list[list[int]]]:
    """Divide images among replicas so that each has about as many rows.

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


# Disjoint: each model has ranks of its own


class Division:
    """The ranks of a tower and of a language model, as one of them sees it.

    Neighboring replicas that exchange messages form a lane. There are as many lanes as the model with fewer replicas
    has, and all ranks of a lane read the same samples. If the tower has fewer replicas, each reads the images of
    several replicas of the language model. If it has more, they divide the images of each micro-batch among them.

    Args:
        tower, language: their meshes.

    Attributes:
        is_tower: whether this rank has the tower.
        mesh: the mesh of this rank.
        lanes: number of lanes.
        lane: the lane of this rank.
        readers: number of replicas of the language model in a lane.
        shares: number of replicas of the tower in a lane.
        replicas: indices of the replicas of the language model whose micro-batches this rank reads.

    Raises:
        LayoutError: neither data-parallel degree divides the other.
    """

    def __init__(self, tower: ParallelMesh, language: ParallelMesh) -> None:
        if tower.dp % language.dp and language.dp % tower.dp:
            raise LayoutError(
                f"the tower has {tower.dp} replicas and the language model {language.dp}; one must divide the other. "
                "Change the ranks or the degrees of one, or let both have the same ranks (megatron_towers_beside)."
            )
        self.lanes = len(lanes(tower, language))
        self.tower, self.language = tower, language
        self.is_tower = tower.contains(tower.global_rank)
        self.mesh = tower if self.is_tower else language
        self.readers, self.shares = language.dp // self.lanes, tower.dp // self.lanes
        own = self.mesh.rank("dp")
        self.lane = own // (self.shares if self.is_tower else self.readers)
        every = range(self.lane * self.readers, (self.lane + 1) * self.readers)
        self.replicas = every if self.is_tower else range(own, own + 1)

    @classmethod
    def of(cls, tower: Layout, language: Layout, world_size: int, rank: int) -> Division:
        """Divide all ranks; the tower's come first. This is arithmetic: a mistake costs no process group.

        Raises:
            LayoutError: the ranks do not add up, or a side cannot have its layout; the message names it.
        """
        if tower.ranks + language.ranks != world_size:
            raise LayoutError(
                f"the tower has {tower.ranks} ranks and the language model {language.ranks}, which are "
                f"{tower.ranks + language.ranks}, and there are {world_size} processes; start as many, or change a "
                "side."
            )
        check_tower(tower)
        return cls(_mesh("the tower", tower, rank, 0), _mesh("the language model", language, rank, tower.ranks))

    def coupling(self) -> Coupling | None:
        """Return what lets all ranks agree on numbers of micro-batches; None with a single lane.

        Replicas of a language model with experts exchange tokens, so that all run as many. Their towers must know.
        """
        if self.lanes == 1:
            return None
        return Coupling(self.mesh, sorted({*self.tower.members, *self.language.members}))

    def describe(self) -> str:
        """Return one line for logs."""
        return f"tower on {self.tower.describe()}; language model on {self.language.describe()}"


def _mesh(name: str, side: Layout, rank: int, first: int) -> ParallelMesh:
    try:
        return side.mesh(side.ranks, rank, first)
    except LayoutError as error:
        raise LayoutError(f"{name}, on {side.ranks} ranks from {first} on: {error}") from error

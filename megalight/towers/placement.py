"""The placement of a vision tower and a language model on ranks: the part and the images that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalight.data.multimodal.images import Images
from megalight.errors import ConfigurationError, LayoutError
from megalight.models.vision.model import PackedImages
from megalight.models.vlm import task
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import VLM, TowerPart
from megalight.parallel.bridge import lanes
from megalight.parallel.collectives import join
from megalight.parallel.coupling import Coupling
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.transform import share_transforms

Placement: TypeAlias = Literal["colocated", "disjoint"]
"""Whether both models share all ranks, or each has ranks of its own: the tower the first ones."""


@dataclass(frozen=True)
class TowerPlacement:
    """The ranks of a tower and of a language model, as one of them sees it.

    Ranks that read the same samples form a lane. Colocated: each replica of the language model is a lane. Disjoint:
    neighboring replicas that exchange messages are a lane, and there are as many lanes as the model with fewer replicas
    has. If the tower has fewer, each of its replicas reads the images of several replicas of the language model. If it
    has more, they divide the images of each micro-batch among them.

    Attributes:
        disjoint: whether each model has ranks of its own.
    """

    tower: ParallelMesh
    language: ParallelMesh
    disjoint: bool

    @classmethod
    def of(cls, placement: Placement, tower: Layout, language: Layout, world_size: int, rank: int) -> TowerPlacement:
        """Place both models. This is arithmetic: a mistake costs no process group.

        Args:
            placement: colocated: ``ranks`` of both layouts are left out, or all. Disjoint: they add up to all.
            rank: the global rank that looks at it.

        Raises:
            LayoutError: the ranks do not add up, a model cannot have its layout, or neither data-parallel degree
                divides the other (disjoint).
            ConfigurationError: the placement is unknown, or the tower has options that are those of both models.
        """
        if placement not in get_args(Placement):
            raise ConfigurationError(f"placement={placement!r}; choose one of {', '.join(get_args(Placement))}.")
        check_tower(tower)
        disjoint, sides = placement == "disjoint", {"the tower": tower, "the language model": language}
        if disjoint and tower.ranks + language.ranks != world_size:
            raise LayoutError(
                f"the tower has {tower.ranks} ranks and the language model {language.ranks}, which are "
                f"{tower.ranks + language.ranks}, and there are {world_size} processes; start as many, or change a "
                "side."
            )
        meshes = []
        for first, (name, layout) in zip((0, tower.ranks), sides.items(), strict=True):
            if not disjoint and layout.ranks not in (1, world_size):
                raise LayoutError(
                    f"{name} has ranks={layout.ranks}, and there are {world_size} processes, which colocated models "
                    "share. Leave it out, or set placement='disjoint'."
                )
            try:
                if disjoint:
                    meshes.append(layout.mesh(layout.ranks, rank, first))
                else:
                    meshes.append(layout.mesh(world_size, rank, 0))
            except LayoutError as error:
                where = f"{name}, on {layout.ranks} ranks from {first} on" if disjoint else name
                raise LayoutError(f"{where}: {error}") from error
        found = cls(meshes[0], meshes[1], disjoint)
        if disjoint and found.tower.dp % found.language.dp and found.language.dp % found.tower.dp:
            raise LayoutError(
                f"the tower has {found.tower.dp} replicas and the language model {found.language.dp}; one must divide "
                "the other. Change the ranks or the degrees of one, or set placement='colocated'."
            )
        return found

    @property
    def is_tower(self) -> bool:
        """Whether this rank has the tower alone."""
        return self.disjoint and self.tower.contains(self.tower.global_rank)

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh of this rank's model; of both colocated models, that of the language model."""
        return self.tower if self.is_tower else self.language

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(lanes(self.tower, self.language)) if self.disjoint else self.language.dp

    @property
    def lane(self) -> int:
        """The lane of this rank."""
        return self.mesh.rank("dp") // (self.shares if self.is_tower else self.readers)

    @property
    def readers(self) -> int:
        """Number of replicas of the language model in a lane."""
        return self.language.dp // self.lanes

    @property
    def shares(self) -> int:
        """Number of replicas of a disjoint tower in a lane, which divide the images of each micro-batch."""
        return self.tower.dp // self.lanes

    @property
    def replicas(self) -> range:
        """Indices of the replicas of the language model whose micro-batches this rank reads."""
        own = self.mesh.rank("dp")
        return range(self.lane * self.readers, (self.lane + 1) * self.readers) if self.is_tower else range(own, own + 1)

    def coupling(self) -> Coupling | None:
        """Return what lets all ranks agree on numbers of micro-batches; None with a single lane.

        Replicas of a language model with experts exchange tokens, and a colocated tower reads images of all replicas.
        """
        if self.lanes == 1:
            return None
        return Coupling(self.mesh, sorted({*self.tower.members, *self.language.members}))

    def describe(self) -> str:
        """Return one line for logs."""
        return f"tower on {self.tower.describe()}; language model on {self.language.describe()}"


def check_tower(layout: Layout) -> None:
    """Raise if a vision tower cannot have this layout.

    Raises:
        LayoutError: it has a pipeline, or expert parallelism.
        ConfigurationError: it has a plan, transforms or data-parallel options, which are those of the whole model.
    """
    if layout.pipeline_parallel > 1 or layout.virtual_pipeline > 1 or layout.pipeline_layout is not None:
        raise LayoutError(
            f"the tower has pipeline_parallel={layout.pipeline_parallel}, virtual_pipeline={layout.virtual_pipeline}, "
            f"pipeline_layout={layout.pipeline_layout!r}; it is one stage, which runs before the language model's. Use "
            "tensor_parallel, or more data-parallel replicas."
        )
    if layout.expert_parallel * layout.expert_tensor_parallel > 1:
        raise LayoutError(
            f"the tower has expert_parallel={layout.expert_parallel}, expert_tensor_parallel="
            f"{layout.expert_tensor_parallel}; it has no experts. Leave both out."
        )
    for name in ("plan", "transforms", "data_parallel"):
        if getattr(layout, name):
            raise ConfigurationError(
                f"the tower has {name} of its own, and both models have the same. Set {name} for the whole model."
            )


def tower_layout(layout: Layout) -> Layout:
    """Return the layout of a tower, whose recompute is that of its own layers."""
    again = None if layout.recompute == RecomputeOptions() else layout.recompute
    return replace(layout, recompute=RecomputeOptions(vision=again))


def divided(whole: nn.Module) -> tuple[TowerPart, VLM]:
    """Return the tower and the projector of a model, and the model without them. A model is divided once.

    Transforms have changed the whole before: patterns of adapters may match layers of one part alone.

    Raises:
        ConfigurationError: the model has no vision tower.
    """
    if not isinstance(whole, VLM):
        raise ConfigurationError(
            f"a tower in a layout of its own needs a model with a vision tower, and {type(whole).__name__} has none; "
            "train a VLMModule, or use MegatronStrategy."
        )
    part = whole.without_tower()
    share_transforms(whole, part)
    return part, whole


def graft_tower(model: ParallelModel, part: TowerPart, mesh: ParallelMesh, layout: Layout) -> None:
    """Split a colocated tower. It then belongs to the tree of its language model, under its own names."""
    tower = ParallelModel(part, mesh, layout)
    assert isinstance(model.root, VLM)
    model.root.attach(part)
    model.graft(tower)


def consecutive(lengths: Sequence[int], count: int) -> list[range]:
    """Divide images among the replicas of a disjoint tower, in order, so that each has about as many rows.

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

"""The placement of a vision tower and a language model on ranks, and the part of the model that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.vlm.model import VLM, TowerPart
from megalight.parallel.bridge import lanes
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
        tower, language: their meshes.
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

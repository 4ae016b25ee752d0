"""The layout of a tower, or of the language model beside it, and the part of the model that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.vlm.model import VLM, TowerPart
from megalight.parallel.degrees import check_sequence_parallel
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.options import ParallelOptions
from megalight.parallel.pipeline.options import PipelineOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.transform import share_transforms


@dataclass(frozen=True, kw_only=True)
class Side:
    """How one model is split over its ranks; data parallelism takes the ranks that the degrees leave.

    Attributes:
        ranks: number of ranks.
        tensor_parallel, sequence_parallel, context_parallel, pipeline_parallel, virtual_pipeline, pipeline_layout: as
            of :class:`~megalight.strategies.MegatronStrategy`.
        expert_parallel, expert_tensor_parallel, expert: likewise; a vision tower has no experts.
        pipeline: the schedule.
        recompute: activations that the backward pass computes again.
    """

    ranks: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    expert: ExpertOptions | None = None
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    pipeline_layout: str | None = None
    pipeline: PipelineOptions | None = None
    recompute: RecomputeOptions | None = None

    def mesh(self, rank: int, first: int) -> ParallelMesh:
        """Return the mesh of the ranks from ``first`` on, as seen by the global ``rank``.

        Raises:
            LayoutError: the degrees do not divide the ranks.
        """
        return ParallelMesh(
            self.ranks,
            rank,
            tp=self.tensor_parallel,
            cp=self.context_parallel,
            pp=self.pipeline_parallel,
            ep=self.expert_parallel,
            etp=self.expert_tensor_parallel,
            offset=first,
        )

    def options(self) -> ParallelOptions:
        """Return the options of the split.

        Raises:
            LayoutError: they do not go together.
        """
        check_sequence_parallel(self.sequence_parallel, self.tensor_parallel)
        pipeline = self.pipeline or PipelineOptions()
        return ParallelOptions(
            sequence_parallel=self.sequence_parallel,
            expert=self.expert or ExpertOptions(),
            pipeline=pipeline,
            virtual_pipeline=pipeline.check(self.pipeline_parallel, self.virtual_pipeline, self.pipeline_layout),
            pipeline_layout=self.pipeline_layout,
            recompute=self.recompute or RecomputeOptions(),
        )

    def tower_options(self) -> ParallelOptions:
        """Return the options of the split of a tower, whose recompute is that of its own layers.

        Raises:
            LayoutError: they do not go together.
        """
        return replace(self.options(), recompute=RecomputeOptions(vision=self.recompute))


def check_tower(side: Side) -> None:
    """Raise if a vision tower cannot have this layout.

    Raises:
        LayoutError: it has a pipeline, or expert parallelism.
    """
    if side.pipeline_parallel > 1 or side.virtual_pipeline > 1 or side.pipeline_layout is not None:
        raise LayoutError(
            f"the tower has pipeline_parallel={side.pipeline_parallel}, virtual_pipeline={side.virtual_pipeline}, "
            f"pipeline_layout={side.pipeline_layout!r}; it is one stage, which runs before the language model's. Use "
            "tensor_parallel, or more data-parallel replicas."
        )
    if side.expert_parallel * side.expert_tensor_parallel > 1:
        raise LayoutError(
            f"the tower has expert_parallel={side.expert_parallel}, expert_tensor_parallel="
            f"{side.expert_tensor_parallel}; it has no experts. Leave both out."
        )


# The part of a rank


def part_of(whole: nn.Module, tower: bool) -> nn.Module:
    """Return the tower and the projector of a model, or everything else; see :func:`divided`."""
    part, language = divided(whole)
    return part if tower else language


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

"""The layout of one model: how it is split over ranks, with which options."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.data_parallel.options import DataParallelOptions
from megalight.parallel.degrees import check_degrees
from megalight.parallel.expert.dispatch import ExpertOptions
from megalight.parallel.layers import depths_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.layout import PipelineLayout, Stage
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.pipeline.stages import check_protocol
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.parallel.transform import ModelTransform


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one model is split over ranks; data parallelism uses the ranks that the degrees leave.

    The arguments of :class:`~megalight.strategies.MegatronStrategy` with these names make one.

    Attributes:
        ranks: number of ranks, for a vision tower or a language model that has ranks of its own.
        tensor_parallel: number of ranks over which each layer's weights are split.
        sequence_parallel: whether each rank holds a share of the tokens of hidden states between split layers.
        tensor: how split layers overlap their communication with matrix products.
        context_parallel: number of ranks over which each sequence is split.
        context: how attention gets the tokens of other ``cp`` ranks.
        expert_parallel: number of ranks over which experts are sharded.
        expert_tensor_parallel: number of ranks over which each expert's weights are split.
        expert: how copies of tokens get to their experts on other ranks.
        pipeline_parallel: number of pipeline ranks over which the layers are divided.
        virtual_pipeline: number of chunks of layers per pipeline rank. A layout string decides it.
        pipeline_layout: the layers of each stage, as a string; None: as ``pipeline`` says.
        pipeline: the schedule, and how layers are divided over ``pp``.
        recompute: activations that the backward pass computes again.
        data_parallel: how replicas share gradients and optimizer state; None: the default of what trains the model.
        plan: how the model's modules are split; None: the plan registered for the model's type, or none.
        transforms: changes of the model's structure, in this order.

    Raises:
        LayoutError: options that do not go together, whatever the model.
        ConfigurationError: likewise.
    """

    ranks: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    tensor: TensorOptions = field(default_factory=TensorOptions)
    context_parallel: int = 1
    context: ContextOptions = field(default_factory=ContextOptions)
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    expert: ExpertOptions = field(default_factory=ExpertOptions)
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    pipeline_layout: str | None = None
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    data_parallel: DataParallelOptions | None = None
    plan: ParallelizePlan | None = None
    transforms: tuple[ModelTransform, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot work with any model and any number of ranks."""
        check_degrees(
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            context_parallel=self.context_parallel,
            pipeline_parallel=self.pipeline_parallel,
            virtual_pipeline=self.virtual_pipeline,
            expert_parallel=self.expert_parallel,
            expert_tensor_parallel=self.expert_tensor_parallel,
        )
        chunks = self.pipeline.check(self.pipeline_parallel, self.virtual_pipeline, self.pipeline_layout)
        object.__setattr__(self, "virtual_pipeline", chunks)  # frozen, hence past its guard
        if self.data_parallel is not None:
            self.data_parallel.check(self.pipeline.schedule)
        schedule, again = self.pipeline.schedule, [p for p in self.recompute.modules if fnmatchcase("mlp.shared", p)]
        if schedule == "combined" and self.expert.dispatcher in ("all_gather", "hybridep"):
            raise LayoutError(
                f"pipeline.schedule='combined' with ExpertOptions(dispatcher={self.expert.dispatcher!r}), whose "
                "messages block. Set dispatcher='all_to_all', or choose another schedule."
            )
        if self.expert.shared_expert_overlap and (again or schedule in ("zero_bubble", "combined")):
            other = f"recompute.modules={again}" if again else f"pipeline.schedule={schedule!r}"
            raise LayoutError(
                f"ExpertOptions: shared_expert_overlap=True with {other}: parts of the shared expert would compute on "
                "different streams, without order. Leave out one of the two."
            )

    @classmethod
    def on(cls, mesh: ParallelMesh, **options: Any) -> Layout:
        """Return the layout with the degrees of a mesh, and further options."""
        return cls(
            tensor_parallel=mesh.tp,
            context_parallel=mesh.cp,
            pipeline_parallel=mesh.pp,
            expert_parallel=mesh.ep,
            expert_tensor_parallel=mesh.etp,
            **options,
        )

    def mesh(self, world_size: int, rank: int = 0, offset: int | None = None) -> ParallelMesh:
        """Return the mesh of ``world_size`` ranks, as seen by the global ``rank``.

        Args:
            offset: first global rank, if these are a part of the world.

        Raises:
            LayoutError: the degrees do not divide the number of ranks.
        """
        return ParallelMesh(
            world_size,
            rank,
            tp=self.tensor_parallel,
            cp=self.context_parallel,
            pp=self.pipeline_parallel,
            ep=self.expert_parallel,
            etp=self.expert_tensor_parallel,
            offset=offset,
        )

    def token_multiple(self, mesh: ParallelMesh) -> int:
        """Packed token counts must be a multiple of this, as sequence parallelism gives each rank an equal share."""
        return mesh.tp if self.sequence_parallel else 1

    def stages(self, model: nn.Module, mesh: ParallelMesh) -> PipelineLayout:
        """Return the stages of a whole model; without a pipeline, one stage that lists no layers.

        Raises:
            LayoutError: the layers cannot be divided like this, or the model cannot be cut.
        """
        depths = len(depths_of(model))
        if mesh.pp > 1:
            layers = check_protocol(model)
            return self.pipeline.layout(layers, mesh.pp, self.virtual_pipeline, self.pipeline_layout, depths)
        if self.pipeline_layout is not None:  # raises if it does not fit
            PipelineLayout.of_string(self.pipeline_layout, check_protocol(model), 1, num_mtp=depths)
        return PipelineLayout((Stage(0, 0, 0, embed=True, layers=(), head=True),), 1, 1)

    def describe(self, mesh: ParallelMesh) -> str:
        """Describe the layout in words, so that layouts that split a model differently differ here, plans aside."""
        parts = [mesh.describe(), *["sequence parallel"] * self.sequence_parallel]
        parts += [repr(self.tensor)] * (mesh.tp > 1 and self.tensor != TensorOptions())
        parts += [repr(self.context)] * (mesh.cp > 1)
        parts += [repr(self.expert)] * (mesh.ep * mesh.etp > 1)
        if mesh.pp > 1:
            chunks = f"{self.virtual_pipeline} chunks per rank"
            parts += [self.pipeline_layout or chunks, repr(self.pipeline)]
        parts += [repr(transform) for transform in self.transforms]
        return ", ".join(parts)

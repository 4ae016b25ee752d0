"""Options of the split of one model; the mesh has the degrees."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.context.options import ContextOptions
from megalight.parallel.expert.options import ExpertOptions
from megalight.parallel.layers import depths_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.layout import PipelineLayout, Stage
from megalight.parallel.pipeline.options import PipelineOptions
from megalight.parallel.pipeline.stages import check_protocol
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.tensor.overlap.options import TensorOptions
from megalight.parallel.transform import ModelTransform


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The options of :class:`~megalight.parallel.model.ParallelModel`, in addition to the mesh.

    Attributes:
        plan: how the model's modules are split; None: the plan registered for the model's type, or none.
        sequence_parallel: each rank holds a share of the tokens of hidden states between split layers.
        tensor: how split layers hide their communication.
        context: how attention gets the tokens of other ``cp`` ranks.
        expert: how copies of tokens get to their experts on other ranks.
        pipeline: the schedule, and how layers are divided over ``pp``.
        virtual_pipeline: number of chunks of layers per pipeline rank.
        pipeline_layout: the layers of each stage, as a string; None: as ``pipeline`` says.
        recompute: activations that the backward pass computes again.
        transforms: changes of the model's structure, in this order.

    Raises:
        LayoutError: options that do not go together.
    """

    plan: ParallelizePlan | None = None
    sequence_parallel: bool = False
    tensor: TensorOptions = field(default_factory=TensorOptions)
    context: ContextOptions = field(default_factory=ContextOptions)
    expert: ExpertOptions = field(default_factory=ExpertOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    virtual_pipeline: int = 1
    pipeline_layout: str | None = None
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    transforms: tuple[ModelTransform, ...] = ()

    def __post_init__(self) -> None:
        """Refuse options of experts that do not go with others."""
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

    def token_multiple(self, mesh: ParallelMesh) -> int:
        """Packed token counts must be a multiple of this, as sequence parallelism gives each rank an equal share."""
        return mesh.tp if self.sequence_parallel else 1

    def layout(self, model: nn.Module, mesh: ParallelMesh) -> PipelineLayout:
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

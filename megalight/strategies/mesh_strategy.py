"""What every strategy of ours is: ranks on a mesh, a split model, and the state that its helpers read and fill."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from megalight.parallel.context.options import ContextOptions
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.layout import PipelineLayout, Stage
from megalight.parallel.pipeline.stages import check_protocol
from megalight.parallel.plan import Plan
from megalight.parallel.random import RandomStreams
from megalight.parallel.recompute import Recompute
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor.overlap.options import TensorOptions
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.collectives import Collectives
from megalight.strategies.options import DataParallel, Pipeline
from megalight.strategies.tree import Split


class MeshStrategy(Collectives, ParallelStrategy):
    """Ranks on a mesh. Set-up, checkpoints and launchers know a strategy as this.

    Attributes:
        tensor_parallel, sequence_parallel, tensor, context_parallel, context, pipeline_parallel, virtual_pipeline,
        pipeline_layout, pipeline, recompute, data_parallel, plan, process_group_backend: as the user asked;
            ``virtual_pipeline`` as a layout string says.
        mesh: the grid of ranks.
        split: this rank's part of the model; None before it is set up.
        engine: the data-parallel engine; None outside ``fit``.
        streams: random streams; None before the environment is set up.
        fresh: whether weights are the initial draws, neither loaded nor trained.
        extra_shard_states: name -> one flat tensor per engine shard: saved and loaded by canonical name, as
            ``<name>.<canonical>`` (a moving average of the weights, say).
    """

    is_distributed = True
    reduces_totals = True

    tensor_parallel: int
    sequence_parallel: bool
    tensor: TensorOptions
    context_parallel: int
    context: ContextOptions
    pipeline_parallel: int
    virtual_pipeline: int
    pipeline_layout: str | None
    pipeline: Pipeline
    recompute: Recompute
    data_parallel: DataParallel
    plan: Plan | None
    process_group_backend: str | None
    num_nodes: int
    mesh: ParallelMesh
    split: Split | None
    engine: DataParallelEngine | None
    streams: RandomStreams | None
    fresh: bool
    extra_shard_states: dict[str, list[Tensor]]

    @property
    def specs(self) -> dict[str, ShardSpec]:
        """What each local parameter and buffer holds of the model."""
        return {} if self.split is None else self.split.specs

    @property
    def chunks(self) -> list[nn.Module]:
        """The parts of the model on this rank, in model order."""
        return [] if self.split is None else self.split.chunks

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """The mesh of so many ranks, as one of them sees it.

        Raises:
            LayoutError: the parallel degrees do not divide the number of ranks.
        """
        return ParallelMesh(
            world_size, rank, tp=self.tensor_parallel, cp=self.context_parallel, pp=self.pipeline_parallel
        )

    def layout(self, model: nn.Module) -> PipelineLayout:
        """Where the layers of a model go.

        Raises:
            LayoutError: they cannot be divided so, or the model cannot be cut.
        """
        if self.pipeline_parallel == 1:
            if self.pipeline_layout is not None:
                PipelineLayout.of_string(self.pipeline_layout, check_protocol(model), 1)  # refuses another model's
            return PipelineLayout((Stage(0, 0, 0, embed=True, layers=(), head=True),), 1, 1)
        return self.pipeline.layout(
            check_protocol(model), self.pipeline_parallel, self.virtual_pipeline, self.pipeline_layout
        )

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes per node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which share of the data this rank reads: all ranks of one replica read the same."""
        return {"num_replicas": self.mesh.dp, "rank": self.mesh.rank("dp")}

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin, in our form."""
        return self._precision_plugin if self._precision_plugin is not None else MegatronPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else MegatronPrecision.of(plugin)

    @property
    def precision(self) -> MegatronPrecision:
        """The precision plugin, typed."""
        plugin = self.precision_plugin
        assert isinstance(plugin, MegatronPrecision)
        return plugin

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)

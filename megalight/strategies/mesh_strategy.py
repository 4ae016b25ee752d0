"""What every strategy of ours is: ranks on a mesh, a split model, and the state that its helpers read and fill."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import Plan
from megalight.parallel.random import RandomStreams
from megalight.parallel.shard import ShardSpec
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.collectives import Collectives
from megalight.strategies.options import DataParallel


class MeshStrategy(Collectives, ParallelStrategy):
    """Ranks on a mesh. Set-up, checkpoints and launchers know a strategy as this.

    Attributes:
        tensor_parallel, sequence_parallel, data_parallel, plan: as the user asked.
        mesh: the grid of ranks.
        specs: what each local parameter holds of the model.
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
    data_parallel: DataParallel
    plan: Plan | None
    num_nodes: int
    mesh: ParallelMesh
    specs: dict[str, ShardSpec]
    engine: DataParallelEngine | None
    streams: RandomStreams | None
    fresh: bool
    extra_shard_states: dict[str, list[Tensor]]

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

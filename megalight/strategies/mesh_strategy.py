"""The base of our strategies: ranks on a mesh, a split model, and the state that helpers read and write."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from megalight.checkpoint.run import TrainingRun
from megalight.errors import ConfigurationError
from megalight.migration import check_arguments
from megalight.optim.configured import Configured
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh, shared_group
from megalight.parallel.model import ParallelModel
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.random import RandomStreams
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.checkpoints import CheckpointOptions
from megalight.strategies.micro_batches import MicroBatchSize
from megalight.strategies.user_module import check_steps, layout_for, root_of
from megalight.strategies.validation import check_not_compiled


class Collectives:
    """Collectives of a strategy. Values are reduced over the ranks with different data, decisions over all ranks.

    In a step that only some ranks run, those over all ranks raise a :class:`~megalight.errors.ConfigurationError`: they
    would wait for ranks that never come.

    Attributes:
        mesh: the grid of ranks.
        in_part: what divides the step that runs: ``pp=2``. None: all ranks run it, or none is running.
    """

    mesh: ParallelMesh
    world_size: int
    in_part: str | None = None
    _host_group: dist.ProcessGroup | None = None

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """This process's device."""

    @contextmanager
    def part(self, what: str, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Enter ``context``, and run code of the user's that other ranks do not run.

        Args:
            what: divides the step, for messages.
        """
        before, self.in_part = self.in_part, what
        try:
            with context():
                yield
        finally:
            self.in_part = before

    def _together(self, call: str) -> None:
        if self.in_part is not None:
            raise ConfigurationError(
                f"{call} waits for all ranks, and with {self.in_part} only some of them run this forward_step or "
                "loss_step. Call it in a hook between steps, such as on_train_batch_end, return the value as one of "
                "loss_step's metrics, or use strategy.reduce(value), which asks the ranks of this part with other data."
            )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks with different data. Ranks of one replica have equal values."""
        if not isinstance(tensor, Tensor):
            return tensor
        group = group or self.mesh.group(*TOKEN_AXES)
        if group is None:
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        mean = name in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper())
        # A copy: the caller's metric must not change.
        value = tensor.to(self.root_device, copy=True)
        # A mean of integers is a fraction.
        if mean and not value.is_floating_point():
            value = value.float()
        dist.all_reduce(value, op=op, group=group)
        return value / dist.get_world_size(group) if mean else value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all (or any) of *all* ranks decided so, inside replicas too."""
        return not self.any_rank(not decision) if all else self.any_rank(decision)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, without touching the device."""
        return self.largest([int(flag)]) == [1]

    def largest(self, values: list[int]) -> list[int]:
        """Return the maximum of each value over all ranks, without touching the device."""
        self._together("a decision of all ranks (reduce_boolean_decision)")
        # On the host: a device collective would wait for all queued kernels, in every step.
        return values if self.world_size == 1 else _largest(values, self.host_group())

    def largest_along(self, axis: str) -> Callable[[list[int]], list[int]]:
        """Return what does the same over the ranks along an axis of the mesh only; these ranks call this together."""
        ranks = self.mesh.ranks(axis)
        if len(ranks) == 1:
            return lambda values: values
        group = shared_group(ranks, "decisions on the host", backend="gloo")
        return lambda values: _largest(values, group)

    def host_group(self) -> dist.ProcessGroup | None:
        """A gloo group over all ranks, for decisions on the host that must not touch the device."""
        if self._host_group is None:
            backend = dist.get_backend()
            # All ranks make this group together, at the first decision that they take together.
            self._host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
        return self._host_group

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._together("barrier")
        if self.world_size > 1 and dist.is_initialized():
            dist.barrier(group=self.host_group())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object of rank ``src`` to all ranks."""
        self._together("broadcast")
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.host_group())
        return box[0]


def _largest(values: list[int], group: dist.ProcessGroup | None) -> list[int]:
    found = torch.tensor(values)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in found]


class ModelPart(NamedTuple):
    """A part of the run's model that has ranks of its own.

    Attributes:
        mesh: its ranks, as seen by the first.
        layout: how it is split over them.
        take: takes it out of the whole model.
    """

    mesh: ParallelMesh
    layout: Layout
    take: Callable[[nn.Module], nn.Module]


class WorkerResult(NamedTuple):
    """What worker processes hand back when ``fit`` ends.

    Attributes:
        module: it has the whole trained model.
        files: those that module and data add to a checkpoint, by name.
    """

    module: pl.LightningModule
    files: dict[str, bytes]


class MeshStrategy(Collectives, ParallelStrategy):
    """A strategy with ranks on a mesh. Setup, checkpoints and launchers depend only on this class.

    Attributes:
        layout: the layout that the user's arguments describe.
        broadcast_buffers, checkpoints, process_group_backend, micro_batch_size: the user's arguments.
        mesh: the grid of ranks.
        micro_batches: the number of samples per micro-batch that is in use. None before setup.
        parallel_model: this rank's part of the model. None before setup.
        configured: the hyperparameters that the run began with. None before ``fit``.
        handed_back: what worker processes have handed back to this process, which called ``fit``. None in others.
        engine: the data-parallel engine. None outside ``fit``.
        streams: random streams. None before the environment is set up.
        extra_shard_states: name -> one flat tensor per engine shard, for example a moving average of the weights. It is
            saved and loaded by canonical name, as ``<name>.<canonical>``. ``model`` and ``optimizer`` are taken.
    """

    layout: Layout
    broadcast_buffers: bool
    checkpoints: CheckpointOptions
    process_group_backend: str | None
    micro_batch_size: int | Literal["auto"] | None
    micro_batches: MicroBatchSize | None = None
    configured: Configured | None = None
    num_nodes: int
    mesh: ParallelMesh
    parallel_model: ParallelModel | None
    handed_back: WorkerResult | None = None
    engine: DataParallelEngine | None
    streams: RandomStreams | None
    extra_shard_states: dict[str, list[Tensor]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse arguments of other strategies by name. Here, so that constructors show only their own."""
        check_arguments(cls, kwargs)
        return super().__new__(cls)

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        # The Trainer sets this first. After that it refuses compiled modules itself, without a next step.
        if module is not None:
            check_not_compiled(type(self).__name__, module)
        self._module = module

    @property
    def ends_steps(self) -> bool:
        """Whether steps tell layers of their end. Steps without an engine are Lightning's."""
        return self.engine is not None

    @property
    def chunks(self) -> list[nn.Module]:
        """The parts of the model on this rank, in model order."""
        return [] if self.parallel_model is None else self.parallel_model.chunks

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of ``world_size`` ranks, as seen by ``rank``.

        Raises:
            LayoutError: the parallel degrees do not divide the number of ranks.
        """
        return self.layout.mesh(world_size, rank)

    def parts(self, world_size: int) -> Sequence[ModelPart]:
        """Return the parts of the model that have ranks of their own. The last one has the loss."""
        return (ModelPart(self.grid(world_size), self.part_layout, self.take),)

    def take(self, whole: nn.Module) -> nn.Module:
        """Return the part of the whole model that is split over the ranks of :attr:`mesh`."""
        return whole

    def split(self, module: pl.LightningModule, root: nn.Module) -> ParallelModel:
        """Split the part of the model that :meth:`take` returned."""
        return ParallelModel(root, self.mesh, layout_for(module, root, self.part_layout))

    def check_module(self, module: pl.LightningModule, mesh: ParallelMesh) -> None:
        """Refuse a module that cannot run on a mesh.

        Raises:
            ConfigurationError: the message says what to do.
        """
        check_steps(module, mesh)

    @property
    def description(self) -> str:
        """The layout in words."""
        return self.mesh.describe()

    @property
    def holds_part(self) -> bool:
        """Whether ranks hold parameters that others lack, so that a rule for parameters may match none here."""
        return self.layout.pipeline_parallel > 1

    @property
    def divides_steps(self) -> str | None:
        """What lets only some ranks run a user's ``forward_step`` or ``loss_step``; None: all of them run each."""
        return f"pp={self.layout.pipeline_parallel}" if self.layout.pipeline_parallel > 1 else None

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all ranks, or from those of ``group``."""
        if group is None:
            self._together("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @property
    def is_distributed(self) -> bool:
        """Whether ranks have different data. If so, Lightning divides loaders over replicas and syncs logged values."""
        # By the degrees, not by the mesh: Lightning asks before there are processes.
        mesh = self.grid(self.num_nodes * self.num_processes)
        return mesh.dp * mesh.cp > 1

    @property
    def divides_data(self) -> bool:
        """Whether there are several replicas, which read different samples."""
        return self.grid(self.num_nodes * self.num_processes).dp > 1

    @property
    def run(self) -> TrainingRun:
        """The parts of the run that checkpoints save."""
        if self.handed_back is not None:
            whole = ParallelModel(root_of(self.handed_back.module), ParallelMesh(), Layout(plan=ParallelizePlan()))
            return TrainingRun(whole, RandomStreams(whole.mesh))
        assert self.parallel_model is not None and self.streams is not None
        # A callback may have added parameters since the split.
        self.parallel_model.describe_new()
        optimizer = self.optimizers[0] if self.engine is not None else None
        return TrainingRun(self.parallel_model, self.streams, self.engine, optimizer, self.extra_shard_states)

    @property
    def part_layout(self) -> Layout:
        """The layout of this rank's part of the model."""
        return self.layout

    @property
    def data_parallel(self) -> DataParallelOptions:
        """How replicas share gradients and optimizer state."""
        return self.layout.data_parallel or DataParallelOptions()

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes per node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """This rank's share of the data. All ranks of one replica read the same share."""
        # By replica: all ranks of one replica need the same samples.
        return {"num_replicas": self.mesh.dp, "rank": self.mesh.rank("dp")}

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin, converted to ours."""
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
        """Set this process's rank and the world size in the cluster environment."""
        if self.cluster_environment is not None:
            # Ranks count nodes first, so that `tp`, the fastest axis, stays inside a node.
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)

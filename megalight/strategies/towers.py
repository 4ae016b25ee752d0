"""MegatronTowersStrategy: train a vision tower and a language model on ranks of their own with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.checkpoint.run import Run
from megalight.errors import ConfigurationError, LayoutError
from megalight.models.vlm.module import VLMModule
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.options import ParallelOptions
from megalight.strategies.mesh_strategy import Part
from megalight.strategies.step import Stepper
from megalight.strategies.tower_base import TowersStrategy
from megalight.strategies.tower_steps import LanguageStepper, Relay, TowerStepper
from megalight.towers import Side
from megalight.towers.arriving import Arrivals
from megalight.towers.division import Division
from megalight.towers.encoder import Encoder


class MegatronTowersStrategy(TowersStrategy):
    """A vision-language model whose vision tower and projector have ranks of their own.

    The first ``tower.ranks`` ranks have the tower, the others the language model. Features and their gradients go over
    a :class:`~megalight.parallel.bridge.BridgeCommunicator`. Losses, gradients, weights and checkpoints are those of
    one device. See :class:`~megalight.towers.division.Division` for the samples that each rank reads: a DataLoader
    batch is the share of a lane.

    Args:
        tower: ranks and layout of the tower.
        options: the arguments of :class:`~megalight.strategies.MegatronStrategy`. They are for the language model, on
            the ranks that the tower leaves. ``data_parallel``, ``checkpoints`` and everything about processes are for
            both.

    Raises:
        LayoutError: the ranks do not add up, or a side cannot have its layout.
        ConfigurationError: options cannot be combined.
    """

    strategy_name = "megatron_towers"
    what = "a tower on ranks of its own"
    division: Division | None = None
    _bridge: BridgeCommunicator | None = None

    # ------------------------------------------------------------------ ranks

    def divide(self, world_size: int, rank: int = 0) -> Division:
        """Divide the ranks of the run.

        Raises:
            LayoutError: they do not add up, or a side cannot have its layout.
        """
        if self.tower.ranks >= world_size:
            raise LayoutError(
                f"tower.ranks={self.tower.ranks} leaves no rank of {world_size} for the language model; start more "
                "processes, or give the tower fewer."
            )
        language = Side(
            ranks=world_size - self.tower.ranks,
            tensor_parallel=self.tensor_parallel,
            context_parallel=self.context_parallel,
            expert_parallel=self.expert_parallel,
            expert_tensor_parallel=self.expert_tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
        )
        return Division.of(self.tower, language, world_size, rank)

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of the tower or of the language model, whichever ``rank`` has.

        Raises:
            LayoutError: as :meth:`divide`.
        """
        return self.divide(world_size, rank).mesh

    def parts(self, world_size: int) -> Sequence[Part]:
        """Return tower and language model."""
        tower, language = self.grid(world_size), self.grid(world_size, self.tower.ranks)
        return (
            Part(tower, self.tower.tower_options(), lambda whole: self.take_part(whole, True)),
            Part(language, super().options, lambda whole: self.take_part(whole, False)),
        )

    def setup_environment(self) -> None:
        """Make the process group, both meshes and the random streams."""
        self.set_world_ranks()
        self.division = self.division or self.divide(self.world_size, self.global_rank)
        super().setup_environment()

    @property
    def own(self) -> Division:
        """The division of the ranks, as this one sees it."""
        assert self.division is not None
        return self.division

    @property
    def layout(self) -> str:
        """Both layouts in words."""
        return self.own.describe()

    @property
    def options(self) -> ParallelOptions:
        """The options of this rank's side."""
        is_tower = self.division is not None and self.division.is_tower
        return self.tower.tower_options() if is_tower else super().options

    @property
    def divides_steps(self) -> str | None:
        """Ranks of the tower run no step of the user's."""
        return self.what

    @property
    def is_distributed(self) -> bool:
        """Whether ranks have different data: if so, Lightning syncs logged values."""
        language = self.divide(self.num_nodes * self.num_processes).language
        return language.dp * language.cp > 1

    @property
    def divides_data(self) -> bool:
        """Whether there are several lanes, which read different samples."""
        return self.divide(self.num_nodes * self.num_processes).lanes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """This lane's share of the data. All ranks of a lane read the same share."""
        return {"num_replicas": self.own.lanes, "rank": self.own.lane}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas of the language model; all ranks call this, and those of the tower get the result.

        Integers become float32. With a ``group``, only its ranks call this; in a step, those of the language model.
        """
        if group is not None or self.in_part is not None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        own = tensor if self.own.is_tower else super().reduce(tensor, None, reduce_op)
        # On the wire all values are of one type: a mean of integers is a fraction.
        value = own.to(self.root_device, torch.float64, copy=True)
        dist.broadcast(value, self.own.language.members.start)
        return value.to(own.dtype if own.is_floating_point() else torch.float32)

    # ------------------------------------------------------------------ model and steps

    def take(self, whole: nn.Module) -> nn.Module:
        """Return the tower and the projector, or everything else."""
        return self.take_part(whole, self.own.is_tower)

    def split(self, module: pl.LightningModule, root: nn.Module) -> ParallelModel:
        """Split this rank's part. The lanes of tower and language model agree on numbers of micro-batches."""
        model = super().split(module, root)
        model.coupling = self.own.coupling()
        return model

    def make_stepper(
        self, module: pl.LightningModule, model: ParallelModel, before_backward: Callable[[Tensor], None]
    ) -> Stepper:
        """Make what runs the steps of this rank's side."""
        assert isinstance(module, VLMModule) and self.micro_batches is not None
        own = self.own
        if self._bridge is None:
            self._bridge = BridgeCommunicator(own.tower, own.language, device=self.root_device)
        relay = Relay(self.broadcast, own.language.members.start, self.root_device, self.host_group())
        common = module, model, self.precision, self.micro_batches, before_backward
        if own.is_tower:
            schedule, context = super().options, self.precision.step_context
            encoder = Encoder(module.config, model, self._bridge, own, schedule, context)
            return TowerStepper(*common, encoder=encoder, relay=relay)
        module.arrivals = Arrivals(self._bridge, model.token_multiple)
        return LanguageStepper(*common, bridge=self._bridge, division=own, relay=relay)

    def _fit_setup(self, trainer: pl.Trainer) -> None:
        super()._fit_setup(trainer)
        if self.engine is None:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigurationError(
                f"{kinds} updates whole parameters, which a tower on ranks of its own does not support; use an "
                "optimizer that updates each element by itself, such as AdamW."
            )

    def _make_engine(self) -> None:
        counts: list[Any] = [None] * self.world_size
        dist.all_gather_object(counts, len(self.optimizers[0].param_groups), group=self.host_group())
        if len(set(counts)) > 1:
            raise ConfigurationError(
                f"configure_optimizers made {counts} parameter groups on the ranks; make the same ones everywhere, "
                "without parameters where a rank has none."
            )
        super()._make_engine()
        assert self.engine is not None
        # The norm is that of both models.
        self.engine.main_gradients.everyone = dist.group.WORLD

    @property
    def run(self) -> Run:
        """The parts of the run that checkpoints save; ranks of the other model have other parameters."""
        run = super().run
        # What was handed back is whole: this process is no rank, and has no others beside it.
        return run if self.handed_back is not None else replace(run, peers=self.host_group())

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the names for ``Trainer(strategy=...)``."""
        registry.register("megatron_towers", cls, "A vision tower on ranks of its own", override=True)

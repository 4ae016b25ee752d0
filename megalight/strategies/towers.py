"""MegatronTowersStrategy: train a vision tower and a language model on ranks of their own with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.checkpoint.run import TrainingRun
from megalight.errors import ConfigurationError, LayoutError
from megalight.models.transforms import DoRA, LoRA
from megalight.models.vlm.model import VLM, TowerPart
from megalight.models.vlm.module import VLMModule
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.coupling import Coupling
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.strategies.checkpoints.options import CheckpointOptions
from megalight.strategies.megatron import MegatronStrategy
from megalight.strategies.mesh_strategy import MeshStrategy, ModelPart
from megalight.strategies.micro_batches import AUTO
from megalight.strategies.step import Stepper
from megalight.strategies.tower_steps import LanguageStepper, Relay, TowerStepper
from megalight.strategies.user_module import STEPS, defines_step, layout_for
from megalight.towers.batch_split import Division
from megalight.towers.colocated import ColocatedExecutor
from megalight.towers.disjoint import FeatureReceiver, TowerRunner
from megalight.towers.layout import check_tower, divided, part_of, tower_layout

ADAPTERS = LoRA, DoRA
"""Transforms that change each layer by itself, wherever it is."""


def check_options(strategy: MeshStrategy, what: str) -> None:
    """Refuse options of a strategy.

    Args:
        what: how the tower is placed, for the messages.

    Raises:
        ConfigurationError: it cannot be combined with such a tower.
    """
    if strategy.micro_batch_size == AUTO:
        raise ConfigurationError(
            f"micro_batch_size='auto' with {what}: both models must run the same micro-batches, and each rank measures "
            "its own memory. Give a number."
        )
    if strategy.checkpoints.format != CheckpointOptions().format:
        raise ConfigurationError(
            f"checkpoints.format={strategy.checkpoints.format!r} with {what}: its names are those of one layout, and "
            f"there are two. Use {CheckpointOptions().format!r}."
        )


def check_tower_module(module: pl.LightningModule, what: str) -> None:
    """Refuse modules that cannot be divided.

    Raises:
        ConfigurationError: says what to do.
    """
    if not isinstance(module, VLMModule):
        raise ConfigurationError(
            f"{what} needs a VLMModule, and {type(module).__name__} is none; use MegatronStrategy."
        )
    if own := [step for step in STEPS if defines_step(module, step)]:
        raise ConfigurationError(
            f"{type(module).__name__} defines {own[0]}, which no rank can run whole with {what}. Remove it: return "
            "further values as metrics from loss_step."
        )
    if module.frozen_models():
        raise ConfigurationError(
            f"{type(module).__name__} has frozen_models, which read whole micro-batches beside the trained model; "
            f"{what} has none beside it. Use MegatronStrategy."
        )
    if strange := [each for each in module.transforms if not isinstance(each, ADAPTERS)]:
        raise ConfigurationError(
            f"the transform {type(strange[0]).__name__} with {what} is not supported, only adapters are; use "
            "MegatronStrategy."
        )


class TowersStrategy(MegatronStrategy):
    """A vision-language model whose vision tower and projector have a layout of their own.

    Args:
        tower: layout of the tower.
        options: the arguments of :class:`~megalight.strategies.MegatronStrategy`. They are for the language model;
            ``data_parallel``, ``checkpoints`` and everything about processes are for both.

    Attributes:
        what: how the tower is placed, for messages.

    Raises:
        LayoutError: the ranks do not add up, or a side cannot have its layout.
        ConfigurationError: options cannot be combined.
    """

    what: ClassVar[str]

    def __init__(self, tower: Layout | None = None, **options: Any) -> None:
        self.tower = tower or Layout()
        check_tower(self.tower)
        super().__init__(**options)
        check_options(self, self.what)

    @property
    def holds_part(self) -> bool:
        """Two layouts divide the model."""
        return True

    def check_module(self, module: pl.LightningModule, mesh: ParallelMesh) -> None:
        """Refuse modules that cannot be divided.

        Raises:
            ConfigurationError: says what to do.
        """
        check_tower_module(module, self.what)
        super().check_module(module, mesh)

    def take_part(self, whole: nn.Module, tower: bool) -> nn.Module:
        """Return the tower and the projector, or everything else, with the precision of that part."""
        self.precision.take(whole, "vision" if tower else "language")
        return part_of(whole, tower)

    def predict_step(self, *args: Any) -> Any:
        """Run the module's ``output_step``: no rank could run a ``predict_step`` of its own."""
        assert self._stepper is not None
        self.sync_parameters()
        return self._stepper.predict(args[0])


class MegatronTowersStrategy(TowersStrategy):
    """A vision-language model whose vision tower and projector have ranks of their own.

    The first ``tower.ranks`` ranks have the tower, the others the language model. Features and their gradients go over
    a :class:`~megalight.parallel.bridge.BridgeCommunicator`. Losses, gradients, weights and checkpoints are those of
    one device. See :class:`~megalight.towers.batch_split.Division` for the samples that each rank reads: a DataLoader
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
        language = replace(self.layout, ranks=world_size - self.tower.ranks)
        return Division.of(self.tower, language, world_size, rank)

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of the tower or of the language model, whichever ``rank`` has.

        Raises:
            LayoutError: as :meth:`divide`.
        """
        return self.divide(world_size, rank).mesh

    def parts(self, world_size: int) -> Sequence[ModelPart]:
        """Return tower and language model."""
        tower, language = self.grid(world_size), self.grid(world_size, self.tower.ranks)
        return (
            ModelPart(tower, tower_layout(self.tower), lambda whole: self.take_part(whole, True)),
            ModelPart(language, self.layout, lambda whole: self.take_part(whole, False)),
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
    def description(self) -> str:
        """Both layouts in words."""
        return self.own.describe()

    @property
    def part_layout(self) -> Layout:
        """The layout of this rank's side."""
        is_tower = self.division is not None and self.division.is_tower
        return tower_layout(self.tower) if is_tower else self.layout

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
            schedule, context = self.layout, self.precision.step_context
            encoder = TowerRunner(module.config, model, self._bridge, own, schedule, context)
            return TowerStepper(*common, encoder=encoder, relay=relay)
        module.arrivals = FeatureReceiver(self._bridge, model.token_multiple)
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
    def run(self) -> TrainingRun:
        """The parts of the run that checkpoints save; ranks of the other model have other parameters."""
        run = super().run
        # What was handed back is whole: this process is no rank, and has no others beside it.
        return run if self.handed_back is not None else replace(run, peers=self.host_group())

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the names for ``Trainer(strategy=...)``."""
        registry.register("megatron_towers", cls, "A vision tower on ranks of its own", override=True)


class MegatronTowersBesideStrategy(TowersStrategy):
    """A vision-language model whose vision tower and projector have a layout of their own, on the same ranks.

    In each step the tower runs for all micro-batches, then the language model's schedule, then the tower backward. The
    images of a micro-batch, of all replicas of the language model, are divided among the replicas of the tower, so that
    each has about as many rows; features come back in the order of the images. Losses, gradients, weights and
    checkpoints are those of one device.

    Args:
        tower: layout of the tower; ``ranks`` is left out, or all.
        options: the arguments of :class:`~megalight.strategies.MegatronStrategy`. They are for the language model;
            ``data_parallel``, ``checkpoints`` and everything about processes are for both.

    Raises:
        LayoutError: the ranks do not add up, or a side cannot have its layout.
        ConfigurationError: options cannot be combined.
    """

    strategy_name = "megatron_towers_beside"
    what = "a tower in a layout of its own"
    _part: TowerPart | None = None

    def tower_mesh(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of the tower.

        Raises:
            LayoutError: its degrees do not divide the ranks, or it has other ranks than the language model.
        """
        if self.tower.ranks not in (1, world_size):
            raise LayoutError(
                f"tower.ranks={self.tower.ranks}, and there are {world_size} processes, which both models share. Leave "
                "it out, or give the tower ranks of its own with MegatronTowersStrategy."
            )
        try:
            return self.tower.mesh(world_size, rank, 0)
        except LayoutError as error:
            raise LayoutError(f"the tower: {error}") from error

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of the language model.

        Raises:
            LayoutError: the degrees of a model do not divide the number of ranks.
        """
        self.tower_mesh(world_size, rank)
        return super().grid(world_size, rank)

    def parts(self, world_size: int) -> Sequence[ModelPart]:
        """Return tower and language model."""
        return (
            ModelPart(self.tower_mesh(world_size), tower_layout(self.tower), lambda whole: self.take_part(whole, True)),
            ModelPart(self.grid(world_size), self.part_layout, lambda whole: self.take_part(whole, False)),
        )

    @property
    def description(self) -> str:
        """Both layouts in words."""
        tower = self.tower_mesh(self.mesh.world_size, self.mesh.global_rank)
        return f"tower on {tower.describe()}; language model on {self.mesh.describe()}"

    def take(self, whole: nn.Module) -> nn.Module:
        """Return the language model, and keep the tower for :meth:`split`."""
        self.precision.take(whole, None)  # this rank has both
        self._part, language = divided(whole)
        return language

    def split(self, module: pl.LightningModule, root: nn.Module) -> ParallelModel:
        """Split both models. The tower then belongs to the language model's tree, under its own names."""
        model = super().split(module, root)
        assert self._part is not None and isinstance(root, VLM)
        options = layout_for(module, self._part, tower_layout(self.tower))
        mesh = self.tower_mesh(self.mesh.world_size, self.mesh.global_rank)
        tower = ParallelModel(self._part, mesh, options)
        root.attach(self._part)
        model.graft(tower)
        if self.mesh.dp > 1:  # replicas of the tower read images of all replicas of the language model
            model.coupling = Coupling(self.mesh)
        return model

    def make_stepper(
        self, module: pl.LightningModule, model: ParallelModel, before_backward: Callable[[Tensor], None]
    ) -> Stepper:
        """Make what runs the steps: the tower around the language model's schedule."""
        assert isinstance(module, VLMModule) and model.grafted is not None
        stepper = super().make_stepper(module, model, before_backward)
        step = stepper.step
        around = ColocatedExecutor(module.config, model.grafted, model, step.executor, self.precision.step_context)
        step.executor = around
        module.arrivals = around
        return stepper

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the names for ``Trainer(strategy=...)``."""
        registry.register("megatron_towers_beside", cls, "A vision tower in a layout of its own", override=True)

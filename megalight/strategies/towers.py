"""MegatronTowersStrategy: train a vision tower and a language model in layouts of their own with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from megalight.checkpoint.run import TrainingRun
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.batches import count_samples, skips
from megalight.models.transforms import DoRA, LoRA
from megalight.models.vlm.model import TowerPart
from megalight.models.vlm.module import VLMModule
from megalight.models.vlm.task import check_images
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.strategies.checkpoints import CheckpointOptions
from megalight.strategies.megatron import MegatronStrategy
from megalight.strategies.mesh_strategy import ModelPart
from megalight.strategies.micro_batches import AUTO
from megalight.strategies.stage_logs import StageLogs
from megalight.strategies.step import Stepper, StepReport
from megalight.strategies.user_module import STEPS, defines_step, layout_for
from megalight.towers.colocated import ColocatedExecutor
from megalight.towers.disjoint import FeatureReceiver, TowerRunner
from megalight.towers.placement import Placement, TowerPlacement, divided, graft_tower, tower_layout
from megalight.types.batch import contents, emptied, is_empty


class Relay:
    """Tells the tower's ranks what the language model's know: losses and other totals, and outputs.

    Args:
        broadcast: sends an object of a rank to all ranks.
        source: a rank of the language model. All of them have the totals.
        host: all ranks, on the host.
    """

    def __init__(
        self,
        broadcast: Callable[[Any, int], Any],
        source: int,
        device: torch.device,
        host: dist.ProcessGroup | None,
    ) -> None:
        self.broadcast = broadcast
        self.source = source
        self.device = device
        self.host = host
        self._names: dict[str, list[str]] = {}

    def __call__(self, stage: str, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the values, 0-dim float64, on all ranks.

        Args:
            stage: the names are the same in all calls for a stage.
            values: None on ranks of the tower.

        Raises:
            ConfigurationError: the names are not the same.
        """
        if stage not in self._names:  # once: it makes the host wait
            self._names[stage] = self.broadcast(None if values is None else list(values), self.source)
        names = self._names[stage]
        row = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if values is not None:
            if set(values) != set(names):
                raise ConfigurationError(
                    f"loss_step returned {sorted(values)} and earlier {sorted(names)}: every micro-batch must have the "
                    "same metrics, since the tower's ranks wait for them. Return a count of 0 instead."
                )
            for place, name in enumerate(names):
                row[place].copy_(values[name])
        dist.broadcast(row, self.source)
        return dict(zip(names, row, strict=True))

    def totals(
        self, stage: str, totals: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Do the same for sums and counts."""
        flat = None
        if totals is not None:
            flat = {f"{name} {part}": pair[part] for name, pair in totals.items() for part in (0, 1)}
        found = self(stage, flat)
        names = [key.removesuffix(" 0") for key in found if key.endswith(" 0")]
        return {name: (found[f"{name} 0"], found[f"{name} 1"]) for name in names}

    def outputs(self, own: Any = None) -> list[Any]:
        """Return what each rank gives, by rank, with tensors on the host; ranks of the tower give nothing."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, apply_to_collection(own, Tensor, Tensor.cpu), group=self.host)
        return every


class LanguageStepper(Stepper):
    """Runs the steps of the language model, whose first stage waits for features.

    Args:
        bridge: comes from the tower.
        placement: which share of a lane's batch this replica takes.
        relay: to the tower's ranks.
    """

    def __init__(self, *args: Any, bridge: BridgeCommunicator, placement: TowerPlacement, relay: Relay) -> None:
        super().__init__(*args)
        self.bridge = bridge
        self.placement = placement
        self.relay = relay
        self.logs = _logs(self, placement, relay.host)

    def train(self, args: tuple[Any, ...], number: int, scale: float, sync: bool) -> tuple[Any, StepReport | None]:
        """Run forward and backward of this replica's share, and tell the tower's ranks the result."""
        output, report = super().train(args, number, scale, sync)
        self.bridge.finish()
        assert report is not None  # only steps of one's own leave batches out
        # All ranks of the language model do this, which keeps their collectives in order.
        self.relay("train", {"loss": report.loss, "num_tokens": report.num_tokens, **report.metrics})
        return output, report

    def totals(self, stage: str, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the totals of an evaluation batch, and tell the tower's ranks."""
        found = super().totals(stage, batch)
        self.bridge.finish()
        self.relay.totals(stage, found)
        return found

    def predict(self, batch: Any) -> Any:
        """Return the module's ``output_step`` for this replica's share of a batch, and tell the tower's ranks."""
        output = super().predict(self._own(batch))
        self.bridge.finish()
        self.relay.outputs(output)
        return output

    def _split(self, batch: Any) -> tuple[list[int], Sequence[Any]]:
        # That of an empty batch asks for its contents.
        return super()._split(batch if is_empty(batch) else self._own(batch))

    def _own(self, batch: Any) -> Any:
        if is_empty(batch):
            return emptied(self._own(contents(batch)))
        return _shares(self._module, batch, self.placement.readers)[self.model.mesh.rank("dp") % self.placement.readers]


class TowerStepper(Stepper):
    """Runs the steps of the tower.

    Args:
        runner: its passes.
        relay: from the language model's ranks.
    """

    def __init__(self, *args: Any, runner: TowerRunner, relay: Relay) -> None:
        super().__init__(*args)
        self.runner = runner
        self.relay = relay
        self.logs = _logs(self, runner.placement, relay.host)

    def train(self, args: tuple[Any, ...], number: int, scale: float, sync: bool) -> tuple[Any, StepReport | None]:
        """Run forward and backward of the images; the gradients that come back have the scale."""
        assert self.step.engine is not None
        self.precision.begin(number)
        sizes, micro_batches = self._split(args[0])
        samples = sum(sizes)
        self.has_gradients = True
        passes = partial(self.runner.train, engine=self.step.engine, sync=sync)
        shared = self.logs.shared(self.module, "train")
        with self.micro_batches.step(samples), shared, self.precision.step(sync):
            self.step.runner((scale, sync), self.runner.joined(micro_batches), passes)
        self.runner.bridge.finish()
        values = self.relay("train")
        loss, tokens = values.pop("loss"), values.pop("num_tokens")
        return loss, StepReport(loss, tokens, values, samples * self.runner.placement.lanes)

    def totals(self, stage: str, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Send the features of an evaluation batch, and return the totals of the language model."""
        _, micro_batches = self._split(batch)
        self.runner.evaluate(self.runner.joined(micro_batches))
        self.runner.bridge.finish()
        return self.relay.totals(stage)

    def predict(self, batch: Any) -> Any:
        """Send the features of a batch, and return the outputs of the lane's replicas of the language model."""
        placement = self.runner.placement
        rows = _shares(self._module, contents(batch), placement.readers)
        self.runner.evaluate(self.runner.joined([emptied(rows) if is_empty(batch) else rows]))
        self.runner.bridge.finish()
        every = self.relay.outputs()
        mesh = placement.language
        # The first rank of each replica tells; all of its ranks have the output.
        first = {mesh.rank("dp", of=rank): rank for rank in reversed(mesh.members)}
        found = [every[first[replica]] for replica in placement.replicas]
        if is_empty(batch):
            return None
        return torch.cat([each.to(self.model.device) for each in found]) if _are_tensors(found) else found

    def _split(self, batch: Any) -> tuple[list[int], Sequence[Any]]:
        """Return the sizes of the lane's micro-batches in samples, and for each those of its replicas side by side."""
        assert isinstance(self.module, VLMModule)
        if is_empty(batch):
            return [], [emptied(self._split(contents(batch))[1][0])]
        shares = _shares(self._module, batch, self.runner.placement.readers)
        divided = [Stepper._split(self, share) for share in shares]
        rows = list(zip(*(parts for _, parts in divided), strict=True))
        language = self.runner.placement.language
        multiple = self.runner.language.token_multiple(language)
        for each in (each for row in rows for each in row):
            check_images(self.module.config, each.parts()[0])  # while images are those of the batch
            self.module.count_work(each, language.cp == 1 and skips(each, multiple))
        return [sum(row) for row in zip(*(sizes for sizes, _ in divided), strict=True)], rows


def _logs(stepper: Stepper, placement: TowerPlacement, host: dist.ProcessGroup | None) -> StageLogs:
    """Share what steps log with all ranks. Those of the tower log what the first replica of their lane does."""
    language, axes = placement.language, ("dp", "cp", "tp")
    pipelines: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(language.members, key=lambda rank: language.rank("pp", of=rank)):
        pipelines.setdefault(tuple(language.rank(axis, of=rank) for axis in axes), []).append(rank)
    own = (placement.replicas[0], 0, 0) if placement.is_tower else tuple(language.rank(axis) for axis in axes)
    return StageLogs(
        list(pipelines.values()),
        list(pipelines).index(own),
        lambda: dist.group.WORLD,
        lambda: host,
        stepper.model.device,
        stepper.step,
    )


def _are_tensors(found: Sequence[Any]) -> bool:
    return all(isinstance(each, Tensor) for each in found)


def _shares(module: Any, batch: Any, readers: int) -> Sequence[Any]:
    """Divide the batch of a lane among the replicas of the language model, in order.

    Raises:
        DataError: it does not divide.
    """
    if readers == 1:
        return [batch]
    samples = count_samples(batch)
    if samples % readers:
        raise DataError(
            f"a batch has {samples} samples, and {readers} replicas of the language model share the images of one "
            f"replica of the tower; give each batch a multiple of {readers} samples."
        )
    shares: Sequence[Any] = module.split_batch(batch, samples // readers)
    return shares


ADAPTERS = LoRA, DoRA
"""Transforms that change each layer by itself, wherever it is."""


class MegatronTowersStrategy(MegatronStrategy):
    """A vision-language model whose vision tower and projector have a layout of their own.

    Losses, gradients, weights and checkpoints are those of a single device.

    Colocated: both models share all ranks. In each step the tower runs for all micro-batches, then the language model's
    schedule, then the tower backward. The images of a micro-batch, of all replicas of the language model, are divided
    among the replicas of the tower, so that each has about as many rows; features come back in the order of the images.

    Disjoint: the first ``tower.ranks`` ranks have the tower, the others the language model. Features and their
    gradients go over a :class:`~megalight.parallel.bridge.BridgeCommunicator`. A DataLoader batch is the share of a
    lane (:class:`~megalight.towers.placement.TowerPlacement`).

    Args:
        tower: layout of the tower. Colocated: ``ranks`` is left out, or all.
        placement: ``colocated`` or ``disjoint``.
        options: the arguments of :class:`~megalight.strategies.MegatronStrategy`. They are for the language model,
            on the ranks that a disjoint tower leaves; ``data_parallel``, ``checkpoints`` and everything about processes
            are for both.

    Attributes:
        placed: the ranks of both models, as this one sees them. None before the environment is set up.

    Raises:
        LayoutError: the ranks do not add up, or a model cannot have its layout.
        ConfigurationError: options cannot be combined.
    """

    strategy_name = "megatron_towers"
    placed: TowerPlacement | None = None
    _bridge: BridgeCommunicator | None = None
    _part: TowerPart | None = None

    def __init__(self, tower: Layout | None = None, placement: Placement = "colocated", **options: Any) -> None:
        self.tower = tower or Layout()
        self.placement = placement
        super().__init__(**options)
        self._check_options()

    def _check_options(self) -> None:
        if self.micro_batch_size == AUTO:
            raise ConfigurationError(
                f"micro_batch_size='auto' with {self.what}: both models must run the same micro-batches, and each rank "
                "measures its own memory. Give a number."
            )
        if self.checkpoints.format != CheckpointOptions().format:
            raise ConfigurationError(
                f"checkpoints.format={self.checkpoints.format!r} with {self.what}: its names are those of one layout, "
                f"and there are two. Use {CheckpointOptions().format!r}."
            )

    @property
    def what(self) -> str:
        """How the tower is placed, for messages."""
        return f"a {self.placement} tower"

    # ------------------------------------------------------------------ ranks

    def place(self, world_size: int, rank: int = 0) -> TowerPlacement:
        """Place both models on the ranks of the run, as seen by ``rank``.

        Raises:
            LayoutError: the ranks do not add up, or a model cannot have its layout.
        """
        language = self.layout
        if self.placement == "disjoint":
            if self.tower.ranks >= world_size:
                raise LayoutError(
                    f"tower.ranks={self.tower.ranks} leaves no rank of {world_size} for the language model; start more "
                    "processes, or give the tower fewer."
                )
            language = replace(language, ranks=world_size - self.tower.ranks)
        return TowerPlacement.of(self.placement, self.tower, language, world_size, rank)

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of the model that ``rank`` has; of both colocated models, that of the language model.

        Raises:
            LayoutError: as :meth:`place`.
        """
        return self.place(world_size, rank).mesh

    def parts(self, world_size: int) -> Sequence[ModelPart]:
        """Return tower and language model."""
        tower = self.place(world_size).tower
        language = self.place(world_size, self.tower.ranks if self.placement == "disjoint" else 0).language
        return (
            ModelPart(tower, tower_layout(self.tower), lambda whole: self._take_part(whole, True)),
            ModelPart(language, self.layout, lambda whole: self._take_part(whole, False)),
        )

    def setup_environment(self) -> None:
        """Make the process group, both meshes and the random streams."""
        self.set_world_ranks()
        self.placed = self.placed or self.place(self.world_size, self.global_rank)
        super().setup_environment()

    @property
    def own(self) -> TowerPlacement:
        """The ranks of both models, as this one sees them."""
        assert self.placed is not None
        return self.placed

    @property
    def description(self) -> str:
        """Both layouts in words."""
        return self.own.describe()

    @property
    def part_layout(self) -> Layout:
        """The layout of this rank's model."""
        return tower_layout(self.tower) if self.placed is not None and self.placed.is_tower else self.layout

    @property
    def holds_part(self) -> bool:
        """Two layouts divide the model."""
        return True

    @property
    def divides_steps(self) -> str | None:
        """Ranks of a disjoint tower run no step of the user's."""
        return self.what if self.placement == "disjoint" else super().divides_steps

    @property
    def is_distributed(self) -> bool:
        """Whether ranks have different data: if so, Lightning syncs logged values."""
        language = self.place(self.num_nodes * self.num_processes).language
        return language.dp * language.cp > 1

    @property
    def divides_data(self) -> bool:
        """Whether there are several lanes, which read different samples."""
        return self.place(self.num_nodes * self.num_processes).lanes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """This lane's share of the data. All ranks of a lane read the same share."""
        return {"num_replicas": self.own.lanes, "rank": self.own.lane}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas of the language model; all ranks call this, and those of the tower get the result.

        Integers become float32. With a ``group``, only its ranks call this; in a step, those of the language model.
        """
        within = group is not None or self.in_part is not None or not isinstance(tensor, Tensor)
        if within or self.placement == "colocated":
            return super().reduce(tensor, group, reduce_op)
        own = tensor if self.own.is_tower else super().reduce(tensor, None, reduce_op)
        # On the wire all values are of one type: a mean of integers is a fraction.
        value = own.to(self.root_device, torch.float64, copy=True)
        dist.broadcast(value, self.own.language.members.start)
        return value.to(own.dtype if own.is_floating_point() else torch.float32)

    # ------------------------------------------------------------------ model and steps

    def check_module(self, module: pl.LightningModule, mesh: ParallelMesh) -> None:
        """Refuse modules that cannot be divided.

        Raises:
            ConfigurationError: says what to do.
        """
        name = type(module).__name__
        if not isinstance(module, VLMModule):
            raise ConfigurationError(f"{self.what} needs a VLMModule, and {name} is none; use MegatronStrategy.")
        if own := [step for step in STEPS if defines_step(module, step)]:
            raise ConfigurationError(
                f"{name} defines {own[0]}, which no rank can run whole with {self.what}. Remove it: return further "
                "values as metrics from loss_step."
            )
        if module.frozen_models():
            raise ConfigurationError(
                f"{name} has frozen_models, which read whole micro-batches beside the trained model; {self.what} has "
                "none beside it. Use MegatronStrategy."
            )
        if strange := [each for each in module.transforms if not isinstance(each, ADAPTERS)]:
            raise ConfigurationError(
                f"the transform {type(strange[0]).__name__} with {self.what} is not supported, only adapters are; use "
                "MegatronStrategy."
            )
        super().check_module(module, mesh)

    def _take_part(self, whole: nn.Module, tower: bool) -> nn.Module:
        """Return the tower and the projector, or everything else, with the precision of that part."""
        self.precision.take(whole, "vision" if tower else "language")
        return divided(whole)[not tower]

    def take(self, whole: nn.Module) -> nn.Module:
        """Return the part of this rank; of colocated models the language model, as :meth:`split` adds the tower."""
        if self.placement == "disjoint":
            return self._take_part(whole, self.own.is_tower)
        self.precision.take(whole, None)  # this rank has both
        self._part, language = divided(whole)
        return language

    def split(self, module: pl.LightningModule, root: nn.Module) -> ParallelModel:
        """Split this rank's part. All ranks agree on numbers of micro-batches."""
        model = super().split(module, root)
        if self._part is not None:
            layout = layout_for(module, self._part, tower_layout(self.tower))
            graft_tower(model, self._part, self.own.tower, layout)
        model.coupling = self.own.coupling()
        return model

    def make_stepper(
        self, module: pl.LightningModule, model: ParallelModel, before_backward: Callable[[Tensor], None]
    ) -> Stepper:
        """Make what runs the steps: of both colocated models, or of this rank's."""
        assert isinstance(module, VLMModule) and self.micro_batches is not None
        own, context = self.own, self.precision.step_context
        if model.grafted is not None:
            stepper = super().make_stepper(module, model, before_backward)
            step = stepper.step
            step.executor = module.feature_receiver = ColocatedExecutor(
                module.config, model.grafted, model, step.executor, context
            )
            return stepper
        if self._bridge is None:
            self._bridge = BridgeCommunicator(own.tower, own.language, device=self.root_device)
        relay = Relay(self.broadcast, own.language.members.start, self.root_device, self.host_group())
        common = module, model, self.precision, self.micro_batches, before_backward
        if own.is_tower:
            runner = TowerRunner(module.config, model, self._bridge, own, self.layout, context)
            return TowerStepper(*common, runner=runner, relay=relay)
        module.feature_receiver = FeatureReceiver(self._bridge, model.token_multiple)
        return LanguageStepper(*common, bridge=self._bridge, placement=own, relay=relay)

    def predict_step(self, *args: Any) -> Any:
        """Run the module's ``output_step``: no rank could run a ``predict_step`` of its own."""
        assert self._stepper is not None
        self.sync_parameters()
        return self._stepper.predict(args[0])

    def _fit_setup(self, trainer: pl.Trainer) -> None:
        super()._fit_setup(trainer)
        if self.engine is None and self.placement == "disjoint":
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigurationError(
                f"{kinds} updates whole parameters, which {self.what} does not support; use an optimizer that updates "
                "each element by itself, such as AdamW."
            )

    def _make_engine(self) -> None:
        if self.placement == "colocated":
            super()._make_engine()
            return
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
        """The parts of the run that checkpoints save; ranks of a disjoint model have other parameters."""
        run = super().run
        # What was handed back is whole: this process is no rank, and has no others beside it.
        if self.placement == "colocated" or self.handed_back is not None:
            return run
        return replace(run, peers=self.host_group())

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the name for ``Trainer(strategy=...)``."""
        registry.register("megatron_towers", cls, "A vision tower in a layout of its own", override=True)

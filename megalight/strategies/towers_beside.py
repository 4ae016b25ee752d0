"""MegatronTowersBesideStrategy: a vision tower in a layout of its own, on the ranks of its language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.models.vlm.model import VLM, TowerPart
from megalight.models.vlm.module import VLMModule
from megalight.parallel.coupling import Coupling
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.strategies.mesh_strategy import Part
from megalight.strategies.step import Stepper
from megalight.strategies.tower_base import TowersStrategy
from megalight.strategies.user_module import options_for
from megalight.towers.around import Around
from megalight.towers.part import divided


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
            return replace(self.tower, ranks=world_size).mesh(rank, 0)
        except LayoutError as error:
            raise LayoutError(f"the tower: {error}") from error

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of the language model.

        Raises:
            LayoutError: the degrees of a model do not divide the number of ranks.
        """
        self.tower_mesh(world_size, rank)
        return super().grid(world_size, rank)

    def parts(self, world_size: int) -> Sequence[Part]:
        """Return tower and language model."""
        return (
            Part(self.tower_mesh(world_size), self.tower.tower_options(), lambda whole: self.take_part(whole, True)),
            Part(self.grid(world_size), self.options, lambda whole: self.take_part(whole, False)),
        )

    @property
    def layout(self) -> str:
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
        options = options_for(module, self._part, self.tower.tower_options())
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
        around = Around(module.config, model.grafted, model, step.executor, self.precision.step_context)
        step.executor = around  # type: ignore[assignment]  # it has the same methods
        module.arrivals = around
        return stepper

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the names for ``Trainer(strategy=...)``."""
        registry.register("megatron_towers_beside", cls, "A vision tower in a layout of its own", override=True)

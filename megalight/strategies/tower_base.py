"""The base of strategies that give a vision tower a layout of its own."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import nn

from megalight.parallel.mesh import ParallelMesh
from megalight.strategies import tower_refusals
from megalight.strategies.megatron import MegatronStrategy
from megalight.towers import Side
from megalight.towers.part import part_of
from megalight.towers.side import check_tower


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

    def __init__(self, tower: Side | None = None, **options: Any) -> None:
        self.tower = tower or Side()
        check_tower(self.tower)
        super().__init__(**options)
        tower_refusals.check_options(self, self.what)

    @property
    def holds_part(self) -> bool:
        """Two layouts divide the model."""
        return True

    def check_module(self, module: pl.LightningModule, mesh: ParallelMesh) -> None:
        """Refuse modules that cannot be divided.

        Raises:
            ConfigurationError: says what to do.
        """
        tower_refusals.check_module(module, self.what)
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

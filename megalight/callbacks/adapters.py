"""Fine-tuning by low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.models.transforms import LoRA


class Adapters(pl.Callback):
    """Freezes the model and trains adapters of linear layers (LoRA, https://arxiv.org/abs/2106.09685).

    Args:
        rank: of the updates.
        targets: globs over names of linear layers or their sections; see :class:`~megalight.models.transforms.LoRA`.
        alpha: updates are scaled by ``alpha / rank``.
        dropout: probability of dropping an input feature of an adapter while training.
        save_base: checkpoints hold the whole model; otherwise the adapters alone, and who loads one needs the weights
            that the run began with.

    Raises:
        ConfigurationError: a value out of range; and, before processes start, a target that matches no layer, a rank
            that is too large, a module without ``build_model``, or ``save_base=False`` without weights to start from.
    """

    def __init__(
        self,
        rank: int,
        targets: Sequence[str] = ("layers.*",),
        alpha: float = 16.0,
        dropout: float = 0.0,
        save_base: bool = True,
    ) -> None:
        self.transform = LoRA(rank, targets, alpha, dropout)
        self.save_base = save_base

    def attach(self, module: pl.LightningModule) -> None:
        """Add the transform to what the module will build. ``MegatronStrategy`` does so before it starts processes."""
        if not isinstance(module, MegalightModule):
            raise ConfigurationError(
                f"{type(module).__name__} is a plain LightningModule, which has built its layers already; adapters "
                "need a MegalightModule, whose build_model makes the model. Derive from it, or leave Adapters out."
            )
        if self.transform not in module.transforms:
            module.transforms.append(self.transform)
        if not self.save_base and module.initial_weights() is None:
            raise ConfigurationError(
                "Adapters(save_base=False) writes checkpoints without the frozen weights, and this run draws those: "
                "nobody could load them. Give the module weights to start from, or leave save_base out."
            )
        module.saves_base = self.save_base

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before the model is built."""
        self.attach(pl_module)

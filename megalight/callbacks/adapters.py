"""Fine-tuning with low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.models.transforms import DoRA, LoRA


class Adapters(pl.Callback):
    """Freezes the model and trains adapters of linear layers (LoRA, https://arxiv.org/abs/2106.09685).

    Args:
        rank: rank of the updates.
        targets: globs over names of linear layers or their sections; see :class:`~megalight.models.transforms.LoRA`.
        alpha: updates are multiplied by ``alpha / rank``.
        dropout: probability of dropping an input feature of an adapter in training.
        exclude: globs in the form of ``targets``; what they match gets no adapter.
        dora: learn the length of each weight row apart; see :class:`~megalight.models.transforms.DoRA`.
        rank_stabilized: multiply by ``alpha / sqrt(rank)`` instead (rsLoRA, https://arxiv.org/abs/2312.03732).
        save_base: whether checkpoints hold the whole model. If not, they hold only the adapters, and loading one needs
            the initial weights of the run.

    Raises:
        ConfigurationError: a value is out of range. Before processes start: a target matches no layer, the rank is too
            large, the module has no ``build_model``, or ``save_base=False`` but there are no initial weights that hold
            the whole base.
    """

    def __init__(
        self,
        rank: int,
        targets: Sequence[str] = ("layers.*",),
        alpha: float = 16.0,
        dropout: float = 0.0,
        save_base: bool = True,
        rank_stabilized: bool = False,
        dora: bool = False,
        exclude: Sequence[str] = (),
    ) -> None:
        self.transform = (DoRA if dora else LoRA)(rank, targets, alpha, dropout, rank_stabilized, exclude)
        self.save_base = save_base

    def attach(self, module: pl.LightningModule) -> None:
        """Add the transform to the model that the module will build. Called before processes start."""
        if not isinstance(module, MegalightModule):
            raise ConfigurationError(
                f"{type(module).__name__} is a plain LightningModule, which has built its layers already; adapters "
                "need a MegalightModule, whose build_model makes the model. Derive from it, or leave Adapters out."
            )
        # Called before processes start, and again in each of them.
        if self.transform not in module.transforms:
            module.transforms.append(self.transform)
        # Now, and not at the first save: hours of training would be lost.
        if not self.save_base and module.initial_weights() is None:
            raise ConfigurationError(
                "Adapters(save_base=False) writes checkpoints without the frozen weights, and this run draws those: "
                "nothing could load them. Give the module weights to start from, or leave save_base out."
            )
        if not self.save_base and getattr(module, "weights_keys", "strict") != "strict":
            raise ConfigurationError(
                "Adapters(save_base=False) writes checkpoints without the frozen weights, and with weights_keys="
                f"{module.weights_keys!r} the folder weights may not hold all of them. Leave save_base out, or use "
                "weights_keys='strict'."
            )
        module.saves_base = self.save_base

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Add the transform before the model is built."""
        # For trainers without our strategy's early checks.
        self.attach(pl_module)

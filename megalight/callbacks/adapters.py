"""Fine-tuning with low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.models.transforms import DoRA, LoRA, StoredBase
from megalight.parallel.transform import ModelTransform


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
        base: how frozen weights of the transformer layers are stored: ``int8`` or ``nf4`` codes with a scale for each
            block of input features (QLoRA, https://arxiv.org/abs/2305.14314); None: in the dtype of the run.
        block: number of input features with one scale, for ``base``; None: 64.
        save_base: whether checkpoints hold the whole model. If not, they hold only the adapters, and loading one needs
            the initial weights of the run.

    Raises:
        ConfigurationError: a value is out of range. Before processes start: a target matches no layer, the rank is too
            large, the module has no ``build_model``, ``base`` is given without ``save_base=False`` or with ``dora``,
            ``block`` without ``base``, or ``save_base=False`` but there are no initial weights that hold the whole
            base.
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
        base: str | None = None,
        block: int | None = None,
    ) -> None:
        self.transforms: list[ModelTransform] = [
            (DoRA if dora else LoRA)(rank, targets, alpha, dropout, rank_stabilized, exclude)
        ]
        self.save_base = save_base
        if base is None and block is not None:
            raise ConfigurationError(f"block={block} is of weights that are stored as codes; set base, too.")
        if base is not None:
            self.transforms.append(StoredBase(base) if block is None else StoredBase(base, block))
            if dora:
                raise ConfigurationError(
                    f"base={base!r} with dora=True: DoRA reads whole rows of the weights in every step, and codes "
                    "would be decoded for it. Leave one of the two out."
                )
            if save_base:
                raise ConfigurationError(
                    f"base={base!r} keeps codes of the frozen weights, not the weights, so checkpoints cannot hold "
                    "them. Set save_base=False: they then hold the adapters alone."
                )

    def attach(self, module: pl.LightningModule) -> None:
        """Add the transform to the model that the module will build. Called before processes start."""
        if not isinstance(module, MegalightModule):
            raise ConfigurationError(
                f"{type(module).__name__} is a plain LightningModule, which has built its layers already; adapters "
                "need a MegalightModule, whose build_model makes the model. Derive from it, or leave Adapters out."
            )
        # Called before processes start, and again in each of them.
        module.transforms += [each for each in self.transforms if each not in module.transforms]
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

"""Fine-tuning with low-rank adapters."""

from __future__ import annotations

import os
from collections.abc import Sequence

import lightning.pytorch as pl

from megalight import checkpoint
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.errors import ConfigurationError, nearest
from megalight.models.family.module import FamilyModule
from megalight.models.module import MegalightModule
from megalight.models.transforms import DoRA, LoRA, QuantizedBase
from megalight.models.transforms.saved import adapters_of, check_base
from megalight.nn.adapter import DEFAULT
from megalight.parallel.transform import ModelTransform


class Adapters(pl.Callback):
    """Freezes the model and trains an adapter of linear layers (LoRA, https://arxiv.org/abs/2106.09685).

    Args:
        rank: rank of the updates. None: as in ``weights``, for an adapter that is there.
        targets: globs over names of linear layers or their sections; see :class:`~megalight.models.transforms.LoRA`.
        alpha: updates are multiplied by ``alpha / rank``.
        dropout: probability of dropping an input feature of an adapter in training.
        exclude: globs in the form of ``targets``; what they match gets no adapter.
        dora: learn the length of each weight row apart; see :class:`~megalight.models.transforms.DoRA`.
        rank_stabilized: multiply by ``alpha / sqrt(rank)`` instead (rsLoRA, https://arxiv.org/abs/2312.03732).
        base: how frozen weights of the transformer layers are stored: ``int8``, ``nf4`` or ``nvfp4`` quantized values
            with a scale for each block of input features (QLoRA, https://arxiv.org/abs/2305.14314); None: in the dtype
            of the run.
        block: number of input features with one scale, for ``base``; None: 64, and 16 for ``nvfp4``.
        save_base: whether checkpoints hold the whole model. If not, they hold only the adapters, and loading one needs
            the initial weights of the run.
        name: name of the adapter that is trained.
        weights: a checkpoint with adapters of the same base, or a folder of runs, whose newest one is taken. The one
            called ``name`` is trained further, with the settings that it has there; all others stay as they are, frozen
            and inactive, and are saved with it.

    Raises:
        ConfigurationError: a value is out of range. Before processes start: a target matches no layer, the rank is too
            large, the module has no ``build_model``, ``base`` is given without ``save_base=False``, ``block`` without
            ``base``, ``save_base=False`` but there are no initial weights that hold the whole base, or ``rank`` is None
            and ``weights`` has no adapter of this name.
        CheckpointError: ``weights`` has no adapters, or those of another base. Before processes start.
    """

    def __init__(
        self,
        rank: int | None = None,
        targets: Sequence[str] = ("layers.*",),
        alpha: float = 16.0,
        dropout: float = 0.0,
        save_base: bool = True,
        rank_stabilized: bool = False,
        dora: bool = False,
        exclude: Sequence[str] = (),
        base: str | None = None,
        block: int | None = None,
        name: str = DEFAULT,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        if rank is None and weights is None:
            raise ConfigurationError(
                f"the adapter {name!r} has no rank; give one, or weights, a checkpoint that has this adapter."
            )
        kind = DoRA if dora else LoRA
        # With a rank of 1 in place of none, the name is checked.
        lora = kind(1 if rank is None else rank, targets, alpha, dropout, rank_stabilized, exclude, name)
        self.name = name
        self.lora = None if rank is None else lora
        # Once: a run may still be saving there.
        self.weights = None if weights is None else latest_checkpoint(weights)
        self.stored: QuantizedBase | None = None
        self.save_base = save_base
        if base is None and block is not None:
            raise ConfigurationError(f"block={block} is of weights that are stored quantized; set base, too.")
        if base is not None:
            self.stored = QuantizedBase(base, block)
            if save_base:
                raise ConfigurationError(
                    f"base={base!r} keeps the frozen weights quantized, so checkpoints cannot hold "
                    "them. Set save_base=False: they then hold the adapters alone."
                )

    def attach(self, module: pl.LightningModule) -> None:
        """Add the transform to the model that the module will build. Called before processes start."""
        if not isinstance(module, MegalightModule):
            raise ConfigurationError(
                f"{type(module).__name__} is a plain LightningModule, which has built its layers already; adapters "
                "need a MegalightModule, whose build_model makes the model. Derive from it, or leave Adapters out."
            )
        transforms = self._transforms(module)
        # Called before processes start, and again in each of them.
        module.transforms += [each for each in transforms if each not in module.transforms]
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
        if self.weights is not None:
            assert isinstance(module, FamilyModule)
            # After the check above: these weights are no base.
            module.adapter_weights = self.weights
        module.saves_base = self.save_base

    def _transforms(self, module: MegalightModule) -> list[ModelTransform]:
        """Return the adapters in order, the trained one last, and the base's form."""
        mine, others = self.lora, list[LoRA]()
        if self.weights is not None:
            if not isinstance(module, FamilyModule):
                raise ConfigurationError(
                    f"Adapters(weights=...) compares the base of saved adapters with the model, and "
                    f"{type(module).__name__} has no configuration. Derive it from a module of a family."
                )
            module.adapter_weights = None
            opened = checkpoint.open(self.weights)
            check_base(opened, module.family, module.config.to_dict())
            found = {lora.adapter: lora for lora in adapters_of(opened)}
            saved = found.pop(self.name, None)
            others = list(found.values())
            if saved is not None and mine not in (None, saved):
                raise ConfigurationError(
                    f"the adapter {self.name!r} in {self.weights} is {saved}, and this one is {mine}. Leave its "
                    "settings out, or give another name."
                )
            mine = saved or mine
            if mine is None:
                raise ConfigurationError(
                    f"{self.weights} has no adapter {self.name!r}.{nearest(self.name, found)} It has "
                    f"{', '.join(found)}; name one of them, or give a rank for a new one."
                )
        assert mine is not None
        return [*others, mine, *([] if self.stored is None else [self.stored])]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Add the transform before the model is built."""
        # For trainers without our strategy's early checks.
        self.attach(pl_module)

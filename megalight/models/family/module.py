"""The Lightning module of a model family: its configuration bound to data, checkpoints and Adam."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from megalight.errors import CheckpointError, ConfigurationError, DataError
from megalight.models.config import compare
from megalight.models.family import family
from megalight.models.module import MegalightModule
from megalight.models.saved import BASE, initial_config, initial_source
from megalight.models.transforms import describe, rebuild
from megalight.optim import AdamConfig
from megalight.parallel.source import Source
from megalight.parallel.transform import ModelTransform, apply_transforms
from megalight.types import PackedSequences

IGNORED = -100
"""Label of a token without a loss."""


class FamilyConfig(Protocol):
    """What every family's configuration states."""

    @property
    def vocab_size(self) -> int:
        """Token ids."""

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence the model takes."""

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values."""


ConfigT = TypeVar("ConfigT", bound=FamilyConfig)


class FamilyModule(MegalightModule, Generic[ConfigT]):
    """A module whose model follows from a configuration: its checkpoints say which model they hold, and data and
    checkpoints of another are refused.

    Args:
        config: the model, or the name of one of the family's presets; None: that of ``weights``.
        optimizer: Adam's settings, parameter groups and learning-rate schedule.
        seed: of the initial weights.
        weights: a checkpoint, or a folder of ``transformers``, to start from; None: weights are drawn. When a run
            resumes, its own checkpoint takes their place.

    Attributes:
        family: name of the family in checkpoints.

    Raises:
        ConfigurationError: neither ``config`` nor ``weights`` is given, or the folder holds a model of another family.
        CheckpointError: ``config`` is to be read from a folder that is not there.
    """

    family: ClassVar[str]

    def __init__(
        self,
        config: ConfigT | str | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(seed)
        self.weights = weights
        self.config: ConfigT = self._config(config)
        self.optimizer = optimizer or AdamConfig()

    def _config(self, config: ConfigT | str | None) -> ConfigT:
        presets = family(self.family).presets
        if config is None and self.weights is None:
            raise ConfigurationError(
                f"{type(self).__name__} needs a configuration: give config (or the name of a preset: "
                f"{', '.join(presets)}), or weights, a folder of transformers."
            )
        found: ConfigT
        if isinstance(config, str):
            found = presets[config]
        else:
            found = initial_config(str(self.weights), family(self.family)) if config is None else config
        return found

    def initial_weights(self) -> Source | None:
        """The folder that was given as ``weights``."""
        if self.weights is None:
            return None
        return initial_source(self.weights, family(self.family), self.config)

    def build_model(self) -> nn.Module:
        """The whole model on one device."""
        return family(self.family).model(self.config)

    def setup(self, stage: str) -> None:
        """Check the data before anything is built."""
        self.check_data(getattr(self.trainer, "datamodule", None))

    def check_data(self, datamodule: Any) -> None:
        """Refuse data that the model cannot take. ``MegatronStrategy`` asks before it starts processes.

        Raises:
            DataError: sequences too long for the model, or a tokenizer with more tokens than its vocabulary.
        """
        length = getattr(datamodule, "sequence_length", None)
        if length is not None and length > self.config.max_sequence_length:
            raise DataError(
                f"data.sequence_length={length} is longer than the model's "
                f"max_sequence_length={self.config.max_sequence_length}; lower the one or raise the other."
            )
        vocabulary = getattr(datamodule, "vocab_size", None)
        if vocabulary is not None and vocabulary > self.config.vocab_size:
            raise DataError(
                f"the data's tokenizer has {vocabulary} tokens, but the model's vocab_size is "
                f"{self.config.vocab_size}; raise vocab_size, or prepare the data with a smaller tokenizer."
            )

    def configure_optimizers(self) -> Any:
        """Adam and its schedule, stepped once per optimizer step.

        A schedule that must know the length of the run takes the trainer's ``max_steps``, or its own ``steps``. (Not
        ``estimated_stepping_batches``: it would start the data before a checkpoint says where to.)
        """
        part = getattr(self.trainer.strategy, "pipeline_parallel", 1) > 1
        optimizer, scheduler = self.optimizer.build(self.named_parameters(), self.trainer.max_steps, part)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def check_model(self, model: nn.Module) -> None:
        """Refuse optimizer rules for parameters that the model does not have."""
        self.optimizer.check((f"model.{name}", parameter) for name, parameter in model.named_parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write what the model is, so that a checkpoint can be used without its recipe."""
        checkpoint["model"] = {
            "family": self.family,
            "config": self.config.to_dict(),
            "transforms": describe(self.transforms),
            BASE: self.saves_base,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint is of this model."""
        self.check_checkpoint(checkpoint)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model. ``MegatronStrategy`` asks before it starts processes.

        Raises:
            CheckpointError: names the settings that differ, or the other family.
        """
        described = checkpoint.get("model", {})
        found, family = described.get("config"), described.get("family", self.family)
        if found is None:
            raise CheckpointError(
                f"the checkpoint does not say which model it holds; it was not written by {type(self).__name__}."
            )
        if family != self.family:
            raise CheckpointError(f"the checkpoint is of the family {family}, but this model is of {self.family}.")
        differences = sorted(compare(self.config.to_dict(), found, "the checkpoint"))
        if differences:
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(differences)}. Use the configuration it was trained "
                "with (megalight inspect shows it), or another checkpoint."
            )
        self._take_transforms(rebuild(described.get("transforms", [])))

    def _take_transforms(self, found: list[ModelTransform]) -> None:
        """Take over what the checkpoint's model has, where this module has none and its model has no values yet."""
        if found == self.transforms:
            return
        if self.transforms or (self.model is not None and not all(p.is_meta for p in self.model.parameters())):
            ours, theirs = (", ".join(map(repr, transforms)) or "none" for transforms in (self.transforms, found))
            raise CheckpointError(
                f"the checkpoint's model has these transforms: {theirs}; this module's has: {ours}. Use those that it "
                "was trained with, or merge adapters first (megalight merge)."
            )
        self.transforms = found
        if self.model is not None:
            apply_transforms(self.model, found)


def pack(rows: Tensor, sequences: PackedSequences, filler: int) -> Tensor:
    """Rows ``[b, s]``, or tokens end to end already, as ``[T]``, with ``filler`` in the dummy sequence."""
    flat = rows.reshape(-1)
    missing = sequences.num_tokens - len(flat)
    return F.pad(flat, (0, missing), value=filler) if missing else flat

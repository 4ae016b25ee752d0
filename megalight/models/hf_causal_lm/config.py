"""The configuration of a model of ``transformers``: its own, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from megalight.errors import ConfigurationError
from megalight.imports import require

LEFT_OUT = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache")
"""Entries of ``config.json`` that say nothing of the model."""


UNBOUNDED = 1 << 40
"""Length of the longest sequence of a model without a bound."""


@dataclass(frozen=True)
class HFConfig:
    """A causal language model of ``transformers``.

    Attributes:
        values: the content of ``config.json``: its ``model_type``, and what differs from that type's defaults.

    Raises:
        ConfigurationError: ``transformers`` is missing or too old, knows no causal model of this type, or refuses a
            value; or the weights are quantized.
    """

    values: dict[str, Any]

    def __post_init__(self) -> None:
        kept = {name: value for name, value in self.values.items() if name not in LEFT_OUT}
        object.__setattr__(self, "values", kept)
        if "quantization_config" in kept:
            raise ConfigurationError(
                "the model is quantized, and is trained in the precision of the run only. Widen its weights first, or "
                "take the folder that it was made of."
            )
        self.read  # noqa: B018  a value that is wrong is refused here

    @cached_property
    def architecture(self) -> str:
        """The class of the model."""
        require("transformers", "models of transformers need it")
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        kind = self.values.get("model_type")
        if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ConfigurationError(
                f"model_type is {kind!r}, and this release of transformers has no causal language model of that type. "
                "Code of a model's own folder is never run."
            )
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]

    @cached_property
    def read(self) -> Any:
        """The configuration as ``transformers`` has it."""
        architecture = self.architecture
        from transformers import AutoConfig

        values = {name: value for name, value in self.values.items() if name != "model_type"}
        try:
            return AutoConfig.for_model(self.values["model_type"], **values)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"the configuration of {architecture} is refused: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.read.get_text_config().vocab_size)

    @property
    def max_sequence_length(self) -> int:
        """Length of the longest sequence of the model, in tokens; :data:`UNBOUNDED` if there is no bound."""
        return int(getattr(self.read.get_text_config(), "max_position_embeddings", None) or UNBOUNDED)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values."""
        return {"values": dict(self.values)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from plain values."""
        return cls(dict(values["values"]))

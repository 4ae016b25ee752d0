"""Conversion of weights and configurations of vision-language models from ``transformers`` to ours and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import compare, require
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.hugging_face import llava, qwen2_5
from megalight.models.vlm.hugging_face.kind import Kind
from megalight.models.weights import WeightMap

KINDS: tuple[Kind, ...] = (*qwen2_5.KINDS, *llava.KINDS)
"""All kinds. Those with parts that few have come first: a model is of the first kind that suits it."""

READERS = {kind.model_type: kind for kind in KINDS}
"""``model_type`` in ``config.json`` -> the kind that reads it."""


def kind_of(config: VLMConfig) -> Kind:
    """Return the kind that a model is nearest to."""
    return next(kind for kind in KINDS if kind.suits(config))


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where ``transformers`` keeps the tensors of a model."""
    return kind_of(config).places(config)


def config_from_transformers(values: Mapping[str, Any]) -> VLMConfig:
    """Convert the ``config.json`` of a ``transformers`` model to our configuration.

    Raises:
        ConfigurationError: the model type or an option is not supported here.
    """
    kind = values.get("model_type")
    require(kind in READERS, f"model_type is {kind!r}; weights of {', '.join(READERS)} can be read.")
    try:
        return READERS[str(kind)].read(values)
    except KeyError as missing:
        raise ConfigurationError(f"the configuration of the {kind} model lacks {missing}; copy it again.") from None


def config_to_transformers(config: VLMConfig, model_type: str | None = None) -> dict[str, Any]:
    """Return the content of ``config.json`` for this model.

    Args:
        config: the model.
        model_type: the kind that the model came from. The configuration says which one it needs.

    Raises:
        ConfigurationError: no kind can express the configuration. The message names what it cannot.
    """
    kind = kind_of(config)
    values = {"model_type": kind.model_type, "architectures": [kind.architecture], **kind.write(config)}
    # Written values are read back: whatever `transformers` cannot say shows as a difference.
    back = config_from_transformers(values)
    differences = compare(config.to_dict(), back.to_dict(), f"transformers' {kind.model_type}")
    require(not differences, f"no model of transformers has this configuration. Nearest: {'; '.join(differences)}.")
    return values

"""A kind of vision-language model of ``transformers``: how its configurations and tensors become ours and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalight.models.vlm.config import VLMConfig
from megalight.models.weights import WeightMap


@dataclass(frozen=True)
class Kind:
    """One ``model_type`` of ``transformers``.

    Attributes:
        model_type: the word in ``config.json``.
        architecture: the class that ``transformers`` makes of it.
        suits: configuration -> whether a model with it may be of this kind. It may say yes too often: a written
            configuration is read back, and differences are found.
        places: configuration -> where the files keep its tensors.
        read: content of ``config.json`` -> configuration.
        write: configuration -> content of ``config.json``, without ``model_type`` and ``architectures``.
    """

    model_type: str
    architecture: str
    suits: Callable[[VLMConfig], bool]
    places: Callable[[VLMConfig], WeightMap]
    read: Callable[[Mapping[str, Any]], VLMConfig]
    write: Callable[[VLMConfig], dict[str, Any]]

"""How large a model may be that a file describes, beside the tensors that the file holds.

A configuration of a few bytes can describe any number of layers and experts, and all modules are built before shapes
are compared. Real files hold at least a matrix for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

from megalight.errors import CheckpointError
from megalight.models.gpt.config import GPTConfig, MultiTokenConfig


def check_held(config: Any, shapes: Iterable[Sequence[int]], where: object) -> None:
    """Check that files with tensors of these shapes can hold the model, before any of it is built.

    Args:
        config: the model's configuration.
        shapes: of all tensors. Those with more than two dims are stacks of matrices.
        where: the files, for messages.

    Raises:
        CheckpointError: they hold fewer matrices than the model has layers, or experts in them.
    """
    needed, held = blocks(config), sum(prod(shape[:-2]) for shape in shapes)
    if needed > held:
        raise CheckpointError(
            f"{where} describes a model of {needed} layers and experts, and holds {held} tensors or matrices, fewer "
            "than one for each. The configuration is of another model, or tensors are missing: copy both again."
        )


def blocks(config: Any) -> int:
    """Count the layers of a model and its parts; a layer of experts counts once for each."""
    if not is_dataclass(config):
        return 0
    inner = sum(blocks(getattr(config, each.name)) for each in fields(config))
    if isinstance(config, MultiTokenConfig):
        return config.num_layers * max(1, len(config.pattern))
    if isinstance(config, GPTConfig) and config.moe is not None:
        sparse = sum(map(config.has_experts, range(config.num_layers)))
        return inner + config.num_layers + sparse * (config.moe.num_experts - 1)
    return inner + int(getattr(config, "num_layers", 0))

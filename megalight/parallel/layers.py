"""The layers of a model, or of a chunk of one, and Megatron's names of the modules inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from megalight.errors import ConfigurationError


def depths_of(model: nn.Module) -> dict[str, Any]:
    """Return the depths of multi-token prediction of a model, or of a chunk of one, by number."""
    found: dict[str, Any] = getattr(getattr(model, "mtp", None), "depths", {})
    return found


def depth_layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of multi-token prediction of a model, or of a chunk of one, by name."""
    return {
        f"mtp.depths.{number}.layers.{index}": layer
        for number, depth in depths_of(model).items()
        for index, layer in depth.layers.items()
    }


def tower_layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of the vision tower of a model, or of a chunk of one, by name; none if it has no tower."""
    layers = getattr(getattr(getattr(model, "embed", None), "tower", None), "layers", {})
    return {f"embed.tower.layers.{index}": layer for index, layer in layers.items()}


def layers_of(model: nn.Module, needed_by: str | None = None) -> dict[int, nn.Module]:
    """Return the layers under ``model.layers`` in order, by global index.

    Args:
        model: a whole model or a chunk of one.
        needed_by: name of the feature that needs layers, for the error; None: a model may have no layers.

    Raises:
        ConfigurationError: a feature needs layers, and ``layers`` is neither a ``ModuleList`` nor a ``ModuleDict`` with
            numbers as keys.
    """
    layers = getattr(model, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return dict(enumerate(layers))
    if isinstance(layers, nn.ModuleDict) and all(map(str.isdecimal, layers)):
        return {int(index): layer for index, layer in layers.items()}
    if needed_by is None:
        return {}
    found = "has none" if layers is None else f"holds {type(layers).__name__} there"
    raise ConfigurationError(
        f"{needed_by} needs a model with `layers`, an nn.ModuleDict keyed by global index ('0', '1', ...), and "
        f"{type(model).__name__} {found}. Give it that attribute, or do without {needed_by}."
    )


# Megatron's names of modules inside a layer.


ALIASES = {
    "attn_norm": "attention_norm",
    "attn_proj": "attention.proj",
    "core_attn": "attention.inner",
    "expert_fc1": "mlp.experts",  # one module holds both products of all experts
    "layernorm": "*_norm",
    "moe": "mlp",
    "moe_act": "mlp.experts.act",
    "qkv_linear": "attention.qkv",
    "shared_experts": "mlp.shared",
}
"""Megatron's names of modules -> ours."""


def translated(names: Iterable[str]) -> tuple[str, ...]:
    """Return our name of each module that Megatron names, and other names as they are."""
    return tuple(ALIASES.get(name, name) for name in names)

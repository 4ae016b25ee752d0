"""The loop over the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megalight.nn.context import LayerContext


def run_layers(
    layers: Mapping[str, nn.Module] | nn.ModuleDict,
    hidden: Tensor,
    context: LayerContext,
    states: Mapping[str, Any] | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """Run the layers in order: ``hidden = layer(hidden, context, state, memory)``. ``[T, h] -> [T, h]``.

    All models run their layers here.

    Args:
        layers: layers in order, by global index. A part of a model has only some of them.
        hidden: ``[T, h]``.
        context: the context that all layers share.
        states: the state of each layer, by the layer's name. None if there are no earlier tokens.
        memory: ``[Tm, h]``, read by layers with cross attention. It may require a gradient.
    """
    for name, layer in layers.items():
        hidden = layer(hidden, context, None if states is None else states[name], memory)
    return hidden

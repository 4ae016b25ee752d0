"""The loop over the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megalight.nn.context import LayerContext


def run_layers(
    layers: nn.ModuleDict,
    hidden: Tensor,
    context: LayerContext,
    states: Mapping[str, Any] | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """Every layer in turn: ``hidden = layer(hidden, context, state, memory)``. ``[T, h] -> [T, h]``.

    All models run their layers here.

    Args:
        layers: by global index, in order; a part of a model has some of them.
        hidden: ``[T, h]``.
        context: what the layers share.
        states: what each layer keeps of earlier tokens, by the layer's name; None: all tokens are here.
        memory: ``[Tm, h]`` that layers with cross attention read; it may want a gradient.
    """
    for name, layer in layers.items():
        hidden = layer(hidden, context, None if states is None else states[name], memory)
    return hidden

"""A layer of one sublayer: the layers of hybrid models, each a mixer or a feed-forward layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.dropout import drop
from megalight.nn.norm import norm_and_sum
from megalight.nn.state import Slots


class ResidualLayer(nn.Module):
    """``x += inner(norm(x))``, where ``inner`` mixes tokens or features.

    Submodules are named as in :class:`~megalight.nn.TransformerLayer`: ``mamba_norm``, ``mamba`` and
    ``mamba_dropout``; or ``mlp_norm``, ``mlp`` and ``mlp_dropout``.

    Args:
        norm: norm before ``inner``.
        inner: a mixer, called as ``inner(hidden, context, state, memory)``, or a feed-forward layer, called as
            ``inner(hidden, context)``. A mixer has ``make_state``.
        name: name of ``inner``.
        dropout: dropout probability of the output of ``inner``.
    """

    def __init__(self, norm: nn.Module, inner: nn.Module, *, name: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.names = f"{name}_norm", name, f"{name}_dropout"
        for child, module in zip(self.names, (norm, inner, nn.Dropout(dropout)), strict=True):
            self.add_module(child, module)
        self.mixes = hasattr(inner, "make_state")

    def make_state(self, slots: Slots) -> Any:
        """Make the mixer's state; None for a feed-forward layer, which needs nothing of earlier tokens."""
        return self.get_submodule(self.names[1]).make_state(slots) if self.mixes else None  # type: ignore[operator]

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. A mixer gets ``state`` and ``memory``."""
        # As in the transformer layer: looking up modules by attribute costs more than the dict.
        norm, inner, dropout = self.names
        modules: dict[str, Any] = self._modules
        normed, hidden = norm_and_sum(modules[norm], hidden)
        feed = modules[inner]
        added: Tensor = feed(normed, context, state, memory) if self.mixes else feed(normed, context)
        return hidden + drop(modules[dropout], added)

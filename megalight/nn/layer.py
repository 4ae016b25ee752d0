"""The transformer layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.norm import norm_and_sum
from megalight.nn.state import Slots


class TransformerLayer(nn.Module):
    """Pre-norm residual layer: ``x += mixer(norm(x))``, then ``x += mlp(norm(x))``.

    The mixer is called as ``mixer(hidden, context, state, memory)``; see :mod:`megalight.nn.stack`. Its submodules are
    named after it: ``attention``, ``attention_norm`` and ``attention_dropout``. The MLP is called as
    ``mlp(hidden, context)``.

    Args:
        mixer_norm: norm before the mixer.
        mixer: mixes tokens.
        mlp_norm: norm before the MLP.
        mlp: mixes features.
        name: name of the mixer.
        dropout: dropout probability of the outputs of mixer and MLP.
    """

    def __init__(
        self,
        mixer_norm: nn.Module,
        mixer: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        name: str = "attention",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        # Names follow the mixer, so that checkpoints tell what a layer mixes with.
        self.names = f"{name}_norm", name, f"{name}_dropout"
        for child, module in zip(self.names, (mixer_norm, mixer, nn.Dropout(dropout)), strict=True):
            self.add_module(child, module)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = nn.Dropout(dropout)

    def make_state(self, slots: Slots) -> Any:
        """Make the mixer's state, which holds what it needs of earlier tokens."""
        return self.get_submodule(self.names[1]).make_state(slots)  # type: ignore[operator]

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. The mixer gets ``state`` and ``memory``."""
        norm, mixer, dropout = self.names
        # Attribute access of modules costs a microsecond each, several times per layer; the dict does not.
        modules: dict[str, Any] = self._modules
        # From here on `hidden` is the residual stream `[T, h]`, which only additions touch.
        # Both come from one op: its backward adds the gradients of the norm and of the residual in one pass.
        normed, hidden = norm_and_sum(modules[norm], hidden)
        mixed = modules[dropout](modules[mixer](normed, context, state, memory))
        # the sum with the residual and the next norm run as one op
        normed, hidden = norm_and_sum(self.mlp_norm, mixed, hidden)
        added: Tensor = self.mlp_dropout(self.mlp(normed, context))
        return hidden + added

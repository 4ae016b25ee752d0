"""The feed-forward layer, plain or gated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError, nearest
from megalight.nn.canonical import Section
from megalight.nn.linear import Fusion, Linear, takes_single
from megalight.nn.state import LayerContext
from megalight.ops.activation import activation, gated
from megalight.ops.activation.quantized import activation_of_quantized, stored
from megalight.ops.batch_invariant import MODE, rowwise
from megalight.ops.linear import single_product

ACTIVATIONS: Mapping[str, tuple[str, bool]] = {
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "geglu_tanh": ("gelu_tanh", True),
    "reglu": ("relu", True),
    "quick_geglu": ("quick_gelu", True),
    "silu": ("silu", False),
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "quick_gelu": ("quick_gelu", False),
    "relu": ("relu", False),
    "squared_relu": ("squared_relu", False),
}
"""Name -> (function, whether it is gated: ``f(gate) * up``, https://arxiv.org/abs/2002.05202)."""


def is_gated(name: str) -> bool:
    """Return whether the activation ``name`` needs two projections of the input, gate and up.

    Raises:
        ConfigurationError: no such activation.
    """
    if name not in ACTIVATIONS:
        raise ConfigurationError(
            f"activation is {name!r}; it must be one of {', '.join(ACTIVATIONS)}." + nearest(name, ACTIVATIONS)
        )
    return ACTIVATIONS[name][1]


class Activation(nn.Module):
    """``f(x)``, or ``f(gate) * up`` for ``x = [gate | up]``. It has no parameters.

    Args:
        name: a key of :data:`ACTIVATIONS`.
        backend: backend of the activation op.
        offset: added to ``up``; for gated activations.
        clamp: limits ``gate`` from above, and ``up`` from both sides, before that; for gated activations.
        fp8_input_store: keep the input in 8 bits for the backward pass.

    Attributes:
        fusion: the linear layers beside it, if they multiply in 8 bits. Quantized values are then all that is written,
            where nothing else would read the output and the gradient of the input.

    Raises:
        ConfigurationError: no such activation, or ``offset`` or ``clamp`` for one that is not gated.
    """

    fusion: Fusion | None = None

    def __init__(
        self,
        name: str,
        backend: str = "auto",
        *,
        offset: float = 0.0,
        clamp: float | None = None,
        fp8_input_store: bool = False,
    ) -> None:
        super().__init__()
        if (offset or clamp is not None) and not is_gated(name):
            raise ConfigurationError(
                f"offset={offset} and clamp={clamp} belong to gated activations, and {name!r} is none. Leave them out, "
                "or choose a gated one, such as quick_geglu."
            )
        self.offset = offset
        self.clamp = clamp
        self.fp8_input_store = fp8_input_store
        self.gated = is_gated(name)
        self.kind = ACTIVATIONS[name][0]
        self.backend = backend

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """``[..., f] -> [..., f]``; if gated, ``[..., 2 f] -> [..., f]``. ``weights [...]`` multiply rows."""
        if MODE.on:
            return self._of_rows(x, weights)
        if self.fp8_input_store:
            return stored(x, weights, self._compute)
        plain = weights is None and not self.offset and self.clamp is None
        if plain and self.fusion is not None and self.fusion.gradient_is_elided(self, x):
            written = not self.fusion.output_is_elided(self)
            return activation_of_quantized(x, self.kind, self.gated, self.backend, written=written)
        return self._compute(x, weights)

    def _compute(self, x: Tensor, weights: Tensor | None) -> Tensor:
        if not self.gated:
            return activation(x, self.kind, backend=self.backend, weights=weights)
        return gated(x, self.kind, backend=self.backend, weights=weights, offset=self.offset, clamp=self.clamp)

    def _of_rows(self, x: Tensor, weights: Tensor | None) -> Tensor:
        out: Tensor
        if weights is None:
            out = rowwise(lambda row: self._compute(row, None), x)
        else:
            out = rowwise(self._compute, x, weights)
        return out

    def extra_repr(self) -> str:
        """Return the function, for printing."""
        return f"{self.kind}, gated={self.gated}"


class MLP(nn.Module):
    """``down(act(up(x)))``; if gated, ``down(act(gate(x)) * up(x))`` with gate and up fused in ``gate_up``.

    Args:
        hidden_size: ``h``.
        ffn_hidden_size: ``f``, the inner width.
        activation: a key of :data:`ACTIVATIONS`.
        bias: whether all projections have biases.
        std: standard deviation of the initial weights of ``up`` or ``gate_up``.
        down_std: standard deviation of the initial weights of ``down``.
        backend: backend of the activation op.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str = "swiglu",
        *,
        bias: bool = False,
        std: float = 0.02,
        down_std: float = 0.02,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if is_gated(activation):
            # Gate first, then up: the order in which the activation op reads the two halves.
            sections = [Section(name, ffn_hidden_size, ffn_hidden_size) for name in ("gate", "up")]
            self.gate_up = Linear(hidden_size, sections, bias=bias, std=std)
        else:
            self.up = Linear(hidden_size, ffn_hidden_size, bias=bias, std=std)
        self.act = Activation(activation, backend)
        # The width of `down` is that of one section, as the activation halves a gated input.
        self.down = Linear(ffn_hidden_size, hidden_size, bias=bias, std=down_std)

    def forward(self, hidden: Tensor, context: LayerContext | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. Every feed-forward layer is called with the context; this one does not read it."""
        # `[T, 2 f]` if gated, gate first; else `[T, f]`.
        modules: dict[str, Any] = self._modules  # see the transformer layer
        act = modules["act"]
        wide = modules["gate_up" if act.gated else "up"](hidden)
        narrow: Tensor = modules["down"](act(wide))
        return narrow

    def of_single(self, hidden: Tensor, residual: Tensor) -> Tensor | None:
        """Return ``residual + self(hidden)`` for one token of inference, in two kernels; None: not these layers.

        Args:
            hidden: ``[1, h]``.
            residual: ``[1, h]``.
        """
        modules: dict[str, Any] = self._modules
        act = modules["act"]
        if torch.is_grad_enabled() or not act.gated or act.offset or act.clamp is not None:
            return None
        # The products run in Triton: another backend of the activation was asked for.
        if act.backend not in ("auto", "triton"):
            return None
        if any(each._forward_hooks or each._forward_pre_hooks for each in (self, act)):
            return None
        wide, down = modules["gate_up"], modules["down"]
        if not takes_single(wide, hidden):
            return None
        narrow: Tensor = single_product(hidden, wide.weight, wide.bias, gate=act.kind)
        if takes_single(down, narrow) and residual.dtype == narrow.dtype:
            summed: Tensor = single_product(narrow, down.weight, down.bias, residual)
            return summed
        added: Tensor = down(narrow)
        return residual + added

"""Experts: a stack of feed-forward layers, each applied to its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalight.nn.canonical import joined
from megalight.nn.init import Initializer, Normal
from megalight.nn.mlp import Activation
from megalight.nn.moe.dispatch import Dispatcher, Grouped, LocalDispatcher
from megalight.ops.grouped_linear import grouped_linear


class Experts(nn.Module):
    """Feed-forward layers ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` if gated, without biases.

    Each expert has its own canonical tensors, named by its index: ``experts.3.up.weight``.

    Args:
        num_experts: ``E``.
        hidden_size: ``h``.
        ffn_hidden_size: ``f``, the inner width.
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS`.
        std: standard deviation of the initial ``up``.
        down_std: standard deviation of the initial ``down``.
        backend: backend of the activation op.

    Attributes:
        up: ``[E, f, h]``. If gated, ``[E, 2 f, h]``: each expert's gate, then its up.
        down: ``[E, h, f]``.
        inner_dims: the dim of each parameter's canonical tensors that counts the inner width.
        dispatcher: brings tokens to their experts and back.
    """

    inner_dims: ClassVar[dict[str, int]] = {"up": 0, "down": 1}

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str = "swiglu",
        *,
        std: float = 0.02,
        down_std: float = 0.02,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.act = Activation(activation, backend)
        self.dispatcher: Dispatcher = LocalDispatcher()
        width = ffn_hidden_size * (2 if self.act.gated else 1)
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.initializers: dict[str, Initializer] = {"up": Normal(std), "down": Normal(down_std)}

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors of each expert; see :mod:`megalight.nn.canonical`."""
        count, hidden, width = self.down.shape
        for expert in map(str, range(count)):
            if local == "down":
                yield joined(path, expert, "down.weight"), (hidden, width)
                continue
            if self.act.gated:
                yield joined(path, expert, "gate.weight"), (width, hidden)
            yield joined(path, expert, "up.weight"), (width, hidden)

    def forward(self, copies: Grouped) -> Tensor:
        """Return each copy's output ``[R, h]``, weighted: the weight multiplies the activation.

        An expert without copies gets a gradient of zeros.
        """
        wide = grouped_linear(copies.tokens, self.up, copies.offsets, copies.sizes)
        return grouped_linear(self.act(wide, weights=copies.probs), self.down, copies.offsets, copies.sizes)

    def __len__(self) -> int:
        return len(self.up)

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        count, hidden, width = self.down.shape
        return f"{count} x ({hidden} -> {width} -> {hidden})"

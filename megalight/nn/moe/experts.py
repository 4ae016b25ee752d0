"""Experts: a stack of feed-forward layers, each applied to its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.nn.init import Initializer, Normal
from megalight.nn.mlp import Activation
from megalight.nn.moe.dispatch import Dispatcher, LocalDispatcher


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
        dispatcher: brings tokens to their experts and back.
    """

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
        for expert in range(count):
            if local == "down":
                yield f"{path}.{expert}.down.weight", (hidden, width)
                continue
            if self.act.gated:
                yield f"{path}.{expert}.gate.weight", (width, hidden)
            yield f"{path}.{expert}.up.weight", (width, hidden)

    def forward(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """``[T, h] -> [T, h]``: each token passes through the expert with the index in ``chosen [T]``."""
        out: Tensor = self.dispatcher(hidden, chosen, len(self.up), self.compute)
        return out

    def compute(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """``[N, h] -> [N, h]`` for tokens grouped by expert. ``counts`` has the number of tokens of each expert.

        An expert without tokens gets a gradient of zeros.
        """
        # experts without tokens take part with empty inputs, so that all of them get gradients
        sizes = list(counts)
        wide = [F.linear(x, up) for x, up in zip(torch.split(tokens, sizes), self.up.unbind(), strict=True)]
        narrow = torch.split(self.act(torch.cat(wide)), sizes)
        return torch.cat([F.linear(x, down) for x, down in zip(narrow, self.down.unbind(), strict=True)])

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        count, hidden, width = self.down.shape
        return f"{count} x ({hidden} -> {width} -> {hidden})"

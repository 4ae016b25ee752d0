"""Experts: a stack of feed-forward layers, each applied to its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from megalight.nn.adapter import AdapterSet
from megalight.nn.canonical import joined
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.nn.mlp import Activation
from megalight.nn.moe.dispatch import Dispatcher, Grouped, LocalDispatcher
from megalight.ops.grouped_linear import GroupedLinearSpec, grouped_bias, grouped_linear
from megalight.ops.grouped_linear.backends import reads_sizes
from megalight.ops.quantized_weight import readable


class Experts(nn.Module):
    """Feed-forward layers ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` if gated.

    Each expert has its own canonical tensors, named by its index: ``experts.3.up.weight``.

    Args:
        num_experts: ``E``.
        hidden_size: ``h``.
        ffn_hidden_size: ``f``, the inner width.
        act: the activation.
        bias: whether all projections have biases.
        weigh_input: multiply inputs by the router's weights, instead of activations.
        std: standard deviation of the initial ``up``.
        down_std: standard deviation of the initial ``down``.
        backend: backend of the products (:mod:`megalight.ops.grouped_linear`). ``loop``: one expert after the other.

    Attributes:
        up: ``[E, f, h]``. If gated, ``[E, 2 f, h]``: each expert's gate, then its up.
        down: ``[E, h, f]``.
        up_bias: ``[E, f]`` or ``[E, 2 f]``; and
        down_bias: ``[E, h]``. None without biases.
        inner_dims: the dim of each parameter's canonical tensors that counts the inner width; None: no dim does.
        dispatcher: brings tokens to their experts and back.
        adapters: projection -> :class:`~megalight.nn.adapter.AdapterSet` of its
            :class:`~megalight.nn.moe.adapters.StackAdapter`; empty: none are adapted.
    """

    weigh_output: ClassVar[bool] = False
    """Multiply outputs by the router's weights, instead of activations: the same product, with other roundings."""
    inner_dims: ClassVar[dict[str, int | None]] = {"up": 0, "down": 1, "up_bias": 0, "down_bias": None}
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        act: Activation,
        *,
        bias: bool = False,
        weigh_input: bool = False,
        std: float = 0.02,
        down_std: float = 0.02,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.act = act
        self.weigh_input = weigh_input
        self.backend = backend
        self.dispatcher: Dispatcher = LocalDispatcher()
        width = ffn_hidden_size * (2 if act.gated else 1)
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.adapters = nn.ModuleDict()
        for name, size in (("up_bias", width), ("down_bias", hidden_size)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, size)) if bias else None)
        zero = ConstantInit(0.0)
        self.initializers: dict[str, Initializer] = {
            "up": Normal(std),
            "down": Normal(down_std),
            "up_bias": zero,
            "down_bias": zero,
        }

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors of each expert; see :mod:`megalight.nn.canonical`."""
        projection, _, bias = local.partition("_")
        leaf, shape = bias or "weight", tuple(getattr(self, local).shape[1:])
        # Gate and up of an expert follow each other in `up`, and are tensors of their own in checkpoints.
        names = self.projections[projection]
        for expert in map(str, range(len(self))):
            for name in names:
                yield joined(path, expert, name, leaf), (shape[0] // len(names), *shape[1:])

    @property
    def projections(self) -> dict[str, tuple[str, ...]]:
        """Name of each stack -> the projections that it holds."""
        return {"up": ("gate", "up") if self.act.gated else ("up",), "down": ("down",)}

    def weight_of(self, projection: str) -> Tensor:
        """Return the weights of one projection, ``[E, out, in]``: a view of their stack, or decoded."""
        for stack, names in self.projections.items():
            if projection in names:
                weight = readable(getattr(self, stack))
                return weight.chunk(len(names), 1)[names.index(projection)]
        raise KeyError(projection)

    def forward(self, copies: Grouped) -> Tensor:
        """Return each copy's output ``[R, h]``, weighted: the weight multiplies the activation, or the input.

        An expert without copies gets a gradient of zeros.
        """
        tokens, weights = copies.tokens, copies.probs
        if self.weigh_input:
            # Back to the dtype of the tokens: weights may be float32, and the product would be, too.
            tokens = (tokens * weights.unsqueeze(1)).to(tokens.dtype)
        wide = self._product(tokens, "up", copies)
        if self.up_bias is not None:
            # Biases differ by expert, so they are added by the rows of each one.
            wide = grouped_bias(wide, self.up_bias, copies.offsets, None, copies.sizes)
        # One pass over memory: the activation multiplies by the weight while it writes.
        unweighted = self.weigh_input or self.weigh_output
        narrow = self.act(wide) if unweighted else self.act(wide, weights=weights)
        out = self._product(narrow, "down", copies)
        if self.down_bias is not None:
            # a weight on the activation is one on the output, so it multiplies the bias too
            out = grouped_bias(out, self.down_bias, copies.offsets, None if unweighted else weights, copies.sizes)
        if self.weigh_output and not self.weigh_input:
            out = (out * weights.unsqueeze(1)).to(out.dtype)
        return out

    def needs_sizes(self, dtype: torch.dtype) -> bool:
        """Return whether the host must know how many rows each expert has, or is asked to learn it.

        Args:
            dtype: of the rows.
        """
        if self.dispatcher.tells_sizes:
            return True
        products = [
            GroupedLinearSpec.of(self.up.new_empty(0, dtype=dtype), stack, None) for stack in (self.up, self.down)
        ]
        return any(reads_sizes(spec._replace(weight_dtype=dtype), self.backend) for spec in products)

    def stack(self, name: str) -> Tensor:
        """Return the weights that the products of a stack use."""
        weight: Tensor = getattr(self, name)
        return weight

    def _product(self, x: Tensor, stack: str, copies: Grouped) -> Tensor:
        y = grouped_linear(x, self.stack(stack), copies.offsets, copies.sizes, self.backend)
        if not self.adapters:
            return y
        parts, names = list(y.chunk(len(self.projections[stack]), -1)), self.projections[stack]
        for number, name in enumerate(names):
            adapter = cast(AdapterSet, self.adapters[name]).current if name in self.adapters else None
            if adapter is not None:
                parts[number] = adapter(x, parts[number], partial(self.weight_of, name), copies, self.backend)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def __len__(self) -> int:
        return self.up.shape[0]

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        count, hidden, width = self.down.shape
        return f"{count} x ({hidden} -> {width} -> {hidden})"

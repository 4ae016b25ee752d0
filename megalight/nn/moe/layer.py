"""The mixture-of-experts layer with its experts; a shared expert may run on a side stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from megalight.nn.adapter import AdapterSet
from megalight.nn.canonical import joined
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.nn.linear import Linear
from megalight.nn.mlp import MLP, Activation
from megalight.nn.moe.dispatch import Dispatcher, Grouped, LocalDispatcher
from megalight.nn.moe.router import Router
from megalight.nn.state import LayerContext
from megalight.ops.autograd import note_of, recipe_of
from megalight.ops.batch_invariant import MODE, rowwise
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


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def on_side_stream(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Start ``function(x)`` on a stream of its own; the returned function lets the current stream wait for the result.

    Autograd runs the backward of each op on the stream of its forward, so the backward is beside the rest, too. On the
    CPU the work is done at once.
    """
    if not x.is_cuda:
        result = function(x)
        return lambda: result
    # Where x is a leaf (the input of a recomputed region), its gradient is summed on the stream of its first use, and
    # torch warns of gradients that come from another. The view's backward takes them over to the current stream.
    seen = x.view_as(x)
    if (note := note_of(x)) is not None:
        seen.megalight_note = note  # type: ignore[attr-defined]
    side = _stream(x.device)
    # The input is made on the current stream.
    side.wait_stream(torch.cuda.current_stream(x.device))
    # The backward reads these on the side stream, and may be the last to do so: their memory must not be reused before.
    recipe = recipe_of(x)
    for tensor in (x, *(recipe.ingredients if recipe is not None else ())):
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        result = function(seen)

    def finish() -> Tensor:
        current = torch.cuda.current_stream(x.device)
        # The result is read on the current stream, and its memory belongs to the other one.
        current.wait_stream(side)
        result.record_stream(current)
        return result

    return finish


class MoE(nn.Module):
    """Sends each token through some experts, and adds up their outputs, weighted by the router.

    Args:
        router: chooses the experts of each token.
        experts: the experts.
        shared: the shared expert, a network for all tokens, whose output is added.
        shared_gate: ``h -> 1``; the sigmoid of its output multiplies that of ``shared``.

    Attributes:
        shared_expert_overlap: compute ``shared`` on a CUDA stream of its own, while tokens travel to their experts.
    """

    def __init__(
        self, router: Router, experts: Experts, shared: MLP | None = None, shared_gate: Linear | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.shared_expert_overlap = False

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """``[T, h] -> [T, h]``."""
        routes = self.router(hidden, context)
        # Before the dispatch, in which the host may wait: the other stream must have its work by then.
        start = on_side_stream if self.shared_expert_overlap else partial
        shared = None if self.shared is None else start(self._for_all, hidden)
        dispatcher = self.experts.dispatcher
        copies, memo = dispatcher.dispatch(hidden, routes, len(self.experts), self.router.rows(hidden.shape[0]))
        out = dispatcher.combine(self.experts(copies), memo)
        # Read last: the wait for the shared expert comes after all that can run beside it.
        return out if shared is None else out + shared()

    def _for_all(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(hidden)
        if self.shared_gate is None:
            return out
        gate = self.shared_gate(hidden)
        factor: Tensor = rowwise(torch.sigmoid, gate) if MODE.on else gate.sigmoid()
        return out * factor

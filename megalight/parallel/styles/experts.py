"""Styles of mixture of experts: stacks over ``ep`` and ``etp``, and routers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn.adapter import AdapterSet
from megalight.nn.canonical import CanonicalPart
from megalight.nn.moe import Dispatcher, Experts, Router
from megalight.nn.moe.adapters import StackAdapter
from megalight.ops.router import Routes
from megalight.parallel.expert import DISPATCHERS
from megalight.parallel.expert.token_pool import MeshPool
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split
from megalight.parallel.tensor.linear import RowStackAdapter


@register
@dataclass(frozen=True)
class Expert(Style):
    """A stack of experts (``nn.moe.Experts``): equal numbers over ``ep``, and the inner width of each over ``etp``.

    Every rank must provide its own tokens, so ``tp > 1`` needs sequence parallelism.
    """

    axis: ClassVar[str] = "ep"

    def splits(self, mesh: ParallelMesh) -> bool:
        """Whether ``ep`` or ``etp`` has several ranks."""
        return mesh.ep * mesh.etp > 1

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return the same module with fewer and narrower experts, and a dispatcher that gets tokens of other ranks."""
        experts: Experts = self.expect(name, module, Experts)
        shared = splitter.shared
        if shared.mesh.tp > 1 and not shared.sequence_parallel:
            raise LayoutError(
                f"{name}: tp={shared.mesh.tp} without sequence parallelism would send the same tokens to the experts "
                f"{shared.mesh.tp} times. Switch sequence_parallel on, or set tp=1."
            )
        if shared.mesh.etp > 1 and experts.down_bias is not None:
            raise LayoutError(
                f"{name}: etp={shared.mesh.etp} divides experts with biases, and each of its ranks would add them. Set "
                "etp=1, or leave the biases out."
            )

        # A copy: the splitter still looks up the parameters of the single-device module, to
        # know how values are drawn.
        here = copy.copy(experts)
        here._modules = dict(experts._modules)
        here._parameters = {
            local: splitter.split(name, experts, local, partial(split.stack, dim=dim))
            for local, dim in experts.inner_dims.items()
        }
        here._modules["adapters"] = nn.ModuleDict(
            {each: _adapters(splitter, f"{name}.adapters.{each}", found) for each, found in experts.adapters.items()}
        )
        splitter.done.add(id(experts.adapters))
        # If one rank has all experts, the module's own dispatcher moves rows without messages.
        if self.splits(shared.mesh):
            here.dispatcher = DISPATCHERS[shared.expert.dispatcher](shared)
        return here


def stacked(module: nn.Module) -> bool:
    """Return whether a module is a stack of experts of ``transformers``, all of whose weights are ``[E, ...]``."""
    parameters = list(module._parameters.values())
    count = getattr(module, "num_experts", None)
    # What `use_experts_implementation` gives to a class.
    known = all(hasattr(module, each) for each in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))
    return known and bool(parameters) and all(each is not None and each.shape[0] == count for each in parameters)


@register
@dataclass(frozen=True)
class StackedExperts(Style):
    """A stack of experts of ``transformers``: equal numbers over ``ep``.

    Copies of tokens travel to the ranks of their experts, where the module's own code computes them.
    """

    axis: ClassVar[str] = "ep"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with fewer experts, and a dispatcher that gets tokens of other ranks."""
        shared, mesh = splitter.shared, splitter.shared.mesh
        if mesh.ep * mesh.etp == 1:
            return
        if not stacked(module):
            raise LayoutError(
                f"the plan's rule StackedExperts meets {name}, a {type(module).__name__}; it serves experts of "
                "transformers whose weights are stacked. Make the rule's pattern narrower."
            )
        if mesh.tp > 1 or mesh.etp > 1:
            raise LayoutError(
                f"{name} ({type(module).__name__}): experts of transformers are divided over ep={mesh.ep} alone; set "
                f"tp=1 (it is {mesh.tp}) and etp=1 (it is {mesh.etp})."
            )
        for local in module._parameters:
            module._parameters[local] = splitter.split(name, module, local, split.experts)
        module.num_experts //= mesh.ep  # type: ignore[operator, assignment]
        dispatcher = DISPATCHERS[shared.expert.dispatcher](shared)
        # Where its class has it, so that the module keeps its type, and its own implementation of the products.
        module.forward = partial(_dispatched, module, dispatcher, module.forward)


def _dispatched(
    module: nn.Module,
    dispatcher: Dispatcher,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """``[T, h]``, and ``[T, k]`` numbers and weights of experts ``-> [T, h]``: sums over the experts of all ranks."""
    count: int = module.num_experts  # type: ignore[assignment]
    probs = weights if weights.dtype == torch.float64 else weights.float()
    copies, memo = dispatcher.dispatch(hidden, Routes(probs, experts), count)
    rows = torch.arange(len(copies.tokens), device=hidden.device)
    expert = torch.searchsorted(copies.offsets.long(), rows, right=True)
    # Rows after the last copy belong to no expert.
    weight = copies.probs.masked_fill(expert == count, 0).unsqueeze(1)
    if len(rows):
        outputs = compute(copies.tokens, expert.clamp(max=count - 1).unsqueeze(1), weight.to(weights.dtype))
    else:
        outputs = copies.tokens * weight  # empty, and part of the graph: other ranks wait in the backward
    return dispatcher.combine(outputs, memo)


def _adapters(splitter: Splitter, name: str, adapters: nn.Module) -> AdapterSet:
    """Split all adapters of a projection."""
    assert isinstance(adapters, AdapterSet)
    splitter.done.add(id(adapters))
    found = AdapterSet({key: _adapter(splitter, f"{name}.{key}", adapter) for key, adapter in adapters.items()})
    found.active = adapters.active
    return found


def _adapter(splitter: Splitter, name: str, adapter: nn.Module) -> StackAdapter:
    """Split an adapter like the projection that it is beside.

    A parameter without the inner width is whole on every ``etp`` rank. Each computes one term of its gradient, from its
    own part of the inner width.
    """
    assert isinstance(adapter, StackAdapter)
    splitter.done.add(id(adapter))
    mesh = splitter.shared.mesh
    if adapter.inner_dims["B"] is None and mesh.etp > 1:
        here: StackAdapter = RowStackAdapter(adapter, mesh)
        splitter.dress(here, adapter)
    else:
        here = copy.copy(adapter)

    def rule(dim: int | None, parts: Sequence[CanonicalPart], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
        spec = split.stack(parts, shape, mesh, dim=dim)
        if dim is not None or mesh.etp == 1:
            return spec
        first = mesh.rank("etp") == 0
        return replace(spec, pieces=tuple(replace(p, partial=("etp",), owner=first) for p in spec.pieces))

    here._parameters = {
        local: splitter.split(name, adapter, local, partial(rule, dim)) for local, dim in adapter.inner_dims.items()
    }
    return here


@register
@dataclass(frozen=True)
class Routing(Style):
    """A router (``nn.moe.Router``): every rank holds it whole, and routes its own tokens.

    Under sequence parallelism these are a share of the tokens, so gradients are summed over ``tp``.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the router, with a pool over all ranks that hold tokens of the micro-batch."""
        router: Router = self.expect(name, module, Router)
        splitter.keep(name, router, partial=splitter.shared.sequence_parallel)
        # The balancing loss is a product of two means over the micro-batch; means of shares
        # would give another product.
        router.pool = MeshPool(splitter.shared)

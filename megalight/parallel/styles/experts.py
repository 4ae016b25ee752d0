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
from megalight.parallel import collectives, shard
from megalight.parallel.expert import DISPATCHERS
from megalight.parallel.expert.dispatch import MeshPool
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.shared_state import SharedState
from megalight.parallel.styles.style import Splitter, Style, register
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
            local: splitter.split(name, experts, local, partial(shard.stack, dim=dim))
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
    """A stack of experts of ``transformers``: equal numbers over ``ep``, and the inner width of each over ``etp``.

    Copies of tokens travel to the ranks of their experts, where the module's own code computes them. Ranks along ``tp``
    have the same tokens, of which each sends its share. Where ``ep`` and ``etp`` are 1, ``tp`` divides the inner width.
    """

    axis: ClassVar[str] = "ep"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with fewer or narrower experts, and communication around its own code."""
        shared, mesh = splitter.shared, splitter.shared.mesh
        alone = mesh.ep * mesh.etp == 1
        if alone and mesh.tp == 1:
            return
        if not stacked(module):
            raise LayoutError(
                f"the plan's rule StackedExperts meets {name}, a {type(module).__name__}; it serves experts of "
                "transformers whose weights are stacked. Make the rule's pattern narrower."
            )
        axis = "tp" if alone else "etp"
        narrow = mesh.size(axis) > 1 and not (module.has_gate and module.is_transposed and module.is_concatenated)
        if not narrow and alone:  # every rank computes all of them
            return
        if not narrow and mesh.etp > 1:
            raise LayoutError(
                f"{name} ({type(module).__name__}): etp={mesh.etp} divides the inner width of experts, and two halves "
                "of transposed weights cannot be divided. Set etp=1."
            )
        for local in module._parameters:
            dim, sections = inner_dim(module, local) if narrow else (None, 1)
            rule = partial(shard.experts, axis=axis, dim=dim, sections=sections)
            module._parameters[local] = splitter.split(name, module, local, rule)
        module.num_experts //= mesh.ep  # type: ignore[operator, assignment]
        compute = module.forward
        if narrow and "down_proj_bias" in module._parameters:
            compute = partial(_with_a_term_of_the_bias, module, mesh.size(axis), compute)
        # Where its class has it, so that the module keeps its type, and its own implementation of the products.
        if alone:
            module.forward = partial(_narrow, shared, compute)
        else:
            dispatcher = DISPATCHERS[shared.expert.dispatcher](shared)
            module.forward = partial(_dispatched, module, dispatcher, shared, compute)


def inner_dim(module: nn.Module, local: str) -> tuple[int | None, int]:
    """Return the dim of a stacked weight or bias that is the inner width, and in how many sections it is.

    None: it has no such dim. Gate and up of one weight are two sections, or alternate.
    """
    down, bias = local.startswith("down"), local.endswith("bias")
    if bias and down:
        return None, 1
    two = module.has_gate and module.is_concatenated and local.startswith("gate_up")
    outputs = 1 if bias or not module.is_transposed else 2
    return (3 - outputs if down else outputs), 2 if two else 1


def _with_a_term_of_the_bias(
    module: nn.Module, ranks: int, compute: Callable[[Tensor, Tensor, Tensor], Tensor], *args: Tensor
) -> Tensor:
    """Compute one of ``ranks`` terms of the experts' outputs, whose sum has the bias once."""
    whole = module._parameters["down_proj_bias"]
    assert whole is not None
    module._parameters["down_proj_bias"] = whole / ranks  # type: ignore[assignment]
    try:
        return compute(*args)
    finally:
        module._parameters["down_proj_bias"] = whole


def _narrow(
    shared: SharedState,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """``[T, h]``, and ``[T, k]`` numbers and weights of experts ``-> [T, h]``: the sum of the terms of all ranks."""
    group = shared.group
    terms = compute(collectives.copy(hidden, group), experts, collectives.copy(weights, group))
    return collectives.all_reduce(terms, group)


def _dispatched(
    module: nn.Module,
    dispatcher: Dispatcher,
    shared: SharedState,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """``[T, h]``, and ``[T, k]`` numbers and weights of experts ``-> [T, h]``: sums over the experts of all ranks."""
    group, length = shared.group, len(hidden)
    if group is not None:
        # Rows that are added belong to expert 0 with weight 0.
        more = -length % group.size()
        hidden, experts, weights = (nn.functional.pad(each, (0, 0, 0, more)) for each in (hidden, experts, weights))
        hidden, weights = collectives.split(hidden, group), collectives.split(weights, group)
        experts = collectives.own_slice(experts, group)
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
    combined = dispatcher.combine(outputs, memo)
    return combined if group is None else collectives.join(combined, group)[:length]


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
        spec = shard.stack(parts, shape, mesh, dim=dim)
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

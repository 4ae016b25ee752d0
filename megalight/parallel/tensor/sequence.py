"""Where tensors change between whole and this rank's share of the tokens, around modules that know of neither."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megalight.parallel.collectives import all_gather, join, own_slice, split
from megalight.parallel.plan import Boundary
from megalight.parallel.tensor.shared import Shared


def add_boundary(module: nn.Module, boundary: Boundary, shared: Shared) -> None:
    """Make ``module`` change its first input and first output as ``boundary`` says, while sequence parallelism is on.

    Hooks serve here, as foreign modules must keep their type; a model has few of them per layer.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not shared.sequence_parallel:
            return args, kwargs
        if args:
            return (_enter(args[0], boundary, shared), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: _enter(kwargs[first], boundary, shared)}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not shared.sequence_parallel:
            return output
        if isinstance(output, tuple):
            return (join(output[0], shared.group, shared.sequence_dim), *output[1:])
        return join(output, shared.group, shared.sequence_dim)

    if boundary.enter:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if boundary.leave:
        module.register_forward_hook(after)


def _enter(x: Tensor, boundary: Boundary, shared: Shared) -> Tensor:
    if boundary.enter == "gather":
        return all_gather(x, shared.group, shared.sequence_dim)
    if boundary.enter == "join":
        return join(x, shared.group, shared.sequence_dim)
    if not x.is_floating_point():  # ids: no gradient
        return own_slice(x, shared.group, shared.sequence_dim)
    return split(x, shared.group, shared.sequence_dim)

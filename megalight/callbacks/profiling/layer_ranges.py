"""Hooks that report the forward and backward pass of each layer to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class LayerListener(Protocol):
    """The methods that :func:`watch` calls."""

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Called before the forward of a layer."""

    def end(self, name: str) -> None:
        """Called after the forward of a layer, also if it raised."""

    def backward(self, name: str) -> None:
        """Called when the gradient of a layer's output is ready: its backward begins, the next layer's is done."""


def layers_of(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the members of the outermost lists of layers, and the modules beside those lists, by name."""
    children = dict(module.named_children())
    stack = any(isinstance(child, CONTAINERS) for child in children.values())
    found: dict[str, nn.Module] = {}
    for name, child in children.items():
        if isinstance(child, CONTAINERS):
            found |= {f"{prefix}{name}.{member}": layer for member, layer in child.named_children()}
        # Modules beside a list of layers (an embedding, a head) count as one each.
        elif stack and not layers_of(child):
            found[f"{prefix}{name}"] = child
        else:
            found |= layers_of(child, f"{prefix}{name}.")
    return found


def watch(modules: Iterable[nn.Module], listener: LayerListener) -> list[Callable[[], None]]:
    """Add hooks to the layers of ``modules`` that call ``listener``. Returns functions that remove the hooks.

    The hooks do nothing inside code that ``torch.compile`` traces.
    """
    removals: list[Callable[[], None]] = []
    for module in modules:
        for name, layer in layers_of(module).items():
            # Before other hooks, so that waits in these count for the layer.
            before = layer.register_forward_pre_hook(partial(_before, listener, name), prepend=True)
            # Also after an error, or the range would stay open.
            after = layer.register_forward_hook(partial(_after, listener, name), always_call=True)
            removals += [before.remove, after.remove]
    return removals


def _before(listener: LayerListener, name: str, layer: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        listener.begin(name, {})


def _after(listener: LayerListener, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    listener.end(name)
    # One tensor is enough: its gradient is complete when the next layer's backward has ended.
    tensor = next((tensor for tensor in _tensors(output) if tensor.requires_grad), None)
    if tensor is not None:
        tensor.register_hook(lambda gradient: listener.backward(name))  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)

"""Hidden states inside a model: outputs of its modules by name, which travel along a pipeline with the carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor, nn

KEPT = "at."
"""Prefix of hidden states in a carry; the name of the module follows."""


@contextmanager
def keeping(
    model: nn.Module, names: Iterable[str], carry: Mapping[str, Tensor] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that a forward pass inside fills: ``KEPT`` and name of a module -> its output ``[T, h]``.

    Args:
        model: the model, or a part of it that has only some of the modules.
        names: names of modules. Of a norm that also returns the residual stream, the normed states are kept.
        carry: what the part before returned. What it has kept is in the dict, too.
    """
    found = {name: tensor for name, tensor in (carry or {}).items() if name.startswith(KEPT)}
    thread = get_ident()

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A pass of another micro-batch may take turns with this one, in a thread of its own.
            if get_ident() == thread:
                found[KEPT + name] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as hooks:
        for name in set(names):
            if (module := module_at(model, name)) is not None:
                hooks.callback(module.register_forward_hook(hook_of(name)).remove)
        yield found


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module with this name, or None if this part of the model lacks it."""
    found: nn.Module | None = model
    for part in name.split("."):
        found = None if found is None else found._modules.get(part)
    return found


def places_of(model: nn.Module) -> list[str]:
    """Return names of the modules of ``embed | layers | head`` whose outputs are hidden states ``[T, h]``.

    These are the layers, their norms, mixers and MLPs, and the final norm.
    """
    found = []
    for index, layer in model.layers.named_children():  # type: ignore[union-attr]
        inside = [name for name, child in layer.named_children() if not isinstance(child, nn.Dropout)]
        found += [f"layers.{index}", *(f"layers.{index}.{name}" for name in inside)]
    return [*found, "head.norm"]

"""What recorded work has taken for granted about a model: where its tensors are, and the mode of its modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class Fingerprint:
    """Tells whether the modules are still as they were when work on them was recorded."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [part for module in modules for part in module.modules()]

    def __call__(self) -> tuple[Any, ...]:
        """Equal while parameters and buffers keep their places and need for gradients, and modules their mode."""
        found: list[Any] = []
        for module in self._modules:
            found.append((module.training, len(module._modules)))
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        found.append((tensor.data_ptr(), tensor.requires_grad))
        return tuple(found)

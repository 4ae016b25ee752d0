"""What a recording assumes about a model: the addresses of its tensors, and the mode of its modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class Fingerprint:
    """Describes the state of modules, to see whether it has changed since work on them was recorded."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [part for module in modules for part in module.modules()]

    def __call__(self) -> tuple[Any, ...]:
        """Return a value that stays equal while tensors keep address and ``requires_grad``, and modules their mode."""
        found: list[Any] = []
        for module in self._modules:
            found.append((module.training, len(module._modules)))
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        found.append((tensor.data_ptr(), tensor.requires_grad))
        return tuple(found)

"""What a recording assumes about a model: addresses of tensors, modes of modules, and values of their attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from megalight.parallel.graphs.attributes import Attributes


class Fingerprint:
    """Describes the state of modules, to see whether it has changed since work on them was recorded.

    Attributes:
        attributes: plain attributes of all modules, and of ``also``.

    Args:
        modules: modules by name. Their submodules count too.
        also: further objects by name, of which only plain attributes count.
        ignored: names of attributes that do not count, besides torch's own.
        address: a tensor -> its address; another function knows those of tensors that come and go.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        also: Iterable[tuple[str, nn.Module]] = (),
        ignored: frozenset[str] = frozenset(),
        address: Callable[[Tensor], int] = Tensor.data_ptr,
    ) -> None:
        self._address = address
        named = [pair for name, module in modules for pair in module.named_modules(prefix=name)]
        self._modules = [module for _, module in named]
        everything = {id(module): (name, module) for name, module in [*named, *also]}
        self.attributes = Attributes(everything.values(), ignored)

    def __call__(self) -> tuple[Any, ...]:
        """Return a value that stays equal while tensors keep address and ``requires_grad``, and modules their state.

        The state of a module is its mode and the values of its plain attributes.
        """
        found: list[Any] = [self.attributes()]
        for module in self._modules:
            found.append((module.training, len(module._modules)))
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        found.append((self._address(tensor), tensor.requires_grad))
        return tuple(found)

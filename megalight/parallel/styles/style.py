"""The base class of styles: how modules that match a rule of a plan are split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from megalight.errors import LayoutError
from megalight.nn import adapter
from megalight.parallel.mesh import ParallelMesh
from megalight.registry import Registry

if TYPE_CHECKING:
    from megalight.parallel.splitter import Splitter


class Style(ABC):
    """How a module is split. Subclasses are frozen dataclasses: their fields are options, and plans compare them.

    Attributes:
        axis: the mesh axis over which the style splits.
    """

    axis: ClassVar[str] = "tp"

    @abstractmethod
    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Split a module.

        It must pass each parameter of the module to ``splitter.split`` or ``splitter.keep``, also if :attr:`axis` has
        one rank. This records the part of the one-device model that the rank holds.

        Args:
            splitter: the pass over the model; ``splitter.shared`` has the mesh and the options.
            name: name of the module.
            module: the one-device module, or the result of an earlier style of the same rule.

        Returns:
            the module that replaces it, or None to keep it.

        Raises:
            LayoutError: the style does not fit the module, or a size is not divisible.
        """

    def splits(self, mesh: ParallelMesh) -> bool:
        """Whether the style splits modules on this mesh; otherwise they are not replaced."""
        return mesh.size(self.axis) > 1

    @property
    def overlaps(self) -> bool:
        """Whether the split layer has a collective that :class:`~.tensor.overlap.options.TensorOptions` can hide."""
        return False

    def expect(self, name: str, module: nn.Module, *types: type[nn.Module], replaced: bool = False) -> Any:
        """Return the module, if it has one of these types.

        Args:
            replaced: another module takes its place, and computes what these types do.

        Raises:
            LayoutError: it has another type, or is replaced and computes something else than its type.
        """
        if not isinstance(module, types):
            known = ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in types)
            raise LayoutError(
                f"the plan's rule {type(self).__name__} meets {name}, a {type(module).__name__}; it serves {known}. "
                "Make the rule's pattern narrower."
            )
        if replaced and (own := _own(module, types)) is not None:
            raise LayoutError(
                f"{name} ({type(module).__name__}) has {own}, which would be lost: the plan's rule "
                f"{type(self).__name__} replaces it. Put that into a module around this one, or make the rule's "
                "pattern narrower."
            )
        return module


def _own(module: nn.Module, types: tuple[type[nn.Module], ...]) -> str | None:
    """Return what a module computes besides what the type does that it is served as; None: nothing."""
    known = next(kind for kind in types if isinstance(module, kind))
    # A class may say that its replacement lacks nothing of it.
    computes = getattr(module, "stands_for", type(module))
    if "forward" in vars(module) or computes.forward is not known.forward:
        return "a forward pass of its own"
    if is_parametrized(module):
        return "parametrizations"
    # A style splits adapters with their layer, and replaces their hook.
    hooks = [
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    ]
    hooks += [hook for hook in module._forward_hooks.values() if hook is not adapter.added]
    return "hooks" if hooks else None


STYLES: Registry[type[Style]] = Registry("style")
"""Name of a style -> its class. A plan may name a style instead of holding one."""

StyleT = TypeVar("StyleT", bound=Style)


def register(style: type[StyleT]) -> type[StyleT]:
    """Class decorator: register a style under the name of its class."""
    STYLES.register(style.__name__)(style)
    return style

"""What a style is: how the modules that a rule of a plan matches are split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn

from megalight.errors import LayoutError
from megalight.registry import Registry

if TYPE_CHECKING:
    from megalight.parallel.splitter import Splitter


class Style(ABC):
    """How a module splits. Subclasses are frozen dataclasses: their fields are options, and plans compare them.

    Attributes:
        axis: the mesh axis over which the style splits. Where it has one rank, modules are not replaced.
    """

    axis: ClassVar[str] = "tp"

    @abstractmethod
    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Split a module.

        It passes each parameter of the module to ``splitter.split`` or ``splitter.keep``, also where :attr:`axis` has
        one rank: this records what part of the one-device model the rank holds.

        Args:
            splitter: the pass over the model; ``splitter.shared`` has the mesh and the options.
            name: of the module.
            module: of the one-device model, or what an earlier style of the same rule made of it.

        Returns:
            the module that takes its place, or None where it stays.

        Raises:
            LayoutError: the style does not fit the module, or something does not divide.
        """

    @property
    def overlaps(self) -> bool:
        """Whether the split layer has a collective that :class:`~.tensor.overlap.options.TensorOptions` can hide."""
        return False

    def expect(self, name: str, module: nn.Module, *types: type[nn.Module]) -> Any:
        """The module, if it is one of these types.

        Raises:
            LayoutError: it is not.
        """
        if not isinstance(module, types):
            known = ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in types)
            raise LayoutError(
                f"the plan's rule {type(self).__name__} meets {name}, a {type(module).__name__}; it serves {known}. "
                "Make the rule's pattern narrower."
            )
        return module


STYLES: Registry[type[Style]] = Registry("style")
"""Name of a style -> its class. A plan may name a style instead of holding one."""

StyleT = TypeVar("StyleT", bound=Style)


def register(style: type[StyleT]) -> type[StyleT]:
    """Class decorator: register a style under the name of its class."""
    STYLES.register(style.__name__)(style)
    return style

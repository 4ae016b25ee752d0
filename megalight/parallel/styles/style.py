"""The base class of styles, and the styles of modules that are replicated or only renamed or reseeded.

A style says how modules that match a rule of a plan are split.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from megalight.errors import LayoutError
from megalight.nn import adapter
from megalight.parallel import shard
from megalight.parallel.degrees import replicas_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.splitter import Splitter
from megalight.parallel.tensor.shared import OwnStream, ParallelDropout, has_dropout
from megalight.registry import Registry

LINEARS = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Classes of other packages with a ``forward`` of their own that is that of ``nn.Linear``."""


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
        one rank. This records the part of the single-device model that the rank holds.

        Args:
            splitter: the pass over the model; ``splitter.shared`` has the mesh and the options.
            name: name of the module.
            module: the single-device module, or the result of an earlier style of the same rule.

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
        """Whether the split layer has a collective that :class:`~.tensor.overlap.spec.TensorOptions` can hide."""
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


def is_named_linear(module: nn.Module) -> bool:
    """Return whether a module is of another package's class that computes what ``nn.Linear`` does."""
    return f"{type(module).__module__}.{type(module).__qualname__}" in LINEARS


def kind_of(module: nn.Module | None) -> type:
    """Return the class of a module, or the one that it says to stand for: it computes the same, by ops of ours."""
    kind: type = getattr(module, "stands_for", type(module))
    return kind


def _own(module: nn.Module, types: tuple[type[nn.Module], ...]) -> str | None:
    """Return what a module computes besides what the type does that it is served as; None: nothing."""
    known = next(kind for kind in types if isinstance(module, kind))
    # A class may say that its replacement lacks nothing of it.
    computes: Any = known if is_named_linear(module) else kind_of(module)
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
    hooks += [hook for hook in module._forward_hooks.values() if hook is not adapter.added and not _marks(hook)]
    return "hooks" if hooks else None


def _marks(hook: Any) -> bool:
    """Whether a hook is that of ``transformers`` that reentrant checkpointing alone needs, which is refused."""
    return getattr(hook, "__name__", "") == "make_inputs_require_grads"


STYLES: Registry[type[Style]] = Registry("style")
"""Name of a style -> its class. A plan may name a style instead of holding one."""

StyleT = TypeVar("StyleT", bound=Style)


def register(style: type[StyleT]) -> type[StyleT]:
    """Class decorator: register a style under the name of its class."""
    STYLES.register(style.__name__)(style)
    return style


@register
@dataclass(frozen=True)
class Replicated(Style):
    """A module that computes the same on every rank: its weights are held whole, and their gradients are complete.

    Without sequence parallelism, modules without a rule are treated like this. With it, every module with parameters
    needs a rule, because it is not known whether it gets a share of the tokens or all of them.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module."""
        splitter.keep(name, module)


@register
@dataclass(frozen=True)
class Refused(Style):
    """A module that a layout cannot split: the layout raises an error, others keep the module.

    Attributes:
        reason: what is in the way, and what to do, as a sentence without its subject, which is the module.
        sequence_parallel: only sequence parallelism is in the way.
    """

    reason: str
    sequence_parallel: bool = False

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module.

        Raises:
            LayoutError: the layout splits it.
        """
        shared = splitter.shared
        if shared.mesh.tp > 1 and (shared.sequence_parallel or not self.sequence_parallel):
            raise LayoutError(f"{name} ({type(module).__name__}) {self.reason}")


@register
@dataclass(frozen=True)
class Attributes(Style):
    """Changes attributes that count things (head counts in foreign models) to the numbers of one rank.

    Attributes:
        divide: names of counts that are divided by ``tp``.
        per_unit: name of a ratio -> number of units. If there are fewer units than ``tp``, the ratio is divided by the
            number of ranks that share a unit (for example, query heads per KV head).
        at_least_one: names of counts that are divided by ``tp``, and are 1 where there are more ranks (KV heads).
        per_head: name of a parameter -> its dim that counts heads, of which a rank holds its own.
        vocabulary: names of parameters with one entry for each row of the vocabulary (a bias tied to that of a head).
    """

    divide: tuple[str, ...] = ()
    per_unit: Mapping[str, int] = field(default_factory=dict)
    at_least_one: tuple[str, ...] = ()
    per_head: Mapping[str, int] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and change its attributes."""
        for local, dim in self.per_head.items():
            module._parameters[local] = splitter.split(name, module, local, functools.partial(shard.along, dim=dim))
        for local in self.vocabulary:
            module._parameters[local] = splitter.split(name, module, local, shard.vocabulary)
        # Its other parameters, if any, stay whole: those that the counts describe belong to the layers inside.
        splitter.keep_rest(name, module)
        self.divide_counts(name, module, splitter.shared.mesh.tp, "tp")

    def divide_counts(self, name: str, module: nn.Module, ranks: int, degree: str) -> None:
        """Change the attributes of a module to those of one of ``ranks``.

        Args:
            degree: name of their number, for messages.

        Raises:
            LayoutError: ``ranks`` does not divide a count.
        """
        for attribute in self.divide:
            _divide(name, module, attribute, ranks, degree)
        for attribute in self.at_least_one:
            count = getattr(module, attribute)
            _divide(name, module, attribute, ranks // replicas_of(count, ranks, f"{name}.{attribute}"), degree)
        # With replicated units, a rank's queries per key head shrink by the number of ranks that share the key head.
        for attribute, units in self.per_unit.items():
            heads = units * getattr(module, attribute)
            if heads % ranks:
                raise LayoutError(
                    f"{name} has {heads} heads, and {degree}={ranks} does not divide them. Lower {degree}."
                )
            _divide(name, module, attribute, replicas_of(units, ranks, f"{name}.{attribute}"), degree)


def _divide(name: str, module: nn.Module, attribute: str, by: int, degree: str) -> None:
    value = getattr(module, attribute, None)
    if not isinstance(value, int) or value % by:
        raise LayoutError(f"{name}.{attribute} is {value!r}; it must be an integer that {by} divides. Lower {degree}.")
    setattr(module, attribute, value // by)


@register
@dataclass(frozen=True)
class Dropout(Style):
    """Dropout that uses the rank's own random stream if its input differs between ``tp`` ranks.

    Attributes:
        split: the input differs even without sequence parallelism (attention weights of this rank's heads).
    """

    split: bool = False

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`ParallelDropout` for ``nn.Dropout``, and a wrapper for other modules that draw."""
        if isinstance(module, nn.Dropout):
            self.expect(name, module, nn.Dropout, replaced=self.splits(splitter.shared.mesh))
            return ParallelDropout(module.p, splitter.shared, split=self.split)
        # A wrapper would hide the parameters from the rules for their modules.
        if next(module.parameters(), None) is not None:
            raise LayoutError(
                f"the plan's rule Dropout meets {name}, a {type(module).__name__} with parameters; it is for "
                "nn.Dropout and modules without any."
            )
        # Without dropout inside there is nothing to draw.
        return OwnStream(module, splitter.shared) if self.split and has_dropout(module) else None

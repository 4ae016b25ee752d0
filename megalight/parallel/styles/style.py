"""The base class of styles, the pass over a model that applies them, and the styles of modules that stay whole.

A style says how modules that match a rule of a plan are split.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from megalight.errors import LayoutError
from megalight.nn.adapter import Adapter, AdapterSet, added
from megalight.nn.canonical import CanonicalPart, joined, parts
from megalight.parallel import shard
from megalight.parallel.degrees import replicas_of
from megalight.parallel.initial_values import SplitOrigin, on_meta
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.shared_state import OwnStream, ParallelDropout, SharedState, has_dropout
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
    hooks += [hook for hook in module._forward_hooks.values() if hook is not added and not _marks(hook)]
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


Rule: TypeAlias = Callable[[Sequence[CanonicalPart], tuple[int, ...], ParallelMesh], ShardSpec]
"""Canonical parts and shape of a single-device parameter, and the mesh -> the part that this rank holds."""


class Splitter:
    """One pass over a model that splits its modules.

    Args:
        model: the single-device model.
        shared: the state that its parallel layers will share.
        prefix: put before canonical names.

    Attributes:
        specs: the parameters split so far, by name.
    """

    def __init__(self, model: nn.Module, shared: SharedState, prefix: str) -> None:
        self.model = model
        self.shared = shared
        self.prefix = prefix
        self.specs: dict[str, ShardSpec] = {}
        self.done: set[int] = set()
        """Ids of modules that need no further visit."""
        self._parts: dict[str, list[CanonicalPart]] = defaultdict(list)
        # Read now, before anything is split: names and shapes of the single-device model cannot be read from its parts
        # later.
        for part in parts(model):
            self._parts[part.parameter].append(replace(part, name=prefix + part.name))
        self._whole = dict(model.named_parameters())
        self._first = {id(parameter): name for name, parameter in self._whole.items()}
        self._local: dict[str, nn.Parameter] = {}
        self._aliases: dict[int, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            # Every name, because a shared module must be replaced at all of its places.
            self._aliases[id(module)].append(name)

    def split(self, name: str, module: nn.Module, local: str, rule: Rule) -> nn.Parameter | None:
        """Split the parameter ``local`` of module ``name``, and return this rank's part; tied parameters stay tied.

        Raises:
            LayoutError: the parameter is tied to one that was split differently.
        """
        whole = module._parameters[local]
        if whole is None:
            return None
        first = self._first[id(whole)]
        spec = rule(self._parts[first], tuple(whole.shape), self.shared.mesh)
        # Tied: one parameter object must stay one, or the two ends would be trained apart.
        if first in self.specs:
            if self.specs[first] != spec:
                raise LayoutError(
                    f"{name}.{local} is the same parameter as {first}, but the plan splits the two differently; give "
                    "both modules styles that agree (Vocab and VocabHead do)."
                )
            return self._local[first]
        self.specs[first] = spec
        self._local[first] = whole
        # A replicated parameter stays the same object.
        if spec.shape != tuple(whole.shape):
            values = torch.empty(spec.shape, dtype=whole.dtype, device=whole.device)
            # Without values (meta) there is nothing to cut: each rank draws or reads just its part later.
            if not whole.is_meta:
                shard.take(whole.detach(), self._parts[first], spec, values)
            self._local[first] = nn.Parameter(values, requires_grad=whole.requires_grad)
        return self._local[first]

    def keep(self, name: str, module: nn.Module, *, partial: bool = False) -> None:
        """Hold the module and its adapters whole on every rank.

        Args:
            partial: their gradients must be summed over ``tp``.
        """
        rule = functools.partial(shard.replicated, partial=partial)
        for local in module._parameters:
            self.split(name, module, local, rule)
        if isinstance(adapters := getattr(module, "adapter", None), AdapterSet):
            self.done.add(id(adapters))
            for key, adapter in adapters.items():
                self.done.add(id(adapter))
                self.keep(joined(name, "adapter", key), adapter, partial=partial)
        self._keep_buffers(name, module)

    def keep_rest(self, name: str, module: nn.Module) -> None:
        """Hold whole what the styles of a module do not know: tensors that its class or its user added."""
        rule = functools.partial(shard.replicated, partial=False)
        for local, parameter in module._parameters.items():
            first = self._first.get(id(parameter))  # None: in place of one that was cut
            if first is not None and first not in self.specs:
                self.split(name, module, local, rule)
        self._keep_buffers(name, module)

    def _keep_buffers(self, name: str, module: nn.Module) -> None:
        for local, buffer in module._buffers.items():
            if buffer is not None and local not in module._non_persistent_buffers_set:
                full, shape = joined(name, local), tuple(buffer.shape)
                part = CanonicalPart(full, self.prefix + full, shape, 0)
                # Persistent buffers are saved in checkpoints, so they need a spec too.
                self.specs[full] = shard.replicated([part], shape, self.shared.mesh, partial=False)

    def check_held(self, name: str, module: nn.Module, replacement: nn.Module) -> None:
        """Refuse to replace a module that holds something which its replacement does not.

        Raises:
            LayoutError: names it.
        """
        if lost := _names(module) - _names(replacement):
            raise LayoutError(
                f"{name} ({type(module).__name__}) has {', '.join(sorted(lost))}, which would be lost: the plan "
                f"replaces it by a {type(replacement).__name__}. Put that into a module around this one."
            )

    def apply(self, name: str, module: nn.Module, styles: Sequence[Style]) -> None:
        """Apply styles to one module; without any style it is replicated.

        Raises:
            LayoutError: a style does not fit the module, or something does not divide.
        """
        # A rule for the layer without parametrizations finds other parameters, and refuses it where it splits.
        if is_parametrized(module) and not any(style.splits(self.shared.mesh) for style in styles):
            styles = ()
        if not styles:
            self.keep(name, module)
        current = module
        # In order, each on the result of the one before: a boundary may wrap a layer that was split.
        for style in styles:
            replacement = style.apply(self, name, current)
            if replacement is None or not style.splits(self.shared.mesh):
                continue
            wraps = any(child is current for child in replacement.children())
            if len(styles) > 1 and not wraps:
                raise LayoutError(
                    f"{name}: the style {type(style).__name__} replaces the module, so it must stand alone."
                )
            # An adapter that no style has split would be whole on each rank, beside a layer that is not.
            if _adapters(replacement) < _adapters(current):
                raise LayoutError(
                    f"{name} has an adapter, which the style {type(style).__name__} does not split; leave it out of "
                    "the adapter's targets."
                )
            if not wraps:
                self.check_held(name, current, replacement)
            self.dress(replacement, current)
            current = replacement
        if current is module:
            self.keep_rest(name, module)
        else:
            self.replace(module, current)

    def dress(self, replacement: nn.Module, module: nn.Module) -> None:
        """Copy training mode and initial values of the single-device module to the parallel one."""
        replacement.train(module.training)
        own = {local: self._first.get(id(p)) for local, p in module._parameters.items() if p is not None}
        if hasattr(module, "initializers"):
            replacement.initializers = module.initializers
        # Without rules of its own, a module is drawn whole, by its single-device form, and cut.
        elif own:
            parts = {local: self._parts[first] for local, first in own.items() if first is not None}
            replacement.origin = SplitOrigin(on_meta(module), parts)  # type: ignore[assignment]

    def replace(self, module: nn.Module, replacement: nn.Module) -> None:
        """Put ``replacement`` at every place of ``module`` in the model.

        Raises:
            LayoutError: the module is the model itself.
        """
        # A module may occur at several places (shared layers): all of them must get the parallel one.
        for name in self._aliases[id(module)]:
            if not name:
                raise LayoutError(
                    f"the plan replaces the model itself ({type(module).__name__}); put it inside another module."
                )
            self.model.set_submodule(name, replacement)

    def sizes(self, weight: nn.Parameter) -> list[int]:
        """Return this rank's rows of each section of a single-device ``weight`` that was split."""
        return [piece.size[0] for piece in self.specs[self._first[id(weight)]].pieces]


def _names(module: nn.Module) -> set[str]:
    """Return the names of what a module itself holds, without adapters, which styles split or refuse."""
    held = {**module._parameters, **module._buffers, **module._modules}
    return {name for name, value in held.items() if value is not None and not isinstance(value, AdapterSet)}


def _adapters(module: nn.Module) -> int:
    return sum(isinstance(part, Adapter) for part in module.modules())


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

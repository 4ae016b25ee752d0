"""One pass over a model that splits it. Styles call it, and it records how each parameter was split."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from megalight.errors import LayoutError
from megalight.nn.adapter import Adapter, AdapterSet
from megalight.nn.canonical import CanonicalPart, joined, parts
from megalight.parallel import shard
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor.shared import Shared

if TYPE_CHECKING:
    from megalight.parallel.styles import Style

Rule: TypeAlias = Callable[[Sequence[CanonicalPart], tuple[int, ...], ParallelMesh], ShardSpec]
"""Canonical parts and shape of a single-device parameter, and the mesh -> the part that this rank holds."""


@dataclass(frozen=True)
class SplitOrigin:
    """The single-device module that a parallel one replaces; initial values are drawn with it.

    Attributes:
        module: its parameters are on meta.
        parts: the canonical tensors of each parameter, by the parameter's own name.
    """

    module: nn.Module
    parts: Mapping[str, Sequence[CanonicalPart]]


@dataclass(frozen=True)
class Elsewhere:
    """The place of a parameter in the whole model, of a tied one whose own place is on another pipeline stage.

    Initial values are drawn there. A module that holds such a parameter has a dict ``elsewhere`` of them, by the
    parameter's name in it.

    Attributes:
        path: name of the module in the whole model.
        module: its parameters are on meta.
        local: name of the parameter in it.
    """

    path: str
    module: nn.Module
    local: str


class Splitter:
    """One pass over a model that splits its modules.

    Args:
        model: the single-device model.
        shared: the state that its parallel layers will share.
        prefix: put before canonical names.

    Attributes:
        specs: the parameters split so far, by name.
    """

    def __init__(self, model: nn.Module, shared: Shared, prefix: str) -> None:
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


def on_meta(module: nn.Module) -> nn.Module:
    """Copy a module's shell (without children), with its own parameters and buffers on meta."""
    shell = copy.copy(module)
    shell._parameters = {
        name: None if p is None else nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    shell._buffers = {
        name: None if b is None else torch.empty_like(b, device="meta") for name, b in module._buffers.items()
    }
    return shell

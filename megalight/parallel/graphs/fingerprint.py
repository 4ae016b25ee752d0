"""The fingerprint of a CUDA graph: the tensor addresses, module modes and attributes that it assumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

PLAIN = (bool, int, float, str, bytes, type(None))
"""Types whose values are compared. Of other attributes, only the type is."""

TORCHS = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

REMEMBERED = 64
"""Number of states that are known again when they come back."""

Values: TypeAlias = tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]


def format_changing(names: Iterable[str]) -> str:
    """Return the reason why steps with changing attributes are not recorded."""
    return (
        f"other code changes {', '.join(names)} between steps, and replays would repeat the values of the recording; "
        "keep what the step reads in buffers, and what it does not read outside of the module"
    )


@dataclass
class Holder:
    """One module, as far as its attributes go.

    Attributes:
        values: the module's own ``__dict__``.
        moving: attributes that the step itself changes.
    """

    name: str
    values: dict[str, Any]
    moving: set[str] = field(default_factory=set)
    keys: tuple[str, ...] = ()
    size: int = -1


class AttributeWatcher:
    """Finds plain attributes that change between steps: set by callbacks, hooks and schedules.

    Attributes that the step itself changes, such as counters, are left out from then on.

    Attributes:
        changed: how often other code has changed each attribute, by name.

    Args:
        modules: modules by name.
        ignored: names of attributes that do not count, besides torch's own.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ignored: frozenset[str] = frozenset()) -> None:
        self._holders = [Holder(name, vars(module)) for name, module in modules]
        self._ignored = TORCHS | ignored
        self._last: Values | None = None
        self._states: dict[int, Values] = {}
        self._made = 0
        self.changed: Counter[str] = Counter()

    def __call__(self) -> int:
        """Return the number of the state in which the attributes are now; called before each step.

        Equal values have equal numbers, among the ``REMEMBERED`` states that were used last.
        """
        now = self._values()
        if self._last is not None and now != self._last:
            names = [f"{holder.name}.{key}".strip(".") for holder, key in self._differences(self._last, now)]
            self.changed.update(names)
        self._last = now
        for number, state in self._states.items():
            if state == now:
                self._states[number] = self._states.pop(number)  # the one that was not used for longest goes first
                return number
        self._made += 1
        self._states[self._made] = now
        if len(self._states) > REMEMBERED:
            del self._states[next(iter(self._states))]
        return self._made

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leave out all attributes that change inside: the model changes them itself."""
        self()
        before = self._last
        assert before is not None
        try:
            yield
        finally:
            now = self._values()
            if now != before:
                for holder, key in self._differences(before, now):
                    holder.moving.add(key)
                    holder.size = -1
                # Earlier states without these attributes, too: they are the same states still.
                self._states = {number: self._reduced(state) for number, state in self._states.items()}
                now = self._values()
            self._last = now

    def _values(self) -> Values:
        found = []
        for holder in self._holders:
            if len(holder.values) != holder.size:
                holder.size = len(holder.values)
                skipped = self._ignored | holder.moving
                holder.keys = tuple(key for key in holder.values if key not in skipped)
            values = map(holder.values.get, holder.keys)
            found.append((holder.keys, tuple([x if isinstance(x, PLAIN) else type(x) for x in values])))
        return tuple(found)

    def _reduced(self, state: Values) -> Values:
        found = []
        for holder, (keys, values) in zip(self._holders, state, strict=True):
            left = [pair for pair in zip(keys, values, strict=True) if pair[0] not in holder.moving]
            found.append((tuple(key for key, _ in left), tuple(value for _, value in left)))
        return tuple(found)

    def _differences(self, before: Values, now: Values) -> Iterator[tuple[Holder, str]]:
        for holder, old, new in zip(self._holders, before, now, strict=True):
            was, has = dict(zip(*old, strict=True)), dict(zip(*new, strict=True))
            for key in {**was, **has}:
                if (key in was) != (key in has) or was[key] != has[key]:
                    yield holder, key


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
        self.attributes = AttributeWatcher(everything.values(), ignored)

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

"""What a CUDA graph assumes: its fingerprint (tensor addresses, module modes, attributes), and what breaks a recording.

A step is inspected before it is recorded: what would a recording freeze, and what would break it?
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalight.parallel.graphs.static import tensors_of

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


HOST_READS = {
    "_local_scalar_dense": "reads a value of a tensor (.item(), int(), float(), if)",
    "is_nonzero": "reads a value of a tensor (if)",
    "equal": "compares tensors on the host (torch.equal)",
    "nonzero": "makes a tensor whose size depends on values (nonzero)",
    "masked_select": "makes a tensor whose size depends on values (masked_select)",
    "_unique2": "makes a tensor whose size depends on values (unique)",
    "unique_dim": "makes a tensor whose size depends on values (unique)",
    "unique_consecutive": "makes a tensor whose size depends on values (unique_consecutive)",
}
"""Ops that make the host wait for the device, with a description for messages."""
SKIPPED = (str(Path(torch.__file__).parent), __file__)


Operation: TypeAlias = tuple[str, str | None, tuple[Any, ...]]
"""Name of an operation, the line that calls it (None: autograd), and the numbers among its arguments."""


class Inspection(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations as usual, and notes what a recording could not repeat.

    Attributes:
        reasons: why the step cannot be recorded, without repetitions.
        external: tensors that the step reads but did not make; a recording must keep them alive.
        numbers: every operation in order, with the Python numbers among its arguments.

    Args:
        device: the device of the recording.
        earlier: ``numbers`` of an earlier step of the same form. A number that has changed would be frozen. Operations
            are compared by name and line, where both steps have equally many, so that what only one of them does (once
            per run, or every second step) does not end the comparison.
    """

    def __init__(self, device: torch.device, earlier: Sequence[Operation] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.reasons: list[str] = []
        self.external: dict[int, Tensor] = {}
        self.numbers: list[Operation] = []
        self._earlier = earlier
        self._made: set[int] = set()
        # Host randomness runs once, at recording; replays would use its result for ever.
        self._before = self._host_draws()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_of((args, kwargs))
        for tensor in inputs:
            # A graph records addresses, not tensors: memory that the step did not make must outlive the recording.
            if tensor.device.type == self.device.type and _key(tensor) not in self._made:
                self.external.setdefault(_key(tensor), tensor)
        self.numbers.append((func._schema.name, place(), tuple(_numbers((args, kwargs)))))
        self._look(func, args, kwargs, inputs)
        result = func(*args, **kwargs)
        outputs = tensors_of(result)
        for tensor in outputs:
            if _key(tensor) not in self.external:
                self._made.add(_key(tensor))
        self._look_at_copy(func, inputs, outputs)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for where in _changed(self._earlier, self.numbers):
            self.note(
                "computes with a Python number that changes from step to step, and replays would repeat it; keep it in "
                "a buffer, which on_train_batch_start writes,",
                where,
            )
        if self._host_draws() != self._before:
            self.note("draws random numbers on the host, which replays would repeat", None)

    def note(self, what: str, where: str | None) -> None:
        """Add a reason, once."""
        reason = f"the step {what}" + (f" at {where}" if where else "")
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _look(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        here = [tensor for tensor in inputs if tensor.device.type == self.device.type]
        if not here:
            return
        if name in HOST_READS:
            self.note(HOST_READS[name], place())
        elif name == "repeat_interleave" and kwargs.get("output_size") is None and not isinstance(args[-1], int):
            self.note("makes a tensor whose size depends on values (repeat_interleave)", place())
        elif name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.note("indexes with a mask, which makes the host wait; use torch.where or masked_fill", place())
        elif self.device.type != "cpu" and name not in COPIES:
            for tensor in inputs:
                if tensor.device.type == "cpu" and _key(tensor) not in self._made:
                    self.note("computes with a tensor in host memory, whose value would be frozen", place())

    def _look_at_copy(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if self.device.type == "cpu" or func._schema.name.partition("::")[2] not in COPIES:
            return
        ends = [*inputs, *outputs]
        if len({tensor.device.type for tensor in ends}) > 1:
            self.note("copies between the host and the device", place())

    def _host_draws(self) -> Any:
        draws: list[Any] = [random.getstate()]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            draws.append([str(part) for part in numpy.random.get_state()])
        if self.device.type != "cpu":
            draws.append(torch.get_rng_state().tolist())
        return draws


COPIES = ("_to_copy", "copy_", "copy", "_foreach_copy_")


def _numbers(value: Any) -> Iterator[bool | int | float | str]:
    if isinstance(value, bool | int | float):
        yield value if value == value else "nan"  # NaN differs from itself
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)


def _changed(earlier: Sequence[Operation], later: Sequence[Operation]) -> Iterator[str | None]:
    """Yield the lines whose operations have other numbers in the later step."""
    before, now = _by_line(earlier), _by_line(later)
    for line, numbers in now.items():
        # If one step has more of them, nobody knows which ones belong together.
        if len(before.get(line, ())) == len(numbers) and before[line] != numbers:
            yield line[1]


def _by_line(operations: Sequence[Operation]) -> dict[tuple[str, str | None], list[tuple[Any, ...]]]:
    found: dict[tuple[str, str | None], list[tuple[Any, ...]]] = {}
    for name, where, numbers in operations:
        found.setdefault((name, where), []).append(numbers)
    return found


def _key(tensor: Tensor) -> int:
    # Views share a storage, so the storage identifies the memory.
    return int(tensor.untyped_storage()._cdata)


def place() -> str | None:
    """Return the innermost line outside torch and this file: ``file.py:12 (function)``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(SKIPPED):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"

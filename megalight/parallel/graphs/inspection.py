"""Inspect a step before it is recorded: find what a recording would freeze, and what would break it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalight.parallel.graphs.static import tensors_of

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

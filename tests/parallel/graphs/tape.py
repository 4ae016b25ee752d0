"""A recorder for any device, faithful to what CUDA graphs do.

Operations are put on a tape, and a replay runs them again on the very same memory. No Python of the recorded function
runs again, recording has no effect, and all memory that it made is poisoned before every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megalight.parallel import random


class Tape:
    """Makes tapes.

    Attributes:
        tapes: all that were made and not dropped.
        fail_at: number of the recording that fails halfway; None: none.
        entries: what is on the tape that is being recorded; None: nothing is recorded now.
    """

    def __init__(self) -> None:
        self.tapes: list[Recorded] = []
        self.made = 0
        self.entered = 0
        self.fail_at: int | None = None
        self.entries: list[Any] | None = None

    def enter(self) -> None:
        self.entered += 1

    def leave(self) -> None:
        self.entered -= 1

    def record(
        self,
        function: Callable[[], Any],
        generators: Sequence[torch.Generator] = (),
        pool: Hashable = None,
        settle: bool = True,
    ) -> Recorded:
        assert self.entered == 1
        self.made += 1
        states = [(g, g.get_state()) for g in (torch.default_generator, *generators)]
        listening = _Listening(list(generators))
        self.entries = listening.entries
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random, "swap_state", listening.lend)
            patch.setattr(dist.Work, "wait", _wait)
            _NOW.append(listening)
            try:
                with listening:
                    result = function()
                    if self.fail_at == self.made:
                        raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                self.entries = None
                _NOW.remove(listening)
                listening.undo()
                for generator, state in states:
                    generator.set_state(state)
        recorded = Recorded(self, listening, result)
        self.tapes.append(recorded)
        return recorded


class Recorded:
    """One tape."""

    def __init__(self, owner: Tape, listening: _Listening, result: Any) -> None:
        self.owner = owner
        self.entries = listening.entries
        self.fresh = listening.fresh
        self.result = result
        self.replays = 0

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for tensor in self.fresh:
            if tensor.is_floating_point() and tensor.untyped_storage().size():
                tensor.fill_(torch.nan)
        works: list[tuple[Any, set[int]]] = []
        loans: list[Callable[[], object]] = []
        for entry in self.entries:
            if callable(entry):
                for work, _ in works:  # it may read what they bring
                    work.wait()
                works = []
                entry(loans)
                continue
            func, args, kwargs, outputs = entry
            touched = {_key(tensor) for tensor in _tensors((args, kwargs))}
            for work, keys in works:
                if keys & touched:
                    work.wait()
            works = [pair for pair in works if not pair[1] & touched]
            result = func(*args, **kwargs)
            if func.namespace == "c10d":
                works += [(part, touched) for part in _flat(result) if not isinstance(part, Tensor) and _is_work(part)]
                continue
            if not _aliases(func):
                for old, new in zip(outputs, _tensors(result), strict=True):
                    old.copy_(new)
        for work, _ in works:
            work.wait()
        assert not loans

    def drop(self) -> None:
        self.entries.clear()
        self.result = None
        self.owner.tapes.remove(self)


class _Listening(TorchDispatchMode):
    """Puts operations on a tape, and remembers what memory from outside held before they wrote to it."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        super().__init__()
        self.generators = generators
        self.entries: list[Any] = []
        self.fresh: list[Tensor] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        known = [each._cdata for each in (torch.default_generator, *self.generators)]
        if isinstance(generator, torch.Generator) and generator._cdata not in known:
            raise RuntimeError("a generator that is not registered cannot be drawn from while recording")
        for tensor in self._written(func, args, kwargs):
            if _key(tensor) not in self._made and _key(tensor) not in self._before:
                self._before[_key(tensor)] = tensor, tensor.untyped_storage().clone()
        result = func(*args, **kwargs)
        new = [] if func.namespace == "c10d" or _aliases(func) else list(_tensors(result))
        for tensor in new:
            self._made[_key(tensor)] = tensor
            self.fresh.append(tensor.detach())
        self.entries.append((func, args, kwargs, [tensor.detach() for tensor in new]))
        return result

    def _written(self, func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        if func.namespace == "c10d":
            yield from _tensors((args, kwargs))
            return
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))

    def lend(self, default: torch.Generator, own: torch.Generator) -> Callable[[], object]:
        assert own in self.generators, "a graph knows registered generators only"
        self.entries.append(lambda loans: loans.append(LEND(default, own)))
        back = LEND(default, own)

        def end() -> None:
            self.entries.append(lambda loans: loans.pop()())
            back()

        return end

    def undo(self) -> None:
        """A recording does nothing."""
        for tensor, content in self._before.values():
            tensor.untyped_storage().copy_(content)


_NOW: list[_Listening] = []
"""The tape that is being made."""


def act(function: Callable[[], object]) -> None:
    """Do what is no operation of torch: now, or in each replay of the tape that is being made."""
    if _NOW:
        _NOW[-1].entries.append(lambda loans: function())
    else:
        with _disable_current_modes():  # the host of a GPU would not wait here, whatever an inspection says
            function()


LEND = random.swap_state
WAIT = dist.Work.wait


def _wait(work: dist.Work, *args: Any) -> Any:
    """What gloo does when it is waited for is no operation of the program's."""
    with _disable_current_modes():
        return WAIT(work, *args)


def _aliases(func: Any) -> bool:
    return any(value.alias_info is not None for value in func._schema.returns)


def _is_work(value: Any) -> bool:
    return hasattr(value, "wait")


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (item for item in _flat(value) if isinstance(item, Tensor))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""Amax history: the largest magnitudes of past steps, for delayed scaling.

A kernel that makes a tensor may annotate it with the magnitudes it met, so that a cast need not search for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megalight.ops.autograd import Magnitudes, Note, annotate
from megalight.ops.common import triton_why_not
from megalight.ops.jit import Value, constexpr, jit, next_power, tl
from megalight.ops.quantize import amax_of

BLOCK = 4096
"""Magnitudes that are read at once."""


@jit
def _record_kernel(kept: Value, magnitudes: Value, count: Value, BLOCK: constexpr) -> None:
    place = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        largest = tl.maximum(largest, tl.load(magnitudes + start + place, mask=start + place < count, other=0.0))
    tl.store(kept, tl.maximum(tl.load(kept), tl.max(largest, 0)))


def triton_record_largest(kept: Tensor, magnitudes: Tensor) -> None:
    """Implement :func:`megalight.ops.quantize.amax_history.record_largest`."""
    count = magnitudes.numel()
    block = min(BLOCK, next_power(count))
    _record_kernel[(1,)](kept, magnitudes.contiguous(), count, BLOCK=block, num_warps=max(1, min(8, block // 512)))


def record_largest(kept: Tensor, magnitudes: Tensor) -> None:
    """``kept = max(kept, largest of magnitudes)`` in place, both float32: ``kept`` 0-dim, ``magnitudes`` of any shape.

    On a GPU this is one kernel, which ignores NaN. Without magnitudes nothing happens.
    """
    if magnitudes.numel():
        _choose(kept.device.type)(kept, magnitudes)


@lru_cache
def _choose(device: str) -> Callable[[Tensor, Tensor], None]:
    found: Callable[[Tensor, Tensor], None] = _record if triton_why_not(device) else triton_record_largest
    return found


def _record(kept: Tensor, magnitudes: Tensor) -> None:
    torch.maximum(kept, magnitudes.max(), out=kept)


INPUT, WEIGHT, GRADIENT = range(3)
"""The roles of a linear layer's matrices. The gradient is that of the output."""

STEPS = 16
"""Default number of steps to look back."""


class AmaxHistory:
    """The magnitudes of one weight's matrices, or of each weight of a stack. Nothing is copied to the host.

    Without past steps, as after a start, a step scales by its own values.

    Args:
        length: number of steps to look back.
        count: number of weights of a stack, which share two tensors: ``past [count, length, 3]`` and ``current
            [count, 3]``. None: a single weight, ``[length, 3]`` and ``[3]``.
        stack: the history of the stack of which this is one weight, for :attr:`weights`.
        otherwise: for each role, what a scale covers if all values of past steps were zero.
        factor: scales cover values so many times as large as those of past steps.

    Attributes:
        stack: the history that owns the tensors.
        covers: for each role, what scales cover, 0-dim; see :attr:`suffices`.
    """

    def __init__(
        self,
        length: int,
        count: int | None = None,
        stack: AmaxHistory | None = None,
        *,
        otherwise: tuple[float, float, float] = (1.0, 1.0, 1.0),
        factor: float = 1.0,
    ) -> None:
        self.length = length
        self.count = count
        self.stack = stack or self
        self.otherwise = otherwise
        self.factor = factor
        self.past: Tensor | None = None
        self.current: Tensor | None = None
        self.covers: tuple[Tensor, ...] = ()
        self._covers: Tensor | None = None
        self._otherwise: Tensor | None = None
        self._rolled = False

    @property
    def rolled(self) -> bool:
        """Whether the history holds at least one step."""
        return self.stack._rolled

    @property
    def suffices(self) -> bool:
        """Whether scales can come from past steps alone. An expert may have had no token in any of them."""
        return self.rolled and self.stack is self and self.count is None

    @property
    def weights(self) -> list[AmaxHistory]:
        """The history of each weight of a stack, as views of its tensors; itself if there is a single weight."""
        if self.count is None:
            return [self]
        assert self.past is not None and self.current is not None
        found = [AmaxHistory(self.length, stack=self) for _ in range(self.count)]
        for history, past, current in zip(found, self.past, self.current, strict=True):
            history.past, history.current = past, current
        return found

    def place(self, device: torch.device) -> None:
        """Make the memory, if there is none yet. A layer that may stay without tokens needs it before it first runs."""
        if self.past is None:
            stack = () if self.count is None else (self.count,)
            self.past = torch.zeros(*stack, self.length, 3, device=device)
            self.current = torch.zeros(*stack, 3, device=device)
            if self.count is None:
                self._otherwise = torch.tensor(self.otherwise, device=device)
                # Views are made once: a cast in each product of each layer reads one.
                self._covers = self._otherwise * self.factor
                self.covers = self._covers.unbind()

    def restore(self, past: Tensor) -> None:
        """Go on from the magnitudes of a saved run, ``[steps, 3]``, newest first. The oldest may find no room."""
        assert self.past is not None
        kept = past[: self.length]
        # In place, because recorded graphs read this memory. Steps that were not seen are zero, which no maximum is.
        self.past.zero_()
        self.past[: len(kept)].copy_(kept)
        self._cover([self])
        self.stack._rolled = True

    def allow(self, role: int, amax: Tensor, record: bool) -> Tensor:
        """Return the magnitude that a scale must cover: the largest of past steps, or ``amax`` if there are none.

        Args:
            role: :data:`INPUT`, :data:`WEIGHT` or :data:`GRADIENT`.
            amax: 0-dim, or one for each weight of a stack: the largest magnitude of the tensor that will be quantized.
            record: whether to add ``amax`` to this step.
        """
        self.place(amax.device)
        assert self.past is not None
        if record:
            self.record(role, amax)
        known = self.past[..., role].amax(-1)
        # A select on the device: the host does not wait, and a CUDA graph can hold it.
        return torch.where(known > 0, known, amax)

    def record(self, role: int, amax: Tensor) -> None:
        """Add magnitudes to this step.

        Args:
            role: :data:`INPUT`, :data:`WEIGHT` or :data:`GRADIENT`.
            amax: of a single weight: any number of magnitudes, of which the largest counts. Of a stack: one for each.
        """
        assert self.current is not None
        # Several micro-batches of a step, and several uses of a layer, count as one.
        if self.count is None:
            record_largest(self.current[role], amax)
        else:
            self.current[..., role] = torch.maximum(self.current[..., role], amax)

    @staticmethod
    def roll(histories: Sequence[AmaxHistory], reduce: Callable[[Tensor], None] | None) -> None:
        """End a step: in every history, this step replaces the oldest one.

        Two magnitudes say nothing of later steps, and the value of the step before is used instead: one that is not
        finite, and zero, that of an expert without tokens. After enough such steps its scales would be 1, with which
        small gradients are zero.

        Args:
            histories: of layers whose weights the same ranks hold, in the same order on each of them. Of stacks, those
                that own the tensors.
            reduce: reduces a tensor over those ranks in place (maximum), once for all histories. None: one rank.
        """
        used = [(h, h.past, h.current) for h in histories if h.past is not None and h.current is not None]
        if not used:
            return
        seen = torch.cat([current.view(-1, 3) for _, _, current in used])
        newest = torch.cat([past[..., 0, :].reshape(-1, 3) for _, past, _ in used])
        # Before the reduction: the maximum with NaN or infinity would reach all ranks.
        seen = torch.where(seen.isfinite(), seen, newest)
        if reduce is not None:
            reduce(seen)
        # After it: the expert may have had tokens on another rank.
        seen = torch.where(seen > 0, seen, newest)
        counts = [current.numel() // 3 for _, _, current in used]
        by_form: dict[tuple[int, float], list[tuple[AmaxHistory, Tensor, Tensor]]] = {}
        for (history, past, _), rows in zip(used, torch.split(seen, counts), strict=True):
            by_form.setdefault((history.length, history.factor), []).append((history, past, rows))
        for (length, _), alike in by_form.items():
            before = torch.cat([past.view(-1, length, 3) for _, past, _ in alike])
            rows = torch.cat([rows for _, _, rows in alike]).unsqueeze(1)
            after = torch.split(torch.cat([rows, before[:, :-1]], 1), [len(rows) for _, _, rows in alike])
            # In place, because recorded graphs read this memory.
            torch._foreach_copy_(
                [past for _, past, _ in alike],
                [new.view_as(past) for new, (_, past, _) in zip(after, alike, strict=True)],
            )
        torch._foreach_zero_([current for _, _, current in used])
        for history, _, _ in used:
            history._rolled = True
        AmaxHistory._cover([history for history, _, _ in used])

    @staticmethod
    def _cover(histories: Sequence[AmaxHistory]) -> None:
        """Find what scales cover from now on, of all histories of single weights at once."""
        by_form: dict[tuple[int, float], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for history in histories:
            past, otherwise, covers = history.past, history._otherwise, history._covers
            if past is not None and otherwise is not None and covers is not None:
                by_form.setdefault((history.length, history.factor), []).append((past, otherwise, covers))
        for (_, factor), alike in by_form.items():
            known = torch.stack([past for past, _, _ in alike]).amax(1)
            found = torch.where(known > 0, known, torch.stack([otherwise for _, otherwise, _ in alike])) * factor
            torch._foreach_copy_([covers for _, _, covers in alike], list(found.unbind()))


def annotate_amax(x: Tensor, parts: Tensor) -> Tensor:
    """Note that the largest magnitude of ``x`` is the largest of ``parts`` (float32), and return ``x``.

    ``parts`` may ignore NaN. Under ``torch.inference_mode`` nothing is noted, because tensors have no version there and
    later writes would not be seen.
    """
    if not x.is_inference():
        annotate(x).magnitudes = Magnitudes(x._version, parts)
    return x


def known_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of ``x``, 0-dim float32: the noted one if it is valid, otherwise computed now.

    A note is valid for this tensor object until the tensor is written: autograd may add gradients in place.
    """
    if (parts := annotated_amax(x)) is None:
        return amax_of(x)
    # No parts: the kernel had no rows to work on, and max() of nothing raises.
    return parts.amax() if parts.shape[0] else parts.new_zeros(())


def magnitudes_of(x: Tensor) -> Tensor:
    """Return magnitudes, float32, of which the largest is that of ``x``: the noted ones, or those that a pass finds."""
    if (parts := annotated_amax(x)) is not None:
        return parts
    return amax_of(x)


def annotated_amax(x: Tensor) -> Tensor | None:
    """Return the ``parts`` noted for ``x``, or None if there are none or ``x`` was written since."""
    note: Note | None = getattr(x, "megalight_note", None)  # `note_of`, inlined
    if note is None or note.magnitudes is None or note.magnitudes.version != x._version:
        return None
    return note.magnitudes.parts


def rows_of(x: Tensor) -> Tensor:
    """Flatten ``x [..., f]`` to ``[T, f]`` and keep its noted magnitudes."""
    if x.dim() == 2:
        return x
    flat = x.reshape(-1, x.shape[-1])
    if (parts := annotated_amax(x)) is not None:
        annotate_amax(flat, parts)
    return flat

"""Steps that do not begin by setting gradients to zero: what comes first is written over what there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel.buffers import Bucket


class FirstWrites:
    """Marks main gradients as untouched (:mod:`megalight.ops.parameter`), and sets to zero what stays so.

    Only the first passes of a step write: what they did not reach is zero when they end, and later ones add. Gaps
    between parameters, which norms and optimizers read, are set to zero at the beginning, being few.

    Attributes:
        wanted: no passes have ended since :meth:`begin`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.wanted = False
        self._buffers: dict[Bucket, list[tuple[nn.Parameter, Tensor]]] = {
            bucket: bucket.main_grads for bucket in buckets
        }
        self._open: set[Bucket] = set()
        self._zeroed = [gap for bucket in buckets for gap in bucket.gaps()]
        self._added: set[int] = set()

    def begin(self) -> None:
        """A step begins: buffers hold rubbish."""
        self.wanted = True
        self._open = set(self._buffers)
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        for pairs in self._buffers.values():
            for parameter, _ in pairs:
                if id(parameter) not in self._added:
                    state_of(parameter).untouched = True
                    parameter.grad = None  # autograd must not add to what is there

    def end(self) -> None:
        """Passes have ended."""
        self.wanted = False
        if left := [buffer for bucket in tuple(self._open) for buffer in self._close(bucket)]:
            torch._foreach_zero_(left)

    def complete(self, bucket: Bucket) -> None:
        """A bucket's gradients have all come: what none has reached is zero."""
        if bucket in self._open and (left := self._close(bucket)):
            torch._foreach_zero_(left)

    def skip(self) -> None:
        """Passes have ended, of which somebody else has done the work."""
        self.wanted = False
        for bucket in tuple(self._open):
            self._close(bucket)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the main gradients of these to zero when a step begins, from the next one on; all is added there."""
        self.end()
        wanted = {id(parameter) for parameter in parameters} - self._added
        found = [pair for pairs in self._buffers.values() for pair in pairs if id(pair[0]) in wanted]
        self._added.update(id(parameter) for parameter, _ in found)
        self._zeroed += [buffer for _, buffer in found]

    def _close(self, bucket: Bucket) -> list[Tensor]:
        """Have all further gradients added, by autograd too; returns the buffers that none has reached."""
        self._open.discard(bucket)
        adds, left = bucket.autograd_adds, []
        for parameter, buffer in self._buffers[bucket]:
            if state_of(parameter).touch():
                left.append(buffer)
            if adds:
                parameter.grad = buffer
        return left

"""Steps that do not begin by setting gradients to zero: what comes first is written over what there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megalight.ops.main_grad import begin, touch
from megalight.parallel.data_parallel.buffers import Bucket


class FirstWrites:
    """Marks main gradients as untouched (:mod:`megalight.ops.main_grad`), and sets to zero what stays so.

    Only the first passes of a step write: what they did not reach is zero when they end, and later ones add. Gaps
    between parameters, which norms and optimizers read, are set to zero at the beginning, being few.

    Attributes:
        wanted: no passes have ended since :meth:`begin`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.wanted = False
        self._zeroed = [gap for bucket in buckets for gap in bucket.gaps()]
        self._added: set[int] = set()

    def begin(self) -> None:
        """A step begins: buffers hold rubbish."""
        self.wanted = True
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        for bucket in self.buckets:
            for info in bucket.infos:
                if id(info.parameter) not in self._added:
                    begin(info.parameter)
                    info.parameter.grad = None  # autograd must not add to what is there

    def end(self) -> None:
        """Passes have ended."""
        if self.wanted:
            self.wanted = False
            self.settle(self.buckets)

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Set to zero what no gradient has reached, and have all further ones added."""
        if left := self._touch(buckets):
            torch._foreach_zero_(left)

    def skip(self) -> None:
        """Passes have ended, of which somebody else has done the work."""
        self.wanted = False
        self._touch(self.buckets)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the main gradients of these to zero when a step begins, from the next one on; all is added there."""
        self.end()
        wanted = {id(parameter) for parameter in parameters} - self._added
        for info in (info for bucket in self.buckets for info in bucket.infos):
            if id(info.parameter) in wanted:
                self._added.add(id(info.parameter))
                self._zeroed.append(info.parameter.main_grad)  # type: ignore[attr-defined]

    @staticmethod
    def _touch(buckets: Sequence[Bucket]) -> list[Tensor]:
        """What no gradient has reached."""
        left = []
        for bucket in buckets:
            for info in bucket.infos:
                buffer: Tensor = info.parameter.main_grad  # type: ignore[attr-defined]
                if touch(info.parameter):
                    left.append(buffer)
                if bucket.autograd_adds:
                    info.parameter.grad = buffer
        return left

"""Steps that do not zero all gradients first: the first gradient overwrites the buffer, later ones add to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel.buffers import Bucket


class FirstWrites:
    """Marks main gradients as untouched (:mod:`megalight.ops.parameter`), and zeroes those that no gradient reached.

    Only the first passes of a step write. When they end, everything that they did not reach is zeroed, and later passes
    add. Norms and optimizers also read the gaps between parameters. The gaps are small, so they are zeroed at the
    beginning of each step.

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
        """Begin a step: the buffers hold old values that must not be read."""
        # Only marked, not zeroed: the first gradient overwrites. This saves
        # one pass over all gradients per step.
        self.wanted = True
        self._open = set(self._buffers)
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        for pairs in self._buffers.values():
            for parameter, _ in pairs:
                if id(parameter) not in self._added:
                    state_of(parameter).untouched = True
                    parameter.grad = None  # so that autograd does not add to the old values

    def end(self) -> None:
        """End the first passes: zero what they did not reach."""
        self.wanted = False
        if left := [buffer for bucket in tuple(self._open) for buffer in self._close(bucket)]:
            torch._foreach_zero_(left)

    def complete(self, bucket: Bucket) -> None:
        """Zero what no gradient of this bucket has reached; all its gradients have arrived."""
        if bucket in self._open and (left := self._close(bucket)):
            torch._foreach_zero_(left)

    def skip(self) -> None:
        """End passes whose gradients a replayed graph has already written to the buffers."""
        self.wanted = False
        for bucket in tuple(self._open):
            self._close(bucket)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Zero the main gradients of these parameters at the beginning of each later step, so that all passes add."""
        self.end()
        wanted = {id(parameter) for parameter in parameters} - self._added
        # A parameter that was left out before is in the list already, and must not come twice.
        found = [pair for pairs in self._buffers.values() for pair in pairs if id(pair[0]) in wanted]
        self._added.update(id(parameter) for parameter, _ in found)
        self._zeroed += [buffer for _, buffer in found]

    def _close(self, bucket: Bucket) -> list[Tensor]:
        """Make all further gradients add, also those of autograd; return the buffers that no gradient has reached."""
        self._open.discard(bucket)
        adds, left = bucket.autograd_adds, []
        for parameter, buffer in self._buffers[bucket]:
            state = state_of(parameter)
            if state.untouched:
                state.untouched = False
                left.append(buffer)
            # From here on autograd adds in place, into the buffer itself.
            if adds:
                parameter.grad = buffer
        return left

"""Steps that begin with rubbish where their gradients will be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from megalight.parallel.data_parallel.gradients import MainGradients


@contextmanager
def stale_gradients() -> Iterator[None]:
    """Inside, no main gradient is a number when a step begins, as after one that overflowed."""
    zero = MainGradients.zero

    def spoilt(self: MainGradients) -> None:
        self._wait()
        for bucket in self.buckets:
            bucket.grads.fill_(torch.nan)
            bucket.own_grads.fill_(torch.nan)
        zero(self)

    with mock.patch.object(MainGradients, "zero", spoilt):
        yield

"""Messages that one side of a channel expects, received ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megalight.parallel.pipeline.carry import Form
from megalight.parallel.pipeline.p2p import Channel, Message
from megalight.parallel.trace import spanned


class Inbox:
    """The messages of one channel, in the order of use. One is always under way where its form is known in time.

    Args:
        channel: where they come from; None where the schedule expects none.
        expected: ``(chunk, micro_batch)`` of each.
        form: what a message consists of; None: not known yet.
        ask: the same where the other side must be asked, which waits for it.
        device: where messages go.
    """

    def __init__(
        self,
        channel: Channel | None,
        expected: Iterable[tuple[int, int]],
        form: Callable[[int, int], Form | None],
        ask: Callable[[int, int], Form],
        device: torch.device,
    ) -> None:
        self.channel = channel
        self.expected = deque(expected)
        self.form = form
        self.ask = ask
        self.device = device
        self._coming: tuple[Form, Message] | None = None

    def post(self) -> None:
        """Start receiving the next message, unless one is under way or its form is not known."""
        if self._coming is None and self.expected:
            form = self.form(*self.expected[0])
            if form is not None:
                self._start(form)

    @spanned("receive")
    def take(self) -> tuple[Form, list[Tensor]]:
        """The next message, and what it consists of; the one after it is then under way."""
        if self._coming is None:
            next_up = self.expected[0]
            form = self.form(*next_up)
            self._start(self.ask(*next_up) if form is None else form)
        assert self._coming is not None
        form, message = self._coming
        tensors = message.wait()
        self._coming = None
        self.expected.popleft()
        self.post()
        return form, tensors

    def _start(self, form: Form) -> None:
        assert self.channel is not None
        self._coming = form, self.channel.receive([entry.buffer(self.device) for entry in form])

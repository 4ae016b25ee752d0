"""Messages that one side of a channel expects, received ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megalight.parallel.pipeline.agenda import Expected
from megalight.parallel.pipeline.carry import Form
from megalight.parallel.pipeline.p2p import Channel, Message
from megalight.parallel.trace import spanned


class Inbox:
    """The messages of one channel, in the order of use.

    Args:
        channel: where they come from; None where nothing is expected.
        expected: the messages.
        form: what a message consists of, by ``(chunk, micro_batch)``; may ask the other side, and wait for the answer.
        device: where messages go.
    """

    def __init__(
        self,
        channel: Channel | None,
        expected: Iterable[Expected],
        form: Callable[[int, int], Form],
        device: torch.device,
    ) -> None:
        self.channel = channel
        self.expected = deque(expected)
        self.form = form
        self.device = device
        self._coming: deque[tuple[Form, Message]] = deque()

    def post(self, number: int) -> None:
        """Start to receive what may come during the action of this number, and what that action needs."""
        while self.expected and number >= self.expected[0].before:
            assert self.channel is not None
            chunk, index, _ = self.expected.popleft()
            form = self.form(chunk, index)
            self._coming.append((form, self.channel.receive([entry.buffer(self.device) for entry in form])))

    @spanned("receive")
    def take(self) -> tuple[Form, list[Tensor]]:
        """The next message, and what it consists of."""
        form, message = self._coming.popleft()
        return form, message.wait()

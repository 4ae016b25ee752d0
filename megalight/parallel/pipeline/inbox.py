"""The inbox of a channel: receives messages ahead of their use."""

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
    """The messages that one channel receives in a step, in the order of use.

    Args:
        channel: the channel; None if no message is expected.
        expected: the messages.
        form: ``(chunk, micro_batch)`` -> the form of the message. It may ask the sender and wait for the answer.
        device: the device that receives.
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
        """Post the receives that may be posted before action ``number`` (see :mod:`.agenda`)."""
        # Strictly in order: a channel matches receives and sends by their order alone.
        while self.expected and number >= self.expected[0].before:
            assert self.channel is not None
            chunk, index, _ = self.expected.popleft()
            # This may wait for the sender's host, but not for long: `before` says that the form is on its way.
            form = self.form(chunk, index)
            self._coming.append((form, self.channel.receive([entry.buffer(self.device) for entry in form])))

    @spanned("receive")
    def take(self) -> tuple[Form, list[Tensor]]:
        """Wait for the next message; return its form and its tensors."""
        form, message = self._coming.popleft()
        return form, message.wait()

"""The way of messages: collectives, or copies by copy engines where GPUs reach each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError
from megalight.parallel.peers import memory

Way: TypeAlias = Literal["plain", "symmetric", "auto"]


@dataclass(frozen=True)
class Choice:
    """Decides the way of one kind of message. It is a value: what one group gets does not depend on those before it.

    Attributes:
        option: name of the option, for messages.
        way: its value: ``plain``, ``symmetric``, or ``auto``: copy engines where they are available.
        against: why ``auto`` does without copy engines whatever the machine; None: it does not.
    """

    option: str
    way: Way
    against: str | None = None

    def why_not(self, device: torch.device) -> str | None:
        """Return why collectives carry all messages of a device; None: copy engines may.

        Raises:
            ConfigurationError: copy engines were asked for by name, and are not available.
        """
        if self.way == "plain":
            return "'plain' was asked for"
        return self.against or self._judge(memory.why_not(device.type))

    def why_not_over(self, group: ProcessGroup) -> str | None:
        """Return why collectives carry the messages of a group; None: copy engines do.

        Its ranks call this together, and get the same answer.

        Raises:
            ConfigurationError: copy engines were asked for by name, and are not available.
        """
        return self._judge(memory.unreachable(group))

    def told(self, reasons: Sequence[str]) -> str:
        """Return the way that was chosen, and why.

        Args:
            reasons: why some messages do without copy engines, as the methods above gave them.
        """
        if reasons:
            return f"by collectives, for some ranks at least: {reasons[0]}"
        return "by copy engines, which leave all multiprocessors to products: the GPUs reach each other's memory"

    def _judge(self, reason: str | None) -> str | None:
        if reason is not None and self.way == "symmetric":
            raise ConfigurationError(
                f"data_parallel.{self.option}='symmetric': it {reason}. Set {self.option}='plain', or replicate, so "
                "that the ranks of a group are on one host."
            )
        return None if reason is None else f"the other way {reason}"

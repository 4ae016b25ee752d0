"""The way of messages: collectives, or copies by copy engines where GPUs reach each other's memory."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError
from megalight.parallel.peers import memory

Way: TypeAlias = Literal["plain", "symmetric", "auto"]


class Choice:
    """Decides the way of one kind of message, for each group of ranks alike.

    Args:
        option: name of the option, for messages.
        way: its value: ``plain``, ``symmetric``, or ``auto``: copy engines where they can be had.
        against: why ``auto`` does without copy engines whatever the machine; None: it does not.

    Attributes:
        reason: why ``auto`` has chosen collectives, at least for some ranks; None: it has not.
    """

    def __init__(self, option: str, way: Way, against: str | None = None) -> None:
        self.option = option
        self.way = way
        self.reason = against

    def on(self, device: torch.device) -> bool:
        """Whether copy engines may be used on this device.

        Raises:
            ConfigurationError: they were asked for by name, and cannot be had.
        """
        if self.way == "plain" or self.reason is not None:
            return False
        return self._judge(memory.why_not(device.type))

    def over(self, group: ProcessGroup) -> bool:
        """Whether copy engines serve a group. Its ranks call this together, and get the same answer.

        Raises:
            ConfigurationError: they were asked for by name, and cannot be had.
        """
        return self._judge(memory.unreachable(group))

    def told(self) -> str:
        """Return the way that was chosen, and why."""
        if self.reason is not None:
            return f"by collectives, for some ranks at least: {self.reason}"
        return f"by copy engines: {self.way!r} was asked for, and the GPUs reach each other's memory"

    def _judge(self, reason: str | None) -> bool:
        if reason is None:
            return True
        if self.way == "symmetric":
            raise ConfigurationError(
                f"data_parallel.{self.option}='symmetric': it {reason}. Set {self.option}='plain', or replicate, so "
                "that the ranks of a group are on one host."
            )
        self.reason = f"the other way {reason}"
        return False

"""Copies into the slots of peers, by copy engines, on a stream of their own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megalight.parallel.capturing import capturing
from megalight.parallel.peers import driver
from megalight.parallel.peers.memory import Flag, Slot


class Copies:
    """A stream for copies, and the flags around them."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.spin: Any = import_module("megalight.parallel.peers.spin")

    def push(self, slot: Slot, to: int, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy each second tensor to the first, a place in the slot of rank ``to``, and raise its flag."""
        for place, source in pairs:
            driver.copy(self.stream, place, source)
        # Stream order makes the flag visible only after the data.
        driver.raise_flags(self.stream, slot.flags_at(Flag.READY, (to,)))

    def await_free(self, slot: Slot) -> None:
        """Wait, before the first push, until all peers have read the previous contents of their slots."""
        driver.wait(self.stream, slot.flags(Flag.FREE, slot.memory.others))

    def free(self, slot: Slot) -> None:
        """Let peers write into a slot of this rank, after the work that the current stream has queued."""
        current = torch.cuda.current_stream()
        flags = slot.flags_at(Flag.FREE, slot.memory.others)
        if capturing():  # a capture must not end with work left on another stream
            # By a kernel: the longest idle times of recorded steps lay behind flags that the front end raised here.
            self.spin.raise_flags(flags)
            return
        self.spin.prepare(len(flags))
        # After what the stream of products has queued so far, which still reads the slot.
        self.stream.wait_stream(current)
        driver.raise_flags(self.stream, flags)

"""The largest magnitudes of past steps, from which delayed scales are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

INPUT, WEIGHT, GRADIENT = range(3)
"""Rows of a history: the gradient is that of the output."""
STEPS = 16
"""How many it looks back, unless it is told."""


class AmaxHistory:
    """Of one linear layer. Nothing is read back to the host.

    It is not saved: a run that begins or resumes scales by the values that are there until it has seen a step.

    Args:
        length: steps to look back.

    Attributes:
        rolled: a step has ended that it took part in.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.past: Tensor | None = None
        self.current: Tensor | None = None
        self.rolled = False

    def allow(self, role: int, amax: Tensor, record: bool) -> Tensor:
        """The magnitude to allow for: the largest of past steps, or ``amax`` while there are none.

        Args:
            role: :data:`INPUT`, :data:`WEIGHT` or :data:`GRADIENT`.
            amax: of what is about to be cast, 0-dim.
            record: remember it.
        """
        if self.past is None or self.current is None:
            self.past = torch.zeros(self.length, 3, device=amax.device)
            self.current = torch.zeros(3, device=amax.device)
        if record:
            self.record(role, amax)
        known = self.past[:, role].amax()
        return torch.where(known > 0, known, amax)

    def known(self, role: int, otherwise: float) -> Tensor:
        """The largest of past steps, of which there are some (:attr:`rolled`); ``otherwise`` where all were zero."""
        assert self.past is not None
        known = self.past[:, role].amax()
        return torch.where(known > 0, known, otherwise)

    def record(self, role: int, amax: Tensor) -> None:
        """Remember ``amax`` of this step."""
        assert self.current is not None
        self.current[role] = torch.maximum(self.current[role], amax)

    @staticmethod
    def roll(histories: Sequence[AmaxHistory], reduce: Callable[[Tensor], None] | None) -> None:
        """End a step: every history's oldest step makes room for this one, reduced over ranks all at once.

        A magnitude that is not finite would spoil scales for as long as it is remembered: the step before stands in.
        """
        used = [(h, h.past, h.current) for h in histories if h.past is not None and h.current is not None]
        if not used:
            return
        seen = torch.stack([current for _, _, current in used])
        seen = torch.where(seen.isfinite(), seen, torch.stack([past[0] for _, past, _ in used]))
        if reduce is not None:
            reduce(seen)
        for (history, past, current), row in zip(used, seen, strict=True):
            past.copy_(torch.cat([row[None], past[:-1]]))
            current.zero_()
            history.rolled = True

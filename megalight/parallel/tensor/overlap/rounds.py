"""The order in which ranks exchange shares, so that every product has its operands in time: arithmetic only.

The ranks' shares form ``pieces`` blocks of neighboring ranks. In round ``s`` a rank works on the block ``s`` places
ahead of its own; round 0 is its own block. Within a round no two ranks send to the same rank, so every link carries one
message at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

Own: TypeAlias = Literal["absent", "early", "late"]
"""Whether a rank's own share is among the gathered ones: not at all, from the first round on, or only at the end."""


@dataclass(frozen=True)
class Round:
    """One product and its messages.

    Attributes:
        block: index of the block of shares that is multiplied.
        pairs: ``(ahead, behind)``, one message in each direction. Rank ``ahead`` owns a share of this block. For rank
            ``behind``, this rank is ``ahead`` at the same place of the same round. In a gather, a share comes from
            ``ahead``, and the own share goes to ``behind``. In a scatter, sums go to ``ahead`` and come from
            ``behind``.
    """

    block: int
    pairs: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def rounds_of(rank: int, size: int, pieces: int) -> tuple[Round, ...]:
    """Return the rounds of ``rank`` among ``size`` ranks, its own block first; ``pieces`` divides ``size``."""
    run = size // pieces
    block, place = divmod(rank, run)

    def neighbor(blocks: int, places: int) -> int:
        # Blocks and places turn together, so each rank meets every other once in each direction.
        return (block + blocks) % pieces * run + (place + places) % run

    return tuple(
        Round(
            (block + s) % pieces,
            # (0, 0) is the rank itself, which needs no message.
            tuple((neighbor(s, t), neighbor(-s, -t)) for t in range(run) if (s, t) != (0, 0)),
        )
        for s in range(pieces)
    )

"""In which order ranks exchange shares, so that every product has its operands just in time: arithmetic only.

The ranks' shares are cut into ``pieces`` blocks of neighbouring ranks. In round ``s`` a rank works on the block ``s``
places ahead of its own, and in round 0 on its own. Within a round no two ranks send to the same one, so all links carry
one message at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Round:
    """One product and the messages that go with it.

    Attributes:
        block: which block of shares the product is of.
        pairs: ``(ahead, behind)``, one message each way at a time: ``ahead`` owns a share of the block, and for
            ``behind`` this rank is the one ahead in the same place of the same round. Gathering, a share comes from
            ``ahead`` and the own one goes to ``behind``; scattering, sums go to ``ahead`` and come from ``behind``.
    """

    block: int
    pairs: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def rounds_of(rank: int, size: int, pieces: int) -> tuple[Round, ...]:
    """The rounds of ``rank`` among ``size``, its own block's first; ``pieces`` divides ``size``."""
    run = size // pieces
    block, place = divmod(rank, run)

    def neighbour(blocks: int, places: int) -> int:
        return (block + blocks) % pieces * run + (place + places) % run

    return tuple(
        Round(
            (block + s) % pieces,
            tuple((neighbour(s, t), neighbour(-s, -t)) for t in range(run) if (s, t) != (0, 0)),
        )
        for s in range(pieces)
    )

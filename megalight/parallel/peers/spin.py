"""A kernel of one warp that waits for flags: it sees one a microsecond or two after a peer has raised it.

It needs a multiprocessor's slot, which a product may hold: so it runs on the stream of the products, between them.
"""

from __future__ import annotations

from functools import lru_cache

from megalight.ops.jit import Value, constexpr, tl, triton

WIDEST = 32
"""Flags in a row at most."""


def wait(flags: tuple[int, ...]) -> None:
    """The current stream waits until every flag is raised, and lowers it.

    Args:
        flags: addresses on this device, at most :data:`WIDEST` words from each other.
    """
    if flags:
        _wait[(1,)](*_row(flags), WIDTH=WIDEST, num_warps=1)


@lru_cache(maxsize=4096)
def _row(flags: tuple[int, ...]) -> tuple[int, int]:
    """The first address, and a bit for each word from there on that is a flag."""
    first = min(flags)
    return first, sum(1 << (flag - first) // 4 for flag in flags)


@triton.jit(do_not_specialize=["first", "which"])  # type: ignore[untyped-decorator]
def _wait(first: Value, which: Value, WIDTH: constexpr) -> None:
    row = first.to(tl.pointer_type(tl.int32))
    for word in range(WIDTH):
        if (which >> word) & 1:
            while tl.atomic_cas(row + word, 1, 0, sem="acquire", scope="sys") == 0:
                pass

"""The kinds of context-parallel attention, by name: one file each, with why it cannot serve a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megalight.errors import BackendError, LayoutError
from megalight.parallel.context import exchange, gather, ring, two_level
from megalight.parallel.context.spec import ContextSpec
from megalight.registry import Backend, BackendRegistry

Attend = Callable[..., Tensor]
"""``(inner, q, k, v, sequences, groups) -> [T, H, D]``: :func:`megalight.parallel.context.exchange.attend` is one."""

KINDS: BackendRegistry[ContextSpec, Attend] = BackendRegistry("context-parallel attention")

KINDS.register(Backend("all_to_all", exchange.attend, 30, exchange.why_not))
KINDS.register(Backend("ring", ring.attend, 20, ring.why_not))
KINDS.register(Backend("all_gather", gather.attend, 10, gather.why_not))
KINDS.register(Backend("all_to_all_ring", two_level.attend, 0, two_level.why_not))

ONE_LEVEL = frozenset({"auto", "all_to_all", "ring", "all_gather"})
"""What has no use for an inner size: ``auto`` takes the two-level kind nowhere, and a plugin's kind may have one."""


def choose(layer: str, spec: ContextSpec, kind: str) -> Backend[ContextSpec, Attend]:
    """The kind that serves a layer; ``auto`` takes the first by priority that can.

    Raises:
        LayoutError: none can, or the named one cannot or does not exist; says why of each.
    """
    try:
        return KINDS.select(spec, kind)
    except BackendError as error:
        raise LayoutError(f"{layer}: {error}") from error

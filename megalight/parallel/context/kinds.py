"""The registry of kinds of context-parallel attention. Each kind is a file with ``attend`` and ``why_not``."""

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
"""Kinds that do not use ``ContextOptions.inner``. ``auto`` is one: it never takes the two-level kind or a plugin's."""


def choose(layer: str, spec: ContextSpec, kind: str) -> Backend[ContextSpec, Attend]:
    """Choose the kind for a layer. ``auto`` takes the kind of the highest priority that can serve.

    Raises:
        LayoutError: no kind can serve, or the named one cannot or does not exist. The message lists the reasons.
    """
    try:
        return KINDS.select(spec, kind)
    except BackendError as error:
        raise LayoutError(f"{layer}: {error}") from error

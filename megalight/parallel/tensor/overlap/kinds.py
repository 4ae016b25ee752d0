"""The ways to run a product and its collective, by name: one file each, with why it cannot serve a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch.distributed import ProcessGroup

from megalight.errors import BackendError, LayoutError
from megalight.parallel.tensor.overlap import plain, symmetric
from megalight.parallel.tensor.overlap.messages import Messages
from megalight.parallel.tensor.overlap.options import TensorOptions
from megalight.parallel.tensor.overlap.pipelined import Pipelined, pieces_why_not
from megalight.parallel.tensor.overlap.spec import Overlap, OverlapSpec
from megalight.registry import Backend, BackendRegistry


class Links(Protocol):
    """What ways are made of."""

    tensor: TensorOptions

    @property
    def tp_group(self) -> ProcessGroup:
        """The ranks that share the layers."""
        ...

    @property
    def message_group(self) -> ProcessGroup:
        """The same ranks, for messages that take few multiprocessors."""
        ...


Make = Callable[[Links], Overlap]


def _pipelined(links: Links) -> Overlap:
    return Pipelined(links.tp_group, Messages(links.message_group), links.tensor.pieces)


OVERLAPS: BackendRegistry[OverlapSpec, Make] = BackendRegistry("tensor-parallel overlap")

OVERLAPS.register(Backend("plain", lambda links: plain.Plain(links.tp_group), 20, plain.why_not))
OVERLAPS.register(Backend("pipelined", _pipelined, 10, pieces_why_not))
OVERLAPS.register(
    Backend("symmetric", lambda links: symmetric.Symmetric(links.tp_group, links.tensor.pieces), 0, symmetric.why_not)
)


def automatic(spec: OverlapSpec) -> str:
    """The way that ``auto`` takes, by what was measured on H200s (``docs/performance/log.md``).

    Copies and flags take the host longer to launch than collectives. Where a CUDA graph launches them, ``symmetric``
    gains 6 to 10 % of a step; step by step the host comes too late, and it loses as much.
    """
    return "symmetric" if spec.recorded and symmetric.why_not(spec) is None else "plain"


def choose(layer: str, spec: OverlapSpec, kind: str) -> Backend[OverlapSpec, Make]:
    """The way that serves a layer.

    Raises:
        LayoutError: the named one cannot, or does not exist; says why of each.
    """
    try:
        return OVERLAPS.select(spec, automatic(spec) if kind == "auto" else kind)
    except BackendError as error:
        raise LayoutError(f"{layer}: {error}") from error

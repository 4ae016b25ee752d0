"""The registry of overlap backends: one file each, with the reasons why it cannot serve a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch.distributed import ProcessGroup

from megalight.errors import BackendError, LayoutError
from megalight.parallel.tensor.overlap import spec, symmetric
from megalight.parallel.tensor.overlap.pipelined import Messages, Pipelined, pieces_why_not
from megalight.parallel.tensor.overlap.spec import Overlap, OverlapSpec, TensorOptions
from megalight.registry import Backend, BackendRegistry


class Links(Protocol):
    """What a backend needs for its construction."""

    tensor: TensorOptions

    @property
    def tp_group(self) -> ProcessGroup:
        """The ranks that share the layers."""
        ...

    @property
    def message_group(self) -> ProcessGroup:
        """The same ranks, in a group for messages that use few SMs."""
        ...


Make = Callable[[Links], Overlap]


def _pipelined(links: Links) -> Overlap:
    return Pipelined(links.tp_group, Messages(links.message_group), links.tensor.pieces)


OVERLAPS: BackendRegistry[OverlapSpec, Make] = BackendRegistry("tensor-parallel overlap")

# The numbers are priorities for a list of reasons; `auto` is decided below, by the layer and its recording.
OVERLAPS.register(Backend("plain", lambda links: spec.NoOverlap(links.tp_group), 20, spec.why_not))
OVERLAPS.register(Backend("pipelined", _pipelined, 10, pieces_why_not))
OVERLAPS.register(
    Backend("symmetric", lambda links: symmetric.Symmetric(links.tp_group, links.tensor.pieces), 0, symmetric.why_not)
)


def automatic(spec: OverlapSpec) -> str:
    """Return the backend that ``auto`` uses, as measured on H200 GPUs (``docs/performance/log.md``).

    The host takes longer to launch copies and flags than collectives. If a CUDA graph launches them, ``symmetric``
    saves 6 to 10 % of a step. Without a graph the host is too slow, and it loses as much.
    """
    # Ranks must choose alike, or they deadlock. So the answer depends only on facts that are equal on all of them.
    return "symmetric" if spec.recorded and symmetric.why_not(spec) is None else "plain"


def choose(layer: str, spec: OverlapSpec, kind: str) -> Backend[OverlapSpec, Make]:
    """Return the backend for a layer.

    Raises:
        LayoutError: the named backend cannot serve it, or does not exist; gives the reason of each backend.
    """
    try:
        return OVERLAPS.select(spec, automatic(spec) if kind == "auto" else kind)
    except BackendError as error:
        raise LayoutError(f"{layer}: {error}") from error

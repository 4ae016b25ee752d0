"""Communication overlap of split layers: its options, the interface of a backend, and the backend without overlap."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError, nearest
from megalight.ops.linear import input_gradient, product
from megalight.parallel.collectives import PendingCollective, start_all_gather, start_all_reduce, start_reduce_scatter


@dataclass(frozen=True)
class OverlapSpec:
    """Properties of one split layer; a backend decides by them whether it can serve it.

    Attributes:
        tp: number of ranks that share the layer.
        sequence_parallel: tokens are split between layers.
        device: device type.
        dtype: dtype of the layer's input; None before the first input.
        weight_dtype: dtype of its weight.
        low_precision: its products are computed in 8 or 4 bits.
        autocast: autocast is enabled, so products have another dtype than the tensors.
        recorded: steps, or their layers, are recorded as CUDA graphs.
        group: the ranks; None: not made yet.
    """

    tp: int
    sequence_parallel: bool
    device: str
    dtype: torch.dtype | None
    weight_dtype: torch.dtype
    low_precision: bool
    autocast: bool
    recorded: bool = False
    group: ProcessGroup | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Product:
    """A product of rows with a matrix that this rank holds.

    Attributes:
        call: ``(rows [n, inner], out [n, width] or None) -> [n, width]``. The result is written into ``out`` if given.
            Without ``out``, the rows may have several leading dims.
        inner: features of a row.
        width: features of a result.
    """

    call: Callable[[Tensor, Tensor | None], Tensor]
    inner: int
    width: int

    @classmethod
    def forward(cls, weight: Tensor, bias: Tensor | None) -> Product:
        """``x -> x W^T + b``."""
        return cls(lambda x, out: product(x, weight, bias, out), weight.shape[1], weight.shape[0])

    @classmethod
    def of_input(cls, weight: Tensor) -> Product:
        """The input gradient ``grad_y -> grad_y W``."""
        # Messages have no gaps between rows, as GEMMs in 8 bits of odd sizes may have.
        rows, columns = weight.shape
        return cls(lambda grad_y, out: input_gradient(grad_y, weight, out).contiguous(), rows, columns)


class Overlap(Protocol):
    """Runs products and their collectives. ``dim`` counts tokens; all ranks make the same calls with equal shapes."""

    def start_gather(self, share: Tensor, dim: int) -> PendingCollective:
        """Start to gather all ranks' shares along ``dim``."""
        ...

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Return the product of all ranks' shares, and with ``keep`` also the gathered shares."""
        ...

    def hold(self, whole: Tensor) -> Tensor:
        """Return gathered shares in memory that is not reused; call it instead of :meth:`done`."""
        ...

    def done(self, whole: Tensor) -> None:
        """Release gathered shares, whose memory may then be reused. Every caller must call it soon after reading."""
        ...

    def put_off(self, weight: Tensor, rows: int, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Call ``compute``, which returns the weight gradient, now or while a later message of this backward travels.

        Args:
            weight: the weight.
            rows: rows that its gradient sums over.
            compute: returns None if the gradient goes into the weight's main gradient. Only then may it come later.

        Returns:
            What ``compute`` returned; None if it is put off.
        """
        ...

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> PendingCollective:
        """Start to compute this rank's slice of the sum over ranks of their products.

        Args:
            covered: the caller computes something else before it waits.
        """
        ...

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> PendingCollective:
        """Start to compute the whole sum over ranks of their products."""
        ...

    def restart(self) -> None:
        """Begin as if nothing had run, on all ranks together, while nothing is gathered."""
        ...


def why_not(spec: OverlapSpec) -> str | None:
    """Return None: this backend serves every layer."""
    return None


class NoOverlap:
    """Overlaps collectives only with the work that callers do before they wait.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start_gather(self, share: Tensor, dim: int) -> PendingCollective:
        """See :class:`~megalight.parallel.tensor.overlap.spec.Overlap`, for this method and those below."""
        return start_all_gather(share, self.group, dim)

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Gather, then multiply, without overlap."""
        whole = start_all_gather(share, self.group, dim).wait()
        return product.call(whole, None), whole if keep else None

    def hold(self, whole: Tensor) -> Tensor:
        """Return the same tensor: its memory is never reused."""
        return whole

    def done(self, whole: Tensor) -> None:
        """Do nothing: no memory is reused."""

    def put_off(self, weight: Tensor, rows: int, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute it now: the next collective would take SMs from it."""
        return compute()

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> PendingCollective:
        """Start a reduce-scatter, which runs until the caller waits."""
        return start_reduce_scatter(product.call(x, None), self.group, dim)

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> PendingCollective:
        """Start an all-reduce, which runs until the caller waits."""
        return start_all_reduce(product.call(x, None), self.group)

    def restart(self) -> None:
        """Do nothing: no call depends on those before it."""


Own: TypeAlias = Literal["absent", "early", "late"]
"""Whether a rank's own share is among the gathered ones: not at all, from the first round on, or only at the end."""


@dataclass(frozen=True)
class ExchangeRound:
    """One product and its messages.

    The ranks' shares form ``pieces`` blocks of neighboring ranks. In round ``s`` a rank works on the block ``s``
    places ahead of its own; round 0 is its own block. Within a round no two ranks send to the same rank, so every
    link carries one message at a time.

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
def rounds_of(rank: int, size: int, pieces: int) -> tuple[ExchangeRound, ...]:
    """Return the rounds of ``rank`` among ``size`` ranks, its own block first; ``pieces`` divides ``size``."""
    run = size // pieces
    block, place = divmod(rank, run)

    def neighbor(blocks: int, places: int) -> int:
        # Blocks and places turn together, so each rank meets every other once in each direction.
        return (block + blocks) % pieces * run + (place + places) % run

    return tuple(
        ExchangeRound(
            (block + s) % pieces,
            # (0, 0) is the rank itself, which needs no message.
            tuple((neighbor(s, t), neighbor(-s, -t)) for t in range(run) if (s, t) != (0, 0)),
        )
        for s in range(pieces)
    )


MAX_CTAS = 16
"""Default number of SMs that messages of ``pipelined`` may occupy."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """How the collectives of split layers run beside their products. With tp=1 nothing has an effect.

    Attributes:
        overlap: a backend's name (``plain``, ``pipelined``, ``symmetric``), or ``auto``: ``symmetric`` if steps or
            layers are recorded as CUDA graphs and it can serve the layer, else ``plain``. Or a mapping from globs over
            names of split linear layers (``"*.mlp.gate_up"``) to backends; the first match decides, and layers without
            a match use ``auto``.
        pieces: number of pieces into which a product is cut, if its communication runs during it; under sequence
            parallelism a divisor of tp. None: chosen by the sizes of each product
            (:mod:`megalight.parallel.tensor.overlap.pipelined`).
        max_ctas: largest number of SMs that the messages of ``pipelined`` may occupy under NCCL; other
            backends refuse a number. None: 16.
        keep_gathered: keep the gathered input of a layer for its weight gradient, instead of gathering it again in the
            backward pass. This keeps ``tp`` times as much memory.

    Raises:
        LayoutError: ``pieces`` or ``max_ctas`` is below 1.
    """

    overlap: str | Mapping[str, str] = "auto"
    pieces: int | None = None
    max_ctas: int | None = None
    keep_gathered: bool = False

    def __post_init__(self) -> None:
        for name in ("pieces", "max_ctas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(f"TensorOptions.{name}={value}; it must be at least 1.")

    def kind_of(self, name: str) -> str:
        """Return the backend's name for the split layer ``name``."""
        if isinstance(self.overlap, str):
            return self.overlap
        return next((kind for pattern, kind in self.overlap.items() if fnmatch.fnmatchcase(name, pattern)), "auto")

    def check(self, names: Iterable[str], tp: int, sequence_parallel: bool) -> None:
        """Raise if an option cannot have an effect on the split layers ``names``.

        Raises:
            LayoutError: a pattern matches none of them; ``pieces`` does not divide ``tp``; ``keep_gathered`` is set,
                but nothing is gathered.
        """
        names = list(names)
        # A glob that matches nothing is a misspelled name, and its layers would go on with `auto` unnoticed.
        for pattern in [] if isinstance(self.overlap, str) else self.overlap:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise LayoutError(
                    f"the pattern {pattern!r} of TensorOptions.overlap matches no split layer; correct or remove it. "
                    f"There are {', '.join(names[:3]) or 'none'}{' ...' if names[3:] else ''}."
                    + nearest(pattern, names)
                )
        if sequence_parallel and self.pieces is not None and tp % self.pieces:
            raise LayoutError(
                f"TensorOptions.pieces={self.pieces} does not divide tp={tp}: a piece holds the tokens of whole ranks. "
                "Choose a divisor, or leave it out."
            )
        if self.keep_gathered and not sequence_parallel:
            raise LayoutError(
                "TensorOptions.keep_gathered=True needs sequence parallelism: without it, inputs are whole and nothing "
                "is gathered. Leave it out."
            )

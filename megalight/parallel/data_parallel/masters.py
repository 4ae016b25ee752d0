"""Master parameters: their dtype, and the flat shard of a bucket that this rank's optimizer updates."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.layout import BucketKey
from megalight.parallel.shard import ShardPiece, ShardSpec


def masters_of(kind: BucketKey, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the masters of parameters of one kind.

    Args:
        wanted: a dtype, for parameters whose values it holds exactly; None: float32 or wider.
    """
    # Small updates vanish in half precision: a step is often below half a unit in the last place of the weight. So
    # float32, unless somebody asks for less.
    if wanted is not None and _holds(wanted, kind):
        return wanted
    return torch.promote_types(kind.param_dtype, torch.float32)


def check_masters(kinds: Sequence[BucketKey], wanted: torch.dtype | None) -> None:
    """Check that some parameters can have the masters that were asked for.

    Raises:
        ConfigurationError: none can, or parameters are quantized.
    """
    if wanted is None or not kinds:
        return
    name = str(wanted).removeprefix("torch.")
    if wanted.itemsize < 4 and any(kind.storage_format is not None for kind in kinds):
        raise ConfigurationError(
            f"data_parallel.master_dtype={name!r} with weights stored in FP8 (primary_weights), which are cast "
            "from float32 masters; leave one of the two out."
        )
    if not any(_holds(wanted, kind) for kind in kinds):
        found = ", ".join(sorted({str(kind.param_dtype).removeprefix("torch.") for kind in kinds}))
        raise ConfigurationError(
            f"data_parallel.master_dtype={name!r} and weights in {found}, whose values such masters cannot hold. Leave "
            "it out, or train bfloat16 weights: Trainer(precision='bf16-true'), or 'bf16-mixed' with MegatronStrategy."
        )


def _holds(wanted: torch.dtype, kind: BucketKey) -> bool:
    return torch.promote_types(kind.param_dtype, wanted) == wanted


SCALARS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number per parameter."""


@dataclass(eq=False)
class FlatShard:
    """The interval of one bucket for which this rank holds the optimizer state.

    Attributes:
        group: index of the optimizer's parameter group.
        start, stop: the interval, in elements of the bucket.
        master: ``[stop - start]`` leaf tensor that the optimizer updates. ``master.grad`` is set once gradients are
            reduced. If it has the parameters' own dtype, it shares their storage; its state (``master_copy``) says so.
        slots: ``(spec, first element in the bucket)`` of every parameter in the bucket.
        replicas: ranks that hold this same shard. They divide the work that must be done only once: counting for the
            norm, writing to a checkpoint.
        place: index of this rank in ``replicas``.
    """

    group: int
    start: int
    stop: int
    master: Tensor
    slots: Sequence[tuple[ShardSpec, int]] = field(repr=False)
    replicas: tuple[int, ...] = (0,)
    place: int = 0

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Tensor:
        """Return a view of the master at elements ``[start, stop)`` of the bucket, which must lie in this shard."""
        return self.master.detach()[start - self.start : stop - self.start]

    def fill(self, offset: int, values: Tensor) -> None:
        """Copy the part of ``values`` that lies in this shard; ``values`` start at element ``offset`` of the bucket."""
        low, high = max(self.start, offset), min(self.stop, offset + values.numel())
        if low < high:
            part = values.reshape(-1)[low - offset : high - offset]
            self.master[low - self.start : high - self.start] = part

    def multiply(self, offset: int, factors: Tensor) -> None:
        """Multiply the part that ``factors`` meet in this shard; they start at element ``offset`` of the bucket."""
        low, high = max(self.start, offset), min(self.stop, offset + factors.numel())
        if low < high:
            part = self.part(low, high)
            part.copy_(part * factors.reshape(-1)[low - offset : high - offset].to(part.device))

    def intervals(self) -> Iterator[tuple[ShardPiece, int, int, int]]:
        """Yield the parts of canonical pieces that lie in this shard.

        Yields:
            piece, first, last, shard_start: elements ``[first, last)`` of the flattened piece lie at ``shard_start`` of
            the shard. Elements that no interval covers are padding.
        """
        for spec, offset in self.slots:
            low, high = max(self.start, offset), min(self.stop, offset + spec.numel)
            if low < high:
                for piece, first, last in spec.cut(low - offset, high - offset):
                    yield piece, first, last, offset + piece.start + first - self.start


def history(state: Mapping[str, Any]) -> Hashable:
    """Return what parameters must have in common to be stepped together: names and counts of their states."""
    numbers = (int, float)
    return tuple(
        (name, float(value) if name in SCALARS or isinstance(value, numbers) else None)
        for name, value in sorted(state.items())
    )

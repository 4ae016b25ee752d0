"""Stop all ranks together when a gradient is NaN or infinite, and say which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.parallel.data_parallel.buffers import Bucket

SHOWN = 3
"""Number of parameters that a message names."""


def check_finite(buckets: Sequence[Bucket], norm: Tensor, everyone: ProcessGroup | None) -> None:
    """Check reduced gradients, before an optimizer spoils weights and its state with them. The host waits.

    Args:
        norm: the norm of all gradients. It is equal on all ranks, so they stop together.
        everyone: all ranks; None for one rank.

    Raises:
        MegalightError: the same on every rank.
    """
    if bool(torch.isfinite(norm)):
        return
    own = sorted({name for bucket in buckets for name in _bad(bucket)})
    if everyone is None:
        found: list[list[str]] = [own]
    else:
        found = [[] for _ in range(everyone.size())]
        # Slow, but this is the end of the run. Each rank sees only its own interval of the sums.
        dist.all_gather_object(found, own, group=everyone)
    names = sorted({name for some in found for name in some})
    if not names:
        raise MegalightError(
            f"the norm of the gradients is {float(norm)}, though every gradient is finite: they are too large. Lower "
            "the learning rate, or look at the loss of the last steps."
        )
    others = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    raise MegalightError(
        f"the gradients of {', '.join(names[:SHOWN])}{others} are NaN or infinite after the sum over ranks "
        "(data_parallel.check_for_nan=True). Weights and optimizer state are those of the last good step. Look at the "
        "data of this step, lower the learning rate, or find the op with Trainer(detect_anomaly=True)."
    )


def _bad(bucket: Bucket) -> list[str]:
    """Return the canonical names of parameters whose gradients in this rank's interval are not all finite."""
    gradient = bucket.reduced
    if gradient is None:
        return []
    pieces = bucket.shard.intervals()
    return [piece.name for piece, first, last, at in pieces if not gradient[at : at + last - first].isfinite().all()]

"""Gradient norm and clipping: every element counts once; NaN or infinity stops all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grad

from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel.data_parallel.buffers import Bucket

PIECE = 2**13
"""Elements whose squares are added in float32 on a CPU."""


@torch.no_grad()
def global_norm(views: Sequence[Tensor], group: ProcessGroup | None, device: torch.device) -> Tensor:
    """Return the L2 norm of the ``views`` of all ranks of ``group``: a 0-dim tensor, with no host synchronization.

    Ranks sum squares in float64, because all must reduce the same dtype, and a rank without ``views`` (a pipeline stage
    with frozen weights only) does not know that of the others.
    """
    dtype = torch.promote_types(views[0].dtype, torch.float32) if views else torch.float64
    square = torch.zeros((), dtype=torch.float64, device=device)
    if views:
        if device.type == "cpu":
            # Squares of a float32 tensor are added one after the other there: the norm of 20 million was 0.1 % short.
            views = [piece for view in views for piece in view.reshape(-1).chunk(1 + view.numel() // PIECE)]
        # One launch for all views; squares are added, because norms of parts do not add up.
        square += torch.stack(torch._foreach_norm(list(views), 2, dtype=dtype)).square_().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt_().to(dtype)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that limits the gradients' norm to ``max_norm``: ``min(1, max_norm / norm)``, 0-dim.

    As in ``torch.nn.utils.clip_grad_norm_``, 1e-6 is added to the norm. A norm that is not finite gives a factor of
    zero or NaN.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


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


# `clip_grad_norm_` calls the second one, also where a script has imported it by name before.
NAMES = ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")

_refused: dict[str, WeakValueDictionary[int, nn.Parameter]] = {}
"""Parameters by the reason, which says what to do instead."""


def refuse_clipping(parameters: Iterable[nn.Parameter], reason: str) -> None:
    """Let ``torch.nn.utils.clip_grad_norm_`` and its like raise for these parameters, as long as they live.

    Args:
        reason: what the error says after the name of the function.
    """
    _refused.setdefault(reason, WeakValueDictionary()).update({id(parameter): parameter for parameter in parameters})
    for name in NAMES:
        function = getattr(clip_grad, name, None)
        # Once per process, for all models.
        if function is None or hasattr(function, "refuses"):
            continue
        guarded = _guarded(name, function)
        for owner in (clip_grad, nn.utils):
            if getattr(owner, name, None) is function:
                setattr(owner, name, guarded)


def permit_clipping(parameters: Iterable[nn.Parameter], reason: str) -> None:
    """Take back what :func:`refuse_clipping` did to these parameters. Others stay as they are."""
    refused = _refused.get(reason, WeakValueDictionary())
    for parameter in parameters:
        refused.pop(id(parameter), None)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for reason, refused in _refused.items():
            if any(refused.get(id(parameter)) is parameter for parameter in found):
                raise ConfigurationError(f"torch.nn.utils.{name.removeprefix('_')} {reason}")
        return function(found, *args, **kwargs)

    clip.refuses = True  # type: ignore[attr-defined]
    return clip

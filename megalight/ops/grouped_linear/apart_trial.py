"""Whether a device has the products of experts one by one. They read parts of matrices, which a library may refuse."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.grouped_linear.apart import Apart
from megalight.ops.grouped_linear.stack_casts import StackCasts
from megalight.ops.linear.session import Session
from megalight.ops.quantize.recipes import Recipe

_log = logging.getLogger(__name__)

SIZES, IN, OUT = (5, 21, 40), 128, 96
"""Groups that begin at rows whose scales lie at no multiple of 16 bytes, and whose tokens are no multiples of 16."""


@lru_cache
def why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Multiply three small experts in all three ways; return and log why this fails or goes wrong here, or None."""
    if (reason := _tried(recipe, device)) is not None:
        _log.warning("recipe %s: large experts run in one product, which is slower: %s", recipe.name, reason)
    return reason


def _tried(recipe: Recipe, device: torch.device) -> str | None:
    expected = products(recipe, device, emulate=True)
    try:
        found = products(recipe, device, emulate=False)
    except (BackendError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"this torch refuses it here: {str(error).splitlines()[0]}"
    wrong = max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))
    # Loose: results are rounded to bfloat16, and sums may be short.
    return None if wrong < 2e-2 else f"this torch gives wrong products here (relative error {wrong:.1e})"


def products(recipe: Recipe, device: torch.device, emulate: bool) -> list[Tensor]:
    """Return outputs, input gradients and weight gradients, added to ones, in float32."""
    draws = torch.Generator().manual_seed(0)  # its own: a trial must not move the random stream of the run
    weight, x, grad = (
        torch.randn(shape, generator=draws).to(device, torch.bfloat16)
        for shape in ((len(SIZES), OUT, IN), (sum(SIZES), IN), (sum(SIZES), OUT))
    )
    apart = Apart(StackCasts(recipe, Session(), count=len(SIZES), emulate=emulate))
    offsets = torch.tensor(SIZES).cumsum(0).to(device, torch.int32)
    y, x_t = apart.product(x, weight, offsets, SIZES, keep=True)
    assert x_t is not None
    grads = apart.gradients(grad, offsets, SIZES)
    out = torch.ones(weight.shape, device=device)
    apart.accumulate(out, grads, x_t, write=False)
    return [y.float(), apart.input_gradient(grads, weight).float(), out]

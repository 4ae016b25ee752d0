"""Causal convolution of every channel on its own, within packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.causal_conv import reference
from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.registry import Backend, BackendRegistry, remembered
from megalight.types import PackedSequences


class Spec(NamedTuple):
    """A request to the convolution: device type, dtypes of input and weight, and numbers of taps and of channels."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    taps: int
    channels: int = 1024


CAUSAL_CONV: BackendRegistry[Spec, Callable[..., Tensor]] = BackendRegistry("causal_conv")
REGISTRIES = (CAUSAL_CONV,)
EXAMPLE = Spec("cpu", torch.bfloat16, torch.bfloat16, 4)

MAX_TAPS = 8
"""Most taps of the kernels, which read a row again for each."""


def _triton_why_not(spec: Spec) -> str | None:
    if spec.taps > MAX_TAPS:
        return f"serves at most {MAX_TAPS} taps, not {spec.taps}"
    return triton_why_not(spec.device, spec.dtype, spec.weight_dtype)


CAUSAL_CONV.register(Backend("triton", lazy("megalight.ops.causal_conv.triton", "causal_conv"), 20, _triton_why_not))
CAUSAL_CONV.register(Backend("reference", reference.causal_conv, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> Callable[..., Tensor]:
    return CAUSAL_CONV.select(spec, backend).fn


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequences: PackedSequences,
    *,
    silu: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``y[t] = sum_j weight[:, k - 1 - j] * x[t - j] + bias``; before the start of a sequence, ``x`` is 0.

    Half dtypes are summed in float32.

    Args:
        x: ``[T, channels]``. Rows may lie apart in memory (a part of a fused projection's output).
        weight: ``[channels, k]``. The last column is for the token itself.
        bias: ``[channels]``, or None.
        sequences: how the tokens divide into sequences, which are whole.
        silu: return ``silu(y)``.
        backend: a backend's name, or ``auto``.
    """
    spec = Spec(x.device.type, x.dtype, weight.dtype, weight.shape[1], x.shape[1])
    return _choose(spec, backend)(x, weight, bias, sequences.positions, silu)

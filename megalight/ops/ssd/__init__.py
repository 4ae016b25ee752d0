"""The scan of Mamba-2 (SSD, https://arxiv.org/abs/2405.21060), within packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not
from megalight.ops.ssd import reference
from megalight.ops.ssd.reference import step_sizes as step_sizes
from megalight.registry import Backend, BackendRegistry, remembered
from megalight.types import PackedSequences


class SSDSpec(NamedTuple):
    """A request to the scan.

    Attributes:
        device: device type.
        dtype: dtype of ``x``, ``b`` and ``c``.
        head_dim: ``P``.
        state_size: ``N``.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    state_size: int


SSD: BackendRegistry[SSDSpec, Callable[..., Tensor]] = BackendRegistry("ssd")
REGISTRIES = (SSD,)
EXAMPLE = SSDSpec("cpu", torch.bfloat16, 64, 128)

MAX_HEAD_DIM, MAX_STATE_SIZE = 128, 128
"""Largest state of a head that fits into the registers and the shared memory of the kernels."""


def _triton_why_not(spec: SSDSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if spec.head_dim > MAX_HEAD_DIM or spec.state_size > MAX_STATE_SIZE:
        return (
            f"serves heads of at most {MAX_HEAD_DIM} features with states of at most {MAX_STATE_SIZE}, not "
            f"{spec.head_dim} and {spec.state_size}"
        )
    return triton_why_not(spec.device, spec.dtype)


SSD.register(Backend("triton", lazy("megalight.ops.ssd.triton", "ssd"), 20, _triton_why_not))
SSD.register(Backend("reference", reference.ssd, 0, serve_all))


@remembered
def _choose(spec: SSDSpec, backend: str) -> Callable[..., Tensor]:
    return SSD.select(spec, backend).fn


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    sequences: PackedSequences,
    *,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``s[t] = exp(dt[t] a) s[t - 1] + dt[t] x[t] b[t]^T`` and ``y[t] = s[t] c[t] + d x[t]``; ``s`` begins at 0.

    Each head has its own state ``s [P, N]``. Every sequence starts from zeros. Half dtypes are summed in float32.

    Args:
        x: ``[T, H, P]``.
        dt: ``[T, H]``, the step sizes, above 0.
        a: ``[H]``, below 0.
        b: ``[T, G, N]``; ``H / G`` neighboring heads share each.
        c: ``[T, G, N]``.
        d: ``[H]``.
        sequences: how the tokens divide into sequences, which are whole.
        bias: ``[H]``. With it, step sizes are ``softplus(dt + bias)``, in float32 for half dtypes.
        backend: a backend's name, or ``auto``.

    Returns:
        ``[T, H, P]`` in the dtype of ``x``.
    """
    spec = SSDSpec(x.device.type, x.dtype, x.shape[-1], b.shape[-1])
    # Positions show where sequences begin, without a copy of offsets to the host.
    return _choose(spec, backend)(x, dt, a, b, c, d, sequences.positions, bias)


def ssd_continued(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    sequences: PackedSequences,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """Continue sequences from their states ``[n, H, P, N]``; return outputs and states, as in :func:`ssd`."""
    return reference.continued(x, dt, a, b, c, d, sequences.lengths, states)

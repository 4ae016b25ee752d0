"""The scan of ``mamba-ssm``."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.common import HALF
from megalight.ops.ssd import Spec
from megalight.plugins.mamba_ssm.sequences import numbers
from megalight.plugins.package import Package

PACKAGE = Package("mamba_ssm", "mamba-ssm", "pip install --no-build-isolation mamba-ssm")
MINIMUM = "2.0"
"""The first version with Mamba-2."""
SCAN = "mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined"
CHUNK = 256
WIDEST = 256


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve, or None."""
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if spec.head_dim % 8 or spec.state_size > WIDEST:
        return (
            f"serves heads of a multiple of 8 features with states of at most {WIDEST}, not {spec.head_dim} and "
            f"{spec.state_size}"
        )
    return PACKAGE.why_not(spec.device, "ssd", SCAN, minimum=MINIMUM)


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """See :func:`megalight.ops.ssd.ssd`."""
    options = {"chunk_size": CHUNK, "D": d, "seq_idx": numbers(positions)}
    if bias is not None:
        options |= {"dt_bias": bias, "dt_softplus": True}
    out: Tensor = PACKAGE.load(SCAN)(x[None], dt[None], a, b[None], c[None], **options)
    return out[0]

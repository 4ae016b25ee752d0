"""One in-place Adam or AdamW step on flat tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.adam import reference
from megalight.ops.cast_flat import cast_flat
from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.quantize.formats import DTYPES, Scheme
from megalight.registry import Backend, BackendRegistry, remembered

# Codes of updated parameters, which a step writes beside them.


@dataclass(frozen=True)
class Coded:
    """Where the codes of some parameters go, and how they are made: as :func:`megalight.ops.cast_flat.cast_flat` does.

    Attributes:
        out: ``[n]``, bytes or of the scheme's 8-bit dtype.
        scheme: of 8 bits, with one scale for the matrix of which the parameters are a part.
        amax: largest magnitude that the scale must cover, 0-dim float32, known before the step.
        rounded: dtype to which values are rounded first.
        largest: 0-dim float32, raised to the largest magnitude of the rounded values; None: nobody asks.
    """

    out: Tensor
    scheme: Scheme
    amax: Tensor
    rounded: torch.dtype
    largest: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """``out`` in the scheme's 8-bit dtype."""
        return self.out.view(DTYPES[self.scheme.format])

    def cast(self, values: Tensor) -> None:
        """Write the codes of ``values [n]``."""
        cast_flat(self.out, values, self.scheme, self.amax, self.rounded, largest=self.largest)


class AdamSpec(NamedTuple):
    """A request to Adam.

    Attributes:
        device: device type.
        dtype: dtype of the (master) parameters.
        grad_dtype: dtype of the gradients.
        state_dtypes: dtypes of the two moments; uint8 ones are codes with exponents.
        out_dtype: dtype of the low-precision copy, or None if there is no copy.
        contiguous: whether all tensors are contiguous.
    """

    device: str
    dtype: torch.dtype
    grad_dtype: torch.dtype
    state_dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype | None
    contiguous: bool


ADAM: BackendRegistry[AdamSpec, Callable[..., None]] = BackendRegistry("adam")
REGISTRIES: tuple[BackendRegistry[AdamSpec, Any], ...] = (ADAM,)
EXAMPLE = AdamSpec("cpu", torch.float32, torch.float32, (torch.float32, torch.float32), torch.bfloat16, True)


def _torch_why_not(spec: AdamSpec) -> str | None:
    if {spec.grad_dtype, *spec.state_dtypes} != {spec.dtype}:
        return f"needs gradients and moments in the dtype of the parameters, {spec.dtype}"
    return None


def _chunked_why_not(spec: AdamSpec) -> str | None:
    if not spec.contiguous or spec.dtype.itemsize < 4:
        return "needs contiguous parameters of 32 or 64 bits"
    if spec.device != "cpu" and _torch_why_not(spec) is None:
        return f"torch's kernel updates whole tensors on {spec.device}"
    return None


def _triton_why_not(spec: AdamSpec) -> str | None:
    if not spec.contiguous:
        return "needs contiguous tensors"
    out = () if spec.out_dtype is None else (spec.out_dtype,)
    moments = tuple(dtype for dtype in spec.state_dtypes if dtype != torch.uint8)
    return triton_why_not(spec.device, spec.dtype, spec.grad_dtype, *moments, *out)


ADAM.register(Backend("triton", lazy("megalight.ops.adam.triton", "adam_step"), 20, _triton_why_not))
ADAM.register(Backend("torch", reference.torch_adam_step, 10, _torch_why_not))
ADAM.register(Backend("chunked", reference.chunked_adam_step, 15, _chunked_why_not))
ADAM.register(Backend("reference", reference.adam_step, 0, serve_all))


@remembered
def _choose(spec: AdamSpec, backend: str) -> Callable[..., None]:
    return ADAM.select(spec, backend).fn


@remembered
def _with_quantized(spec: AdamSpec, backend: str) -> bool:
    """Whether the chosen kernel also writes codes."""
    return spec.dtype == torch.float32 and ADAM.select(spec, backend).name == "triton"


@torch.no_grad()
def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float | Tensor,
    decoupled: bool = True,
    grad_scale: Tensor | None = None,
    out: Tensor | None = None,
    exponents: tuple[Tensor | None, Tensor | None] = (None, None),
    coded: Coded | None = None,
    backend: str = "auto",
) -> None:
    """Update ``param`` and both moments in place.

    The formula has bias correction, as in ``torch.optim.Adam`` and ``AdamW``::

        m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
        p -= lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)

    Args:
        param: ``[n]``: the (master) parameters.
        grad: ``[n]``: the gradient; it is not written.
        exp_avg: ``[n]``: the first moment, in any floating-point dtype, or codes of 8 bits (uint8).
        exp_avg_sq: ``[n]``: the second moment, likewise. :mod:`megalight.ops.adam.low_precision_moments` says how
            moments of fewer than 32 bits are rounded.
        lr: learning rate. Use a 0-dim device tensor if a CUDA graph captures the step.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decay coefficient.
        step: number of this step, counted from 1. A 0-dim device tensor is allowed.
        decoupled: whether the decay scales the parameter (AdamW). If not, it is added to the gradient (Adam).
        grad_scale: 0-dim device tensor that multiplies the gradient.
        out: ``[n]``: receives a copy of the new parameters in its own dtype.
        exponents: ``[ceil(n / 64)]``, uint8: those of the codes of each moment; None: it is no code.
        coded: receives codes of the new parameters, instead of ``out``. Triton's kernel writes them itself. Beside
            others, and for float64, they are cast afterwards.
        backend: name of a backend.

    Raises:
        ConfigurationError: both ``out`` and ``coded`` are given.
    """
    if coded is not None and out is not None:
        raise ConfigurationError("adam_step writes out or coded: a copy of the new parameters, or codes. Give one.")
    tensors = (param, grad, exp_avg, exp_avg_sq) if out is None else (param, grad, exp_avg, exp_avg_sq, out)
    spec = AdamSpec(
        param.device.type,
        param.dtype,
        grad.dtype,
        (exp_avg.dtype, exp_avg_sq.dtype),
        None if out is None else out.dtype,
        all(t.is_contiguous() for t in tensors),
    )
    # Only where there are codes: backends that serve none need not know of exponents.
    codes: dict[str, Any] = {} if exponents == (None, None) else {"exponents": exponents}
    written = coded is not None and _with_quantized(spec, backend)
    if written:
        codes["coded"] = coded
    _choose(spec, backend)(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        decoupled=decoupled,
        grad_scale=grad_scale,
        out=out,
        **codes,
    )
    if coded is not None and not written:
        coded.cast(param)

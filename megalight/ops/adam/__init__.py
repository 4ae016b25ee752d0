"""One in-place Adam or AdamW step on flat tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.cast_flat import cast_flat
from megalight.ops.common import lazy, serve_all, triton_why_not, wide
from megalight.ops.quantize.formats import DTYPES, Scheme
from megalight.registry import Backend, BackendRegistry, choose, remembered

MOMENT_BLOCK = 64
"""Elements that share an exponent. Parameters in flat buffers begin at multiples of it: no block has parts of two."""

MULTIPLIER, STEPS = -1640531535, -2048144789
"""Odd numbers, as int32, that spread bits of values and of steps over the high bits of a product."""

HALF_BITS, QUANTIZED_BITS = 16, 20
"""Bits of a float32 that bfloat16 and moments in 8 bits leave out."""
LOWEST = 32
"""Moments in 8 bits span at most 32 octaves, so exponents are at least this: a smaller one would have none."""

MAGNITUDE = (1 << 31) - 1
"""All bits but the sign."""


def exponents_like(data: Tensor) -> Tensor:
    """Make room for the exponents of a quantized moment: uint8, ``[ceil(n / MOMENT_BLOCK)]``, zero at first as it is.

    A moment in 16 bits is bfloat16. One in 8 bits is a float of three mantissa bits, and blocks of
    :data:`MOMENT_BLOCK` elements share the highest exponent that they reach. A first moment has a sign, and
    four bits for 16 octaves below that exponent. A second moment has none: its root is stored, in 32 octaves, and
    is never rounded to 0, so that no update is divided by 0.

    A value is rounded up with a probability that is its distance to the value below. The random number is a hash of
    the value and of the step. So it needs no state, is the same on each device and in each layout, and a resumed
    run repeats it. Without this, a second moment would never fall in 16 bits: 0.999 of it rounds back to all of it.

    All formats hold their values exactly in bfloat16, which is how checkpoints and other formats read them.
    """
    return torch.zeros(-(-data.numel() // MOMENT_BLOCK), dtype=torch.uint8, device=data.device)


def half_moment(values: Tensor, step: float | Tensor | None) -> Tensor:
    """Round values to bfloat16: at random if there is a step, else to the nearest one."""
    if step is None:
        return values.to(torch.bfloat16)
    bits = values.float().view(torch.int32)
    kept = (bits + _noise(bits, step, HALF_BITS)) & -(1 << HALF_BITS)
    return kept.view(torch.float32).to(torch.bfloat16)


def encode_moment(values: Tensor, data: Tensor, exponents: Tensor, second: bool, step: float | Tensor | None) -> None:
    """Round values to 8 bits: at random if there is a step, else to the nearest ones.

    Args:
        values: floating point, contiguous.
        data: uint8, as many; written.
        exponents: those of its blocks (:func:`exponents_like`); written.
        second: a second moment, which is not negative.
    """
    values = values.reshape(-1).float()
    bits = values.view(torch.int32)
    # From the bits before the root, whose last one differs between libraries.
    rounding = 1 << (QUANTIZED_BITS - 1) if step is None else _noise(bits, step, QUANTIZED_BITS)
    size = values.sqrt().view(torch.int32) if second else bits & MAGNITUDE
    # Sign and mantissa aside, these are the three highest bits of the mantissa under the exponent.
    steps = (size + rounding) >> QUANTIZED_BITS
    blocks = torch.nn.functional.pad(steps, (0, -len(steps) % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
    highest = (blocks.amax(1) >> 3).clamp_(LOWEST, 255)
    exponents.copy_(highest)
    limit = 255 if second else 127
    found = (blocks - (highest * 8 + 7 - limit)[:, None]).view(-1)[: len(steps)].clamp_(0, limit)
    if second:
        found = found.clamp_(min=1).mul_(size > 0)
    else:
        found |= (bits < 0).int() << 7
    data.view(-1).copy_(found)


def decode_moment(data: Tensor, exponents: Tensor, second: bool) -> Tensor:
    """Return the values, float32, in their shape."""
    limit = 255 if second else 127
    found = data.view(-1).int()
    size = found & limit
    highest = exponents.int().repeat_interleave(MOMENT_BLOCK)[: len(found)]
    values = torch.where(size > 0, (size + (highest * 8 + 7 - limit)) << QUANTIZED_BITS, 0).view(torch.float32)
    values = values.square() if second else torch.where(found > 127, -values, values)
    return values.view(data.shape)


def read_moment(moment: Tensor, exponents: Tensor | None, second: bool) -> Tensor:
    """Return a moment's values: floating-point ones as they are, those of quantized values in float32."""
    return moment if exponents is None else decode_moment(moment, exponents, second)


def write_moment(
    moment: Tensor, exponents: Tensor | None, values: Tensor, second: bool, step: float | Tensor | None = None
) -> None:
    """Store values in a moment, rounded to its format: at random if there is a step, else to the nearest ones."""
    if exponents is not None:
        encode_moment(values, moment, exponents, second, step)
    elif moment.dtype == torch.bfloat16:
        moment.copy_(half_moment(values, step))
    else:
        moment.copy_(values)


def _noise(bits: Tensor, step: float | Tensor, width: int) -> Tensor:
    """Return random numbers of ``width`` bits, which follow from the bits of values and the step."""
    shift = step.to(bits.device, torch.int32) * STEPS if isinstance(step, Tensor) else wrapped(int(step) * STEPS)
    # A product's high bits depend on all bits below them. int32 wraps around.
    return (((bits + shift) * MULTIPLIER) >> (32 - width)) & ((1 << width) - 1)


def wrapped(number: int) -> int:
    """Return a number modulo 2^32, as an int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def reference_adam_step(
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
) -> None:
    """Adam (Kingma and Ba 2015) or, with ``decoupled``, AdamW (Loshchilov and Hutter 2019)."""
    # Parameters in half precision are rounded once, after the whole update.
    stored, param = param, param.to(wide(param.dtype))
    grad = grad.to(param.dtype)
    if grad_scale is not None:
        grad = grad * grad_scale.to(param.dtype)
    # The decay comes before the update and uses the old parameter, as in `torch.optim.AdamW`.
    if weight_decay and decoupled:
        param = param * (1 - lr * weight_decay)
    elif weight_decay:
        grad = grad + weight_decay * param
    # Moments may be stored in fewer bits. The update uses them before they are rounded.
    first = beta1 * read_moment(exp_avg, exponents[0], False).to(param.dtype) + (1 - beta1) * grad
    second = beta2 * read_moment(exp_avg_sq, exponents[1], True).to(param.dtype) + (1 - beta2) * grad * grad
    write_moment(exp_avg, exponents[0], first, False, step)
    write_moment(exp_avg_sq, exponents[1], second, True, step)
    step = torch.as_tensor(step, dtype=torch.float64)  # 1 - beta**step loses digits in float32
    param = param - lr * (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
    stored.copy_(param)
    if out is not None:
        out.copy_(param)


def torch_adam_step(
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
) -> None:
    """Call the fused update. To scale the gradient and to write ``out`` take separate passes over memory."""
    # torch's own `grad_scale` argument divides, and needs a `found_inf`; so multiply first.
    if grad_scale is not None:
        grad = grad * grad_scale.to(grad.dtype)
    if isinstance(step, Tensor):
        # torch's kernel wants the step on the device, and does not advance it here.
        count = step.to(param.device, torch.float32)
    else:
        count = torch.full((), float(step), dtype=torch.float32, device=param.device)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [count],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    if out is not None:
        out.copy_(param)


SHARE = 1 << 17
"""Elements of a piece for each thread: 512 KiB per tensor, so that those of a step about fit into a core's cache."""


def piece() -> int:
    """Return the number of elements of a piece, a multiple of :data:`MOMENT_BLOCK`.

    A piece is scaled or widened, updated, and rounded while it is in the caches of the cores. Whole tensors would
    take the memory of a scaled gradient, which the host sets to zero in each step, and one more pass for every such
    change.
    """
    return SHARE * torch.get_num_threads()


def chunked_adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float | Tensor,
    out: Tensor | None = None,
    exponents: tuple[Tensor | None, Tensor | None] = (None, None),
    **options: Any,
) -> None:
    """Update pieces in turn; see :func:`megalight.ops.adam.adam_step`."""
    size = piece()
    flat = [tensor.view(-1) for tensor in (param, grad, exp_avg, exp_avg_sq)]
    for start in range(0, param.numel(), size):
        own, gradient, *moments = (tensor[start : start + size] for tensor in flat)
        blocks = slice(start // MOMENT_BLOCK, (start + size) // MOMENT_BLOCK)
        shared = [None if each is None else each[blocks] for each in exponents]
        wide = [
            read_moment(moment, each, bool(second)).to(param.dtype)
            for second, (moment, each) in enumerate(zip(moments, shared, strict=True))
        ]
        torch_adam_step(
            own,
            gradient.to(param.dtype),
            *wide,
            step=step,
            out=None if out is None else out.view(-1)[start : start + size],
            **options,
        )
        for second, (moment, each, values) in enumerate(zip(moments, shared, wide, strict=True)):
            if values is not moment:
                write_moment(moment, each, values, bool(second), step)


@dataclass(frozen=True)
class QuantizedOutput:
    """Where quantized parameters go, and how they are made: as :func:`megalight.ops.cast_flat.cast_flat` does.

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
    def data(self) -> Tensor:
        """``out`` in the scheme's 8-bit dtype."""
        return self.out.view(DTYPES[self.scheme.format])

    def cast(self, values: Tensor) -> None:
        """Quantize ``values [n]`` into it."""
        cast_flat(self.out, values, self.scheme, self.amax, self.rounded, largest=self.largest)


class AdamSpec(NamedTuple):
    """A request to Adam.

    Attributes:
        device: device type.
        dtype: dtype of the (master) parameters.
        grad_dtype: dtype of the gradients.
        state_dtypes: dtypes of the two moments; uint8 ones are quantized with exponents.
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
ADAM.register(Backend("torch", torch_adam_step, 10, _torch_why_not))
ADAM.register(Backend("chunked", chunked_adam_step, 15, _chunked_why_not))
ADAM.register(Backend("reference", reference_adam_step, 0, serve_all))


@remembered
def _with_quantized(spec: AdamSpec, backend: str) -> bool:
    """Whether the chosen kernel also writes quantized values."""
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
    quantized_out: QuantizedOutput | None = None,
    backend: str = "auto",
) -> None:
    """Update ``param`` and both moments in place.

    The formula has bias correction, as in ``torch.optim.Adam`` and ``AdamW``::

        m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
        p -= lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)

    Args:
        param: ``[n]``: the (master) parameters.
        grad: ``[n]``: the gradient; it is not written.
        exp_avg: ``[n]``: the first moment, in any floating-point dtype, or 8-bit values (uint8).
        exp_avg_sq: ``[n]``: the second moment, likewise. :mod:`megalight.ops.adam` says how
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
        exponents: ``[ceil(n / 64)]``, uint8: those of each moment; None: it is not quantized.
        quantized_out: the new parameters quantized, instead of ``out``. Triton's kernel writes them itself. Beside
            others, and for float64, they are cast afterwards.
        backend: name of a backend.

    Raises:
        ConfigurationError: both ``out`` and ``quantized_out`` are given.
    """
    if quantized_out is not None and out is not None:
        raise ConfigurationError("adam_step writes a copy of the new parameters to out or to quantized_out. Give one.")
    tensors = (param, grad, exp_avg, exp_avg_sq) if out is None else (param, grad, exp_avg, exp_avg_sq, out)
    spec = AdamSpec(
        param.device.type,
        param.dtype,
        grad.dtype,
        (exp_avg.dtype, exp_avg_sq.dtype),
        None if out is None else out.dtype,
        all(t.is_contiguous() for t in tensors),
    )
    # Only where moments are quantized: backends that serve none need not know of exponents.
    optional: dict[str, Any] = {} if exponents == (None, None) else {"exponents": exponents}
    written = quantized_out is not None and _with_quantized(spec, backend)
    if written:
        optional["quantized_out"] = quantized_out
    choose(ADAM, spec, backend)(
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
        **optional,
    )
    if quantized_out is not None and not written:
        quantized_out.cast(param)

"""``a b^T`` for two quantized matrices.

The backend ``reference`` multiplies the dequantized values in float64. It serves all schemes on all devices; emulation
uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.common import cuda_why_not, serve_all
from megalight.ops.quantize import Quantized, Scheme, quantize
from megalight.ops.scaled_mm import blockwise, microscaled
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request to a product.

    Attributes:
        device: device type.
        a, b: schemes of the factors.
        dtype: dtype of the result.
        bias: whether a bias is added.
    """

    device: str
    a: Scheme
    b: Scheme
    dtype: torch.dtype
    bias: bool = False


ScaledMM: TypeAlias = Callable[[Quantized, Quantized, torch.dtype, bool, Tensor | None], Tensor]
SCALED_MM: BackendRegistry[Spec, ScaledMM] = BackendRegistry("scaled_mm")
REGISTRIES = (SCALED_MM,)
EXAMPLE = Spec("cpu", Scheme("e4m3"), Scheme("e4m3"), torch.bfloat16)


def scaled_mm(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``a [M, K] x b [N, K] -> [M, N]``, and a bias on demand.

    Args:
        a: the left factor.
        b: the right factor, transposed.
        dtype: dtype of the result.
        bias: ``[N]`` of the same dtype. Where the product adds it, the sum is rounded once.
        fast: whether sums may have fewer bits than float32, which is good enough for forward passes.
        backend: name of a backend.

    Raises:
        BackendError: the named backend cannot serve these schemes on this device.
    """
    spec = Spec(a.data.device.type, a.scheme, b.scheme, dtype, bias is not None)
    return choose(spec, backend)(a, b, dtype, fast, bias)


def multiply_into(out: Tensor, a: Quantized, b: Quantized, *, fast: bool = False, backend: str = "auto") -> bool:
    """Write ``a b^T`` into ``out`` if torch can do so without a temporary tensor. Returns whether it did.

    ``fast`` and ``backend`` are those of :func:`scaled_mm`.
    """
    spec = Spec(a.data.device.type, a.scheme, b.scheme, out.dtype)
    if not writes_products(choose(spec, backend)) or not out.is_contiguous():
        return False
    torch._scaled_mm(
        a.data,
        b.data.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=out.dtype,
        use_fast_accum=fast,
        out=out,
    )
    return True


def writes_products(product: ScaledMM) -> bool:
    """Return whether a product is written straight into its place: others are rounded to bf16 first."""
    return product is _tensorwise


@remembered
def choose(spec: Spec, backend: str = "auto") -> ScaledMM:
    """Return the function that multiplies for ``spec``."""
    return SCALED_MM.select(spec, backend).fn


def _reference(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, bias: Tensor | None) -> Tensor:
    product = a.dequantize() @ b.dequantize().T
    return (product if bias is None else product + bias).to(dtype)


def _then_bias(
    product: Callable[[Quantized, Quantized, torch.dtype, bool], Tensor],
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
) -> Tensor:
    """Add the bias to what a product gives, in a kernel of its own."""
    y = product(a, b, dtype, fast)
    return y if bias is None else y + bias


def _tensorwise(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    return torch._scaled_mm(
        a.data,
        b.data.t(),
        bias=bias,
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _rowwise(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    y = torch._scaled_mm(
        a.data,
        b.data.t(),
        bias=bias,
        scale_a=a.scale.contiguous(),
        scale_b=b.scale.reshape(1, -1).contiguous(),
        out_dtype=torch.bfloat16,  # row-wise scales serve no other dtype
        use_fast_accum=fast,
    )
    return y.to(dtype)


FP32 = ("fp32", "power")


def _native_why_not(
    spec: Spec, product: ScaledMM, tiles: tuple[tuple[int, int], ...], capability: float, scales: tuple[str, ...]
) -> str | None:
    schemes = (spec.a, spec.b)
    bits = 4 if scales == ("e4m3",) else 8
    if any(s.scale not in scales or s.tile not in tiles or (s.format == "e2m1") != (bits == 4) for s in schemes):
        return f"serves {bits}-bit tiles {', '.join(map(str, tiles))} (0 means all) with {scales[0]} scales"
    if spec.a.format == spec.b.format == "e5m2":
        return "multiplies e5m2 by e4m3 only"
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"gives bfloat16, float16 or float32, not {spec.dtype}"
    if (reason := cuda_why_not(spec.device)) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability()
    if major + minor / 10 < capability:
        return f"needs a GPU of compute capability {capability}, and this one has {major}.{minor}"
    return _probe(product, spec)


def trial(spec: Spec, device: str) -> tuple[Quantized, Quantized, Tensor | None]:
    """Return factors ``[272, 384]`` and ``[144, 384]`` and the bias of a product that finds wrong libraries out.

    It fits into float16.
    """
    # A seed of its own: a probe must not move the random stream of the run.
    generator = torch.Generator().manual_seed(0)
    left, right = (
        # Rows of very different magnitude: a library that mixes up the scales cannot pass. Sizes are no multiples of
        # 128, so padding of scales is tested too.
        quantize((torch.randn(size, 384, generator=generator) * torch.logspace(-3, 1, size)[:, None]).to(device), each)
        for size, each in ((272, spec.a), (144, spec.b))
    )
    # About a third of the product's size: a library that forgets it cannot pass either.
    bias = (torch.randn(144, generator=generator) * 30).to(device, spec.dtype) if spec.bias else None
    return left, right, bias


@lru_cache(maxsize=64)
def _probe(product: ScaledMM, spec: Spec) -> str | None:
    """Try the product on this GPU; return why it fails, or None. Some torch releases refuse it or compute it wrong."""
    left, right, bias = trial(spec, "cuda")
    expected = _reference(left, right, torch.float64, False, bias)
    try:
        found = product(left, right, spec.dtype, False, bias).double()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"this torch refuses it here: {str(error).splitlines()[0]}"
    wrong = float((found - expected).norm() / expected.norm())
    # Loose, because fast accumulation and bf16 results are allowed.
    return None if wrong < 1e-2 else f"this torch gives a wrong product here (relative error {wrong:.1e})"


def _register(
    name: str,
    product: ScaledMM,
    priority: int,
    tiles: tuple[tuple[int, int], ...],
    needs: float,
    scales: tuple[str, ...] = FP32,
) -> None:
    why_not = partial(_native_why_not, product=product, tiles=tiles, capability=needs, scales=scales)
    SCALED_MM.register(Backend(name, product, priority, why_not))


MICROSCALED = partial(_then_bias, microscaled.product)
_register("torch_tensorwise", _tensorwise, 30, ((0, 0),), 8.9)
_register("torch_rowwise", _rowwise, 20, ((1, 0),), 9.0)
# Where the library does not add a bias: to results in float32, for example.
_register("torch_tensorwise_then_bias", partial(_then_bias, _tensorwise), 29, ((0, 0),), 8.9)
_register("torch_rowwise_then_bias", partial(_then_bias, _rowwise), 19, ((1, 0),), 9.0)
_register("torch_blockwise", partial(_then_bias, blockwise.product), 10, blockwise.BLOCKS, 9.0)
_register("torch_mxfp8", MICROSCALED, 10, ((1, 32),), 10.0, ("e8m0",))
_register("torch_nvfp4", MICROSCALED, 10, ((1, 16), (16, 16)), 10.0, ("e4m3",))
SCALED_MM.register(Backend("reference", _reference, 0, serve_all))

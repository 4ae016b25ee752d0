"""8-bit GEMMs that cuBLASLt adds to a float32 matrix in its epilogue.

torch offers these products only without the addition. So we call cuBLASLt, which torch has loaded, through its C
interface. Constants are from ``cublasLt.h`` and ``library_types.h`` of CUDA 12 and 13. :func:`why_not` tries a small
product first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.common import cuda_why_not
from megalight.ops.quantize import Quantized, Scheme, quantize
from megalight.ops.quantize.formats import Format

# Values of cudaDataType (CODES), cublasComputeType, and of the matmul descriptor and preference attributes.
CODES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_FP32 = 68
TRANSPOSE_A, SCALE_OF_A, SCALE_OF_B = 3, 17, 18
MAX_WORKSPACE, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
WORKSPACE = 32 << 20
ALIGNMENT = 256
"""Alignment of pointers that cuBLAS assumes by default, in bytes."""

LEAST_ALIGNMENT = 16
"""Alignment that 8-bit GEMMs need, in bytes."""

POINTER_BYTES = sizeof(c_void_p)


class _Found(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``; its first 64 bytes are the algorithm."""

    _fields_ = [
        # The layout must match the C struct byte for byte: cuBLASLt writes into it.
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@lru_cache(maxsize=1)
def _library() -> Any:
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    handle = POINTER(c_void_p)
    for name, arguments in {
        "Create": [handle],
        "MatmulDescCreate": [handle, c_int, c_int],
        "MatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
        "MatrixLayoutCreate": [handle, c_int, c_uint64, c_uint64, c_int64],
        "MatmulPreferenceCreate": [handle],
        "MatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
        "MatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, POINTER(_Found), POINTER(c_int)],
        "Matmul": [c_void_p] * 14 + [c_size_t, c_void_p],
    }.items():
        function = getattr(library, f"cublasLt{name}")
        function.argtypes, function.restype = arguments, c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise BackendError(f"cublasLt{name} returned {status}; choose another backend of scaled_accumulate.")


def _made(name: str, *arguments: Any) -> c_void_p:
    made = c_void_p()
    _call(name, byref(made), *arguments)
    return made


@lru_cache
def _handle(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return _made("Create")


@dataclass(frozen=True)
class _GemmPlan:
    """Descriptors and algorithm for products of one shape. They are never freed, because there are few shapes."""

    product: c_void_p
    left: c_void_p
    right: c_void_p
    out: c_void_p
    algorithm: Any


@cache
def _plan(
    device: int,
    rows: int,
    columns: int,
    tokens: int,
    left: torch.dtype,
    right: torch.dtype,
    strides: tuple[int, int, int],
    align: int,
) -> _GemmPlan:
    """Make a plan. cuBLAS is column-major: our row-major ``out [rows, columns]`` is its ``[columns, rows]``.

    ``strides`` are those between rows of the left factor, of the right one and of ``out``.
    """
    product = _made("MatmulDescCreate", COMPUTE_FP32, CODES[torch.float32])
    # 8-bit GEMMs exist in one form only: A transposed, B not. Both our factors are `[features, tokens]` in row-major
    # order, so both have the summed dim (tokens) contiguous, which is just this form.
    _set("MatmulDescSetAttribute", product, TRANSPOSE_A, c_int32(1))
    a = _made("MatrixLayoutCreate", CODES[left], tokens, columns, strides[0])
    b = _made("MatrixLayoutCreate", CODES[right], tokens, rows, strides[1])
    out = _made("MatrixLayoutCreate", CODES[torch.float32], columns, rows, strides[2])
    preference = _made("MatmulPreferenceCreate")
    _set("MatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, c_uint64(WORKSPACE))
    for attribute in MIN_ALIGNMENTS:
        _set("MatmulPreferenceSetAttribute", preference, attribute, c_uint32(align))
    found, count = _Found(), c_int()
    _call(
        # `out` stands for both C (the addend) and D (the result): the addition is in place.
        "MatmulAlgoGetHeuristic",
        _handle(device), product, a, b, out, out, preference, 1, byref(found), byref(count),
    )  # fmt: skip
    if not count.value or found.state:
        raise BackendError(
            f"cuBLASLt has no product [{rows}, {tokens}] x [{tokens}, {columns}] that adds to float32; choose another "
            "backend of scaled_accumulate."
        )
    return _GemmPlan(product, a, b, out, byref(found))


def _set(function: str, what: c_void_p, attribute: int, value: Any) -> None:
    _call(function, what, attribute, byref(value), sizeof(value))


def accumulate(out: Tensor, a: Quantized, b: Quantized, write: bool) -> None:
    """Implement :func:`megalight.ops.scaled_accumulate.scaled_accumulate`."""
    tokens = a.data.shape[1]
    products = _Products(out, a.data, b.data, write)
    if products.empty or not tokens:
        # cuBLASLt refuses empty matrices; a product over zero tokens is zero.
        if write:
            out.zero_()
        return
    left, right, target = a.data.data_ptr(), b.data.data_ptr(), out.data_ptr()
    # The heuristic assumes 256 bytes unless told otherwise. Views into flat buffers may start anywhere, and an
    # algorithm for a wider alignment would then fault or read wrong data, so the plan depends on the alignment.
    align = ALIGNMENT if not (left | right | target) % ALIGNMENT else LEAST_ALIGNMENT
    products.add(tokens, align, target, left, right, a.scale.data_ptr(), b.scale.data_ptr())


def accumulate_groups(out: Tensor, a: Quantized, b: Quantized, sizes: Sequence[int], group: int, write: bool) -> None:
    """Implement :func:`megalight.ops.scaled_accumulate.accumulate_groups` for one scale per matrix.

    Groups begin at multiples of ``group`` columns. Places are computed, not looked up in views.
    """
    products = _Products(out[0], a.data, b.data, write)
    left, right, target = a.data.data_ptr(), b.data.data_ptr(), out.data_ptr()
    scale, other = a.scale.data_ptr(), b.scale.data_ptr()
    scale_step, other_step, step = a.scale.stride(0) * 4, b.scale.stride(0) * 4, out.stride(0) * 4
    align = group if not (left | right | target | step) % group else LEAST_ALIGNMENT
    for number, size in enumerate(sizes):
        if size and not products.empty:
            # With the zeros after them: numbers of tokens differ from pass to pass, and each has a plan. The products
            # take as many tokens at once.
            tokens = -(-size // group) * group
            products.add(tokens, align, target, left, right, scale, other)
            left, right = left + tokens, right + tokens
        elif write:
            out[number].zero_()  # the memory holds anything when a step begins
        target, scale, other = target + step, scale + scale_step, other + other_step


class _Products:
    """Products that are added to float32 matrices of one shape: what they share is looked up once.

    Args:
        out: ``[rows, columns]``, one of the matrices.
        a: quantized ``[rows, L]``.
        b: quantized ``[columns, L]``.
        write: overwrite instead.
    """

    def __init__(self, out: Tensor, a: Tensor, b: Tensor, write: bool) -> None:
        left, right, target = a.stride(), b.stride(), out.stride()
        if left[1] != 1 or right[1] != 1 or target[1] != 1:
            raise BackendError("cublaslt needs contiguous rows of both factors and of `out`; choose another backend.")
        device = out.device
        self.rows, self.columns = out.shape
        self.empty = not (self.rows and self.columns)
        self.device = device.index
        self.dtypes = b.dtype, a.dtype
        # Column-major, the product is out^T = b a^T: the factors change places.
        self.strides = right[0], left[0], target[0]
        self.handle, library = _handle(device.index), _library()
        self.set_attribute, self.multiply = library.cublasLtMatmulDescSetAttribute, library.cublasLtMatmul
        # From torch's allocator, so that the memory belongs to the current stream and may be captured in a CUDA graph.
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.current_stream(device).cuda_stream
        # beta = 0 makes cuBLASLt ignore the old content, so NaN in uninitialized memory does no harm.
        self.factors = byref(c_float(1.0)), byref(c_float(0.0 if write else 1.0))

    def add(self, tokens: int, align: int, out: int, left: int, right: int, left_scale: int, right_scale: int) -> None:
        """Add the product over ``tokens`` columns of the matrices at these addresses, which are so aligned."""
        plan = _plan(self.device, self.rows, self.columns, tokens, *self.dtypes, self.strides, align)
        product, (one, addend) = plan.product, self.factors
        # Scales stay on the device: cuBLASLt reads them through these pointers when the kernel runs. The plan is shared
        # by all products of a shape, so the pointers are set for every call.
        status = self.set_attribute(product, SCALE_OF_A, byref(c_void_p(right_scale)), POINTER_BYTES)
        status = status or self.set_attribute(product, SCALE_OF_B, byref(c_void_p(left_scale)), POINTER_BYTES)
        status = status or self.multiply(
            self.handle, product, one, right, plan.left, left, plan.right, addend, out, plan.out, out, plan.out,
            plan.algorithm, self.workspace.data_ptr(), WORKSPACE, self.stream,
        )  # fmt: skip
        if status:
            raise BackendError(f"cuBLASLt's product returned {status}; choose another backend of scaled_accumulate.")


@lru_cache
def why_not(left: Format, right: Format) -> str | None:
    """Try a small product of these formats; return why it fails, or None."""
    if (reason := cuda_why_not("cuda")) is not None:
        return reason
    if torch.version.cuda is None:
        return "needs a torch that was built for CUDA"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return f"needs a GPU of compute capability 8.9, and this one has {major}.{minor}"
    generator = torch.Generator().manual_seed(0)
    a, b = (
        quantize(torch.randn(size, 96, generator=generator).cuda(), Scheme(form))
        # Sizes differ, so that swapped factors or a wrong leading dim cannot pass unnoticed.
        for size, form in ((48, left), (80, right))
    )
    # Begin from ones: a product that overwrites instead of adding is found too.
    out = torch.ones(48, 80, device="cuda")
    expected = 1 + a.dequantize() @ b.dequantize().T
    try:
        accumulate(out, a, b, False)
    except (BackendError, OSError, AttributeError) as error:
        return str(error).splitlines()[0]
    wrong = float((out - expected).norm() / expected.norm())
    return None if wrong < 1e-3 else f"cuBLASLt gives a wrong sum here (relative error {wrong:.1e})"

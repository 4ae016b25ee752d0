"""The one place that imports Gluon, Triton's language of layouts, barriers and roles of warps. Hopper's parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megalight.imports import require

_WHAT = "a Gluon kernel"
gl: Any = require("triton.experimental.gluon.language", _WHAT)
_gluon: Any = require("triton.experimental.gluon", _WHAT)
jit: Callable[[Callable[..., Any]], Any] = _gluon.jit
Descriptor: Any = require("triton.experimental.gluon.nvidia.hopper", _WHAT).TensorDescriptor
_hopper: Any = require("triton.experimental.gluon.language.nvidia.hopper", _WHAT)
fence_async_shared: Any = _hopper.fence_async_shared
mbarrier: Any = _hopper.mbarrier
tma: Any = _hopper.tma
warpgroup_mma: Any = _hopper.warpgroup_mma
warpgroup_mma_wait: Any = _hopper.warpgroup_mma_wait
_builtin: Callable[..., Any] = require("triton.experimental.gluon.language._core", _WHAT).builtin
_ir: Any = require("triton._C.libtriton", _WHAT).ir

if TYPE_CHECKING:
    from megalight.ops.jit import constexpr as constexpr
else:
    constexpr = gl.constexpr


def jit_for_all(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Return ``jit`` that compiles no kernels of their own for arguments ``names`` that are 1 or multiples of 16."""
    decorate: Callable[[Callable[..., Any]], Any] = _gluon.jit(do_not_specialize=list(names))
    return decorate


@_builtin
def add_to_memory(descriptor: Any, place: Any, block: Any, _semantic: Any = None) -> None:
    """Add a block in shared memory to one in memory, by the copy engine; to wait for like for a store.

    (Gluon of Triton 3.6 has the operation, but no name for it.)
    """
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    kind = _ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, block.handle)


LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
"""How blocks lie in shared memory: rows of 128 bytes, whose parts of 16 bytes change places."""


def described(x: Tensor, rows: int) -> Any:
    """Return the descriptor of blocks of ``rows`` tokens of one head, whose heads lie side by side."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    flat = x.as_strided((x.shape[0], width), (x.stride(0), 1))
    return Descriptor.from_tensor(flat, [rows, x.shape[2]], LAYOUT)

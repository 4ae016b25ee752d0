"""What fused kernels of TransformerEngine and Apex compute, in torch, with their arguments in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops import adam
from megalight.ops.activation import reference_activation, reference_gated
from megalight.ops.norm import reference_layer_norm, reference_rms_norm


def vjp(function: Any, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        own = [t.detach().requires_grad_() for t in inputs]
        return torch.autograd.grad(function(*own), own, grad)


def check_rows(x: Tensor, weight: Tensor) -> None:
    assert x.ndim == 2
    assert x.is_contiguous()
    assert x.dtype == weight.dtype
    assert x.shape[1] == weight.shape[0]


def multi_tensor_adam(
    chunk: int, flag: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, correct: int, decay: float,
) -> None:  # fmt: skip
    """Lists of gradients, parameters (with masters: copies), two moments, and masters where there are."""
    assert flag.dtype == torch.int32
    assert not flag.any()
    assert correct == 1
    assert type(step) is int
    assert chunk > 0
    (grad,), (param,), (first,), (second,), *masters = lists
    master = masters[0][0] if masters else param
    rest = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay, "step": step}
    adam.reference_adam_step(master, grad, first, second, **rest, decoupled=bool(mode), out=param if masters else None)


def multi_tensor_adam_capturable(
    chunk: int, flag: Tensor, lists: list[list[Tensor]], lr: Tensor, beta1: float, beta2: float, eps: float,
    step: Tensor, mode: int, correct: int, decay: float, inv_scale: Tensor,
) -> None:  # fmt: skip
    assert lr.dtype == torch.float32
    assert step.dtype == torch.int32
    (grad,), (param,), *_ = lists
    assert grad.dtype == param.dtype
    grad.mul_(inv_scale)
    multi_tensor_adam(chunk, flag, lists, float(lr), beta1, beta2, eps, int(step), mode, correct, decay)
    grad.fill_(torch.nan)  # the kernel may write here: whoever reads it afterwards is wrong


def multi_tensor_applier(op: Any, flag: Tensor, lists: list[list[Tensor]], *args: Any) -> None:
    op(2048 * 32, flag, lists, *args)


DTYPES = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16", torch.float64: "kFloat64"}


def te_norms() -> dict[str, Any]:
    """The four kernels of ``transformer_engine_torch``."""

    def rmsnorm_fwd(
        x: Tensor, w: Tensor, eps: float, out: None, quantizer: None, code: str, sm: int, centered: bool
    ) -> Any:
        check_rows(x, w)
        assert out is quantizer is None
        assert code == DTYPES[x.dtype]
        assert sm == 0
        assert not centered
        return reference_rms_norm(x, w, eps), None, (x.square().mean(1) + eps).rsqrt()

    def rmsnorm_bwd(dy: Tensor, x: Tensor, rstd: Tensor, w: Tensor, sm: int, centered: bool) -> Any:
        check_rows(dy, w)
        eps = float((rstd**-2 - x.square().mean(1)).mean())
        return vjp(lambda a, b: reference_rms_norm(a, b, eps), [x, w], dy)

    def layernorm_fwd(
        x: Tensor, w: Tensor, b: Tensor, eps: float, out: None, quantizer: None, code: str, sm: int, centered: bool
    ) -> Any:
        check_rows(x, w)
        assert b.shape == w.shape
        assert out is quantizer is None
        assert code == DTYPES[x.dtype]
        assert sm == 0
        assert not centered
        return reference_layer_norm(x, w, b, eps), x.mean(1), (x.var(1, correction=0) + eps).rsqrt()

    def layernorm_bwd(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, sm: int, centered: bool) -> Any:
        check_rows(dy, w)
        eps = float((rstd**-2 - x.var(1, correction=0)).mean())
        torch.testing.assert_close(mean, x.mean(1))
        return vjp(lambda a, b, c: reference_layer_norm(a, b, c, eps), [x, w, torch.zeros_like(w)], dy)

    return {f.__name__: f for f in (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)}


def te_activations() -> dict[str, Any]:
    """Both ways of every activation, plain and gated: ``gelu`` is the one with tanh, gates come first."""
    plain = {"silu": "silu", "gelu": "gelu_tanh", "qgelu": "quick_gelu", "relu": "relu", "srelu": "squared_relu"}
    gates = {"swiglu": "silu", "geglu": "gelu_tanh", "qgeglu": "quick_gelu", "reglu": "relu", "sreglu": "squared_relu"}
    found: dict[str, Any] = {}
    for names, formula in ((plain, reference_activation), (gates, reference_gated)):
        for name, kind in names.items():

            def forward(x: Tensor, quantizer: None, kind: str = kind, formula: Any = formula) -> Tensor:
                assert x.is_contiguous()
                assert quantizer is None
                out: Tensor = formula(x, kind)
                return out

            def backward(dy: Tensor, x: Tensor, quantizer: None, kind: str = kind, formula: Any = formula) -> Tensor:
                assert dy.is_contiguous()
                assert x.is_contiguous()
                assert quantizer is None
                return vjp(lambda a: formula(a, kind), [x], dy)[0]

            found |= {name: forward, f"d{name}": backward}
    return found


def general_gemm(
    a: Tensor, b: Tensor, out_dtype: Any = None, layout: str = "TN", accumulate: bool = False, out: Any = None,
    grad: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """``NT``: ``b^T a`` in row-major terms."""
    assert layout == "NT"
    assert grad
    assert out.is_contiguous()
    assert out_dtype == out.dtype
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert a.dtype == b.dtype
    product = b.T.to(out.dtype) @ a.to(out.dtype)
    out.copy_(out + product if accumulate else product)
    return out, None, None, None

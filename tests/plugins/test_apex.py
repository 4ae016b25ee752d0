from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops import adam as adam_op
from megalight.ops import linear as wgrad
from megalight.ops import norm as norm_op
from megalight.ops.norm import reference_layer_norm, reference_rms_norm
from megalight.plugins import apex as adam
from tests.ops.checks import check_adam, check_norms, check_weight_gradient
from tests.plugins import kernels
from tests.plugins.fakes import Fakes

WHY_NOT: dict[str, tuple[Callable[[Any], str | None], Any, str]] = {
    "rms": (adam.rms_why_not, norm_op.EXAMPLE, "fused_layer_norm_cuda"),
    "layer": (adam.layer_why_not, norm_op.EXAMPLE, "fused_layer_norm_cuda"),
    "weight gradient": (adam.weight_gradient_why_not, wgrad.EXAMPLE, "fused_weight_gradient_mlp_cuda"),
    "adam": (adam.adam_why_not, adam_op.EXAMPLE._replace(out_dtype=torch.bfloat16), "amp_C"),
}


def fused_rms_norm_affine(x: Tensor, weight: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
    assert shape == weight.shape
    return reference_rms_norm(x, weight, eps)


def fused_layer_norm_affine(x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
    assert shape == weight.shape == bias.shape
    return reference_layer_norm(x, weight, bias, eps)


def accumulate(x: Tensor, grad_y: Tensor, main_grad: Tensor) -> None:
    assert x.is_contiguous()
    assert grad_y.is_contiguous()
    assert main_grad.is_contiguous()
    main_grad.add_(grad_y.T.to(main_grad.dtype) @ x.to(main_grad.dtype))


def install(packages: Fakes) -> None:
    packages.add("apex")
    packages.add(
        "apex.normalization.fused_layer_norm",
        fused_rms_norm_affine=fused_rms_norm_affine,
        fused_layer_norm_affine=fused_layer_norm_affine,
    )
    packages.add("apex.multi_tensor_apply", multi_tensor_applier=kernels.multi_tensor_applier)
    packages.add("fused_layer_norm_cuda")
    names = {f"wgrad_gemm_accum_{kind}": accumulate for kind in ("fp32", "fp16")}
    packages.add("fused_weight_gradient_mlp_cuda", **names)
    adams = (kernels.multi_tensor_adam, kernels.multi_tensor_adam_capturable)
    packages.add("amp_C", **{f.__name__: f for f in adams})


@pytest.fixture
def apex(packages: Fakes) -> Fakes:
    install(packages)
    return packages


@pytest.mark.parametrize("name", WHY_NOT)
def test_all_serve_where_the_extensions_are(apex: Fakes, name: str) -> None:
    why_not, spec, _ = WHY_NOT[name]
    assert why_not(spec) is None


@pytest.mark.parametrize("name", WHY_NOT)
def test_an_extension_that_was_not_built_is_named(apex: Fakes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    why_not, spec, extension = WHY_NOT[name]
    monkeypatch.setitem(sys.modules, extension, None)
    assert f"{extension} could not be imported" in why_not(spec)


@pytest.mark.parametrize("name", WHY_NOT)
def test_an_absent_package_says_where_to_get_it(packages: Fakes, name: str) -> None:
    why_not, spec, _ = WHY_NOT[name]
    reason = why_not(spec)
    assert "needs the package apex, which is not installed" in reason
    assert "https://github.com/NVIDIA/apex" in reason
    assert "pip install" not in reason, "PyPI's apex is another package"


def test_the_other_apex_is_a_reason(packages: Fakes) -> None:
    packages.add("apex", "0.9.10.dev0")
    assert "apex.multi_tensor_apply could not be imported" in adam.adam_why_not(adam_op.EXAMPLE)


def test_what_it_does_not_serve(apex: Fakes) -> None:
    assert "weight in the dtype of the input" in adam.rms_why_not(norm_op.EXAMPLE._replace(weight_dtype=torch.float32))
    assert "half operands" in adam.weight_gradient_why_not(wgrad.EXAMPLE._replace(dtype=torch.float32))
    assert "in float32" in adam.adam_why_not(adam_op.EXAMPLE._replace(grad_dtype=torch.bfloat16))
    assert "contiguous" in adam.adam_why_not(adam_op.EXAMPLE._replace(contiguous=False))
    main_grad = torch.zeros(4, 6).T
    with pytest.raises(BackendError, match="contiguous main gradients"):
        adam.accumulate(main_grad, torch.ones(2, 6).bfloat16(), torch.ones(2, 4).bfloat16(), False)


def test_norms(apex: Fakes) -> None:
    check_norms(adam, "cpu", torch.float64, (5, 3, 24))


@pytest.mark.parametrize(("main_dtype", "kernel"), [(torch.float32, "fp32"), (torch.bfloat16, "fp16")])
def test_weight_gradient(apex: Fakes, main_dtype: torch.dtype, kernel: str) -> None:
    check_weight_gradient(adam.accumulate, "cpu", torch.bfloat16, main_dtype, 63, 12, 20)
    assert apex.called(f"wgrad_gemm_accum_{kernel}")


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_adam(apex: Fakes, decoupled: bool, tensors: bool, out_dtype: torch.dtype | None) -> None:
    check_adam(adam.adam_step, "cpu", 103, decoupled=decoupled, tensors=tensors, out_dtype=out_dtype)

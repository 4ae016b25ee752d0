"""TransformerEngine itself, against the float64 references: relative norms of 8e-3 in bfloat16, 2e-5 in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalight.models.gpt.config import GPTBackendConfig
from megalight.ops import activation as activation_op
from megalight.ops import adam as adam_op
from megalight.ops import linear as wgrad
from megalight.ops import norm as norm_op
from megalight.ops import use_backends
from megalight.ops.linear import linear
from megalight.plugins import transformer_engine
from megalight.plugins.transformer_engine import attention, kernels
from tests.ops.checks import check_activations, check_adam, check_norms, check_weight_gradient, error
from tests.ops.test_linear import with_main_grad
from tests.plugins.real import GOOD, MARKS, check_attention, check_model, need, ragged, serve, uniform

pytestmark = MARKS
NAME = "transformer_engine"


@pytest.fixture(autouse=True)
def _te() -> None:
    need(NAME, NAME, transformer_engine.register)


@pytest.mark.parametrize(("batch", "length"), [(2, 64), (1, 500), (2, 1024)])
@pytest.mark.parametrize(("heads", "dim"), [((8, 8), 64), ((8, 2), 128)])
@pytest.mark.parametrize("causal", [True, False])
def test_uniform_attention(batch: int, length: int, heads: tuple[int, int], dim: int, causal: bool) -> None:
    serve(attention.why_not, GOOD._replace(causal=causal))
    check_attention(NAME, uniform(batch, length), heads, dim, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_attention(causal: bool) -> None:
    check_attention(NAME, ragged(63, 1, 500, 129), (8, 2), 128, causal=causal)


@pytest.mark.parametrize("window", [17, 100])
def test_windows(window: int) -> None:
    check_attention(NAME, uniform(2, 512), (8, 2), 128, window=window)
    check_attention(NAME, ragged(63, 1, 500, 129), (8, 2), 128, window=window)


def test_keys_longer_than_queries() -> None:
    check_attention(NAME, replace(uniform(2, 64), keys=uniform(2, 320)), (8, 2), 64)
    check_attention(NAME, replace(ragged(7, 100), keys=ragged(63, 1000)), (8, 2), 64)


def test_views_of_a_packed_projection() -> None:
    packed = torch.randn(256, 12, 64, device="cuda").bfloat16().requires_grad_()
    q, k, v = packed.split((8, 2, 2), 1)
    out = attention.attention(q, k, v, uniform(2, 128), True, None, None, None, 0.0)
    expected = attention.attention(*(t.contiguous() for t in (q, k, v)), uniform(2, 128), True, None, None, None, 0.0)
    weight = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(each, packed, weight)[0] for each in (out, expected))
    assert error(ours, theirs) < 8e-3


@pytest.mark.parametrize("shape", [(64, 64), (500, 3, 128), (1000, 1000), (500, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for why_not in (kernels.rms_why_not, kernels.layer_why_not):
        serve(why_not, norm_op.NormSpec("cuda", dtype, dtype, shape[-1]))
    check_norms(kernels, "cuda", dtype, shape)


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(kind: str, dtype: torch.dtype) -> None:
    for why_not in (kernels.gated_why_not, kernels.activation_why_not):
        serve(why_not, activation_op.ActivationSpec("cuda", dtype, kind))
    check_activations(kernels, "cuda", dtype, (500, 1024), kind)


@pytest.mark.parametrize(("tokens", "out", "width"), [(64, 64, 128), (500, 304, 1000), (8192, 512, 256)])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient(main_dtype: torch.dtype, tokens: int, out: int, width: int) -> None:
    serve(kernels.weight_gradient_why_not, wgrad.WeightGradientSpec("cuda", torch.bfloat16, main_dtype))
    check_weight_gradient(kernels.accumulate, "cuda", torch.bfloat16, main_dtype, tokens, out, width)


def test_linear_adds_to_the_main_gradient() -> None:
    weight = with_main_grad(torch.randn(304, 200, device="cuda").bfloat16(), torch.float32)
    x = torch.randn(512, 200, device="cuda").bfloat16().requires_grad_()
    gradient = torch.randn(512, 304, device="cuda").bfloat16()
    use_backends(weight_gradient=NAME)
    try:
        for _ in range(2):
            linear(x, weight).backward(gradient)
    finally:
        use_backends(weight_gradient="auto")
    assert error(weight.main_grad, 2 * gradient.double().T @ x.double()) < 2e-5


def test_the_product_makes_no_temporary() -> None:
    main_grad = torch.zeros(4096, 4096, device="cuda")
    grad_y, x = (torch.randn(512, 4096, device="cuda").bfloat16() for _ in range(2))
    kernels.accumulate(main_grad, grad_y, x, False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.accumulate(main_grad, grad_y, x, False)
    assert torch.cuda.max_memory_allocated() - before < main_grad.nbytes // 2


@pytest.mark.parametrize("n", [1, 63, 1_000_003])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_adam(n: int, decoupled: bool, tensors: bool, out_dtype: torch.dtype | None) -> None:
    serve(kernels.adam_why_not, adam_op.EXAMPLE._replace(device="cuda", out_dtype=out_dtype))
    check_adam(kernels.adam_step, "cuda", n, decoupled=decoupled, tensors=tensors, out_dtype=out_dtype)


def test_adam_takes_half_gradients() -> None:
    check_adam(kernels.adam_step, "cuda", 1003, grad_dtype=torch.bfloat16, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_a_model_by_name(style: str) -> None:
    names = GPTBackendConfig(attention=NAME, norm=NAME, activation=NAME)
    check_model(style, names, weight_gradient=NAME)

from __future__ import annotations

import pytest
import torch

from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize.recipes import recipe
from megalight.plugins.transformer_engine.low_precision import KINDS, TransformerEngineProducts, why_not
from tests.ops.checks import error
from tests.ops.test_linear import with_main_grad

pytestmark = pytest.mark.gpu

BOUND = {"nvfp4": 0.35}
"""Beside bf16 products; 0.08 for all others."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [200, 512])
def test_layers_are_near_bf16(name: str, tokens: int) -> None:
    if (reason := why_not("cuda", recipe(name))) is not None:
        pytest.skip(reason)
    data = torch.randn(256, 384, device="cuda").bfloat16()
    inputs = [(torch.randn(tokens, 384).cuda().bfloat16(), torch.randn(tokens, 256).cuda().bfloat16()) for _ in "ab"]
    weight, session = with_main_grad(data.clone(), torch.float32), Session()
    state_of(weight).precision = TransformerEngineProducts(recipe(name), session)
    expected = torch.zeros_like(weight.main_grad)
    for step, (x, grad_y) in enumerate(inputs):
        leaf = x.clone().requires_grad_()
        with session.step(step):
            out = linear(leaf, weight)
            out.backward(grad_y)
        expected += grad_y.float().T @ x.float()
        assert leaf.grad is not None
        bound = BOUND.get(name, 0.08)
        assert 1e-3 < error(out, x.double() @ data.double().T) < bound
        assert 1e-3 < error(leaf.grad, grad_y.double() @ data.double()) < bound
    assert 1e-3 < error(weight.main_grad, expected) < bound


def test_tensorwise_casts_as_we_do() -> None:
    if (reason := why_not("cuda", recipe("tensorwise"))) is not None:
        pytest.skip(reason)
    data = torch.randn(256, 384, device="cuda").bfloat16()
    x, grad_y = (torch.randn(256, size, device="cuda").bfloat16() for size in (384, 256))
    found = []
    for kind in (TransformerEngineProducts, LowPrecision):
        weight, session = with_main_grad(data.clone(), torch.float32), Session()
        state_of(weight).precision = kind(recipe("tensorwise"), session)
        leaf = x.clone().requires_grad_()
        with session.step(0):
            out = linear(leaf, weight)
            out.backward(grad_y)
        found.append((out, leaf.grad, weight.main_grad))
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) < 5e-3

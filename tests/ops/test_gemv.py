"""Products of a single token."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from megalight.imports import has
from megalight.nn.init import initialize
from megalight.nn.mlp import MLP
from megalight.ops.jit import overlapping
from megalight.ops.linear import linear, takes_gemv
from megalight.ops.norm import rms_norm

SHAPES = [(64, 2048), (33, 4096), (48, 2056), (5, 40)]


def check(gemv: Any, out: int, size: int, device: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    shapes = (1, size), (out, size), (out,)
    x, weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    x /= size**0.5
    for added in (None, bias):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        found = gemv(x, weight, added)
        assert found.dtype == dtype
        assert float((found.double() - exact).norm() / exact.norm()) < tolerance
        residual = torch.randn(1, out, device=device).to(dtype)
        # The sum and the gate are those of kernels of their own, bit by bit.
        assert torch.equal(gemv(x, weight, added, residual), found + residual)
        wide = torch.randn(2 * out, size, device=device).to(dtype)
        pair = None if added is None else torch.cat([added, -added])
        gate, up = gemv(x, wide, pair).chunk(2, -1)
        exact = torch.nn.functional.silu(gate.double()) * up.double()
        found = gemv(x, wide, pair, gate="silu")
        assert float((found.double() - exact).norm() / exact.norm()) < tolerance


@pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="needs triton's interpreter")
@pytest.mark.parametrize(("out", "size"), SHAPES)
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_interpreted(out: int, size: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    check(importlib.import_module("megalight.ops.linear.gemv").gemv, out, size, "cpu", torch.float32, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("out", "size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(out: int, size: int, dtype: torch.dtype) -> None:
    check(importlib.import_module("megalight.ops.linear.gemv").gemv, out, size, "cuda", dtype, 3e-3)


@pytest.mark.gpu
def test_a_layer_of_one_token_is_that_of_its_modules() -> None:
    """The MLP of a single token runs as two kernels, and gives what its modules give one by one."""
    layer = MLP(256, 640).to("cuda", torch.bfloat16)
    initialize(layer, seed=1)
    hidden, residual = (torch.randn(1, 256, device="cuda").bfloat16() for _ in range(2))
    with torch.no_grad():
        found = layer.of_single(hidden, residual)
        assert found is not None
        wide = torch.cat([hidden, hidden])  # two tokens take the modules
        assert float((found.double() - (residual + layer(wide)[:1]).double()).norm() / found.double().norm()) < 5e-3
        layer.act.register_forward_hook(lambda *_: None)
        assert layer.of_single(hidden, residual) is None  # a hook sees its module run


@pytest.mark.gpu
def test_recorded_chains_wait_for_each_other() -> None:
    """Kernels that begin early read what those before them wrote: 200 replays equal runs without a graph."""
    torch.manual_seed(0)
    weights = [torch.randn(4096, 4096, device="cuda").bfloat16() / 64 for _ in range(8)]
    scale, x = torch.ones(4096, device="cuda").bfloat16(), torch.empty(1, 4096, device="cuda").bfloat16()

    def run() -> torch.Tensor:
        hidden = x
        for weight in weights:
            assert takes_gemv(hidden, weight)
            hidden = linear(rms_norm(hidden, scale, 1e-5), weight)
        return hidden

    with torch.no_grad():
        x.normal_()
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), overlapping(x.device):
            result = run()
        for _ in range(200):
            x.normal_()
            graph.replay()
            assert torch.equal(result, run())

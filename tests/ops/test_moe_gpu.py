"""The kernels of mixture of experts on a GPU, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from megalight.ops.activation import gated
from megalight.ops.grouped_linear import PRODUCT, WGRAD, GroupedLinearSpec, grouped_linear
from megalight.ops.permute import permutation, permute, unpermute
from megalight.ops.router import Rule, route
from tests.ops import moe_checks
from tests.ops.checks import error
from tests.ops.test_linear import with_main_grad

pytestmark = pytest.mark.gpu

GROUPS = [*moe_checks.GROUPS, (1024, 0, 3000, 77), tuple(37 * i % 200 for i in range(128)), (1,)]


@pytest.mark.parametrize("name", moe_checks.ROUTES)
@pytest.mark.parametrize(("alignment", "capacity"), [(1, None), (16, None), (128, None), (4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [70, 4096, 5000])
def test_permutation(name: str, alignment: int, capacity: int | None, dtype: torch.dtype, size: int) -> None:
    from megalight.ops.permute import triton

    moe_checks.check_permutation(triton, "cuda", name, alignment, capacity, dtype, size)


@pytest.mark.parametrize(("tokens", "k", "num_experts"), [(8192, 8, 128), (5000, 2, 8), (3000, 6, 384), (1, 1, 1)])
@pytest.mark.parametrize("alignment", [1, 128])
def test_many_tokens(tokens: int, k: int, num_experts: int, alignment: int) -> None:
    experts = torch.rand(tokens, num_experts, device="cuda").topk(k).indices
    found = permutation(experts, num_experts, alignment=alignment)
    exact = permutation(experts, num_experts, alignment=alignment, backend="reference")
    assert torch.equal(found.positions, exact.positions)
    assert torch.equal(found.sizes, exact.sizes)
    assert torch.equal(found.offsets, exact.offsets)


@pytest.mark.parametrize("rule", moe_checks.RULES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_experts", [16, 128])
def test_route(rule: Rule, biased: bool, num_experts: int) -> None:
    from megalight.ops.router import triton

    if biased and rule.score == "softmax" and not rule.pre_softmax:
        pytest.skip("there is nothing to add a bias to")
    for tokens in (5000, 1, 0):
        moe_checks.check_route(triton, "cuda", rule, tokens, num_experts, biased)


def test_experts_of_any_number() -> None:
    from megalight.ops.router import triton

    for num_experts in (1, 7, 60, 384):
        rule = Rule(min(6, num_experts), pre_softmax=True)
        moe_checks.check_route(triton, "cuda", rule, 999, num_experts, False)
        moe_checks.check_statistics(triton, "cuda", "sigmoid", 999, max(2, num_experts), True, True)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_statistics(score: str, pools: bool, masked: bool) -> None:
    from megalight.ops.router import triton

    for tokens in (17, 9000):
        moe_checks.check_statistics(triton, "cuda", score, tokens, 128, pools, masked)


@pytest.mark.parametrize("kind", ["silu", "quick_gelu", "squared_relu", "gelu"])
@pytest.mark.parametrize("shape", [(3, 63), (500, 768), (10, 7, 2880), (1000, 14336)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_activations(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from megalight.ops.activation import triton as weighted

    moe_checks.check_weighted(weighted, "cuda", dtype, shape, kind)


@pytest.mark.parametrize("backend", ["triton", "grouped_mm", "loop"])
@pytest.mark.parametrize("sizes", GROUPS, ids=lambda sizes: str(sizes)[:30])
@pytest.mark.parametrize("shape", [(24, 40), (512, 256), (1000, 2880)])
@pytest.mark.parametrize("tail", [0, 130])
def test_grouped_products(backend: str, sizes: tuple[int, ...], shape: tuple[int, int], tail: int) -> None:
    table = PRODUCT.table(GroupedLinearSpec("cuda", torch.bfloat16, torch.bfloat16, True, True))
    run, reason = {b.name: (b.fn, reason) for b, reason in table}[backend]
    if reason is not None:
        pytest.skip(reason)
    moe_checks.check_grouped_product(run, "cuda", torch.bfloat16, sizes, *shape, tail)


@pytest.mark.parametrize("backend", ["triton", "loop"])
@pytest.mark.parametrize("sizes", GROUPS, ids=lambda sizes: str(sizes)[:30])
@pytest.mark.parametrize("shape", [(24, 40), (512, 256), (1000, 2880)])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_grouped_weight_gradients(
    backend: str, sizes: tuple[int, ...], shape: tuple[int, int], main_dtype: torch.dtype
) -> None:
    table = WGRAD.table(GroupedLinearSpec("cuda", torch.bfloat16, main_dtype, True, True))
    run = {b.name: b.fn for b, _ in table}[backend]
    moe_checks.check_grouped_weight_gradient(run, "cuda", torch.bfloat16, main_dtype, sizes, *shape, 130)


def test_hopper_uses_its_own_kernels() -> None:
    spec = GroupedLinearSpec("cuda", torch.bfloat16, torch.bfloat16, False, True)
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    assert PRODUCT.select(spec).name in ("triton", "grouped_mm")
    assert WGRAD.select(spec).name == "triton"


def test_a_whole_layer_without_a_wait_and_in_a_graph() -> None:
    """Route, permute, two products, weighted SwiGLU and back: the host never waits, and a graph replays it."""
    tokens, hidden, ffn, num_experts = 512, 256, 128, 16
    x = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
    gate = torch.randn(num_experts, hidden, device="cuda")
    up = with_main_grad(torch.randn(num_experts, 2 * ffn, hidden, device="cuda").bfloat16() / 16, torch.float32)
    down = with_main_grad(torch.randn(num_experts, hidden, ffn, device="cuda").bfloat16() / 16, torch.float32)

    x_exact = x.detach().double().requires_grad_()
    weights = [w.detach().double().requires_grad_() for w in (up, down)]

    def ours() -> torch.Tensor:
        logits = x.float() @ gate.T
        routes = route(logits, Rule(4))
        where = permutation(routes.experts, num_experts, alignment=16)
        rows, probs = permute(x, where, routes.probs)
        inner = gated(grouped_linear(rows, up, where.offsets), weights=probs)
        return unpermute(grouped_linear(inner, down, where.offsets), where)

    ours().float().square().sum().backward()  # compiles, which may wait
    for t in (up, down):
        t.main_grad.zero_()
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = ours()
        out.float().square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    routes = route(x_exact @ gate.double().T, Rule(4), backend="reference")
    exact = torch.zeros_like(x_exact)
    for e in range(num_experts):
        token, slot = (routes.experts == e).nonzero(as_tuple=True)
        a, b = (x_exact[token] @ weights[0][e].T).chunk(2, -1)
        made = (torch.nn.functional.silu(a) * b * routes.probs[token, slot, None]) @ weights[1][e].T
        exact = exact.index_add(0, token, made)
    exact.square().sum().backward()
    assert error(out, exact) < 2e-2
    assert x.grad is not None
    assert x_exact.grad is not None
    assert error(x.grad, x_exact.grad) < 3e-2
    for found, right in zip((up, down), weights, strict=True):
        assert right.grad is not None
        assert error(found.main_grad, right.grad) < 3e-2
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph), torch.no_grad():
        captured = ours()
    graph.replay()
    assert torch.equal(captured, out)

"""cuDNN's graphs themselves, against the float64 reference: relative norms of 8e-3 in bfloat16, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.models.gpt import GPTBackendConfig
from megalight.ops.attention import attention, reference
from megalight.plugins import cudnn_frontend
from megalight.types import PackedSequences
from tests.ops.checks import check
from tests.plugins.real import GOOD, MARKS, check_attention, check_model, need, ragged, serve, uniform

pytestmark = MARKS
NAME = "cudnn_frontend"


@pytest.fixture(autouse=True)
def _there() -> None:
    need("cudnn", NAME, cudnn_frontend.register)
    serve(cudnn_frontend.why_not, GOOD)


@pytest.mark.parametrize(("heads", "dim"), [((8, 8), 64), ((8, 2), 128), ((4, 1), 80), ((4, 2), 256)])
@pytest.mark.parametrize("causal", [True, False])
def test_uniform(heads: tuple[int, int], dim: int, causal: bool) -> None:
    for sequences in (uniform(2, 500), uniform(3, 63), uniform(3, 1)):
        check_attention(NAME, sequences, heads, dim, causal=causal)


@pytest.mark.parametrize("window", [None, 0, 17, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged(window: int | None, causal: bool) -> None:
    for lengths in ((63, 1, 500, 129), (100, 93, 400, 100), tuple(range(30, 47))):
        check_attention(NAME, ragged(*lengths), (8, 2), 128, causal=causal, window=window)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_keys_longer_than_queries(window: int | None, sink: bool) -> None:
    check_attention(NAME, replace(uniform(2, 17), keys=uniform(2, 300)), (8, 2), 64, window=window, sink=sink)
    check_attention(NAME, replace(ragged(7, 100), keys=ragged(63, 1000)), (8, 2), 64, window=window, sink=sink)


@pytest.mark.parametrize("sequences", [uniform, ragged], ids=["uniform", "ragged"])
def test_values_narrower_than_keys(sequences: Callable[..., PackedSequences]) -> None:
    packed = uniform(2, 250) if sequences is uniform else ragged(63, 1, 307, 129)
    check(
        lambda q, k, v: attention(q, k, v, packed, scale=0.135, backend=NAME),
        lambda q, k, v: reference.attention(q, k, v, packed, True, 0.135, None, None, 0.0),
        [torch.randn(500, 4, dim, device="cuda").bfloat16() for dim in (192, 192, 128)],
        poison=False,
    )


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_softcap(window: int | None, sink: bool) -> None:
    for sequences in (uniform(2, 301), ragged(63, 1, 500, 129)):
        check_attention(NAME, sequences, (8, 2), 128, softcap=5.0, window=window, sink=sink)


def test_sinks() -> None:
    check_attention(NAME, uniform(2, 500), (8, 2), 128, window=100, sink=True)
    check_attention(NAME, ragged(63, 1, 500), (8, 2), 64, sink=True)


@pytest.mark.parametrize("sequences", [uniform, ragged], ids=["uniform", "ragged"])
def test_in_a_recorded_graph(sequences: Callable[..., PackedSequences]) -> None:
    """Recorded after a call, and run with other values."""
    packed = uniform(2, 128) if sequences is uniform else ragged(100, 156)
    tensors = [torch.randn(256, heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (8, 2, 2)]
    weight = torch.randn(256, 8, 64, device="cuda").bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(*tensors, packed, backend=NAME), tensors, weight)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(0.5)
    graph.replay()
    for made, expected in zip(found, step(), strict=True):
        torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2)


def test_auto_takes_it_for_windows_and_sinks() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on Hopper")
    q, k, v = (torch.randn(3000, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    sequences, sink = uniform(2, 1500), torch.randn(8, device="cuda").bfloat16()
    cases: list[dict[str, Any]] = [{"window": 1100}, {"sink": sink}]
    for options in cases:
        # The kernel's own additions always have the same order in the forward pass.
        assert torch.equal(*(attention(q, k, v, sequences, backend=name, **options) for name in ("auto", NAME)))
    check_attention("auto", sequences, (8, 2), 128, window=1100)
    check_attention("auto", sequences, (8, 2), 128, sink=True)


def test_a_model_by_name() -> None:
    check_model("windowed", GPTBackendConfig(attention=NAME))

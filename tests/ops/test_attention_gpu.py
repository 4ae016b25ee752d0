from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops.attention import attention, reference_attention
from megalight.types import PackedSequences
from tests.ops.checks import check
from tests.ops.checks import check_attention as check_kernel

pytestmark = pytest.mark.gpu


def uniform(batch: int, length: int) -> PackedSequences:
    return PackedSequences.of_uniform(batch, length, "cuda")


def ragged(*lengths: int) -> PackedSequences:
    return PackedSequences.of_lengths(lengths, "cuda")


def check_attention(
    backend: str,
    sequences: PackedSequences,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    keys = sequences.keys or sequences
    shapes = ((sequences.num_tokens, heads), (keys.num_tokens, kv_heads), (keys.num_tokens, kv_heads))
    check(
        lambda q, k, v: attention(q, k, v, sequences, causal=causal, window=window, backend=backend),
        lambda q, k, v: reference_attention(q, k, v, sequences, causal, None, window, None, 0.0),
        [torch.randn(*shape, dim, device="cuda").to(dtype) for shape in shapes],
        poison=False,
    )


@pytest.mark.parametrize("backend", ["cudnn", "varlen", "sdpa", "auto"])
@pytest.mark.parametrize(("batch", "length"), [(2, 63), (1, 500), (2, 1000), (3, 1), (2, 1024)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 64), (8, 2, 128), (4, 1, 80)])
@pytest.mark.parametrize("causal", [True, False])
def test_uniform(backend: str, batch: int, length: int, heads: int, kv_heads: int, dim: int, causal: bool) -> None:
    check_attention(backend, uniform(batch, length), heads, kv_heads, dim, causal=causal)


@pytest.mark.parametrize("backend", ["varlen", "auto"])
@pytest.mark.parametrize("sequences", [uniform, ragged], ids=["uniform", "ragged"])
def test_values_narrower_than_keys(sequences: Callable[..., PackedSequences], backend: str) -> None:
    """The heads of DeepSeek-V3: 192 features of queries and keys, 128 of values."""
    packed = sequences(2, 250) if sequences is uniform else ragged(63, 1, 307, 129)
    check(
        lambda q, k, v: attention(q, k, v, packed, scale=0.135, backend=backend),
        lambda q, k, v: reference_attention(q, k, v, packed, True, 0.135, None, None, 0.0),
        [torch.randn(500, 4, dim, device="cuda").bfloat16() for dim in (192, 192, 128)],
        poison=False,
    )


@pytest.mark.parametrize("backend", ["triton", "varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 0, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged(backend: str, window: int | None, causal: bool) -> None:
    check_attention(backend, ragged(63, 1, 500, 129), 8, 2, 128, causal=causal, window=window)


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 50])
def test_keys_longer_than_queries(backend: str, window: int | None) -> None:
    for sequences in (
        replace(uniform(3, 1), keys=ragged(63, 500, 1)),
        replace(ragged(7, 100), keys=ragged(63, 1000)),
        replace(uniform(2, 17), keys=uniform(2, 300)),
    ):
        check_attention(backend, sequences, 8, 2, 64, window=window)


def test_float32() -> None:
    check_attention("auto", uniform(2, 63), 4, 2, 64, dtype=torch.float32)
    check_attention("auto", ragged(63, 100), 4, 2, 64, dtype=torch.float32)


def test_views_of_a_packed_projection() -> None:
    sequences = uniform(2, 128)
    packed = torch.randn(256, 12, 64, device="cuda").bfloat16()
    q, k, v = packed.split((8, 2, 2), 1)
    expected = reference_attention(q.double(), k.double(), v.double(), sequences, True, None, None, None, 0.0)
    for backend in ("cudnn", "varlen", "sdpa"):
        out = attention(q, k, v, sequences, backend=backend)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["cudnn", "varlen"])
def test_dropout_keeps_the_mean(backend: str) -> None:
    q = k = torch.zeros(256, 8, 64, device="cuda").bfloat16().requires_grad_()
    v = torch.ones(256, 8, 64, device="cuda").bfloat16().requires_grad_()
    out = attention(q, k, v, uniform(1, 256), causal=False, dropout=0.25, backend=backend)
    out.float().sum().backward()
    assert out.float().std() > 0.005
    assert out.float().mean().item() == pytest.approx(1, abs=0.02)
    assert v.grad is not None
    assert v.grad.float().sum().item() == pytest.approx(out.float().sum().item(), rel=2e-2)


def test_named_backend_refuses() -> None:
    q = torch.randn(64, 4, 64, device="cuda").bfloat16()
    with pytest.raises(BackendError, match="needs equally long sequences"):
        attention(q, q, q, ragged(30, 34), backend="cudnn")


@pytest.mark.filterwarnings("ignore")  # torch's compiler uses what torch deprecates
@pytest.mark.parametrize("backend", ["flex", "triton"])
@pytest.mark.parametrize("lengths", [(256, 256), (300, 1, 129), (1000,)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 4, 256), (4, 4, 64)])
def test_soft_caps(
    backend: str, lengths: tuple[int, ...], window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    """The heads of Gemma-2 among them. Other lengths must not give up the compiled kernel."""
    sequences = ragged(*lengths)
    check(
        lambda q, k, v: attention(q, k, v, sequences, window=window, softcap=20.0, backend=backend),
        lambda q, k, v: reference_attention(q, k, v, sequences, True, None, window, 20.0, 0.0),
        [3 * torch.randn(sum(lengths), n, dim, device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads)],
        poison=False,
    )


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(
    ("lengths", "keys", "causal", "window", "softcap"),
    [
        ([300, 1, 211], None, True, None, None),
        ([64, 448], None, False, None, None),
        ([300, 212], None, True, 37, None),
        ([512], None, True, 3, None),
        ([300, 212], None, False, 100, 20.0),
        ([100, 140], [300, 212], True, 50, None),
    ],
)
@pytest.mark.parametrize(
    "sizes", [(8, 2, 128, 128), (4, 2, 8, 8), (4, 2, 64, 128), (6, 6, 80, 80), (4, 2, 256, 256), (4, 4, 192, 128)]
)
def test_triton(
    lengths: list[int],
    keys: list[int] | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sizes: tuple[int, int, int, int],
    sunk: bool,
) -> None:
    from megalight.ops.attention import triton

    torch.manual_seed(0)
    check_kernel(triton, "cuda", torch.bfloat16, lengths, keys, causal, window, softcap, sizes, sunk)


@pytest.mark.parametrize("request_", [{"window": 10}, {"softcap": 5.0}, {"sink": torch.zeros(4)}])
def test_the_choice_of_what_cudnn_lacks(request_: dict[str, Any]) -> None:
    """Packed sequences, windows and soft caps take our kernel; sinks on equal sequences stay with cuDNN's."""
    given = {name: x.to("cuda", torch.bfloat16) if isinstance(x, torch.Tensor) else x for name, x in request_.items()}
    q = torch.randn(128, 4, 64, device="cuda").bfloat16()
    named = "block" if "sink" in given else "triton"
    found, wanted = (attention(q, q, q, uniform(2, 64), backend=backend, **given) for backend in ("auto", named))
    assert torch.equal(found, wanted)
    found, wanted = (attention(q, q, q, ragged(28, 100), backend=backend, **given) for backend in ("auto", "triton"))
    assert torch.equal(found, wanted)

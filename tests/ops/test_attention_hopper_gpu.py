from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalight.ops.attention import attention, hopper, reference_attention
from megalight.types import PackedSequences

pytestmark = pytest.mark.gpu


def packed(lengths: list[int], keys: list[int] | None) -> PackedSequences:
    sequences = PackedSequences.of_lengths(lengths, "cuda")
    return sequences if keys is None else replace(sequences, keys=PackedSequences.of_lengths(keys, "cuda"))


def heads_of(tokens: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, and keys and values that are parts of wider rows, as in a model."""
    q = torch.randn(tokens, heads, 128, device="cuda").to(dtype)
    return (q, *torch.randn(keys, kv_heads, 256, device="cuda").to(dtype).split([128, 128], -1))


@pytest.fixture(autouse=True)
def _served() -> None:
    q = torch.zeros(1024, 1, 128, device="cuda", dtype=torch.bfloat16)
    if not hopper.serves(q, q, packed([1024], None), True, None):
        pytest.skip("another GPU, or another version of Triton")


@pytest.mark.parametrize(
    ("lengths", "keys", "causal", "window", "softcap", "heads", "sunk", "dtype"),
    [
        ([300, 1, 211], None, True, None, None, (8, 2), False, torch.bfloat16),
        ([700, 300, 1100], None, True, None, None, (48, 12), False, torch.bfloat16),
        ([64, 448], None, False, None, None, (8, 2), False, torch.bfloat16),
        ([300, 212, 500], None, True, 37, None, (3, 3), True, torch.bfloat16),
        ([512], None, True, 3, None, (8, 2), False, torch.bfloat16),
        ([300, 212], None, False, 100, 20.0, (8, 2), False, torch.bfloat16),
        ([100, 140], [300, 212], True, 50, None, (3, 3), False, torch.float16),
        ([300, 1, 211], None, True, None, 5.0, (8, 2), True, torch.float16),
    ],
)
def test_the_reference(
    lengths: list[int],
    keys: list[int] | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    heads: tuple[int, int],
    sunk: bool,
    dtype: torch.dtype,
) -> None:
    from megalight.ops.attention import triton as forward
    from megalight.ops.attention import triton_backward as backward

    torch.manual_seed(0)
    sequences = packed(lengths, keys)
    q, k, v = heads_of(sum(lengths), sum(keys or lengths), *heads, dtype)
    sink = torch.randn(heads[0], device="cuda").to(dtype) if sunk else None
    options = (sequences, causal, 0.1, window, softcap)
    out, lse = hopper.run_forward(q, k, v, sink, *options)
    wide = [x.double().requires_grad_() for x in (q, k, v)] + ([] if sink is None else [sink.double()])
    exact = reference_attention(*wide[:3], *options, 0.0, *wide[3:])
    grad = torch.randn_like(out)
    *found, delta = hopper.run_backward(grad, q, k, v, out, lse, *options)
    assert torch.allclose(delta, backward.run_delta(out, grad), rtol=1e-4, atol=1e-3)
    wanted = torch.autograd.grad(exact, wide[:3], grad.double())
    for x, y in zip((out, *found), (exact.detach(), *wanted), strict=True):
        assert float((x.double() - y).norm() / y.norm()) < (8e-3 if dtype == torch.bfloat16 else 2e-3)
    _, other = forward.launch_forward(q, k, v, sink, *options)
    assert torch.allclose(lse, other, rtol=1e-4, atol=1e-3)


def test_the_same_bits_again() -> None:
    sequences = packed([1500, 700, 300], None)
    q, k, v = heads_of(2500, 2500, 24, 6, torch.bfloat16)
    first, *others = [hopper.run_forward(q, k, v, None, sequences, True, 0.1, 333, None)[0] for _ in range(4)]
    assert all(torch.equal(first, other) for other in others)


def test_deterministic_runs_have_the_same_bits_again() -> None:
    q, k, v = (x.requires_grad_() for x in heads_of(2600, 2600, 8, 2, torch.bfloat16))
    sequences, grad = packed([2500, 100], None), torch.randn_like(q)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, sequences, backend="triton"), (q, k, v), grad)

    assert hopper.serves_backward(q, v, sequences, True, None)
    found = run()
    torch.use_deterministic_algorithms(True)
    try:
        assert not hopper.serves_backward(q, v, sequences, True, None)
        first, *others = [run() for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for other in others for x, y in zip(other, first, strict=True))
    assert all(float((x - y).float().norm() / y.float().norm()) < 8e-3 for x, y in zip(found, first, strict=True))


def test_short_documents_keep_small_blocks() -> None:
    q = torch.zeros(1024, 1, 128, device="cuda", dtype=torch.bfloat16)
    assert hopper.serves(q, q, packed([1024], None), True, None)
    assert not hopper.serves(q, q, packed([1024], None), True, 255)
    assert not hopper.serves(q, q, packed([256] * 4, None), True, None)
    assert not hopper.serves(q[..., :64], q[..., :64], packed([1024], None), True, None)

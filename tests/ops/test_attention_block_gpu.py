"""Kernels in half types beside the float64 reference; the bound on relative norms is that of the other GPU tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.attention_block import block_attention, block_attention_backward
from megalight.ops.attention_block.torch_kernels import reference_backward, reference_forward
from megalight.ops.attention_merge import merge
from megalight.types import PackedSequences
from tests.ops.checks import TOLERANCE, check_merge, error, poisoned

pytestmark = pytest.mark.gpu

HEADS = [(8, 8, 64), (8, 2, 128), (4, 1, 80)]
SHAPES = [(2, 126, 126), (1, 512, 256), (1, 256, 512), (2, 250, 500), (1, 1024, 2048), (2, 1090, 1090)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def inputs(batch: int, queries: int, keys: int, heads: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    count, kv_count, dim = heads
    return [random(batch, *shape, dim, dtype=dtype) for shape in ((queries, count), (keys, kv_count), (keys, kv_count))]


def check_block(
    backend: str,
    tensors: list[Tensor],
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
) -> None:
    """Output, log-sum-exp and gradients of one block."""
    dtype = tensors[0].dtype
    exact = [t.double() for t in tensors]
    wanted, wanted_lse = reference_forward(*exact, sequences, causal, scale, window)
    options = {"causal": causal, "scale": scale, "window": window, "backend": backend}
    out, lse = block_attention(*tensors, sequences, **options)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, torch.float32, wanted.shape, wanted_lse.shape)
    assert error(out, wanted) <= TOLERANCE[dtype]
    assert error(lse, wanted_lse) <= 1e-4
    grad = torch.randn_like(out)
    expected = reference_backward(grad.double(), *exact, wanted, wanted_lse, sequences, causal, scale, window)
    grads = block_attention_backward(grad, *tensors, out, lse, sequences, **options)
    for name, found, exactly in zip("qkv", grads, expected, strict=True):
        assert found.shape == exactly.shape
        assert found.dtype == dtype
        assert error(found, exactly) <= 1.5 * TOLERANCE[dtype], (name, error(found, exactly))


@pytest.mark.parametrize("backend", ["cudnn", "triton", "varlen"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("batch", "queries", "keys"),
    [(2, 126, 126), (1, 512, 256), (1, 256, 512), (2, 250, 500), (1, 1024, 2048), (2, 1090, 1090)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_dense(backend: str, heads: tuple[int, int, int], batch: int, queries: int, keys: int, causal: bool) -> None:
    if causal and queries != keys:
        pytest.skip("causal blocks are square")
    check_block(backend, inputs(batch, queries, keys, heads, torch.bfloat16), None, causal)


@pytest.mark.parametrize("backend", ["cudnn", "triton", "varlen"])
def test_float16_and_a_scale(backend: str) -> None:
    check_block(backend, inputs(1, 192, 192, HEADS[1], torch.float16), None, True, 0.2)


@pytest.mark.parametrize("backend", ["triton", "varlen"])
@pytest.mark.parametrize("heads", HEADS)
def test_packed(backend: str, heads: tuple[int, int, int]) -> None:
    """Single queries and keys among them; the last two are long enough for kernels with roles for warps."""
    queries = PackedSequences.of_lengths([63, 1, 500, 130], "cuda")
    check_block(backend, inputs(1, 694, 694, heads, torch.bfloat16), queries, True)
    for lengths in ([31, 7, 250, 65], [126, 1, 1, 300], [1260, 1, 701, 300]):
        sequences = replace(queries, keys=PackedSequences.of_lengths(lengths, "cuda"))
        check_block(backend, inputs(1, 694, sum(lengths), heads, torch.bfloat16), sequences, False)
    sequences = replace(queries, keys=PackedSequences.of_lengths([1260, 1, 701, 300], "cuda"))
    check_block(backend, inputs(1, 694, 2262, heads, torch.bfloat16), sequences, True)
    single = replace(PackedSequences.of_uniform(4, 1, "cuda"), keys=PackedSequences.of_lengths([3, 70, 200, 9], "cuda"))
    check_block("auto", inputs(1, 4, 282, heads, torch.bfloat16), single, False)


@pytest.mark.parametrize("backend", ["triton", "varlen"])
@pytest.mark.parametrize("window", [5, 100, 900])
def test_windows(backend: str, window: int) -> None:
    sequences = PackedSequences.of_lengths([1063, 1, 500], "cuda")
    sequences = replace(sequences, keys=PackedSequences.of_lengths([1700, 9, 500], "cuda"))
    check_block(backend, inputs(1, 1564, 2209, HEADS[1], torch.bfloat16), sequences, True, window=window)


@pytest.mark.parametrize("causal", [True, False])
def test_values_narrower_than_keys(causal: bool) -> None:
    """The heads of DeepSeek-V3: 192 features of queries and keys, 128 of values."""
    q, k, v = inputs(2, 250, 250, (4, 4, 192), torch.bfloat16)
    check_block("varlen", [q, k, v[..., :128]], None, causal, 0.135)
    packed = [t.reshape(1, 500, 4, -1) for t in (q, k, v[..., :128])]
    check_block("varlen", packed, PackedSequences.of_lengths([63, 1, 307, 129], "cuda"), causal, 0.135)


@pytest.mark.parametrize("backend", ["cudnn", "triton", "varlen"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_merged_blocks_add_up(backend: str, heads: tuple[int, int, int], batch: int) -> None:
    check_merged_blocks(backend, heads, batch)


def check_merged_blocks(backend: str, heads: tuple[int, int, int], batch: int) -> None:
    """As a ring computes them: its own causal block, all queries with half of the keys, half with all keys.

    Keys and values lie beside one another, and halves are views.
    """
    q, k, v = inputs(batch, 256, 3 * 256, heads, torch.bfloat16)
    kv = torch.cat((k, v), -1)
    dim = heads[2]
    k, v = kv[..., :dim], kv[..., dim:]
    everything, half = slice(0, 256), slice(128, 256)
    blocks = [(everything, slice(0, 256), True), (everything, slice(256, 384), False), (half, slice(512, 768), False)]
    exact = [t.double() for t in (q, k, v)]
    total = torch.zeros_like(exact[0]), torch.full((batch, heads[0], 256), -torch.inf, device="cuda").double()
    mine = torch.zeros_like(q, dtype=torch.float32), total[1].float()
    for rows, keys, causal in blocks:
        target = total[0][:, rows], total[1][:, :, rows]
        part = reference_forward(exact[0][:, rows], exact[1][:, keys], exact[2][:, keys], None, causal, None)
        merge(*target, *part, into=target)
        target = mine[0][:, rows], mine[1][:, :, rows]
        part = block_attention(q[:, rows], k[:, keys], v[:, keys], causal=causal, backend=backend)
        merge(*target, *part, into=target)
    out, lse = mine[0].bfloat16(), mine[1]
    assert error(out, total[0]) <= TOLERANCE[torch.bfloat16]
    assert error(lse, total[1]) <= 1e-4
    grad = torch.randn_like(q)
    sums = [torch.zeros_like(t) for t in exact]
    wanted = [torch.zeros_like(t) for t in exact]
    for rows, keys, causal in blocks:
        given = (grad[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
        parts = block_attention_backward(*given, causal=causal, backend=backend)
        exactly = reference_backward(
            grad[:, rows].double(), exact[0][:, rows], exact[1][:, keys], exact[2][:, keys],
            total[0][:, rows], total[1][:, :, rows], None, causal, None,
        )  # fmt: skip
        for place, (found, true) in enumerate(zip(parts, exactly, strict=True)):
            where = rows if place == 0 else keys
            sums[place][:, where] += found
            wanted[place][:, where] += true
    for name, found, true in zip("qkv", sums, wanted, strict=True):
        assert error(found, true) <= 1.5 * TOLERANCE[torch.bfloat16], (name, error(found, true))


def test_choices() -> None:
    """Dense half types go to cuDNN, packed ones to our kernels, others to the reference."""
    q, k, v = inputs(1, 64, 64, HEADS[1], torch.bfloat16)
    sequences = PackedSequences.of_lengths([30, 34], "cuda")
    with pytest.raises(BackendError, match="cudnn: needs equally long sequences"):
        block_attention(q, k, v, sequences, causal=True, backend="cudnn")
    for described, backend in ((None, "cudnn"), (sequences, "triton")):
        chosen = block_attention(q, k, v, described, causal=True)
        named = block_attention(q, k, v, described, causal=True, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(chosen, named, strict=True))
    assert block_attention(*(t.double() for t in (q, k, v)), causal=True)[1].dtype == torch.float64


def test_backward_kernels_take_what_cudnn_found() -> None:
    """As long blocks have them."""
    q, k, v = inputs(1, 1024, 2048, (8, 2, 128), torch.bfloat16)
    found = block_attention(q, k, v, causal=False, backend="cudnn")
    grad = torch.randn_like(q)
    exact = [t.double() for t in (q, k, v)]
    expected = reference_backward(
        grad.double(), *exact, *reference_forward(*exact, None, False, None), None, False, None
    )
    grads = block_attention_backward(grad, q, k, v, *found, causal=False, backend="triton")
    assert all(error(one, other) <= 1.5 * TOLERANCE[torch.bfloat16] for one, other in zip(grads, expected, strict=True))


@pytest.mark.parametrize("shape", [(1, 500, 8, 128), (2, 63, 5, 80), (3, 8, 1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other_dtype", [torch.float32, torch.bfloat16])
def test_merge(shape: tuple[int, int, int, int], dtype: torch.dtype, other_dtype: torch.dtype) -> None:
    from megalight.ops import attention_merge as triton

    with poisoned():
        check_merge(triton.triton_merge, "cuda", dtype, other_dtype, shape)

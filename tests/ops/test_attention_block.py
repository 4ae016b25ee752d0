from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError, LayoutError
from megalight.ops import attention_block
from megalight.ops.attention import hopper, reference_attention
from megalight.ops.attention_block import (
    ATTENTION_BLOCK,
    ATTENTION_BLOCK_BACKWARD,
    EXAMPLE,
    REGISTRIES,
    block_attention,
    block_attention_backward,
    torch_kernels,
)
from megalight.ops.attention_block.torch_kernels import reference_backward, reference_forward
from megalight.ops.attention_merge import merge
from megalight.types import PackedSequences
from tests.ops.checks import error


def leaves(batch: int, queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dim: int = 6) -> list[Tensor]:
    """Queries, keys and wider values in float64."""
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim + 3))
    return [torch.randn(batch, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def exact(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention of one device, folded like ``q``."""
    rows = (t.flatten(0, 1) for t in (q, k, v))
    return reference_attention(*rows, sequences, causal, scale, None, None, 0.0).view(*q.shape[:3], -1)


def uniform(batch: int, queries: int, keys: int) -> PackedSequences:
    return replace(PackedSequences.of_uniform(batch, queries), keys=PackedSequences.of_uniform(batch, keys))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("keys", "causal"), [(7, True), (7, False), (4, False), (11, False)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_block_is_attention_to_its_keys(packed: bool, keys: int, causal: bool, scale: float | None) -> None:
    sequences = uniform(2, 7, keys)
    if packed:
        sequences = PackedSequences.of_lengths([4, 1, 2])
        if not causal:
            sequences = replace(sequences, keys=PackedSequences.of_lengths([keys - 3, 2, 1]))
    described = sequences if packed else None
    q, k, v = leaves(1 if packed else 2, 7, keys)
    expected = exact(q, k, v, sequences, causal, scale)
    out, lse = block_attention(q, k, v, described, causal=causal, scale=scale)
    assert error(out, expected) < 1e-12
    assert lse.shape == (len(q), 4, 7)
    grad = torch.randn_like(expected)
    grads = block_attention_backward(grad, q, k, v, out, lse, described, causal=causal, scale=scale)
    for found, wanted in zip(grads, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert found.shape == wanted.shape
        assert error(found, wanted) < 1e-12


def test_merged_blocks_are_the_whole() -> None:
    """Three blocks of keys, the last for half of the queries; gradients come from the merged output."""
    q, k, v = leaves(2, 8, 8)
    blocks = [(slice(0, 8), slice(0, 3)), (slice(0, 8), slice(3, 5)), (slice(4, 8), slice(5, 8))]
    out, lse = torch.zeros(2, 8, 4, 9, dtype=torch.float64), torch.full((2, 4, 8), -torch.inf, dtype=torch.float64)
    for rows, keys in blocks:
        target = out[:, rows], lse[:, :, rows]
        assert merge(*target, *block_attention(q[:, rows], k[:, keys], v[:, keys], causal=False), into=target) == target
    expected = torch.cat(
        [exact(q[:, :4], k[:, :5], v[:, :5], uniform(2, 4, 5)), exact(q[:, 4:], k, v, uniform(2, 4, 8))], 1
    )
    assert error(out, expected) < 1e-12
    grad = torch.randn_like(expected)
    totals = [torch.zeros_like(t) for t in (q, k, v)]
    for rows, keys in blocks:
        inputs = (grad[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
        for total, part, where in zip(
            totals, block_attention_backward(*inputs, causal=False), (rows, keys, keys), strict=True
        ):
            total[:, where] += part
    for total, wanted in zip(totals, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert error(total, wanted) < 1e-12


def test_half_types_are_computed_in_float32() -> None:
    q, k, v = (t.detach().bfloat16() for t in leaves(1, 5, 5))
    out, lse = block_attention(q, k, v, causal=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert error(out, block_attention(q.float(), k.float(), v.float(), causal=True)[0]) < 4e-3
    grads = block_attention_backward(out, q, k, v, out, lse, causal=True)
    assert {grad.dtype for grad in grads} == {torch.bfloat16}


def test_refusals() -> None:
    q, k, v = leaves(1, 6, 4)
    with pytest.raises(LayoutError, match="6 queries and 4 keys; their numbers must be equal"):
        block_attention(q, k, v, causal=True)
    with pytest.raises(LayoutError, match="3 query heads and 2 key heads"):
        block_attention(q[:, :, :3], k, v, causal=False)
    with pytest.raises(BackendError, match="varlen: serves bfloat16 and float16"):
        block_attention(q, k, v, causal=False, backend="varlen")


@pytest.mark.parametrize(("head_dim", "value_dim", "serves"), [(192, 128, True), (128, 192, False), (576, 512, False)])
def test_varlen_pads_narrow_values(head_dim: int, value_dim: int, serves: bool) -> None:
    for registry in REGISTRIES:
        table = registry.table(EXAMPLE._replace(device="cuda", head_dim=head_dim, value_dim=value_dim))
        why = next(why or "" for backend, why in table if backend.name == "varlen")
        assert ("multiple of 8 up to 256" in why) == (not serves)


class EqualHeads:
    """The kernel's operators in plain torch. Like the kernel, they want heads of one size."""

    @staticmethod
    def _described(cu: Tensor | None, cu_keys: Tensor | None) -> PackedSequences | None:
        if cu is None or cu_keys is None:
            return None
        queries, keys = (PackedSequences.of_lengths(x.diff().tolist()) for x in (cu, cu_keys))
        return replace(queries, keys=keys)

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu: Any, cu_keys: Any, *rest: Any, scale: float | None
    ) -> tuple[Tensor, ...]:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        described, packed = self._described(cu, cu_keys), cu is not None
        given = (t[None] if packed else t for t in (q, k, v))
        found = reference_forward(*given, described, rest[3], scale)
        return tuple(t[0] for t in found) if packed else found

    def _flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float | None
    ) -> tuple[Tensor, ...]:
        assert q.shape[-1] == v.shape[-1] == out.shape[-1] == grad.shape[-1]
        described, packed = self._described(*rest[:2]), rest[0] is not None
        given = (t[None] if packed else t for t in (grad, q, k, v, out, lse))
        found = reference_backward(*given, described, rest[5], scale)
        return tuple(t[0] for t in found) if packed else found


@pytest.mark.parametrize("packed", [False, True])
def test_varlen_cuts_what_it_padded(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "aten", EqualHeads())
    sequences = PackedSequences.of_lengths([4, 1, 2]) if packed else None
    q, k, v = (t.detach() for t in leaves(1 if packed else 2, 7, 7))
    v = v[..., :4]
    found, expected = (
        forward(q, k, v, sequences, True, None) for forward in (torch_kernels.varlen_forward, reference_forward)
    )
    grad = torch.randn_like(expected[0])
    found += torch_kernels.varlen_backward(grad, q, k, v, *found, sequences, True, None)
    expected += reference_backward(grad, q, k, v, *expected, sequences, True, None)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert error(one, other) < 1e-12


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dense": False}, "equally long"),
        ({"single": True}, "two queries"),
        ({"dtype": torch.float32}, "serves bfloat16 and float16"),
        ({"head_dim": 192, "value_dim": 128}, "equal key and value heads"),
    ],
)
def test_cudnn_says_what_it_lacks(change: dict[str, object], reason: str) -> None:
    table = ATTENTION_BLOCK.table(EXAMPLE._replace(device="cuda", **change))
    assert reason in next(why or "" for backend, why in table if backend.name == "cudnn")


def test_auto_takes_the_kernels_for_hopper_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda_why_not", "triton_heads_why_not"):
        monkeypatch.setattr(attention_block, name, lambda *_: None)
    monkeypatch.setattr(torch._C, "_get_cudnn_sdp_enabled", lambda: True)
    dense = EXAMPLE._replace(device="cuda")
    for registry, swift in ((ATTENTION_BLOCK, "cudnn"), (ATTENTION_BLOCK_BACKWARD, "triton")):
        assert registry.select(dense).name == "cudnn"
        assert registry.select(dense._replace(swift=True)).name == swift
        assert registry.select(dense._replace(swift=True), "cudnn").name == "cudnn"
        assert registry.select(dense, "triton").name == "triton"
        assert registry.select(dense._replace(dense=False)).name == "triton"
        assert registry.select(dense._replace(window=True)).name == "triton"


@pytest.mark.parametrize("fast", [True, False])
def test_backends_are_told_of_fast_kernels(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dense blocks, with as many keys as they have."""
    asked: list[tuple[tuple[int, ...], ...]] = []

    def serves(q: Tensor, v: Tensor, sequences: PackedSequences, *options: Any) -> bool:
        asked.append((sequences.lengths, (sequences.keys or sequences).lengths))
        return fast and options == (False, None, attention_block.LONG)

    found: list[Any] = []
    monkeypatch.setattr(attention_block, "choose", lambda _, spec, __: found.append(spec) or reference_forward)
    monkeypatch.setattr(hopper, "serves_backward", serves)
    monkeypatch.setattr(hopper, "fills", lambda *_: True)
    monkeypatch.setattr(hopper, "DEVICES", ("cpu",))
    q, k, v = (t.detach() for t in leaves(2, 7, 11))
    block_attention(q, k, v, causal=False)
    block_attention(q[:1], k[:1, :7], v[:1, :7], PackedSequences.of_lengths([4, 3]), causal=True)
    assert [spec.swift for spec in found] == [fast, False]
    assert asked == [((7, 7), (11, 11))]

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import megalight.ops.attention as ops
from megalight.errors import BackendError, LayoutError
from megalight.ops.attention import ATTENTION, EXAMPLE, attention
from megalight.types import PackedSequences
from tests.ops.checks import check, error

UNIFORM = PackedSequences.of_uniform(3, 7)
RAGGED = PackedSequences.of_lengths([5, 1, 9])
DECODE = replace(PackedSequences.of_uniform(3, 1), keys=PackedSequences.of_lengths([4, 9, 1]))
EXTEND = replace(PackedSequences.of_uniform(2, 3), keys=PackedSequences.of_uniform(2, 8))


def inputs(sequences: PackedSequences, heads: int, kv_heads: int, dim: int = 8) -> list[Tensor]:
    keys = sequences.keys or sequences
    shapes = ((sequences.num_tokens, heads), (keys.num_tokens, kv_heads), (keys.num_tokens, kv_heads))
    return [torch.randn(*shape, dim, dtype=torch.float64) for shape in shapes]


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    causal: bool,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """One query and head at a time."""
    keys = sequences.keys or sequences
    out = torch.zeros_like(q)
    starts = [sum(sequences.lengths[:i]) for i in range(len(sequences.lengths))]
    key_starts = [sum(keys.lengths[:i]) for i in range(len(keys.lengths))]
    for start, length, key_start, key_length in zip(starts, sequences.lengths, key_starts, keys.lengths, strict=True):
        for i in range(length):
            place = key_length - length + i
            seen = [
                j for j in range(key_length) if (not causal or j <= place) and (window is None or j >= place - window)
            ]
            rows = [key_start + j for j in seen]
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                scores = k[rows, shared] @ q[start + i, head] / math.sqrt(q.shape[2])
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                out[start + i, head] = scores.softmax(0) @ v[rows, shared]
    return out


@pytest.mark.parametrize("sequences", [UNIFORM, RAGGED, DECODE, EXTEND], ids=["uniform", "ragged", "decode", "extend"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None), (True, 100), (False, 3)])
def test_backends_equal_the_loop(
    sequences: PackedSequences, heads: int, kv_heads: int, causal: bool, window: int | None
) -> None:
    tensors = inputs(sequences, heads, kv_heads)
    expected = by_hand(*tensors, sequences, causal, window)
    for backend in ("reference", "sdpa"):
        out = attention(*tensors, sequences, causal=causal, window=window, backend=backend)
        assert error(out, expected) < 1e-12, backend
    check(
        lambda q, k, v: attention(q, k, v, sequences, causal=causal, window=window, backend="sdpa"),
        lambda q, k, v: attention(q, k, v, sequences, causal=causal, window=window, backend="reference"),
        tensors,
    )


def test_softcap_scale_and_value_width() -> None:
    q, k, v = inputs(RAGGED, 4, 2)
    assert error(attention(q, k, v, RAGGED, softcap=0.5), by_hand(q, k, v, RAGGED, True, None, 0.5)) < 1e-12
    scaled = attention(q, k, v, RAGGED, scale=0.7)
    assert error(scaled, by_hand(q * 0.7 * math.sqrt(8), k, v, RAGGED, True, None)) < 1e-12
    for backend in ("reference", "sdpa"):
        wider = attention(q, k, torch.cat((v, v), -1), RAGGED, backend=backend)
        assert error(wider, torch.cat((attention(q, k, v, RAGGED),) * 2, -1)) < 1e-12


def test_reference_passes_gradcheck() -> None:
    sequences = PackedSequences.of_lengths([2, 3])
    tensors = [t.requires_grad_() for t in inputs(sequences, 2, 1, 4)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, sequences, window=1, softcap=2.0, backend="reference"), tensors
    )


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_dropout_keeps_the_mean(backend: str) -> None:
    sequences = PackedSequences.of_uniform(1, 64)
    q = k = torch.zeros(64, 8, 8)
    v = torch.ones(64, 8, 8)
    out = attention(q, k, v, sequences, causal=False, dropout=0.25, backend=backend)
    assert out.std() > 0.01
    assert out.mean() == pytest.approx(1, abs=0.02)


def test_uniform_views_copy_nothing() -> None:
    """The dense kernel sees the packed tensors' own memory: sequences do not mix, and lengths fold back."""
    q, k, v = inputs(UNIFORM, 2, 2)
    whole = attention(q, k, v, UNIFORM)
    for i in range(3):
        part = slice(7 * i, 7 * i + 7)
        assert error(attention(q[part], k[part], v[part], PackedSequences.of_uniform(1, 7)), whole[part]) < 1e-14


def test_refusals() -> None:
    q, k, v = inputs(UNIFORM, 3, 2)
    with pytest.raises(LayoutError, match="3 query heads and 2 key heads"):
        attention(q, k, v, UNIFORM)
    with pytest.raises(BackendError, match="sdpa: has no soft cap on scores"):
        attention(q, q, q, UNIFORM, softcap=1.0, backend="sdpa")
    with pytest.raises(BackendError, match="Did you mean 'sdpa'"):
        attention(q, q, q, UNIFORM, backend="sdp")


@pytest.mark.parametrize(("head_dim", "value_dim", "serves"), [(192, 128, True), (128, 192, False), (576, 512, False)])
def test_varlen_pads_narrow_values(head_dim: int, value_dim: int, serves: bool) -> None:
    table = ATTENTION.table(EXAMPLE._replace(device="cuda", head_dim=head_dim, value_dim=value_dim))
    why = next(why or "" for backend, why in table if backend.name == "varlen")
    assert ("multiple of 8 up to 256" in why) == (not serves)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"uniform": False}, "equally long"),
        ({"square": False}, "bottom-right"),
        ({"window": True}, "no window"),
        ({"softcap": True}, "no soft cap"),
        ({"dtype": torch.float32}, "serves bfloat16 and float16"),
        ({"head_dim": 100, "value_dim": 100}, "multiple of 8"),
        ({"head_dim": 192, "value_dim": 128}, "equal key and value heads"),
    ],
)
def test_cudnn_says_what_it_lacks(change: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "wider_heads", lambda device: False)
    table = ATTENTION.table(EXAMPLE._replace(device="cuda", **change))
    assert reason in next(why or "" for backend, why in table if backend.name == "cudnn")


@pytest.mark.parametrize(("head_dim", "value_dim", "serves"), [(192, 128, True), (256, 128, False), (192, 192, False)])
def test_cudnn_serves_latent_heads_on_hopper(
    head_dim: int, value_dim: int, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "wider_heads", lambda device: True)
    monkeypatch.setattr(ops, "cuda_why_not", lambda device: None)
    monkeypatch.setattr(torch._C, "_get_cudnn_sdp_enabled", lambda: True)
    table = ATTENTION.table(EXAMPLE._replace(device="cuda", head_dim=head_dim, value_dim=value_dim))
    assert (next(why for backend, why in table if backend.name == "cudnn") is None) == serves


def test_auto_takes_the_kernels_for_hopper_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda_why_not", "triton_heads_why_not"):
        monkeypatch.setattr(ops, name, lambda *_: None)
    monkeypatch.setattr(torch._C, "_get_cudnn_sdp_enabled", lambda: True)
    spec = EXAMPLE._replace(device="cuda")
    assert ATTENTION.select(spec).name == "cudnn"
    assert ATTENTION.select(spec._replace(swift=True)).name == "triton"
    assert ATTENTION.select(spec._replace(swift=True), "cudnn").name == "cudnn"
    assert ATTENTION.select(spec, "triton").name == "triton"
    assert ATTENTION.select(spec._replace(window=True)).name == "triton"


@pytest.mark.parametrize(
    ("fast", "dropout", "full", "swift"),
    [
        (True, 0.0, True, True),
        (True, 0.1, True, False),
        (False, 0.0, True, False),
        (True, 0.0, False, False),
    ],
)
def test_backends_are_told_of_fast_kernels(
    fast: bool, dropout: float, full: bool, swift: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[ops.AttentionSpec] = []
    monkeypatch.setattr(ops, "choose", lambda _, spec, backend: found.append(spec) or ops.reference_attention)
    monkeypatch.setattr(ops.hopper, "serves_backward", lambda *_: fast)
    monkeypatch.setattr(ops.hopper, "fills", lambda *_: full)
    assert "cpu" not in ops.hopper.DEVICES
    monkeypatch.setattr(ops.hopper, "DEVICES", ("cpu",))
    attention(*inputs(UNIFORM, 2, 2), UNIFORM, dropout=dropout)
    attention(*inputs(RAGGED, 2, 2), RAGGED, dropout=dropout)  # which cuDNN does not serve
    assert [spec.swift for spec in found] == [swift, False]

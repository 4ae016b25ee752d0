"""All ranks of a ring one after the other in one process, in bfloat16: messages are handed over by the test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megalight.ops.attention import attention
from megalight.parallel.context import ring
from megalight.types import PackedSequences
from tests.ops.checks import TOLERANCE, error


class Messages:
    """Stands in for the other ranks: brings keys and values, and adds up what is sent of their gradients."""

    def __init__(self, kv: list[Tensor]) -> None:
        self.kv = kv
        self.grads = [torch.zeros_like(x, dtype=torch.float32) for x in kv]
        self.rank = self.keys_sent = self.sums_sent = 0

    def begin(self, rank: int) -> None:
        self.rank, self.keys_sent, self.sums_sent = rank, 0, 0

    def send(self, x: Tensor) -> ring._Flight:
        if x.dtype == torch.float32 or self.keys_sent == len(self.kv) - 1:  # the last sum is rounded already
            self.grads[(self.rank - self.sums_sent) % len(self.kv)] += x
            self.sums_sent += 1
            return ring._Flight([], x, torch.zeros_like(x))
        self.keys_sent += 1
        assert torch.equal(x, self.kv[(self.rank - self.keys_sent + 1) % len(self.kv)])
        return ring._Flight([], x, self.kv[(self.rank - self.keys_sent) % len(self.kv)])


def check_ring(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    lengths: list[int],
    size: int,
    causal: bool,
    heads: tuple[int, int, int] = (4, 2, 64),
    backend: str = "auto",
    window: int | None = None,
    chunk: int | None = None,
) -> None:
    """Output and gradients of every rank beside attention of one device in float64."""
    count, kv_count, dim = heads
    sequences = PackedSequences.of_lengths(lengths, device)
    q, k, v, grad = (
        torch.randn(sequences.num_tokens, many, dim, device=device).bfloat16()
        for many in (count, kv_count, kv_count, count)
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = attention(*exact, sequences, causal=causal, window=window, chunk=chunk, backend="reference")
    wanted.backward(grad.double())
    shares = [sequences.zigzag(rank, size) for rank in range(size)]
    local = [[x[index.clamp(min=0)] for x in (q, k, v, grad)] for _, index in shares]
    messages = Messages([torch.cat(parts[1:3], -1) for parts in local])
    monkeypatch.setattr(ring._Ring, "send", lambda _, x: messages.send(x))
    found = [torch.full_like(x, torch.nan) for x in (q, q)]
    for rank, ((share, index), (*inputs, own)) in enumerate(zip(shares, local, strict=True)):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        mine = [x.requires_grad_() for x in inputs]
        real = index >= 0
        messages.begin(rank)
        out = ring.ring_attention(*mine, share, group, causal=causal, window=window, chunk=chunk, backend=backend)  # type: ignore[arg-type]
        assert messages.keys_sent == size - 1
        messages.begin(rank)
        out.backward(own * real[:, None, None])
        assert (messages.keys_sent, messages.sums_sent) == (size - 1, size)
        assert mine[0].grad is not None
        for whole, part in zip(found, (out, mine[0].grad), strict=True):
            whole[index[real]] = part[real].detach()
    keys = [torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)]
    for (_, index), total in zip(shares, messages.grads, strict=True):
        for whole, part in zip(keys, total.split(dim, -1), strict=True):
            whole[index[index >= 0]] = part[index >= 0]
    true = (wanted, *(x.grad for x in exact))
    for name, mine, whole in zip(("output", "q", "k", "v"), (*found, *keys), true, strict=True):
        assert error(mine, whole) <= 1.5 * TOLERANCE[torch.bfloat16], (name, error(mine, whole))


@pytest.mark.parametrize("lengths", [[32], [9, 30, 1]])
def test_in_half_precision(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    check_ring(monkeypatch, "cpu", lengths, 3, True, (4, 2, 8))


@pytest.mark.parametrize("limits", [{"window": 6}, {"chunk": 7}])
def test_windows_and_chunks_in_half_precision(monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]) -> None:
    check_ring(monkeypatch, "cpu", [9, 30, 1], 3, True, (4, 2, 8), **limits)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "varlen", "auto"])
@pytest.mark.parametrize("lengths", [[1024], [512, 512, 512], [1001, 1001]])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_equally_long_sequences(
    monkeypatch: pytest.MonkeyPatch, backend: str, lengths: list[int], size: int, causal: bool
) -> None:
    check_ring(monkeypatch, "cuda", lengths, size, causal, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences(monkeypatch: pytest.MonkeyPatch, size: int, causal: bool) -> None:
    check_ring(monkeypatch, "cuda", [333, 700, 1, 130], size, causal, (8, 2, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("limits", [{"window": 63}, {"window": 300}, {"window": 1}, {"chunk": 100}])
def test_windows_and_chunks(monkeypatch: pytest.MonkeyPatch, size: int, limits: dict[str, int]) -> None:
    check_ring(monkeypatch, "cuda", [333, 700, 1, 130], size, True, (8, 2, 128), **limits)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [([512], [512]), ([300, 212], [308, 204])])
def test_the_host_never_waits(monkeypatch: pytest.MonkeyPatch, lengths: tuple[list[int], list[int]]) -> None:
    """Neither for lengths nor for rows; the first call, of other lengths where they differ, compiles kernels."""
    monkeypatch.setattr(ring._Ring, "send", lambda _, x: ring._Flight([], x, torch.zeros_like(x)))
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    q, k = (torch.randn(256, heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (4, 2))
    for these, mode in zip(lengths, ("default", "error"), strict=True):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            share, _ = PackedSequences.of_lengths(these, "cuda").zigzag(0, 2)
            out = ring.ring_attention(q, k, k, share, group, causal=True)  # type: ignore[arg-type]
            out.backward(out.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")

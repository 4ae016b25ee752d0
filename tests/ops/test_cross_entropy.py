from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops import cross_entropy
from megalight.ops import cross_entropy as op
from megalight.ops.cross_entropy import CrossEntropyKernels, blocks, gradient_, linear_cross_entropy, statistics
from tests.ops.checks import check_cross_entropy, error
from tests.ops.test_linear import with_main_grad

TORCH = partial(op.chunked_cross_entropy, CrossEntropyKernels(statistics, gradient_))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [None, 10])
def test_torch_equals_the_reference(
    dtype: torch.dtype, padding: int, bias: bool, softcap: float | None, chunk: int | None
) -> None:
    check_cross_entropy(TORCH, "cpu", dtype, 63, 97, 16, padding=padding, bias=bias, softcap=softcap, chunk=chunk)


def test_bfloat16() -> None:
    check_cross_entropy(TORCH, "cpu", torch.bfloat16, 63, 97, 16)


def test_memory_between_rows_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bf16 by a CPU with AMX did."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    hidden, weight = (torch.randn(rows, 32).bfloat16().requires_grad_() for rows in (48, 101))
    linear_cross_entropy(hidden, weight, torch.arange(48), backend="torch").sum().backward()
    for parameter in (hidden, weight):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_reference_equals_torch() -> None:
    hidden, weight = torch.randn(9, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    labels = torch.randint(0, 11, (9,))
    labels[3] = -100
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    assert error(linear_cross_entropy(hidden, weight, labels, backend="reference"), expected) < 1e-14


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(softcap: float | None) -> None:
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (7, 3), (7,))
    )
    labels = torch.tensor([0, -100, 5, 2, 2])

    def losses(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, softcap=softcap, chunk=2, num_rows=6)

    assert torch.autograd.gradcheck(losses, (hidden, weight, bias))


@pytest.mark.parametrize("aligned", [64, 4])
def test_main_gradients(aligned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "ALIGNED", aligned)
    monkeypatch.setattr(op, "_vocabulary_blocks_on", lambda device, rows: op.vocabulary_blocks(rows))
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(11, 5, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    labels = torch.randint(0, 11, (9,))
    plain = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    main = [with_main_grad(weight), with_main_grad(bias)]
    for w, b in (plain, main):
        linear_cross_entropy(hidden, w, labels, bias=b, chunk=4).sum().backward()
    for ours, theirs in zip(main, plain, strict=True):
        assert ours.grad is None
        assert ours.ready == 1
        assert error(ours.main_grad, theirs.grad) < 1e-14


def test_a_second_backward_is_the_same() -> None:
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.randn(11, 5, dtype=torch.float64), torch.randint(0, 11, (9,))
    loss = linear_cross_entropy(hidden, weight, labels).sum()
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("rows", [0, 25, 40, 63])
def test_logits_that_do_not_fit_are_made_twice(rows: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for so many of 63 rows."""
    monkeypatch.setattr(op, "memory_of", lambda device: 97 * 8 * rows)
    monkeypatch.setattr(op, "SHARE", 1)
    made = []
    plain = op.logits_of
    monkeypatch.setattr(op, "logits_of", lambda h, w, b: made.append(len(h)) or plain(h, w, b))
    check_cross_entropy(TORCH, "cpu", torch.float64, 63, 97, 16, chunk=chunk)
    size, kept = op.cut(63, 97 * 8, chunk, 97 * 8 * rows)
    assert sum(made) == 63 + max(0, 63 - size * kept)


def test_chunks_fill_the_memory_that_logits_may_take() -> None:
    gigabyte = 1e9
    row = 2 * 128256
    assert op.cut(8192, row, None, 4.4 * gigabyte) == (8192, 1)  # one product, one pass over the main gradient
    size, kept = op.cut(32768, row, None, 4.4 * gigabyte)
    assert (size, kept) == (4096, 3)
    assert op.cut(32000, row, None, 4.4 * gigabyte) == (4096, 3)  # even chunks, in whole tiles
    assert size * row * (kept + 1) <= 4.4 * gigabyte
    assert op.cut(100, row, None, 0) == (1, 0)
    assert op.cut(0, row, None, 0) == (1, 0)
    assert op.cut(100, row, 30, gigabyte) == (30, 4)


def test_rows_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", 97 * 4)
    assert len(blocks(torch.empty(63, 97))) == 16
    check_cross_entropy(TORCH, "cpu", torch.float64, 63, 97, 16, softcap=2.0, padding=3)


@pytest.mark.parametrize(("backend", "share"), [("torch", 1 / 32), ("torch", 0), ("reference", 1 / 32)])
def test_parts_of_the_vocabulary_combine(backend: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts, one after the other, as two devices would hold them; the second ends in padding."""
    monkeypatch.setattr(op, "SHARE", share)
    hidden, table = torch.randn(9, 5, dtype=torch.float64), torch.randn(16, 5, dtype=torch.float64)
    labels = torch.randint(0, 13, (9,))
    labels[[2, 5]] = -100
    scale = torch.rand(9, dtype=torch.float64)
    whole_hidden, whole_table = hidden.clone().requires_grad_(), table.clone().requires_grad_()
    whole = linear_cross_entropy(whole_hidden, whole_table, labels, num_rows=13, backend="reference")
    (whole * scale).sum().backward()

    parts: list[tuple[Tensor, Tensor]] = []

    def record(logsumexp: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        parts.append((logsumexp.detach().clone(), target.detach().clone()))
        return logsumexp, target

    def join(logsumexp: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return torch.logaddexp(parts[0][0], parts[1][0]), parts[0][1] + parts[1][1]

    halves: list[dict[str, Any]] = [{"first_row": 0, "num_rows": 13}, {"first_row": 8, "num_rows": 13}]
    for index, half in enumerate(halves):
        linear_cross_entropy(hidden, table[8 * index : 8 * index + 8], labels, **half, combine=record, backend=backend)
    grad_hidden, grad_table = torch.zeros_like(hidden), []
    for index, half in enumerate(halves):
        own = hidden.clone().requires_grad_()
        weight = table[8 * index : 8 * index + 8].clone().requires_grad_()
        losses = linear_cross_entropy(own, weight, labels, **half, combine=join, backend=backend)
        assert error(losses, whole) < 1e-14
        if backend == "torch":
            (losses * scale).sum().backward()
            grad_hidden += own.grad
            grad_table.append(weight.grad)
    if backend == "torch":
        assert error(grad_hidden, whole_hidden.grad) < 1e-13
        assert error(torch.cat(grad_table), whole_table.grad) < 1e-13


def test_a_part_of_padding_only() -> None:
    hidden = torch.randn(3, 5, requires_grad=True)
    seen: list[Tensor] = []

    def combine(logsumexp: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logsumexp)
        return torch.ones_like(logsumexp), target

    labels = torch.tensor([1, 2, 3])
    loss = linear_cross_entropy(hidden, torch.randn(4, 5), labels, first_row=8, num_rows=8, combine=combine)
    loss.sum().backward()
    assert bool(torch.isneginf(seen[0]).all())
    assert hidden.grad is not None
    assert bool((hidden.grad == 0).all())


def test_autocast() -> None:
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.randint(0, 11, (9,))
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, labels)
    losses.sum().backward()
    assert losses.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert error(losses, F.cross_entropy(hidden @ weight.T, labels, reduction="none")) < 1e-2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [97, 128, 33])
def test_unaligned_vocabularies_have_two_products(size: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: an aligned block, and the rest."""
    monkeypatch.setattr(op, "_vocabulary_blocks_on", lambda device, rows: op.vocabulary_blocks(rows))
    expected = {97: [64, 33], 128: [128], 33: [33]}[size]
    assert [len(range(size)[block]) for block in op.vocabulary_blocks(size)] == expected
    check_cross_entropy(TORCH, "cpu", torch.float64, 63, size, 16, bias=bias, chunk=10)

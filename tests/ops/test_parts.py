from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.ops.row_indexing import empty_gradient, joined, place_of, split

SIZES = [3, 1, 2]


def parts_of(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, SIZES, -1)


def test_neighboring_columns_are_joined_without_a_copy() -> None:
    rows = torch.randn(5, 9)[:, 2:8]
    found = joined(parts_of(rows))
    assert found.equal(rows)
    assert found.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: [parts[0], parts[2], parts[1]],  # another order
        lambda parts: [parts[0], parts[2]],  # a gap
        lambda parts: [parts[0].clone(), *parts[1:]],
        lambda parts: [part.clone() for part in parts],
        lambda parts: [parts[0], parts[1].double(), parts[2]],
        lambda parts: [part[None] for part in parts],
        lambda parts: [parts[0], parts[1].expand(5, 4), parts[2]],
    ],
)
def test_other_parts_are_copied(change: Any) -> None:
    rows = torch.randn(5, 6)
    parts = change(parts_of(rows))
    found = joined(parts)
    assert found.equal(torch.cat(parts, -1))
    assert found.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


def test_rows_that_overlap_are_copied() -> None:
    memory = torch.arange(12.0)
    parts = [memory.as_strided((3, 2), (2, 1), place) for place in (0, 2)]
    assert joined(parts).equal(torch.cat(parts, -1))


def test_gradients_equal_those_of_torch() -> None:
    rows = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    weight = torch.randn(4, 6, dtype=torch.float64)

    def gradient(divide: Any) -> Tensor:
        first, _, last = divide(rows)
        # The second part is unused, and the last is used twice.
        out = (first * weight[:, :3]).sum() + (last * weight[:, 3:5]).sum() + last.square().sum()
        return torch.autograd.grad(out, rows)[0]

    assert gradient(lambda t: split(t, SIZES)).equal(gradient(parts_of))
    for own, expected in zip(split(rows, SIZES), parts_of(rows), strict=True):
        assert own.equal(expected)


def test_a_gradient_that_an_op_wrote_side_by_side_is_taken_as_it_is() -> None:
    memory: list[Tensor] = []

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *parts: Tensor) -> Tensor:
            return torch.cat(parts, -1).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            memory.append(torch.randn(4, 6))
            return parts_of(memory[0])

    rows = torch.randn(4, 6).requires_grad_()
    seen: list[Tensor] = []
    whole = rows * 1.0
    whole.register_hook(seen.append)
    Op.apply(*split(whole, SIZES)).backward()
    assert seen[0].data_ptr() == memory[0].data_ptr()
    assert rows.grad is not None
    assert rows.grad.equal(memory[0])


class Scaled(torch.autograd.Function):
    """``factor * part``, whose backward asks for the place of its gradient, as ops with kernels do."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(part)
        ctx.place, ctx.factor = place_of(part), factor
        return part * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (part,) = ctx.saved_tensors
        out = empty_gradient(part, ctx.place)
        out.copy_(grad * ctx.factor)
        return out, None


def outputs_of(parts: tuple[Tensor, ...], case: str) -> Tensor:
    first, second, third = parts
    outputs = [Scaled.apply(first, 2.0), second * 3, Scaled.apply(third, 5.0)]
    if case == "used twice by the op":
        outputs.append(Scaled.apply(first, 7.0))
    if case == "used elsewhere too":
        outputs.append(first.square())
    if case == "unused":
        del outputs[2]
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("case", ["plain", "used twice by the op", "used elsewhere too", "unused"])
def test_ops_write_gradients_beside_each_other(case: str) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    found: list[Tensor] = []
    for divide in (split, lambda t, sizes: parts_of(t)):
        out = outputs_of(divide(leaf * 1.0, SIZES), case)
        torch.manual_seed(1)
        grad = torch.randn_like(out)
        # The memory of one backward is not that of the next.
        found += [torch.autograd.grad(out, leaf, grad, retain_graph=True)[0] for _ in range(2)]
    for other in found[:3]:
        assert other.equal(found[3])


def test_a_place_is_the_gradient_itself() -> None:
    whole = torch.randn(4, 6).requires_grad_()
    parts = split(whole * 1.0, SIZES)
    place = place_of(parts[0])
    assert place is not None
    assert place_of(whole) is None
    seen: list[Tensor] = []
    parts[0].register_hook(seen.append)
    outputs_of(parts, "plain").sum().backward()
    assert whole.grad is not None
    assert seen[0].stride() == (6, 1)
    assert whole.grad[:, :3].equal(seen[0])
    # What the backward held is given up.
    assert place[0].memory is None


def test_a_gradient_that_was_taken_away_is_not_written_to() -> None:
    whole = torch.randn(4, 6).requires_grad_()
    parts = split(whole * 1.0, SIZES)
    out = outputs_of(parts, "plain").sum()
    (kept,) = torch.autograd.grad(out, parts[0], retain_graph=True)
    before = kept.clone()
    (3 * out).backward()
    assert kept.equal(before)
    assert whole.grad is not None
    assert whole.grad[:, :3].equal(3 * before)


def test_gradients_of_gradients() -> None:
    rows = torch.randn(2, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: torch.cat([p.square() for p in split(t, SIZES)], -1), rows)

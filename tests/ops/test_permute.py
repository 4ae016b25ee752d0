from __future__ import annotations

import pytest
import torch

from megalight.ops.permute import drop, most_rows, permutation, permute, unpermute
from tests.ops.moe_checks import ROUTES, routes


def expected_rows(experts: list[list[int]], num_experts: int, alignment: int, capacity: int | None) -> list[list[int]]:
    """The pairs of each group with padding (-1), in Python's own words."""
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    k = len(experts[0]) if experts else 0
    for t, chosen in enumerate(experts):
        for j, e in enumerate(chosen):
            if 0 <= e < num_experts and (capacity is None or len(groups[e]) < capacity):
                groups[e].append(t * k + j)
    for group in groups:
        missing = -len(group) % alignment if capacity is None else capacity - len(group)
        group.extend([-1] * missing)
    return groups


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize(("alignment", "capacity"), [(1, None), (4, None), (16, None), (1, 5), (4, 8)])
def test_rows_are_grouped_by_expert(name: str, alignment: int, capacity: int | None) -> None:
    experts, num_experts = routes(name)
    where = permutation(experts, num_experts, alignment=alignment, capacity=capacity)
    groups = expected_rows(experts.tolist(), num_experts, alignment, capacity)
    assert where.sizes.tolist() == [sum(pair >= 0 for pair in group) for group in groups]
    rows = [pair for group in groups for pair in group]
    assert where.offsets.tolist() == [sum(len(g) for g in groups[: e + 1]) for e in range(num_experts)]
    assert len(rows) <= where.rows
    assert where.positions.shape == experts.shape
    for pair, position in enumerate(where.positions.flatten().tolist()):
        assert position == (rows.index(pair) if pair in rows else -1)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize(("alignment", "capacity"), [(1, None), (16, None), (1, 5)])
def test_there_and_back(name: str, alignment: int, capacity: int | None) -> None:
    """Values and gradients of both directions equal products with a matrix of ones and zeros."""
    experts, num_experts = routes(name)
    where = permutation(experts, num_experts, alignment=alignment, capacity=capacity)
    tokens, k = experts.shape
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(tokens, k, dtype=torch.float64, requires_grad=True)
    matrix = torch.zeros(where.rows, tokens, k, dtype=torch.float64)
    for t in range(tokens):
        for j in range(k):
            if where.positions[t, j] >= 0:
                matrix[where.positions[t, j], t, j] = 1
    rows, weights = permute(x, where, probs)
    assert weights is not None
    for weighted in (False, True):
        out = unpermute(rows, where, probs if weighted else None)
        pairs = torch.einsum("rtk,rh->tkh", matrix, torch.einsum("rtk,th->rh", matrix, x))
        expected = (pairs * probs.unsqueeze(-1) if weighted else pairs).sum(1)
        seeds = [torch.randn_like(t) for t in (out, weights)]
        found = torch.autograd.grad((out, weights), (x, probs), seeds, retain_graph=True)
        right = torch.autograd.grad(
            (expected, torch.einsum("rtk,tk->r", matrix, probs)), (x, probs), seeds, retain_graph=True
        )
        for actual, exact in zip((out, *found), (expected, *right), strict=True):
            assert torch.allclose(actual, exact, rtol=1e-12, atol=1e-12)


def test_rows_of_no_token_are_not_read() -> None:
    where = permutation(torch.tensor([[0], [1], [-1]]), 2, alignment=4)
    rows = torch.full((where.rows, 2), torch.nan)
    rows[where.positions[:2, 0].long()] = 1.0
    assert unpermute(rows, where).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_sums_of_half_precision_are_rounded_once() -> None:
    where = permutation(torch.arange(8)[None], 8)
    rows = torch.tensor([256.0] + [1.0] * 7)[:, None].bfloat16()
    assert unpermute(rows, where).item() == 264.0  # one by one, each 1 would be rounded away


def test_rows_that_the_caller_knows() -> None:
    experts = torch.tensor([[0, 2], [-1, 0]])
    where = permutation(experts, 3, rows=3)
    assert where.rows == 3
    assert where.positions.tolist() == [[0, 2], [-1, 1]]
    short = permutation(experts, 3, rows=2)
    assert short.positions.tolist() == [[0, -1], [-1, 1]]
    assert short.offsets.tolist() == [2, 2, 2]


def test_most_rows() -> None:
    assert most_rows(100, 8, 1) == 100
    assert most_rows(100, 8, 16) == 208  # 100 + 8 * 15 rows, in whole sixteens
    assert most_rows(3, 8, 16) == 48  # three experts with a token each
    assert most_rows(0, 8, 16) == 0


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("by_probability", [False, True])
def test_drop_keeps_the_first_or_the_most_probable(name: str, by_probability: bool) -> None:
    experts, num_experts = routes(name)
    priority = torch.randint(0, 4, experts.shape).float() if by_probability else None
    capacity = 4
    kept = drop(experts, num_experts, capacity, priority).flatten().tolist()
    flat = experts.flatten().tolist()
    for e in range(num_experts):
        pairs = [p for p, chosen in enumerate(flat) if chosen == e]
        if priority is not None:
            values = priority.flatten()
            pairs.sort(key=lambda p: -float(values[p]))
        assert {p for p, chosen in enumerate(kept) if chosen == e} == set(pairs[:capacity])
    assert all(a in (b, -1) for a, b in zip(kept, flat, strict=True))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alignment": 0}, "alignment=0"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 6, "alignment": 4}, "capacity=6 must be a positive multiple of alignment=4"),
    ],
)
def test_impossible_forms(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        permutation(torch.zeros(1, 1, dtype=torch.long), 1, **options)

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megalight.errors import BackendError, LayoutError
from megalight.ops.attention import attention
from megalight.ops.common import mask
from megalight.parallel.context.attention import _joint
from megalight.parallel.context.ring import blocks_of, ring_attention, why_not
from megalight.parallel.context.spec import ContextSpec
from megalight.types import PackedSequences
from tests.parallel.gathering import relative_error
from tests.support.workers import run

CASES: dict[str, list[int]] = {
    "one sequence": [24],
    "equal": [16, 16],
    "equal, padded": [13, 13, 13],
    "packed": [9, 30, 1, 17],
}
HEADS = ((4, 4), (4, 2), (3, 1))


def ring_errors(lengths: list[int], heads: tuple[int, int], causal: bool, scale: float | None) -> dict[str, float]:
    """Output and gradients of a ring over the world; padding holds numbers that must not show."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    generator = torch.Generator().manual_seed(1)
    sequences = PackedSequences.of_lengths(lengths)
    q, k, v, grad = (
        torch.randn(sequences.num_tokens, count, dim, generator=generator, dtype=torch.float64)
        for count, dim in ((heads[0], 6), (heads[1], 6), (heads[1], 5), (heads[0], 5))
    )
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attention(*whole, sequences, causal=causal, scale=scale)
    wanted.backward(grad)
    share, index = sequences.zigzag(rank, size)
    real = index >= 0
    mine = [torch.where(real[:, None, None], x[index.clamp(min=0)], 50.0).requires_grad_() for x in (q, k, v)]
    out = ring_attention(*mine, share, group, causal=causal, scale=scale)
    out.backward(grad[index.clamp(min=0)] * real[:, None, None])
    errors = {"output": relative_error(out[real], wanted[index[real]])}
    for name, x, exact in zip("qkv", mine, whole, strict=True):
        assert x.grad is not None
        assert exact.grad is not None
        errors[name] = relative_error(x.grad[real], exact.grad[index[real]])
        errors[f"padding of {name}"] = float(x.grad[~real].abs().sum())
    return errors


def every_case() -> dict[str, float]:
    """The worst error of each case."""
    found = {}
    for (name, lengths), heads, causal in itertools.product(CASES.items(), HEADS, (True, False)):
        scale = 0.2 if heads == HEADS[0] else None
        for what, error in ring_errors(lengths, heads, causal, scale).items():
            found[f"{name}, {heads}, causal={causal}: {what}"] = error
    return found


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)])
def test_equals_one_device(world: int) -> None:
    for answers in run(every_case, world):
        wrong = {name: error for name, error in answers.items() if not error <= 1e-9}
        assert not wrong, wrong


def test_a_ring_of_one() -> None:
    wrong = {name: error for name, error in every_case().items() if not error <= 1e-9}
    assert not wrong, wrong


@pytest.mark.parametrize("lengths", [[40], [40, 40], [40, 80]])
def test_causal_work_is_balanced(lengths: list[int]) -> None:
    """Every step but the first is half of a full block: all queries, or all keys, and half of the other."""
    for rank in range(4):
        share, _ = PackedSequences.of_lengths(lengths).zigzag(rank, 4)
        first, *others = blocks_of(share, True).steps
        assert first[0].causal
        whole = first[0].queries.count
        for (block,) in others:
            assert not block.causal
            assert sorted((block.queries.count, block.keys.count)) == [whole // 2, whole]


@pytest.mark.parametrize("limits", [{"window": 4}, {"window": 7}, {"chunk": 5}, {"chunk": 7}, {"window": 40}])
def test_only_keys_within_limits_are_in_blocks(limits: dict[str, int]) -> None:
    """Over all blocks, a query meets each key that it sees once, and no other key."""
    length, size = 40, 4
    met = torch.zeros(length, length, dtype=torch.long)
    shares = [PackedSequences.of_lengths([length]).zigzag(rank, size) for rank in range(size)]
    for rank, (share, index) in enumerate(shares):
        for step, blocks in enumerate(blocks_of(share, True, **limits).steps):
            for block in blocks:
                assert block.sequences is not None
                queries, keys = (index[None], shares[(rank - step) % size][1][None])
                rows = block.queries.take(queries)[0].split(list(block.sequences.lengths))
                columns = block.keys.take(keys)[0].split(list((block.sequences.keys or block.sequences).lengths))
                for row, column in zip(rows, columns, strict=True):
                    allowed = mask(len(row), len(column), block.causal, block.window)
                    met[row[:, None], column] += 1 if allowed is None else allowed.long()
    place = torch.arange(length)
    near = place[:, None] // limits["chunk"] == place // limits["chunk"] if "chunk" in limits else True
    assert torch.equal(met, (mask(length, length, True, limits.get("window")) & near).long())


def test_blocks_are_worked_out_once() -> None:
    share, _ = PackedSequences.of_lengths([9, 30]).zigzag(1, 4)
    blocks = blocks_of(share, True)
    assert blocks_of(share, True) is blocks
    assert blocks_of(share, False) is not blocks
    (second,), (third,) = blocks.steps[2:]  # both for the second chunks' queries: taken once, not at every step
    assert second.queries is third.queries


def test_refusals() -> None:
    q = torch.randn(8, 2, 4)
    sequences = PackedSequences.of_uniform(1, 8)
    with pytest.raises(LayoutError, match="not cut, but this is rank 0 of a ring of 1"):
        ring_attention(q, q, q, sequences, None, causal=True)
    with pytest.raises(LayoutError, match="share 1 of 2, but this is rank 0 of a ring of 1"):
        ring_attention(q[:4], q[:4], q[:4], sequences.zigzag(1, 2)[0], None, causal=True)
    with pytest.raises(BackendError, match="cudnn: serves bfloat16 and float16"):
        ring_attention(q, q, q, sequences.zigzag(0, 1)[0], None, causal=True, backend="cudnn")


@pytest.mark.parametrize(
    "option",
    [
        {"window": True, "causal": False},
        {"chunk": True, "causal": False},
        {"window": True, "chunk": True},
        {"window": True, "auto": True},
        {"softcap": True},
        {"dropout": True},
        {"backend": "sdpa"},
    ],
)
def test_why_not(option: dict) -> None:
    plain = {
        "causal": True,
        "window": False,
        "chunk": False,
        "softcap": False,
        "dropout": False,
        "softmax": "vanilla",
        "backend": "auto",
    }
    for backend in ("auto", "cudnn", "varlen", "reference"):
        assert why_not(ContextSpec(2, None, (4, 2), **(plain | {"backend": backend}))) is None
    answer = why_not(ContextSpec(2, None, (4, 2), **(plain | option)))
    assert answer is not None
    assert answer.startswith("has no")


@pytest.mark.parametrize("lengths", [[16, 16], [24, 8]])
def test_indices_are_on_the_device_of_the_sequences(lengths: list[int]) -> None:
    share, _ = PackedSequences.of_lengths(lengths, "meta").zigzag(1, 4)
    assert share.context is not None
    joint, order = _joint(share.context, 2)
    assert {joint.device.type, joint.positions.device.type, order.device.type} == {"meta"}

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalight.imports import has
from megalight.ops.attention import hopper
from megalight.ops.attention.hopper import seen
from megalight.ops.common import mask
from megalight.types import PackedSequences


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 3, 20])
@pytest.mark.parametrize(
    ("lengths", "keys"), [((7,), (7,)), ((1, 5), (4, 9)), ((6, 2), (2, 2))], ids=["same", "more keys", "fewer keys"]
)
def test_how_many_keys_a_query_sees(
    lengths: tuple[int, ...], keys: tuple[int, ...], window: int | None, causal: bool
) -> None:
    pairs = 0
    for length, count in zip(lengths, keys, strict=True):
        allowed = mask(length, count, causal, window, torch.device("cpu"))
        pairs += length * count if allowed is None else int(allowed.sum())
    assert seen(lengths, keys, causal, window) == pytest.approx(pairs / sum(lengths))


def test_other_devices_keep_the_other_kernel() -> None:
    q = torch.zeros(2048, 1, 128, dtype=torch.bfloat16)
    assert not hopper.serves(q, q, PackedSequences.of_lengths([2048], "cpu"), True, None)


def test_long_sequences_have_one_kernel_for_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_available", lambda device: True)

    def serves(length: int, window: int | None = None, dtype: torch.dtype = torch.bfloat16) -> bool:
        q: Any = SimpleNamespace(device=torch.device("cuda"), shape=(length, 8, 128), dtype=dtype)
        return hopper.serves_backward(q, q, PackedSequences.of_lengths([length], "cpu"), True, window)

    assert serves(2048)
    assert serves(8192, window=1023)
    assert serves(8192, window=511)
    assert serves(2048, dtype=torch.float16)
    assert serves(8192, window=383)
    assert not serves(512)
    assert not serves(8192, window=255)
    q: Any = SimpleNamespace(device=torch.device("cuda"), shape=(512, 8, 128), dtype=torch.bfloat16)
    assert not hopper.serves(q, q, PackedSequences.of_lengths([512], "cpu"), True, None)
    # Beside cuDNN, whose launches cost the host less.
    for length, longer in ((1024, True), (768, False)):
        packed = PackedSequences.of_lengths([length], "cpu")
        assert hopper.serves(q, q, packed, True, None)
        assert hopper.serves(q, q, packed, True, None, hopper.LONGER) == longer
    assert not serves(2048, dtype=torch.float32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not serves(2048)


needs_triton = pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="needs triton, and no GPU")


@needs_triton
def test_blocks_of_sums() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    from megalight.ops.attention.hopper import backward as sums

    cpu = torch.device("cpu")
    assert sums.query_blocks((130, 0, 64, 1), cpu).tolist() == [[0, 64], [64, 64], [128, 2], [130, 64], [194, 1]]


@needs_triton
def test_programs_of_large_blocks_take_turns_and_small_ones_come_last() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from megalight.ops.attention.hopper.programs import programs

    lengths = (130, 0, 64, 1)
    found = programs(lengths, lengths, True, None, 8, 4, torch.device("cpu"))
    # 130, 64, 2 and 1 queries see the blocks, and the first two have 0.8 of all. Numbers of blocks are those of above.
    blocks = [(0, 0, 0), (130, 0, 3), (0, 128, 0), (194, 0, 4)]
    heads = [[(block, head) for block in blocks[:2] for head in range(turn, turn + 4)] for turn in (0, 4)]
    late = [(block, head) for block in blocks[2:] for head in range(8)]
    assert [((row[0], row[4], row[5]), row[6]) for row in found.table.tolist()] == [*heads[0], *heads[1], *late]
    assert {tuple(row[7:9]) for row in found.table.tolist()} == {(0, 1)}
    assert found[1:] == (0, 1)


@needs_triton
def test_small_blocks_of_a_window_are_divided_where_that_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from megalight.ops.attention.hopper import programs

    monkeypatch.setattr(programs, "num_sms", lambda device: 132)
    cpu = torch.device("cpu")
    found = programs.programs((8192,), (8192,), True, 2047, 8, 4, cpu)
    rows = [tuple(row) for row in found.table.tolist()]
    assert found.parts == 2
    assert len(set(rows)) == len(rows) == (64 * 8 - found.split) + 2 * found.split
    divided = [row for row in rows if row[8] > 1]
    assert sorted((row[9], row[7]) for row in divided) == [
        (slot, part) for slot in range(found.split) for part in range(2)
    ]
    assert len({(row[4], row[6], row[9]) for row in divided}) == found.split
    assert programs.programs((8192,), (8192,), True, None, 8, 4, cpu).parts == 1
    assert programs.programs((8192,), (8192,), True, 2047, 8, 1, cpu).parts == 1
    # More waves of all SMs even themselves out.
    assert programs.programs((65536,), (65536,), True, 2047, 8, 4, cpu).parts == 1
    # Four programs on two SMs, then one.
    assert programs.fullest([5.0] * 4 + [7.0], 2) == 17
    # The longest of them, or the mean, is all that must be known.
    assert programs.fullest([5.0] * 4 + [7.0], 2, 7.0) == 13.5
    assert programs.fullest([5.0] * 2 + [17.0], 2, 17.0) == 17


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "key_heads", "group", "causal", "parts", "full"),
    [
        ((4096,), 4, 4, True, 2, 1.1),  # split over two ranks
        ((4096, 4096), 2, 4, True, 2, 1.1),
        ((8192,), 1, 4, True, 4, 1.1),
        ((4096,), 4, 8, True, 2, 1.1),
        ((4096,), 2, 4, False, 2, 1.1),
        ((4096,), 5, 4, False, 4, 1.15),
        ((3907, 2559, 1280, 446), 4, 4, True, 2, 1.1),
        ((2048,), 8, 4, True, 2, 1.25),
        ((4096,), 4, 1, True, 1, 2.1),  # no heads to divide by
        ((4096,), 8, 4, True, 1, 1.05),
        ((4096,), 4, 4, False, 1, 1.05),
        ((8192,), 8, 4, True, 1, 1.05),
    ],
)
def test_long_blocks_are_divided_where_there_are_few(
    lengths: tuple[int, ...], key_heads: int, group: int, causal: bool, parts: int, full: float
) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from megalight.ops.attention.hopper import programs

    options = (lengths, lengths, causal, None, key_heads, group, 132)
    rows, fullest = programs.plan(*options)
    assert full - 0.1 < fullest < full
    assert max(row[8] for row in rows) == parts
    # Every block of every head is there once, or in all parts, which lie side by side and share a slot of their own.
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for row in rows:
        found.setdefault((*row[:5], row[6]), []).append(row[7:])
    assert len(found) == sum(-(-length // 128) for length in lengths) * key_heads
    shared = [turns[0][2] for turns in found.values() if turns[0][1] > 1]
    assert shared == list(range(len(shared)))
    assert all(turns == [(part, turns[0][1], turns[0][2]) for part in range(turns[0][1])] for turns in found.values())
    assert hopper.fills(PackedSequences.of_lengths(lengths), causal, None, key_heads, group, 132) == (full < 2)


@needs_triton
def test_sums_are_rounded_to_rows_of_tokens() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from megalight.ops.attention.hopper import backward as sums

    torch.manual_seed(0)
    table = sums.query_blocks((70, 3), torch.device("cpu"))
    exact = torch.randn(3, len(table), 64, 128)  # heads, blocks, queries, features
    # A product leaves four rows of warps, and in each two of rows of eight, with two features a thread.
    parts = exact.view(3, len(table), 4, 2, 8, 2, 8, 4, 2).permute(0, 1, 5, 6, 2, 4, 7, 3, 8)
    out = torch.full((73, 3, 128), torch.nan)
    sums.round_sums(parts.reshape(-1, sums.WIDTH).contiguous(), out, table, 0.5, 3)
    wanted = torch.cat([exact[:, 0], exact[:, 1, :6], exact[:, 2, :3]], 1).transpose(0, 1) * 0.5
    assert torch.equal(out, wanted)


@needs_triton
@pytest.mark.parametrize(("heads", "group"), [(12, 3), (9, 1), (14, 2)])
def test_outputs_times_gradients_and_sums_of_zero(heads: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from megalight.ops.attention.hopper import backward as sums

    torch.manual_seed(0)
    out, grad = torch.randn(2, 70, heads, 128)
    # Memory that nobody wrote is not 0.
    monkeypatch.setattr(sums.torch, "empty", lambda *sizes, **options: torch.full(sizes, 7, **options))
    delta, zeros, tickets = sums.prepare(out, grad, 3, group, 100)
    torch.testing.assert_close(delta, (out * grad).sum(-1).T)
    assert zeros.shape == (heads * 3 * 64, 128)
    assert not zeros.any()
    assert tickets.tolist() == [0] * 100

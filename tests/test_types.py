from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalight.errors import DataError
from megalight.types import Loss, PackedSequences, TokenBatch


def check(packed: PackedSequences, lengths: list[int]) -> None:
    """A description of ``lengths`` agrees with one made the slow way."""
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert packed.lengths == tuple(lengths)
    assert packed.cu_seqlens.tolist() == offsets
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.positions.tolist() == [i for length in lengths for i in range(length)]
    assert packed.positions.dtype == torch.int64
    assert packed.uniform == ((len(lengths), lengths[0]) if len(set(lengths)) == 1 else None)
    assert packed.num_tokens == sum(lengths)
    assert packed.max_length == max(lengths)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_lengths_and_padding(lengths: list[int], multiple: int) -> None:
    packed = PackedSequences.of_lengths(lengths)
    check(packed, lengths)
    padded = packed.pad_to(multiple)
    missing = -sum(lengths) % multiple
    check(padded, lengths + [missing] * bool(missing))
    assert padded.num_padding == missing
    assert padded.num_tokens % multiple == 0


def test_uniform() -> None:
    check(PackedSequences.of_uniform(3, 5), [5, 5, 5])


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_impossible_lengths(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="each must be at least 1"):
        PackedSequences.of_lengths(lengths)


def test_padding_twice_counts_all_of_it() -> None:
    packed = PackedSequences.of_lengths([3, 2]).pad_to(3).pad_to(4)
    check(packed, [3, 2, 1, 2])
    assert packed.num_padding == 3
    assert packed.pad_to(2) is packed


def test_padding_keeps_keys_and_positions() -> None:
    cached = replace(
        PackedSequences.of_lengths([1, 1]),
        positions=torch.tensor([7, 4]),
        keys=PackedSequences.of_lengths([8, 5]),
    )
    padded = cached.pad_to(4)
    assert padded.positions.tolist() == [7, 4, 0, 1]
    assert padded.keys is not None
    check(padded.keys, [8, 5, 2])
    assert padded.keys.num_padding == 2


def test_what_validation_made_first_serves_training() -> None:
    """Descriptions are cached; one made under inference mode must not hold inference tensors."""
    with torch.inference_mode():
        PackedSequences.of_uniform(2, 11)
    positions = PackedSequences.of_uniform(2, 11).positions
    torch.nn.Embedding(11, 3)(positions).sum().backward()


def test_to_moves_every_tensor() -> None:
    packed = replace(PackedSequences.of_lengths([2, 3]), keys=PackedSequences.of_lengths([4, 5]))
    moved = packed.to("meta")
    assert moved.keys is not None
    assert {moved.device.type, moved.positions.device.type, moved.keys.device.type} == {"meta"}
    assert moved.lengths == packed.lengths


def batch(rows: int, length: int, documents: tuple[tuple[int, ...], ...] | None = None) -> TokenBatch:
    tokens = torch.arange(rows * length).view(rows, length)
    return TokenBatch(tokens, tokens + 1, torch.ones(rows, length), documents)


def test_rows_are_sequences() -> None:
    check(batch(2, 5).sequences, [5, 5])


def test_documents_are_sequences() -> None:
    check(batch(2, 5, ((2, 3), (5,))).sequences, [2, 3, 5])


@pytest.mark.parametrize("documents", [((2, 2), (6,)), ((5,),), ((5,), (5,), (5,))])
def test_documents_that_do_not_fill_the_rows(documents: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(DataError, match="the batch has 2 rows of 5 tokens"):
        _ = batch(2, 5, documents).sequences


def test_split_is_views_of_all_rows_in_order() -> None:
    whole = batch(5, 3, ((3,), (1, 2), (3,), (2, 1), (3,)))
    whole = replace(whole, columns={"prices": 2.0 * whole.labels})
    parts = whole.split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    assert [part.document_lengths for part in parts] == [((3,), (1, 2)), ((3,), (2, 1)), ((3,),)]
    assert parts[1].tokens.data_ptr() == whole.tokens[2:].data_ptr()
    assert all(torch.equal(part.columns["prices"], 2.0 * part.labels) for part in parts)
    check(parts[1].sequences, [3, 2, 1])


def test_batches_move() -> None:
    whole = batch(2, 3, ((3,), (1, 2)))
    moved = replace(whole, columns={"prices": whole.loss_mask}).to("meta")
    assert {moved.tokens.device.type, moved.labels.device.type, moved.loss_mask.device.type} == {"meta"}
    assert moved.columns["prices"].is_meta
    assert moved.document_lengths == ((3,), (1, 2))


@pytest.mark.gpu
def test_page_locked_copies_and_equal_descriptions_on_the_device() -> None:
    packed = replace(PackedSequences.of_lengths([2, 3]), keys=PackedSequences.of_lengths([4, 5]))
    pinned = packed.pin_memory()
    assert pinned.keys is not None
    assert pinned.cu_seqlens.is_pinned()
    assert pinned.positions.is_pinned()
    assert pinned.keys.positions.is_pinned()
    held = replace(batch(2, 3), columns={"prices": torch.ones(2, 3)}).pin_memory()
    assert held.columns["prices"].is_pinned()
    assert held.tokens.is_pinned()
    assert held.labels.is_pinned()
    assert held.loss_mask.is_pinned()
    check(PackedSequences.of_lengths([2, 3], "cuda").pad_to(4).to("cpu"), [2, 3, 3])


def test_values_with_tensors_compare_by_identity() -> None:
    """Comparing tensors element by element would raise; these objects can be dictionary keys."""
    first, second = PackedSequences.of_uniform(2, 3), PackedSequences.of_uniform(2, 3)
    assert first == first
    assert first != second
    assert len({first, second, batch(1, 2), Loss(torch.zeros(()))}) == 4


def test_positions_on_axes_follow_their_tokens():
    axes = torch.arange(24).view(2, 12)
    whole = PackedSequences.of_lengths([7, 5]).with_axes(axes)
    assert torch.equal(whole.rotary_positions, axes)
    padded = whole.pad_to(8)
    assert padded.rotary_positions[:, 12:].tolist() == [[0, 1, 2, 3]] * 2
    for rank in range(2):
        share, index = whole.zigzag(rank, 2, multiple=4)
        held = index >= 0
        assert torch.equal(share.rotary_positions[:, held], axes[:, index[held]])
    moved = whole.to("cpu").rotary_positions
    assert torch.equal(moved, axes)
    with pytest.raises(DataError, match=r"shape \[2, 12\]; 11 tokens need \[axes, 11\]"):
        PackedSequences.of_lengths([11]).with_axes(axes)


def test_sequences_that_hold_only_padding_are_not_counted() -> None:
    sequences = PackedSequences.of_lengths([3, 4])
    assert sequences.num_sequences == 2
    assert sequences.pad_to(2).pad_to(5).lengths == (3, 4, 1, 2)
    assert sequences.pad_to(2).pad_to(5).num_sequences == 2
    for rank in range(2):
        share, _ = sequences.zigzag(rank, 2, multiple=5)
        assert len(share.lengths) == 3
        assert share.num_sequences == 2
        assert share.num_real_tokens == 7
    assert PackedSequences.of_uniform(3, 4).num_sequences == 3
    assert sequences.pad_to(2).pad_to(5).num_real_tokens == 7

"""The zigzag cut: every token once, at its place, with its label; padding nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megalight.errors import DataError
from megalight.types import PackedSequences, TokenBatch

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
SIZES = st.integers(1, 5)
MULTIPLES = st.integers(1, 6)


def by_hand(length: int, chunk: int, rank: int, size: int) -> list[int]:
    """Places of a sequence that a share holds, padding as -1."""
    chunks = [list(range(j * chunk, (j + 1) * chunk)) for j in range(2 * size)]
    return [place if place < length else -1 for place in chunks[rank] + chunks[2 * size - 1 - rank]]


@given(LENGTHS, SIZES, MULTIPLES)
def test_shares_hold_every_token_once_in_its_place(lengths: list[int], size: int, multiple: int) -> None:
    assume(max(lengths) >= 2 * size)
    sequences = PackedSequences.of_lengths(lengths)
    shares = [sequences.zigzag(rank, size, multiple) for rank in range(size)]
    starts = sequences.cu_seqlens.tolist()
    for rank, (share, index) in enumerate(shares):
        assert share.num_tokens == len(index) == len(share.positions)
        assert share.num_tokens % multiple == 0
        wanted, place = [], 0
        for i, local in enumerate(share.lengths):
            length = lengths[i] if i < len(lengths) else 0
            places = by_hand(length, local // 2, rank, size)
            wanted += [-1 if p < 0 else starts[i] + p for p in places]
            positions = share.positions[place : place + local].tolist()
            assert positions == [max(length - 1, 0) if p < 0 else p for p in places]
            place += local
        assert index.tolist() == wanted
    every = torch.cat([index for _, index in shares])
    assert sorted(every[every >= 0].tolist()) == list(range(sum(lengths)))
    assert torch.equal(shares[0][0].context.join(every), torch.arange(sum(lengths)))


@given(LENGTHS, SIZES, MULTIPLES)
def test_what_a_share_knows_of_the_whole(lengths: list[int], size: int, multiple: int) -> None:
    assume(max(lengths) >= 2 * size)
    sequences = PackedSequences.of_lengths(lengths)
    share, _ = sequences.zigzag(size - 1, size, multiple)
    context = share.context
    assert (context.rank, context.size) == (size - 1, size)
    assert [size * length for length in share.lengths] == list(context.whole.lengths)
    assert all(length % (2 * size) == 0 for length in context.whole.lengths)
    assert context.real.lengths == tuple(lengths)
    assert context.real_lengths == (*lengths, *[1] * context.num_dummies)
    assert share.longest == sequences.longest == max(lengths)
    assert share.num_padding == sum(share.lengths[len(lengths) :])
    if sequences.uniform:
        assert share.uniform == (len(lengths), share.lengths[0])
        assert not context.num_dummies
    assert share.pad_to(multiple) is share


@given(st.integers(1, 3), st.integers(8, 30), SIZES, MULTIPLES, st.booleans())
def test_batches(batch: int, length: int, size: int, multiple: int, documents: bool) -> None:
    assume(length >= 2 * size + 3)
    tokens = torch.arange(batch * length).view(batch, length) + 1
    mask = (tokens % 5 > 0).float()
    cut = ((3, length - 3),) * batch if documents else None
    whole = TokenBatch(tokens, 2 * tokens, mask, cut, columns={"prices": 0.5 * tokens})
    seen = []
    for rank in range(size):
        share = whole.context_share(rank, size, multiple)
        if size == 1:
            assert share is whole
            continue
        assert share.tokens.shape == share.labels.shape == share.loss_mask.shape
        assert share.tokens.shape[0] == (1 if documents else batch)
        assert share.tokens.numel() == share.sequences.num_tokens
        real = share.tokens > 0
        assert torch.equal(share.labels, 2 * share.tokens)
        assert torch.equal(share.columns["prices"], 0.5 * share.tokens)
        assert torch.equal(share.loss_mask[real], (share.tokens[real] % 5 > 0).float())
        assert not share.loss_mask[~real].any()
        offset = torch.tensor([0, 3])[(((share.tokens[real] - 1) % length) >= 3).long()] if documents else 0
        assert torch.equal(share.sequences.positions.view_as(real)[real], (share.tokens[real] - 1) % length - offset)
        seen += share.tokens[real].tolist()
    assert size == 1 or sorted(seen) == tokens.flatten().tolist()


def test_rows_shorter_than_their_chunks_are_refused_and_short_documents_padded() -> None:
    ids, mask = torch.zeros(1, 7, dtype=torch.int64), torch.ones(1, 7)
    with pytest.raises(DataError, match=r"a sequence has 7 tokens, but .* cp=4 .* 8 tokens or more, or lower cp"):
        TokenBatch(ids, ids, mask).context_share(0, 4)
    assert TokenBatch(ids, ids, mask, ((3, 4),)).context_share(0, 3).sequences.lengths == (2, 2)


def test_what_cannot_be_cut_or_padded_again() -> None:
    whole = PackedSequences.of_lengths([8, 5])
    share, _ = whole.zigzag(0, 2)
    with pytest.raises(DataError, match="call zigzag on the whole sequences"):
        share.zigzag(0, 2)
    with pytest.raises(DataError, match="call zigzag on the whole sequences"):
        replace(whole, keys=whole).zigzag(0, 2)
    with pytest.raises(DataError, match=r"a share of 8 tokens cannot be padded to a multiple of 3 .*multiple=3"):
        share.pad_to(3)
    rows = torch.ones(2, 8)
    with pytest.raises(DataError, match="split the whole batch first"):
        TokenBatch(rows, rows, rows).context_share(0, 2).split(1)


def test_shares_move() -> None:
    rows = torch.ones(2, 8)
    share = TokenBatch(rows, rows, rows).context_share(1, 2).to("meta").sequences
    assert {share.device.type, share.context.whole.device.type, share.context.order.device.type} == {"meta"}


@pytest.mark.gpu
def test_the_cut_never_makes_the_host_wait() -> None:
    rows = torch.ones(2, 16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for documents in (None, ((3, 13), (16,))):
            batch = TokenBatch(rows, rows, rows, documents).context_share(1, 2, 4)
            assert batch.sequences.context is not None
            assert len(batch.sequences.context.order) == 32
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lengths", [[8, 8], [5, 5], [7, 3, 12], [8, 4]])
@pytest.mark.parametrize("multiple", [1, 3])
def test_the_mask_of_padding(lengths: list[int], multiple: int) -> None:
    for rank in range(2):
        share, index = PackedSequences.of_lengths(lengths).zigzag(rank, 2, multiple)
        mask = share.token_mask
        real = torch.ones(len(index), dtype=torch.bool) if mask is None else mask
        assert torch.equal(real, index >= 0)
    whole = PackedSequences.of_lengths(lengths).pad_to(7)
    mask = whole.token_mask
    assert (whole.num_tokens if mask is None else int(mask.sum())) == sum(lengths)

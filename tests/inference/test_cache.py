"""Blocks of a cache: who has which, and that sequences never see each other's rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalight.errors import ConfigurationError, DataError
from megalight.inference import BlockPool, Cache
from tests.inference.test_generate import build, last_logits


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=20))
def test_every_block_has_one_owner(size, changes):
    blocks, tokens = BlockPool(3, 9, size), [0, 0, 0]
    for slot, count in changes:
        before = [list(table) for table in blocks.tables]
        if count < tokens[slot]:
            blocks.shrink(slot, count)
        else:
            try:
                blocks.grow({slot: count})
            except DataError:
                assert blocks.tables == before
                assert -(-count // size) - len(before[slot]) > blocks.free
                continue
        tokens[slot] = count
        assert [len(table) for table in blocks.tables] == [-(-each // size) for each in tokens]
        for old, new in zip(before, blocks.tables, strict=True):
            assert all(a == b for a, b in zip(old, new, strict=False)), "a token's row moved"
        owned = [block for table in blocks.tables for block in table]
        assert len({*owned}) == len(owned) == 9 - blocks.free
        assert {*owned} <= {*range(9)}


def test_a_pool_without_a_block_is_refused():
    for numbers, name in (((0, 1, 1), "num_slots"), ((1, 0, 1), "number of blocks"), ((1, 1, 0), "block_size")):
        with pytest.raises(ConfigurationError, match=f"{name} is 0; it must be at least 1"):
            BlockPool(*numbers)


def test_sequences_share_a_pool_that_cannot_hold_all_of_them_at_their_longest(poison):
    """Blocks come back in another order than they were given, and a sequence's rows lie apart."""
    model = build()
    cache = Cache(model.layers, 3, 12, BlockPool(3, 5, 3))
    rows = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]

    def extend(new):
        sequences = cache.extend(list(new), [len(ids) for ids in new.values()], "cpu")
        tokens = torch.tensor([token for ids in new.values() for token in ids])
        ends = sequences.cu_seqlens[1:].long() - 1
        with torch.no_grad():
            found = model(tokens, sequences, states=cache.states, rows=ends).logits
        torch.testing.assert_close(found, last_logits(model, [rows[slot] for slot in new]), rtol=1e-11, atol=1e-11)

    extend(dict(enumerate(rows)))
    assert cache.blocks.free == 1
    before = list(cache.lengths), [list(table) for table in cache.blocks.tables]
    with pytest.raises(DataError, match=r"sequences of \[7, 4\] tokens need 2 more blocks of 3 tokens, and 1 of 5 are"):
        cache.extend([0, 2], [3, 1], "cpu")
    assert (cache.lengths, cache.blocks.tables) == before, "an error changed the cache"
    cache.release(1)
    rows[0] += [10, 11, 12, 13]
    rows[2] += [14]
    extend({0: rows[0][4:], 2: [14]})
    cache.release(0)
    assert (cache.blocks.free, cache.lengths) == (3, [0, 0, 4])
    rows[0], rows[2] = [20, 21, 22, 23, 24, 25], [*rows[2], 15, 16, 17]
    extend({2: [15, 16, 17], 0: rows[0]})
    assert cache.blocks.tables == [[1, 2], [], [3, 4, 0]], "blocks in order would prove little"
    cache.truncate(0, 3)
    assert cache.blocks.free == 1
    rows[0] = [*rows[0][:3], 30]
    extend({0: [30]})

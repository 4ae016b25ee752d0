"""What every mixer with a state must keep: passes that continue one another equal one pass over all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalight.inference.cache import Cache
from megalight.nn import LayerContext
from megalight.types import PackedSequences

Passes = Sequence[tuple[list[int], list[int]]]


def assert_continued(mixer: nn.Module, width: int, room: int, passes: Passes, tolerance: float) -> None:
    """Compare passes with a state to passes over whole sequences.

    Args:
        mixer: called as ``mixer(rows [T, width], context, state)``, in float64.
        room: tokens of the cache per sequence.
        passes: the slots of each pass, and how many tokens each of them gets.
        tolerance: largest absolute and relative difference.
    """
    cache = Cache(nn.ModuleDict({"0": mixer}), 3, room)
    rows: dict[int, Tensor] = {slot: torch.empty(0, width, dtype=torch.float64) for slot in range(3)}
    for slots, counts in passes:
        sequences = cache.extend(slots, counts, "cpu")
        new = torch.randn(sum(counts), width, dtype=torch.float64)
        found = mixer(new, LayerContext(sequences), cache.states["0"])
        for slot, part in zip(slots, new.split(counts), strict=True):
            rows[slot] = torch.cat([rows[slot], part])
        whole = [mixer(rows[slot], LayerContext(PackedSequences.of_lengths([len(rows[slot])]))) for slot in slots]
        expected = torch.cat([out[-count:] for out, count in zip(whole, counts, strict=True)])
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    cache.release(1)  # another sequence takes the slot
    new = torch.randn(2, width, dtype=torch.float64)
    found = mixer(new, LayerContext(cache.extend([1], [2], "cpu")), cache.states["0"])
    alone = mixer(new, LayerContext(PackedSequences.of_lengths([2])))
    torch.testing.assert_close(found, alone, rtol=tolerance, atol=tolerance)

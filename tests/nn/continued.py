"""What every mixer with a state must keep: passes that continue one another equal one pass over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def assert_recurrence(mixer: nn.Module, by_loop: Callable[..., Tensor]) -> None:
    """Compare outputs and gradients of a mixer of width 12 with a loop over tokens, which is called with lengths."""
    torch.manual_seed(0)
    lengths = [5, 1, 40, 9]
    hidden = torch.randn(sum(lengths), 12, dtype=torch.float64, requires_grad=True)
    found = mixer(hidden, LayerContext(PackedSequences.of_lengths(lengths)))
    expected = by_loop(mixer, hidden, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    factor = torch.randn_like(found)
    tensors = [hidden, *mixer.parameters()]
    gradients = [torch.autograd.grad((y * factor).sum(), tensors) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-11 * other.norm()


def assert_state(mixer: nn.Module) -> None:
    """Check that an earlier sequence changes nothing in a later one, and passes of several tokens in any slots."""
    context = LayerContext(PackedSequences.of_lengths([33, 37]))
    hidden = torch.randn(70, 12, dtype=torch.float64)
    other = torch.cat([1e3 * hidden[:33] + 1, hidden[33:]])
    torch.testing.assert_close(mixer(hidden, context)[33:], mixer(other, context)[33:], rtol=1e-10, atol=1e-10)
    passes = [([0, 1, 2], [2, 36, 1]), ([2, 0], [1, 1]), ([1, 0, 2], [3, 1, 2]), ([0], [5])]
    assert_continued(mixer, 12, 60, passes, 1e-11)

"""What a source holds against what all ranks ask for: names and shapes, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from megalight.checkpoint.ranks import Ranks
from megalight.errors import CheckpointError, nearest
from megalight.parallel.source import Filled, Stored

SHOWN = 5
"""Tensors that a message names."""


def compare(
    ranks: Ranks,
    where: str,
    stored: Mapping[str, Stored],
    asked: Mapping[str, tuple[int, ...]],
    *,
    strict: bool,
    prefix: str,
    label: Callable[[str], str] = repr,
    lenient: str = "strict=False",
    remedy: str = "",
) -> Filled:
    """Check that names and shapes agree; see :meth:`megalight.parallel.source.Source.fill`.

    Args:
        ranks: who asks, all together.
        where: the source, for messages.
        stored: what it holds.
        asked: canonical name -> global shape, on this rank.
        strict: see there.
        prefix: see there.
        label: what messages call a tensor.
        lenient: what a user sets to accept other names.
        remedy: what a user does instead, if it is known why they differ.

    Raises:
        CheckpointError: on every rank, when they differ on any.
    """

    def advice(effect: str) -> str:
        return remedy or f"Is it of another model? {lenient} {effect}."

    def check() -> list[str]:
        # Sorted, so that every run names the same tensors.
        missing = sorted(asked.keys() - stored.keys())
        if strict and missing:
            meant = "" if remedy else nearest(missing[0], stored)
            raise CheckpointError(
                f"{_some(missing, label)} not in {where}.{meant} {advice('leaves such tensors as they are')}"
            )
        known = sorted(asked.keys() & stored.keys())
        differ = [name for name in known if tuple(stored[name].shape) != tuple(asked[name])]
        if differ:
            lines = "; ".join(f"{label(n)}: {list(stored[n].shape)} and {list(asked[n])}" for n in differ[:SHOWN])
            more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
            raise CheckpointError(
                f"shapes in {where} and in this model differ: {lines}{more}. {remedy or 'Is it of another model?'}"
            )
        return list(asked)

    # All ranks together: one that fails alone would leave the others in a collective.
    everyone = ranks.together(f"loading {where}", check)

    # On rank 0, which knows what all ranks ask for: a rank of a pipeline asks for its own layers only.
    def leftover() -> tuple[str, ...]:
        # As sets: a source that is read tensor by tensor comes here as often as it has names.
        others = stored.keys() - {name for names in everyone for name in names}
        return tuple(sorted(name for name in others if name.startswith(prefix)) if prefix else sorted(others))

    unexpected = ranks.first(f"loading {where}", leftover)
    if strict and unexpected:
        raise CheckpointError(
            f"{where} holds {_some(unexpected, label)} that this model does not ask for. "
            f"{advice('ignores such tensors')}"
        )
    # Missing ones are a rank's own; unexpected ones are known of all ranks only.
    return Filled(tuple(sorted(asked.keys() - stored.keys())), unexpected)


def _some(names: Collection[str], label: Callable[[str], str]) -> str:
    shown = ", ".join(label(name) for name in list(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"

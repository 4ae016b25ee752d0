"""What schedules share: the order of forwards and of backwards, how they alternate, and how backwards are split."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megalight.parallel.pipeline.actions import Action, Actions, Kind


def rounds(pp: int, vpp: int, micro_batches: int, group_size: int) -> list[tuple[int, int]]:
    """``(chunk, micro_batch)`` of all forwards: a group of micro-batches through chunk 0, through chunk 1, ...

    A last group of less than ``pp`` is filled up with micro-batches that do not exist, ``micro_batches`` and on: the
    caller leaves them out at the end. What is left keeps the order of a full group, which cannot deadlock.
    """
    found = []
    start = 0
    for size in group_sizes(pp, micro_batches, group_size):
        group = range(start, start + max(size, pp))
        found += [(chunk, i) for chunk in range(vpp) for i in group]
        start += size
    return found


def group_sizes(pp: int, micro_batches: int, group_size: int) -> list[int]:
    """Micro-batches in groups of ``group_size`` at most: equally large if each then has ``pp``, else with a rest."""
    count = -(-micro_batches // group_size)
    share, more = divmod(micro_batches, count)
    if share >= pp:
        return [share + 1] * more + [share] * (count - more)
    return [min(group_size, micro_batches - start) for start in range(0, micro_batches, group_size)]


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Actions:
    """``warm_up`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    actions = list(forwards[:warm_up])
    for place, backward in enumerate(backwards):
        actions += [*forwards[warm_up + place : warm_up + place + 1], backward]
    return actions


def split(actions: Actions, delay: int) -> Actions:
    """Each backward cut in two: the input gradient in its place, the weight gradient ``delay`` backwards later."""
    found: Actions = []
    waiting: deque[Action] = deque()
    for action in actions:
        if action.kind is not Kind.BACKWARD:
            found.append(action)
            continue
        found.append(action._replace(kind=Kind.INPUT_GRADIENT))
        waiting.append(action._replace(kind=Kind.WEIGHT_GRADIENT))
        if len(waiting) > delay:
            found.append(waiting.popleft())
    return [*found, *waiting]

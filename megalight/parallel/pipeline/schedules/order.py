"""Functions that schedules share: the order of forwards, alternating or paired with backwards, splitting backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest

from megalight.parallel.pipeline.actions import Action, Actions, Kind


def rounds(pp: int, vpp: int, micro_batches: int, group_size: int) -> list[tuple[int, int]]:
    """Return ``(chunk, micro_batch)`` of all forwards: each group of micro-batches through chunk 0, chunk 1, and so on.

    A last group of less than ``pp`` is filled up with numbers from ``micro_batches`` on, which the caller removes at
    the end. So the rest keeps the order of a full group, which cannot deadlock.
    """
    found = []
    start = 0
    for size in group_sizes(pp, micro_batches, group_size):
        group = range(start, start + max(size, pp))
        # A whole group goes through one chunk before the next chunk begins: by then the first micro-batch of the group
        # has come around all ranks, if the group has at least pp.
        found += [(chunk, i) for chunk in range(vpp) for i in group]
        start += size
    return found


def group_sizes(pp: int, micro_batches: int, group_size: int) -> list[int]:
    """Divide micro-batches into groups of at most ``group_size``: equal groups if each has ``pp``, else with a rest."""
    count = -(-micro_batches // group_size)
    share, more = divmod(micro_batches, count)
    # Groups of nearly equal size waste less than full groups and a short rest.
    if share >= pp:
        return [share + 1] * more + [share] * (count - more)
    return [min(group_size, micro_batches - start) for start in range(0, micro_batches, group_size)]


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Actions:
    """Return ``warm_up`` forwards, then a forward and a backward in turn, then the remaining backwards."""
    actions = list(forwards[:warm_up])
    for place, backward in enumerate(backwards):
        # An empty slice once the forwards are used up.
        actions += [*forwards[warm_up + place : warm_up + place + 1], backward]
    return actions


def pair(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, micro_batches: int) -> Actions:
    """Return ``warm_up`` forwards, then each backward together with the next forward, then the remaining backwards.

    Micro-batches with numbers from ``micro_batches`` on (:func:`rounds`) are left out of their pairs.
    """
    actions = [action for action in forwards[:warm_up] if action.micro_batch < micro_batches]
    for backward, forward in zip_longest(backwards, forwards[warm_up:]):
        beside = forward if forward is not None and forward.micro_batch < micro_batches else None
        if backward.micro_batch < micro_batches:
            actions.append(backward._replace(beside=beside))
        elif beside is not None:
            actions.append(beside)
    return actions


def split(actions: Actions, delay: int) -> Actions:
    """Split each backward: the input gradient keeps its place, the weight gradient comes ``delay`` backwards later."""
    found: Actions = []
    waiting: deque[Action] = deque()
    for action in actions:
        if action.kind is not Kind.BACKWARD:
            found.append(action)
            continue
        found.append(action._replace(kind=Kind.INPUT_GRADIENT))
        waiting.append(action._replace(kind=Kind.WEIGHT_GRADIENT))
        # First in, first out: the oldest weight gradient holds activations longest.
        if len(waiting) > delay:
            found.append(waiting.popleft())
    return [*found, *waiting]

"""Schedules under the harshest transfers: nothing is buffered but what a receiver has made room for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megalight.parallel.pipeline.schedules import ActionKind, Actions


def play(schedules: Sequence[Actions], vpp: int, depth: int = 1) -> list[str]:
    """Run to the end; what each stuck rank was about to do, empty if none is stuck.

    Every directed edge has a channel for activations and one for gradients. A receiver makes room for the next
    ``depth`` messages of a channel that it has not taken yet (for a gradient: once it has done the forward before it).
    A sender goes on only when its message found room.
    """
    pp = len(schedules)
    last = pp * vpp - 1
    incoming: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(
        list
    )  # (rank, forward) -> (chunk, i), in order
    for rank, actions in enumerate(schedules):
        for kind, chunk, i, _ in (part for action in actions for part in action.parts):
            stage = chunk * pp + rank
            if kind is not ActionKind.WEIGHT_GRADIENT and stage != (0 if kind is ActionKind.FORWARD else last):
                incoming[rank, kind is ActionKind.FORWARD].append((chunk, i))
    arrived: dict[tuple[int, bool], int] = defaultdict(int)
    taken: dict[tuple[int, bool], int] = defaultdict(int)
    outgoing: list[list[tuple[int, bool]]] = [[] for _ in range(pp)]
    place = [0] * pp
    done: list[set[tuple[ActionKind, int, int]]] = [set() for _ in range(pp)]

    def room(channel: tuple[int, bool]) -> bool:
        rank, forward = channel
        if arrived[channel] >= taken[channel] + depth:
            return False
        chunk, i = incoming[channel][arrived[channel]]
        return forward or (ActionKind.FORWARD, chunk, i) in done[rank]

    def step(rank: int) -> bool:
        if outgoing[rank]:
            channel = next(filter(room, outgoing[rank]), None)
            if channel is not None:
                arrived[channel] += 1
                outgoing[rank].remove(channel)
            return channel is not None
        if place[rank] == len(schedules[rank]):
            return False
        parts = schedules[rank][place[rank]].parts
        wanted = {}
        for kind, chunk, i, _ in parts:
            forward, stage = kind is ActionKind.FORWARD, chunk * pp + rank
            if kind is not ActionKind.WEIGHT_GRADIENT and stage != (0 if forward else last):
                wanted[rank, forward] = chunk, i
        if any(arrived[channel] == taken[channel] for channel in wanted):
            return False
        for channel, message in wanted.items():
            assert incoming[channel][taken[channel]] == message
            taken[channel] += 1
        for kind, chunk, i, _ in parts:
            forward, stage = kind is ActionKind.FORWARD, chunk * pp + rank
            if kind is not ActionKind.WEIGHT_GRADIENT and stage != (last if forward else 0):
                outgoing[rank].append(((stage + (1 if forward else -1)) % pp, forward))
            done[rank].add((kind, chunk, i))
        place[rank] += 1
        return True

    while sum(step(rank) for rank in range(pp)):  # one step of every rank that can make one
        pass
    return [
        f"rank {rank}: {'send' if outgoing[rank] else schedules[rank][place[rank]]}"
        for rank in range(pp)
        if outgoing[rank] or place[rank] < len(schedules[rank])
    ]

"""Messages are expected so that no rank that stops until all its messages are through stops the others for good."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megalight.parallel.pipeline.schedules import SCHEDULES, Action, ActionKind, build
from megalight.parallel.pipeline.timeline import Place, RankSchedule, input_of, output_of, rank_schedule_of
from tests.parallel.pipeline.test_schedules import Case, cases


def stopping(rank_schedules: Sequence[RankSchedule], vpp: int) -> list[str]:
    """Play a step in which every rank, before each action, waits until all that it has posted and sent is through.

    Every activation is asked for: whoever asks waits for the answer before it posts more. Without that, ranks wait for
    less, and come to the end if they do here.

    Returns:
        what each rank that is stuck was about to do; empty if all come to the end.
    """
    pp = len(rank_schedules)
    last = pp * vpp - 1
    sent: set[Place] = set()
    posted: set[Place] = set()
    doing = [0] * pp
    waits: list[set[Place]] = [set() for _ in range(pp)]
    inboxes = [[list(rank_schedule.gradients), list(rank_schedule.activations)] for rank_schedule in rank_schedules]

    def step(rank: int) -> None:
        if doing[rank] == len(rank_schedules[rank].actions):
            return
        for kind, inbox in zip((ActionKind.BACKWARD, ActionKind.FORWARD), inboxes[rank], strict=True):
            while inbox and doing[rank] >= inbox[0].before:
                place = input_of(Action(kind, inbox[0].chunk, inbox[0].micro_batch), rank, pp, vpp)
                assert place is not None
                if kind is ActionKind.FORWARD and place not in sent:
                    return
                posted.add(place)
                waits[rank].add(place)
                inbox.pop(0)
        if not waits[rank] <= sent & posted:
            return
        for action in rank_schedules[rank].actions[doing[rank]].parts:
            needed = input_of(action, rank, pp, vpp)
            assert needed is None or needed[1] % pp == rank or needed in posted, f"{action} was not prepared for"
            given = output_of(action, rank, pp)
            if given is not None and given[1] != (last if given[0] == "F" else 0) and pp > 1:
                sent.add(given)
                waits[rank].add(given)
        doing[rank] += 1

    before = None
    while before != (before := (sum(doing), len(posted))):  # as long as a rank gets on, or makes room for a message
        for rank in range(pp):
            step(rank)
    return [
        f"rank {r}: {rank_schedules[r].actions[n]}" for r, n in enumerate(doing) if n < len(rank_schedules[r].actions)
    ]


def check(case: Case) -> None:
    lists = build(*case)
    rank_schedules = [rank_schedule_of(rank, lists) for rank in range(case.pp)]
    assert not stopping(rank_schedules, case.vpp), case


@pytest.mark.parametrize("name", SCHEDULES)
def test_hosts_that_wait_for_all_their_messages_come_to_the_end(name: str) -> None:
    for case in cases(name):
        check(case)


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_of_many_more(name: str) -> None:
    for case in cases(name, full=True):
        check(case)


def test_one_message_ahead_without_thought_would_stop_for_good() -> None:
    """Two ranks with two chunks each: either waits for what the other sends after its own next action."""
    lists = build("zero_bubble", 2, 2, 4)
    hasty = []
    for rank in range(2):
        rank_schedule = rank_schedule_of(rank, lists)
        uses = {
            (a.chunk, a.micro_batch): n for n, a in enumerate(rank_schedule.actions) if a.kind is ActionKind.FORWARD
        }
        before = [0, *(uses[e.chunk, e.micro_batch] for e in rank_schedule.activations)]
        ahead = [e._replace(before=n) for e, n in zip(rank_schedule.activations, before, strict=False)]
        hasty.append(RankSchedule(rank_schedule.actions, tuple(ahead), rank_schedule.gradients))
    assert stopping(hasty, 2)


def test_what_is_sent_may_come_meanwhile() -> None:
    lists = build("1f1b", 2, 1, 3)  # they begin at 0 1 4 6 7 10 and at 1 2 4 5 7 8
    first, last = rank_schedule_of(0, lists), rank_schedule_of(1, lists)
    assert first.activations == last.gradients == ()
    assert last.activations == ((0, 0, 0), (0, 1, 1), (0, 2, 4))
    assert first.gradients == ((0, 0, 2), (0, 1, 4), (0, 2, 5))


def holding(rank_schedules: Sequence[RankSchedule], vpp: int, slots: int) -> list[str]:
    """Play a step in which every rank stops at a send until its slot on the receiver is free.

    A slot is free again when the receiver begins the action that uses its message.

    Returns:
        what each rank that is stuck was about to do; empty if all come to the end.
    """
    pp = len(rank_schedules)
    last = pp * vpp - 1
    here: set[Place] = set()
    sent: dict[tuple[int, str], int] = {}
    used: dict[tuple[int, str], int] = {}
    doing = [0] * pp
    leaving: list[list[Place]] = [[] for _ in range(pp)]

    def step(rank: int) -> None:
        while leaving[rank]:
            place = leaving[rank][0]
            channel = (place[1] + (1 if place[0] == "F" else -1)) % pp, place[0]
            if sent.get(channel, 0) - used.get(channel, 0) >= slots:
                return
            sent[channel] = sent.get(channel, 0) + 1
            here.add(leaving[rank].pop(0))
        if doing[rank] == len(rank_schedules[rank].actions):
            return
        parts = rank_schedules[rank].actions[doing[rank]].parts
        needs = [
            place for part in parts if (place := input_of(part, rank, pp, vpp)) is not None and place[1] % pp != rank
        ]
        if not set(needs) <= here:
            return
        for place in needs:
            used[rank, place[0]] = used.get((rank, place[0]), 0) + 1
        for part in parts:
            given = output_of(part, rank, pp)
            if given is not None and given[1] != (last if given[0] == "F" else 0) and pp > 1:
                leaving[rank].append(given)
        doing[rank] += 1

    before = None
    while before != (before := (sum(doing), sum(sent.values()))):
        for rank in range(pp):
            step(rank)
    return [
        f"rank {r}: {rank_schedules[r].actions[n]}" for r, n in enumerate(doing) if n < len(rank_schedules[r].actions)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_senders_that_wait_for_slots_come_to_the_end(name: str) -> None:
    for case in cases(name):
        lists = build(*case)
        rank_schedules = [rank_schedule_of(rank, lists) for rank in range(case.pp)]
        (slots,) = {rank_schedule.slots for rank_schedule in rank_schedules}
        # one is to spare
        assert not holding(rank_schedules, case.vpp, slots - 1), case


def test_too_few_slots_hold_up_a_pipeline() -> None:
    """The play above can fail: each rank waits for a slot on the other one."""
    lists = build("interleaved", 2, 2, 6, 3)
    rank_schedules = [rank_schedule_of(rank, lists) for rank in range(2)]
    assert rank_schedules[0].slots == 3
    assert len(holding(rank_schedules, 2, 1)) == 2

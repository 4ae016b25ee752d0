"""Rows pushed into slots of other ranks: files that all ranks map stand for the memory of GPUs."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.errors import LayoutError, MegalightError
from megalight.parallel.expert import ExpertOptions, SymmetricDispatcher, copy_engine
from megalight.parallel.expert.all_to_all import Traffic
from megalight.parallel.expert.copy_engine import PeerExchange, Regions
from megalight.parallel.interleaved_passes import PassAborted, PassInterleaver
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.peers import memory
from megalight.parallel.peers.memory import BOUNDARY
from megalight.parallel.shared_state import SharedState
from tests.parallel.expert import test_dispatch, test_overlap
from tests.parallel.expert.model import build
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.support.workers import run


def _step(degrees: dict[str, int]) -> dict[str, float]:
    with symmetric_on_cpu():
        return test_dispatch.step(degrees, "optim", "symmetric")


@pytest.mark.parametrize(("ranks", "degrees"), [(2, {"ep": 2}), (4, {"ep": 2, "etp": 2})])
def test_steps_equal_one_device(ranks: int, degrees: dict[str, int]) -> None:
    for errors in run(_step, ranks, degrees):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


def _turns(degrees: dict[str, int], options: dict[str, Any], count: int) -> tuple[int, dict[str, Any]]:
    with symmetric_on_cpu():
        return test_overlap.found(degrees, options, count)


def test_slots_of_two_passes_in_turns() -> None:
    options = {"expert": ExpertOptions("symmetric"), **test_overlap.COMBINED}
    test_overlap.assert_equal(2, {"ep": 2}, options, 4, _turns)


def _routed() -> dict[tuple[str, bool], list[torch.Tensor]]:
    with symmetric_on_cpu():
        return test_dispatch.routed("symmetric")


def test_extreme_routes() -> None:
    """The same as by messages, also where no rank has a row."""
    found, expected = run(_routed, 2), run(test_dispatch.routed, 2, "all_to_all")
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True)), name


TABLES = ([[3, 0, 2], [1, 4, 0], [0, 0, 5]], [[0, 0, 0]] * 3, [[0, 0, 0], [0, 0, 0], [40, 0, 0]], [[2, 2, 2]] * 3)


def _exchanged() -> list[bool]:
    """Rows of several tensors, of different widths and dtypes, while slots grow and shrink; and back."""
    rank, good = dist.get_rank(), []
    with symmetric_on_cpu():
        send = PeerExchange(dist.group.WORLD)  # type: ignore[arg-type]
        for number, table in enumerate(TABLES):

            def rows(source: int, to: int) -> torch.Tensor:
                return torch.arange(table[source][to]) + 1000 * source + 100 * to + 10_000 * number  # noqa: B023

            leaving = torch.cat([rows(rank, to) for to in range(3)])
            tensors = leaving.double()[:, None] * torch.arange(1.0, 8), leaving.half(), leaving[:, None].expand(-1, 2)
            traffic = Traffic.between_all(table, rank)
            found = send(tensors, traffic)
            arrived = torch.cat([rows(source, rank) for source in range(3)])
            wanted = arrived.double()[:, None] * torch.arange(1.0, 8), arrived.half(), arrived[:, None].expand(-1, 2)
            good += [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]
            good += [torch.equal(a, b) for a, b in zip(send(found, traffic.back), tensors, strict=True)]
    return good


def _ends_of_turns() -> list[int]:
    """How often an exchange ends its turn, with rows and without."""
    ended: list[int] = []
    with symmetric_on_cpu(), patch.object(copy_engine, "interleaving", lambda: True):
        send = PeerExchange(dist.group.WORLD)  # type: ignore[arg-type]
        for rows in (2, 0):
            with patch.object(copy_engine, "pause") as pause:
                send([torch.ones(2 * rows, 3)], Traffic.even(rows, 2))
            ended.append(pause.call_count)
    return ended


def test_turns_end_also_where_no_rank_has_a_row() -> None:
    """Ranks of another group may have rows, and all passes must take turns in the same order."""
    assert run(_ends_of_turns, 2) == [[1, 1]] * 2


def _sums(send: PeerExchange, sizes: tuple[int, ...]) -> list[tuple[float, float]]:
    """What arrives if each rank sends as many rows of its number to each, and what should."""
    found = []
    for rows in sizes:
        leaving = torch.full((2 * rows, 3), float(dist.get_rank() + 1 + rows), dtype=torch.float64)
        (out,) = send([leaving], Traffic.even(rows, 2))
        found.append((float(out.sum()), 3.0 * rows * (3 + 2 * rows)))
    return found


def _grown_in_turns() -> list[tuple[float, float]]:
    """The memory grows in each pass while rows of the other one are in the old memory."""
    found: list[tuple[float, float]] = []
    with symmetric_on_cpu():
        send = PeerExchange(dist.group.WORLD)  # type: ignore[arg-type]
        # What is patched is seen in all threads.
        PassInterleaver(torch.device("cpu")).play(
            lambda: found.extend(_sums(send, (3, 100, 7, 3000))),
            lambda: found.extend(_sums(send, (5, 40, 900, 2, 6000))),
            lambda: None,
        )
    return found


def test_slots_may_grow_while_two_passes_take_turns() -> None:
    for found in run(_grown_in_turns, 2):
        assert len(found) == 9
        assert all(one == other for one, other in found), found


def _after_failures() -> tuple[int, list[tuple[float, float]]]:
    """Passes that end in their pause, as when the other one fails; and what arrives later."""
    failed = 0
    with symmetric_on_cpu():
        send = PeerExchange(dist.group.WORLD)  # type: ignore[arg-type]
        for _ in range(memory.SLOTS + 1):
            with (
                patch.object(copy_engine, "interleaving", lambda: True),
                patch.object(copy_engine, "pause", side_effect=PassAborted),
                pytest.raises(PassAborted),
            ):
                _sums(send, (4,))
            failed += 1
        return failed, _sums(send, (1, 2, 3))


def test_an_abandoned_pass_leaves_its_slot_free() -> None:
    """Neither this rank nor its peers wait for it in the next step."""
    for failed, found in run(_after_failures, 2):
        assert failed == memory.SLOTS + 1
        assert all(one == other for one, other in found), found


def _connected(reason: str | None) -> str:
    with symmetric_on_cpu(), patch.object(memory, "unreachable", lambda group: reason):
        mesh = ParallelMesh(2, dist.get_rank(), ep=2)
        options = Layout(expert=ExpertOptions("symmetric"))
        try:
            ParallelModel.build(build().to("meta"), mesh, options)
        except LayoutError as error:
            return str(error)
        return "connected"


def test_ranks_that_cannot_reach_each_other_are_told_before_the_first_pass() -> None:
    far = "needs all 2 ranks on one host, and they are on 2"
    assert run(_connected, 2, None) == ["connected"] * 2
    for message in run(_connected, 2, far):
        assert message.startswith(f"ExpertOptions: dispatcher='symmetric' cannot serve: it {far}. Set dispatcher=")


def test_rows_of_all_ranks_arrive_in_order() -> None:
    for good in run(_exchanged, 3):
        assert len(good) == 6 * len(TABLES)
        assert all(good)


@settings(deadline=None, max_examples=50)
@given(
    table=st.integers(1, 4).flatmap(
        lambda size: st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size)
    ),
    widths=st.lists(st.integers(1, 700), min_size=1, max_size=3),
)
def test_no_two_rows_share_a_place(table: list[list[int]], widths: list[int]) -> None:
    regions = Regions(table, widths)
    for to in range(len(table)):
        places = [regions.place(tensor, source, to) for tensor in range(len(widths)) for source in range(len(table))]
        assert all(one.stop <= other.start for one, other in pairwise(places))
        assert places[-1].stop <= regions.nbytes
        for tensor, width in enumerate(widths):
            whole = regions.arrived(tensor, to)
            assert whole.start % BOUNDARY == 0
            assert whole.stop - whole.start == width * sum(row[to] for row in table)


def test_traffic_goes_back_the_way_it_came() -> None:
    table = TABLES[0]
    for rank in range(3):
        traffic = Traffic.between_all(table, rank)
        assert (traffic.send, traffic.receive) == (table[rank], [row[rank] for row in table])
        assert traffic.back == Traffic.between_all([list(column) for column in zip(*table, strict=True)], rank)
        assert traffic.back.back == traffic


def test_machines_without_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedState(ParallelMesh(2, 0, ep=2), expert=ExpertOptions("symmetric"))
    monkeypatch.setattr(memory, "why_not", lambda device: f"needs a tensor on {device}, and there is none")
    with pytest.raises(LayoutError, match=r"'symmetric' cannot serve: it needs .* Set dispatcher='all_to_all'"):
        SymmetricDispatcher(shared)
    monkeypatch.setattr(memory, "unreachable", lambda group: "needs all 2 ranks on one host, and they are on 2")
    with pytest.raises(LayoutError, match="cannot serve: it needs all 2 ranks on one host"):
        PeerExchange(None)  # type: ignore[arg-type]


def test_a_push_that_fails_leaves_its_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = SimpleNamespace(place=1, view=lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype))
    asked: list[set[int]] = []

    def next_slot(nbytes: int, busy: set[int]) -> Any:
        asked.append(set(busy))
        return slot

    def push(*arguments: Any) -> None:
        raise MegalightError("cuMemcpyDtoDAsync failed")

    exchange = object.__new__(PeerExchange)
    exchange.memory = SimpleNamespace(rank=0, size=2, others=(1,), capacity=1024, slot=next_slot)  # type: ignore[assignment]
    exchange.copies = SimpleNamespace(stream=mock.MagicMock(), await_free=lambda slot: None, push=push)  # type: ignore[assignment]
    exchange.watch = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    exchange._busy = set()
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    for _ in range(2):
        with pytest.raises(MegalightError, match="cuMemcpyDtoDAsync failed"):
            exchange([torch.ones(2, 4)], Traffic.between_all([[1, 1], [1, 1]], 0))
    assert asked == [set(), set()]


def _gone() -> str:
    """A peer that was missing in one exchange is named before the next one."""
    with symmetric_on_cpu():
        exchange = PeerExchange(dist.group.WORLD)  # type: ignore[arg-type]
        traffic = Traffic.between_all([[1, 1], [1, 1]], dist.get_rank())
        exchange([torch.ones(2, 4)], traffic)
        exchange.watch.missing[1 - dist.get_rank()] = 1
        try:
            exchange([torch.ones(2, 4)], traffic)
        except MegalightError as error:
            return str(error)
    return ""


def test_a_peer_that_is_gone_is_named() -> None:
    for rank, message in enumerate(run(_gone, 2)):
        assert message.startswith(f"rank {rank} waited ")
        assert f"for data of rank {1 - rank}, in vain" in message

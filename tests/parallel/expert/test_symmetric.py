"""Rows pushed into slots of other ranks: files that all ranks map stand for the memory of GPUs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.errors import LayoutError
from megalight.parallel.expert import ExpertOptions, SymmetricDispatcher, symmetric
from megalight.parallel.expert.exchange import Traffic
from megalight.parallel.expert.symmetric import BOUNDARY, PeerExchange, Regions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.peers import memory
from megalight.parallel.tensor.shared import Shared
from tests.parallel.expert import test_dispatch, test_overlap
from tests.parallel.tensor.overlap.shared_files import symmetric_on_cpu
from tests.workers import run


def _step(degrees: dict[str, int]) -> dict[str, float]:
    with symmetric_on_cpu():
        return test_dispatch.step(degrees, "optim", "symmetric")


@pytest.mark.parametrize(("ranks", "degrees"), [(2, {"ep": 2}), (4, {"ep": 2, "etp": 2})])
def test_steps_equal_one_device(ranks: int, degrees: dict[str, int]) -> None:
    for errors in run(_step, ranks, degrees):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


def _turns(options: dict[str, Any]) -> dict[str, float]:
    with symmetric_on_cpu():
        return test_overlap._compare({"ep": 2}, {"expert": ExpertOptions("symmetric"), **options}, 4)


def test_slots_of_two_passes_in_turns() -> None:
    for errors in run(_turns, 2, test_overlap.COMBINED):
        assert all(error <= 1e-9 for error in errors.values()), errors


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
    with symmetric_on_cpu(), patch.object(symmetric, "taking_turns", lambda: True):
        send = PeerExchange(dist.group.WORLD)  # type: ignore[arg-type]
        for rows in (2, 0):
            with patch.object(symmetric, "pause") as pause:
                send([torch.ones(2 * rows, 3)], Traffic.even(rows, 2))
            ended.append(pause.call_count)
    return ended


def test_turns_end_also_where_no_rank_has_a_row() -> None:
    """Ranks of another group may have rows, and all passes must take turns in the same order."""
    assert run(_ends_of_turns, 2) == [[1, 1]] * 2


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
    shared = Shared(ParallelMesh(2, 0, ep=2), expert=ExpertOptions("symmetric"))
    monkeypatch.setattr(memory, "why_not", lambda device: f"needs a tensor on {device}, and there is none")
    with pytest.raises(LayoutError, match=r"'symmetric' cannot serve: it needs .* Set dispatcher='all_to_all'"):
        SymmetricDispatcher(shared)
    monkeypatch.setattr(memory, "unreachable", lambda group: "needs all 2 ranks on one host, and they are on 2")
    with pytest.raises(LayoutError, match="cannot serve: it needs all 2 ranks on one host"):
        PeerExchange(None)  # type: ignore[arg-type]

"""What runs under what: every message is under way while another piece is multiplied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.parallel.collectives import PendingCollective
from megalight.parallel.tensor.overlap import pipelined
from megalight.parallel.tensor.overlap.pipelined import Pipelined
from megalight.parallel.tensor.overlap.spec import Product, rounds_of

ROWS = 3


@pytest.mark.parametrize(("size", "pieces"), [(2, 2), (4, 2), (4, 4), (8, 4), (6, 3), (4, 1)])
def test_rounds_bring_everything_everywhere_once(size: int, pieces: int) -> None:
    """Whoever is ahead of a rank in some place of a round sees that rank behind it in the same place."""
    run = size // pieces
    schedules = [rounds_of(rank, size, pieces) for rank in range(size)]
    for rank, rounds in enumerate(schedules):
        assert rounds[0].block == rank // run
        assert sorted(each.block for each in rounds) == list(range(pieces))
        assert sorted(ahead for each in rounds for ahead, _ in each.pairs) == [r for r in range(size) if r != rank]
        for number, each in enumerate(rounds):
            assert all(ahead // run == each.block for ahead, _ in each.pairs)
            for place, (ahead, _) in enumerate(each.pairs):
                assert schedules[ahead][number].pairs[place][1] == rank


class Recorder:
    """A carrier of nothing that writes down what is asked of it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.events: list[str] = []
        self.own = ""

    def gather(self, share: Tensor, rounds: Any, own: str) -> Any:
        self.own = own
        self.events.append(f"post {sum(len(each.pairs) for each in rounds)}")
        whole = torch.zeros(self.size * len(share), share.shape[1])
        return SimpleNamespace(
            whole=whole,
            wait=lambda number: self.events.append(f"wait {number}"),
            finish=lambda: self.events.append("left"),
        )

    def scatter(self, rows: int, width: int, like: Tensor, rounds: Any) -> Any:
        def send(number: int, piece: Tensor) -> None:
            assert len(piece) == rows * self.size // len(rounds)
            self.events.append(f"send {number}")

        def finish() -> Tensor:
            self.events.append("finish")
            return torch.zeros(rows, width)

        def keep(own: Tensor) -> None:
            assert own.shape == (rows, width)

        return SimpleNamespace(place=lambda: torch.empty(rows, width), keep=keep, send=send, finish=finish)

    def product(self) -> Product:
        def call(rows: Tensor, out: Tensor | None) -> Tensor:
            self.events.append(f"multiply {len(rows)}")
            return torch.zeros(len(rows), 5) if out is None else out

        return Product(call, 4, 5)


def way(rank: int, size: int, pieces: int | None) -> tuple[Pipelined, Recorder]:
    carrier = Recorder(rank, size)
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return Pipelined(group, carrier, pieces), carrier  # type: ignore[arg-type]


def test_gathered_shares_travel_under_the_products_before_them() -> None:
    overlap, carrier = way(1, 4, 4)
    y, whole = overlap.gather_product(torch.zeros(ROWS, 4), carrier.product(), 0, keep=False)
    own = f"multiply {ROWS}"
    assert carrier.events == ["post 3", "wait 0", own, "wait 1", own, "wait 2", own, "wait 3", own, "left"]
    assert (tuple(y.shape), whole, carrier.own) == ((4 * ROWS, 5), None, "absent")

    overlap, carrier = way(1, 4, 2)
    _, whole = overlap.gather_product(torch.zeros(ROWS, 4), carrier.product(), 0, keep=True)
    assert carrier.events == ["post 3", "wait 0", f"multiply {2 * ROWS}", "wait 1", f"multiply {2 * ROWS}", "left"]
    assert whole is not None
    assert carrier.own == "early", "the first product reads it"

    overlap, carrier = way(1, 4, 4)
    overlap.gather_product(torch.zeros(ROWS, 4), carrier.product(), 0, keep=True)
    assert carrier.own == "late", "only the caller reads it, when all products are there"


def test_sums_leave_under_the_products_after_them() -> None:
    overlap, carrier = way(2, 4, 4)
    pending = overlap.start_product_scatter(torch.zeros(4 * ROWS, 4), carrier.product(), 0, covered=False)
    own = f"multiply {ROWS}"
    assert carrier.events == [own, "send 1", own, "send 2", own, "send 3", own]
    pending.wait()
    assert carrier.events[-1] == "finish"

    overlap, carrier = way(2, 4, 2)
    overlap.start_product_scatter(torch.zeros(4 * ROWS, 4), carrier.product(), 0, covered=False)
    assert carrier.events == [f"multiply {2 * ROWS}", "send 1", f"multiply {2 * ROWS}", "send 0"]


def test_what_the_caller_covers_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap, carrier = way(0, 4, 4)
    started: list[Any] = []
    monkeypatch.setattr(
        "megalight.parallel.tensor.overlap.spec.start_reduce_scatter",
        lambda x, group, dim: started.append(x) or PendingCollective(None, lambda: x),
    )
    overlap.start_product_scatter(torch.zeros(4 * ROWS, 4), carrier.product(), 0, covered=True)
    assert carrier.events == [f"multiply {4 * ROWS}"]
    assert len(started) == 1


@pytest.mark.parametrize("rows", [7, 2])
def test_pieces_are_reduced_under_the_next_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap, carrier = way(0, 2, 3)

    def start(x: Tensor, group: Any) -> PendingCollective:
        carrier.events.append(f"reduce {len(x)}")
        return PendingCollective(None, lambda: carrier.events.append("wait") or x)  # type: ignore[func-returns-value]

    monkeypatch.setattr(pipelined, "start_all_reduce", start)
    y = overlap.start_product_reduce(torch.zeros(rows, 4), carrier.product(), 0, covered=False).wait()
    sizes = {7: (2, 2, 3), 2: (1, 1)}[rows]  # never more pieces than rows
    pieces = [event for size in sizes for event in (f"multiply {size}", f"reduce {size}")]
    assert carrier.events == [*pieces, *["wait"] * len(sizes)]
    assert tuple(y.shape) == (rows, 5)

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from megalight.errors import LayoutError
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.schedules import Action, ActionKind, Actions, build
from megalight.parallel.pipeline.timeline import Costs, check_transfers, simulate


def actions(text: str) -> Actions:
    found = []
    for word in text.split():
        micro_batch, _, chunk = word[1:].partition(".")
        found.append(Action(ActionKind(word[0]), int(chunk or 0), int(micro_batch)))
    return found


def test_two_ranks_by_hand() -> None:
    """Rank 1 waits for F0, then rank 0 for B0: 1 + (1 + 2) + 2 + ... as one can count on paper."""
    timeline = simulate([actions("F0 F1 B0 B1"), actions("F0 B0 F1 B1")])
    assert timeline.total == 9
    assert timeline.busy == (6, 6)
    assert timeline.bubble == 0.5
    assert timeline.peak == (2, 1)
    assert [(span.start, span.end) for span in timeline.ranks[0]] == [(0, 1), (1, 2), (4, 6), (7, 9)]
    assert [(span.start, span.end) for span in timeline.ranks[1]] == [(1, 2), (2, 4), (4, 5), (5, 7)]


def test_transfers_take_time_between_ranks_only() -> None:
    lists = [actions("F0 F1 B0 B1"), actions("F0 B0 F1 B1")]
    timeline = simulate(lists, Costs(transfer=Fraction(1, 2)))
    assert timeline.ranks[1][0].start == Fraction(3, 2)
    assert timeline.total == 10
    assert simulate([actions("F0 B0")], Costs(transfer=5)).total == 3


def test_weight_gradients_end_the_life_of_activations() -> None:
    assert simulate([actions("F0 I0 F1 I1 W0 W1")]).peak == (2,)
    assert simulate([actions("F0 I0 W0 F1 I1 W1")]).peak == (1,)
    assert simulate([actions("F0 F1 F2")]).peak == (3,)


def test_costs_of_a_rank_shared_by_its_chunks() -> None:
    whole = simulate(build("1f1b", 4, 1, 8))
    halves = simulate(build("interleaved", 4, 2, 8), Costs().times(Fraction(1, 2)))
    assert set(whole.busy) == set(halves.busy) == {24}
    assert (whole.total, halves.total) == (33, Fraction(57, 2))
    assert Costs(transfer=3).times(2) == Costs(2, 4, 2, 2, transfer=3)


def test_unequal_stages_by_hand() -> None:
    """The second stage takes twice as long: rank 0 waits 2, then 4, for each micro-batch, and then works 2."""
    lists = [actions("F0 B0 F1 B1"), actions("F0 B0 F1 B1")]
    timeline = simulate(lists, [Costs(), Costs().times(2)])
    assert [(span.start, span.end) for span in timeline.ranks[1]] == [(1, 3), (3, 7), (10, 12), (12, 16)]
    assert (timeline.total, timeline.busy) == (18, (6, 12))
    assert timeline.bubble == 1.0
    with pytest.raises(LayoutError, match="costs for 3 stages, but 2"):
        simulate(lists, [Costs()] * 3)


def test_a_fitting_layout_beats_an_even_one() -> None:
    """Where the head weighs as much as two layers, fewer layers beside it shorten the step."""

    def length(text: str) -> float:
        layout = PipelineLayout.of_string(text, 14, 4)
        costs = [Costs().times(weight) for weight in layout.weights(2)]
        return float(simulate(build("1f1b", 4, 1, 8), costs).total)

    assert PipelineLayout.of_string("Et*4|t*4|t*4|ttL", 14, 4).weights(2) == (4, 4, 4, 4)
    assert length("Et*4|t*4|t*4|ttL") == 4 * 33
    assert length("Ettt|ttt|t*4|t*4L") > length("Et*4|t*4|t*4|ttL")


def test_drawing() -> None:
    drawing = simulate([actions("F0 F1 B0 B1"), actions("F0 B0 F1 B1")]).draw()
    assert drawing.splitlines() == [
        "rank 0  F0 F1 .  .  B0 =  .  B1 =",
        "rank 1  .  F0 B0 =  F1 B1 =  .  .",
    ]
    assert simulate([actions("F0 F1 B0 B1"), actions("F0 B0 F1 B1")], Costs(8, 16)).draw() == drawing
    chunks = simulate(build("interleaved", 2, 2, 2)).draw(width=30).splitlines()
    assert chunks[0] == "rank 0  F0.0 F1.0 F0.1 F1.1..."
    assert max(map(len, chunks)) == 30


@pytest.mark.parametrize(
    ("lists", "parts"),
    [
        (["F0 F0 B0"], ["rank 0 does F0.0 more than once", "list it once"]),
        (["F0", "F0 B0"], ["rank 0 does F for micro-batch 0 on chunk 0", "F and B, or F, I and W"]),
        (["F0 F1 B0 B1", "F0 B0"], ["rank 1 does nothing for micro-batch 1"]),
        (["F0 I0"], ["rank 0 does F+I"]),
        (["F0 B0 W0"], ["rank 0 does F+B+W"]),
        (["F0 B0 I0 W0"], ["rank 0 does F+B+I+W"]),
        (["B0"], ["rank 0 does B for"]),
        (["F0", "F1 F0"], ["rank 0 does nothing for micro-batch 1", "it must do F."]),
        (["B0 F0"], ["rank 0: B0.0 (its action 0)", "activations of micro-batch 0 from stage 0", "forever"]),
        (["F0 I0 W0 B1 F1"], ["rank 0: B1.0 (its action 3)"]),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            ["rank 0: B0.0", "gradient of micro-batch 0 from stage 1", "rank 1: F1.0"],
        ),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], ["rank 0 sends the activations of micro-batch 0", "expects the activ"]),
        (["F0 F1 B1 B0", "F0 F1 B0 B1"], ["rank 1 sends the gradient of micro-batch 0", "micro-batch 1 from"]),
    ],
)
def test_lists_that_cannot_be_played(lists: list[str], parts: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        simulate([actions(line) for line in lists])
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_order_of_messages_around_the_ring() -> None:
    good = build("interleaved", 2, 2, 4)
    check_transfers(good)
    place = good[0].index(Action(ActionKind.FORWARD, 1, 0))
    bad = [[*good[0]], good[1]]
    bad[0][place : place + 2] = reversed(bad[0][place : place + 2])
    with pytest.raises(LayoutError, match=re.escape("rank 1 sends the activations of micro-batch 0 from stage 1")):
        check_transfers(bad)


def test_actions_read_well() -> None:
    assert str(Action(ActionKind.INPUT_GRADIENT, 2, 17)) == "I17.2"

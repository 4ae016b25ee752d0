from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from megalight.errors import LayoutError
from megalight.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Actions,
    bubble_warning,
    build,
    check,
    chosen,
    group_sizes,
)
from megalight.parallel.pipeline.timeline import Costs, Timeline, simulate
from tests.parallel.pipeline.rendezvous import play


class Case(NamedTuple):
    name: str
    pp: int
    vpp: int
    m: int
    group: int | None = None


def cases(name: str, full: bool = False) -> Iterator[Case]:
    """All that a schedule serves: few and many micro-batches, multiples of ``pp`` and others, several group sizes."""
    sizes = ((1, 2, 3, 4, 5, 8), (1, 2, 3, 4), range(1, 26)) if full else ((1, 2, 3, 5), (1, 2, 3), (1, 2, 4, 6, 8, 9))
    for pp, vpp, m in itertools.product(*sizes):
        for group in (None, pp + 1, pp + 3, 2 * pp) if full else (None, pp + 1):
            if not SCHEDULES[name].why_not(pp, vpp, group) and not (pp == 1 and vpp > 1) and not (vpp == 1 and group):
                yield Case(name, pp, vpp, m, group)


@functools.cache
def played(case: Case) -> Timeline:
    return simulate(build(*case))


def words(actions: Actions) -> str:
    return " ".join(map(str, actions))


def test_one_forward_one_backward() -> None:
    first, last = build("1f1b", 2, 1, 3)
    assert words(first) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert words(last) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"


def test_one_rank_accumulates_gradients() -> None:
    assert words(build("auto", 1, 1, 2)[0]) == "F0.0 B0.0 F1.0 B1.0"


def test_interleaved() -> None:
    first, last = build("interleaved", 2, 2, 2)
    assert words(first) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0"
    assert words(last) == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"


def test_zero_bubble() -> None:
    first, last = build("zero_bubble", 2, 1, 3)
    assert words(first) == "F0.0 F1.0 I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0"
    assert words(last) == "F0.0 I0.0 F1.0 I1.0 W0.0 F2.0 I2.0 W1.0 W2.0"


def test_combined() -> None:
    first, last = build("combined", 2, 1, 5)
    assert words(first) == "F0.0 F1.0 F2.0 F3.0+B0.0 F4.0+B1.0 B2.0 B3.0 B4.0"
    assert words(last) == "F0.0 F1.0+B0.0 F2.0+B1.0 F3.0+B2.0 F4.0+B3.0 B4.0"
    assert words(build("combined", 2, 2, 2)[1]) == "F0.0 F1.0 F0.1 F1.1+B0.1 B1.1 B0.0 B1.0"


def test_pairs_cost_no_bubble() -> None:
    for case in cases("combined"):
        if case.m % case.pp == 0:
            assert played(case).bubble == pytest.approx(played(case._replace(name="auto")).bubble), case


@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_is_done_once_in_an_order_that_ends(name: str) -> None:
    every = list(cases(name))
    assert len(every) > 20
    for case in every:
        assert ends(case), case


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_ends_for_many_more(name: str) -> None:
    for case in cases(name, full=True):
        assert ends(case), case


def ends(case: Case) -> bool:
    played(case)  # raises where work is missing, doubled or misordered, or where ranks wait for ever
    room = max(1, (case.group or case.pp) - case.pp + 1)
    return not play(build(*case), case.vpp, depth=room)


@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
def test_the_bubble_is_the_formulas(vpp: int) -> None:
    for pp, groups in itertools.product((2, 3, 4, 7), (1, 2, 5)):
        m = groups * pp
        timeline = simulate(build("auto", pp, vpp, m))
        assert set(timeline.busy) == {3 * m * vpp}
        assert (timeline.total - 3 * m * vpp) * m * vpp == (pp - 1) * 3 * m * vpp, (pp, m)
        assert timeline.bubble == pytest.approx((pp - 1) / (m * vpp), abs=1e-12)


@pytest.mark.parametrize("costs", [Costs(), Costs(2, 4, 2, 2), Costs(2, 3, 2, 1), Costs(3, 4, 2, 2), Costs(1, 3, 2, 1)])
def test_zero_bubble_leaves_what_the_paper_says(costs: Costs) -> None:
    forward, inputs, weights = (
        costs.of(kind) for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    )
    for pp, vpp, groups in itertools.product((2, 3, 8), (1, 3), (1, 2)):
        m = groups * pp
        timeline = simulate(build("zero_bubble", pp, vpp, m), costs)
        assert timeline.total == m * vpp * (forward + inputs + weights) + (pp - 1) * (forward + inputs - weights)


def test_zero_bubble_is_better_for_any_number_of_micro_batches() -> None:
    for case in cases("zero_bubble"):
        if case.pp > 1:
            assert played(case).total < played(case._replace(name="auto")).total, case


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_activations_stay_below_theory(name: str) -> None:
    for case in cases(name):
        _, pp, vpp, m, group = case
        for rank, peak in enumerate(played(case).peak):
            started = pp - rank if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * (group or pp) + 1
            first = pp if vpp == 1 else 2 * (pp - 1) + (vpp - 1) * (group or pp) + 1
            pairs = 2 * (pp - rank - 1) + (vpp - 1) * (group or pp) + 2
            other = {"forward_only": m * vpp, "zero_bubble": first, "combined": pairs}
            theory = min(other.get(name, started), m * vpp)
            assert peak <= theory, (case, rank)
            if name == "1f1b":
                assert peak == theory


def test_last_groups_that_are_smaller_cost_no_more_than_full_ones() -> None:
    for case in cases("interleaved"):
        group = case.group or case.pp
        rest = case.m % group
        full = case.m - rest + max(rest, case.pp) if rest else case.m
        assert played(case).total <= played(case._replace(m=full)).total, case


def test_the_warning_knows_the_bubble() -> None:
    for pp, vpp, m in itertools.product((2, 3, 7), (1, 2, 3), range(1, 8)):
        warning = bubble_warning(pp, vpp, m)
        assert (warning is None) == (m % pp == 0 or (vpp == 1 and m > pp))
        if m < pp:
            assert f"the bubble is {simulate(build('auto', pp, vpp, m)).bubble:.0%} of the work" in str(warning)


def test_many_ranks_build_at_once() -> None:
    assert len(build("interleaved", 128, 2, 128)) == 128
    one = check("zero_bubble", 128, 4, 1024).of_rank(64, 128, 4, 1024, None)
    assert len(one) == 3 * 4 * 1024
    assert Action(ActionKind.WEIGHT_GRADIENT, 3, 1023) in one


def test_names() -> None:
    assert [chosen("auto", 1), chosen("auto", 2), chosen("zero_bubble", 2)] == ["1f1b", "interleaved", "zero_bubble"]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (("1f1", 2), ["unknown pipeline schedule '1f1'", "auto, 1f1b", "Did you mean '1f1b'"]),
        (("auto", 0), ["pp=0", "at least 1"]),
        (("auto", 2, 0), ["vpp=0", "at least 1"]),
        (("auto", 2, 1, 0), ["micro_batches=0", "at least 1"]),
        (("auto", 1, 2), ["vpp=2", "pp=1", "Set vpp to 1"]),
        (("1f1b", 2, 2), ["'1f1b'", "not vpp=2; use 'interleaved'"]),
        (("interleaved", 2, 1), ["'interleaved'", "vpp=1; use '1f1b'"]),
        (("auto", 2, 1, 4, 2), ["no groups", "remove group_size=2"]),
        (("zero_bubble", 2, 1, 4, 2), ["'zero_bubble'", "remove group_size=2"]),
        (("interleaved", 4, 2, 8, 3), ["group_size=3 is below", "pp=4", "use group_size=4 or more"]),
        (("forward_only", 4, 2, 8, 3), ["group_size=3 is below", "use group_size=4 or more"]),
    ],
)
def test_what_cannot_run_is_refused(case, parts) -> None:
    with pytest.raises(LayoutError) as error:
        build(*case)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_groups_as_large_as_needed_leave_no_small_rest() -> None:
    """What the documentation advises: any number of micro-batches from ``pp`` up then has the formula's bubble."""
    for pp, vpp, m in itertools.product((2, 3, 4, 7), (2, 3), (7, 8, 9, 11, 13, 17, 20)):
        size = -(-m // (m // pp))
        if warning := bubble_warning(pp, vpp, m):
            assert f"group_size={size}, which keeps activations of {(vpp - 1) * (size - pp)} more" in warning
        assert bubble_warning(pp, vpp, m, size) is None
        for name, work in (("interleaved", 1), ("zero_bubble", 3)):
            timeline = simulate(build(name, pp, vpp, m, size))
            assert timeline.bubble == pytest.approx((pp - 1) / (m * vpp * work)), (pp, vpp, m)


def test_sizes_of_groups() -> None:
    assert group_sizes(2, 7, 3) == [3, 2, 2]
    assert group_sizes(4, 9, 4) == [4, 4, 1]
    assert group_sizes(4, 3, 4) == [3]
    assert group_sizes(4, 9, 9) == [9]
    assert group_sizes(4, 11, 6) == [6, 5]

"""One attention by each kind, beside one device: outputs, gradients, and padding that shows nowhere."""

from __future__ import annotations

import pytest

from tests.parallel.context.parity import attention_errors, check
from tests.support.workers import run

PACKS = {"uniform": [8, 8, 8], "uniform_odd": [13, 13], "ragged": [19, 1, 8, 30, 3]}
PLAIN = [{}, {"causal": False, "scale": 0.3}]
ALL = [
    *PLAIN,
    {"window": 5},
    {"window": 40},
    {"chunk": 7},
    {"softcap": 2.0},
    {"backend": "sdpa"},
    {"backend": "reference"},
]
NEAR = [
    {"window": 5},
    {"window": 0, "softmax": "off-by-one"},
    {"window": 40},
    {"chunk": 7},
    {"chunk": 2},
]
CASES = {
    "all_to_all": [*ALL, {"window": 3, "causal": False}],
    "all_gather": ALL,
    "ring": NEAR,
    "all_to_all_ring": [*PLAIN, {"window": 5}, {"chunk": 3}],
    "auto": [{"window": 5, "softcap": 2.0}],
}
HEADS = {"all_to_all": (8, 2), "all_gather": (3, 3), "ring": (3, 1), "all_to_all_ring": (6, 1), "auto": (3, 1)}


@pytest.mark.parametrize(
    ("kind", "cp"),
    [
        ("all_to_all", 2),
        ("all_gather", 2),
        ("ring", 2),
        ("all_to_all_ring", 4),  # two ranks have one level
        ("auto", 2),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [("all_to_all", 4), ("all_gather", 4), ("ring", 4)]),
    ],
)
def test_attention_equals_one_device(kind: str, cp: int) -> None:
    cases = [(lengths, HEADS[kind], options) for lengths in PACKS.values() for options in CASES[kind]]
    check(run(attention_errors, cp, kind, cases, 2 if kind == "all_to_all_ring" else None))


@pytest.mark.parametrize("heads", [(4, 4), (12, 6), (8, 1)])
def test_heads_that_are_spread_and_repeated(heads: tuple[int, int]) -> None:
    check(run(attention_errors, 4, "all_to_all", [([19, 1, 8], heads, {})]))


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "ring"])
def test_a_dummy_sequence_fills_up(kind: str) -> None:
    cases = [([19, 1, 9], (2, 2), options) for options in PLAIN]
    check(run(attention_errors, 2, kind, cases, None, 6))

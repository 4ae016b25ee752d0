from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalight.errors import LayoutError
from megalight.parallel.pipeline.layout import MAX_LENGTH, compose, parse


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ["EtL"]),
        ("Et|tt|tL", ["Et", "tt", "tL"]),
        ("Et*3|tL", ["Ettt", "tL"]),
        ("E t*3, | (tt|)*2 , m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("tt(tt|tt|tt)*2,mL", ["tttt", "tt", "tttt", "tt", "ttmL"]),
        ("(tt)*3", ["tttttt"]),
        ("(|tt)*2,mL", ["", "tt", "ttmL"]),
        ("((t|)*2m|)*2L", ["t", "t", "m", "t", "t", "m", "L"]),
        ("E||t|L", ["E", "", "t", "L"]),
        ("E|*3tL", ["E", "", "", "tL"]),
        ("Et*12|L", ["E" + "t" * 12, "L"]),
        ("", [""]),
    ],
)
def test_reading(text: str, stages: list[str]) -> None:
    assert parse(text) == tuple(stages)


def test_megatrons_own_example() -> None:
    """DeepSeek-V3 over 16 ranks of 2 chunks: 61 layers and one multi-token-prediction layer."""
    assert parse("Et*3|(tt|)*29,m|L") == ("Ettt", *["tt"] * 29, "m", "L")


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("Et|x", 4, "'x' is unknown here; use E"),
        ("Et|)", 4, "has no"),
        ("E(t|(t|)*2", 2, "not closed"),
        ("Et*|L", 4, "'*' needs a number"),
        ("Et*0", 4, "'*' needs a number"),
        ("*3", 1, "'*' is unknown here"),
        ("t*2*3", 4, "'*' is unknown here"),
        ("E3", 2, "'3' is unknown here"),
        (f"t*{MAX_LENGTH + 1}", 3, f"more than {MAX_LENGTH}"),
        ("((((t*999)*999)*999)*999)*999", 12, f"more than {MAX_LENGTH}"),
        ("t*999999999999999999999", 3, f"more than {MAX_LENGTH}"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(text: str, place: int, rule: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(rule)) as error:
        parse(text)
    first, shown, mark = str(error.value).splitlines()
    assert f"character {place}:" in first
    assert shown == f"  {text}"
    assert mark.index("^") == place + 1


@given(st.lists(st.text("EtmL", max_size=8), min_size=1, max_size=8).flatmap(lambda s: st.permutations(s * 2)))
def test_what_is_written_reads_back(stages: list[str]) -> None:
    assert parse(compose(stages)) == tuple(stages)


def test_writing_is_short() -> None:
    assert compose(["Et", *["tt"] * 126, "tL"]) == "Et|(tt|)*126tL"
    assert compose(["E" + "t" * 8, "t" * 8]) == "Et*8|t*8"

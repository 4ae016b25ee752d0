from __future__ import annotations

from fractions import Fraction

import pytest

from megalight.rl.rewards import last_number, read_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-7", -7),
        ("−7", -7),  # the sign of Unicode
        ("+3.50", "7/2"),
        (".5", "1/2"),
        ("5.", 5),
        ("1,000", 1000),
        ("12,345,678.9", "123456789/10"),
        ("1{,}000", 1000),
        ("$1,234.50$", "2469/2"),
        ("\\$18", 18),
        ("-$5", -5),
        ("€ 5", 5),
        ("3/4", "3/4"),
        ("-3 / 4", "-3/4"),
        ("\\frac{3}{4}", "3/4"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("\\frac{-1}{2}", "-1/2"),
        ("\\tfrac12", "1/2"),
        ("2 1/2", "5/2"),
        ("-1\\frac{1}{4}", "-5/4"),
        ("1e3", 1000),
        ("1.5 \\times 10^{3}", 1500),
        ("2×10^-2", "1/50"),
        ("10^3", 1000),
        ("x = 5", 5),
        ("2 + 3 = 5", 5),
        ("72 clips", 72),
        ("12\\text{ cm}", 12),
        ("$12\\,\\mathrm{m/s}$", 12),
        ("1.5 \\text{ m}^2.", "3/2"),
        ("\\$5 \\text{ per hour}", 5),
        ("5 miles per hour.", 5),
        ("90^\\circ", 90),
        ("\\left(5\\right)", None),
        ("{7}", 7),
        ("1,00", None),
        ("1,0000", None),
        ("2x", None),
        ("2 pi", None),
        ("3 million", None),
        ("3\\text{ million}", None),
        ("\\text{ cm}", None),
        ("5 \\text{ or } 6", None),
        ("5/0", None),
        ("\\frac{1}{0}", None),
        ("1/2/3", None),
        ("x=5, y=3", None),
        ("three", None),
        ("", None),
        ("-", None),
        ("nan", None),
        ("inf", None),
        ("1_000", None),
        ("0x10", None),
        ("9**9**9", None),
        ("1e999999999", None),
        ("10^{999999999}", None),
        ("1e" + "9" * 5000, None),
        ("9" * 5000, None),
        ("__import__('os')", None),
    ],
)
def test_a_number_is_read_exactly_or_not_at_all(text: str, value: int | str | None) -> None:
    number = read_number(text)
    assert (number and number.value) == (value if value is None else Fraction(value))


def test_percent_signs_are_kept_apart() -> None:
    for text in ("50%", "50\\%", "50 %"):
        assert read_number(text) == (Fraction(50), True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 5, so 12.", "12"),
        ("The answer is $1,234.50.", "1,234.50"),
        ("between 3-5", "5"),
        ("from 10 to -4", "-4"),
        ("half: 1/2", "1/2"),
        ("it is \\frac{1}{2}!", "\\frac{1}{2}"),
        ("it is 50\\%.", "50%"),
        ("so **72**", "72"),
        ("so x5", None),
        ("nothing", None),
    ],
)
def test_the_last_number_of_a_text(text: str, found: str | None) -> None:
    assert last_number(text) == found


@pytest.mark.parametrize("piece", ["1 ", "1,", "1.", "\\frac{", "-", "(", "9" * 50, "a ", "1/", "$", "\\text{", "1 a."])
def test_long_texts_end(piece: str) -> None:
    # A blow-up would take hours.
    text = piece * (200_000 // len(piece))
    last_number(text)
    for length in (399, 400, len(text)):
        for start in ("", "1", "-"):
            read_number(start + text[: length - len(start)])
    assert read_number(text) is None

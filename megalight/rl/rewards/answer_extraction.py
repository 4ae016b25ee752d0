r"""Answer extraction: where texts hold their final answers, and how the numbers in them are read.

Answers stand in ``\boxed{...}``, in ``<answer>...</answer>``, after ``####``, or are the last number of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

from megalight.errors import ConfigurationError

# Numbers: separators, decimals, fractions, percents, powers of ten and LaTeX, read exactly


LONGEST = 400
"""Characters of a number, at most; a longer text is none."""
LARGEST_EXPONENT = 400
"""Of a power of ten; beyond it a text is no number, so that none takes long to read."""

DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
NUMBER = re.compile(rf"(?P<sign>[-+]?)(?P<digits>{DIGITS})(?:[eE](?P<exponent>[-+]?\d+))?")
POWER = re.compile(r"(?:(?P<factor>.+?)(?:\\times|\\cdot|\*|x))?10\^(?P<exponent>[-+]?\d+)")
FRACTION = re.compile(
    r"(?P<sign>[-+]?)\\frac(?:\{(?P<top>[^{}]*)\}|(?P<digit>\d))(?:\{(?P<under>[^{}]*)\}|(?P<low>\d))"
)
MIXED = re.compile(r"(?P<sign>[-+]?)(?P<whole>\d+)(?:\s+(?P<ratio>\d+/\d+)|\s*(?P<frac>\\frac.+))")
UNIT = re.compile(r"(?P<number>\S+)\s+(?P<unit>[^\W\d_][^\W\d_.\s]+(?:[\s/.]+[^\W\d_]+)*\.?)")
LATEX_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}\d]*)\}(?:\^\{?[23]\}?)?[\s.$]*$")
CHANGING = re.compile(
    r"\b(pi|sqrt|plus|minus|times|over|squared|cubed|percent|and|or|to"
    r"|dozen|hundred|thousand|million|billion|trillion)\b",
    re.IGNORECASE,
)
"""Words after a number that make it another one, so that they are no unit."""
FOUND = re.compile(
    rf"(?<![\w.^)\]}}])[-+]?(?:\\frac(?:\{{[^{{}}]*\}}|\d)(?:\{{[^{{}}]*\}}|\d)"
    rf"|(?:{DIGITS})(?:[eE][-+]?\d+)?(?:\s?%|\s?/\s?\d+(?:\.\d+)?)?)"
)
"""A number within a text. Right after a letter, a digit or a bracket, a sign is a hyphen or an operator."""

WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textit)\s*\{([^{}]*)\}")
NOTHING = re.compile(r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|\\[!,;:]|\\\(|\\\)|\\\[|\\\]|(?<!\\)\$|\u200b")
SPELLINGS = {
    "{,}": ",",
    "−": "-",
    "–": "-",
    "⁄": "/",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\%": "%",
    "\\$": "",
    "~": " ",
    "\\ ": " ",
    "^\\circ": "°",
    "^{\\circ}": "°",
}


class Number(NamedTuple):
    """A number, and whether it was followed by a percent sign (the value is that before the sign)."""

    value: Fraction
    percent: bool


def plain(text: str) -> str:
    r"""Return a text without the looks that LaTeX gives it: ``\left``, ``\text{...}``, thin spaces, dollar signs."""
    for written, meant in SPELLINGS.items():
        text = text.replace(written, meant)
    text = WRAPPED.sub(lambda match: f" {match[1]} ", NOTHING.sub("", text))
    return " ".join(text.split())


def read_number(text: str) -> Number | None:
    """Return the number that a text is, also with a unit after it, or None.

    ``x = 5`` is 5; ``1,000`` is 1000; ``2 1/2`` is 5/2. It is exact: ``0.1`` is 1/10.
    """
    if len(text) > LONGEST:
        return None
    if (unit := LATEX_UNIT.search(text)) and not CHANGING.search(unit[1]):
        text = text[: unit.start()]
    text = plain(text)
    if text.count("=") == 1:
        text = text.partition("=")[2]
    text = text.strip().rstrip(".").strip(" €£¥")
    if (unit := UNIT.fullmatch(text)) and not CHANGING.search(unit["unit"]):
        text = unit["number"]
    text = text.rstrip("°").strip()
    percent = text.endswith("%")
    value = _value(text.rstrip("%").strip())
    return None if value is None else Number(value, percent)


def last_number(text: str) -> str | None:
    """Return the last number in a text, as it is written there, or None."""
    # Only the end is searched, so that long texts take no time.
    found = FOUND.findall(plain(text[-4 * LONGEST :]))
    return found[-1].rstrip(".") if found else None


def _value(text: str) -> Fraction | None:
    text = re.sub(r"^([-+]?)\s*[€£¥]\s*", r"\1", text).strip()
    text = re.sub(r"^([-+])\s+", r"\1", text)
    if text.startswith("{") and text.endswith("}"):
        return _value(text[1:-1])
    if number := NUMBER.fullmatch(text):
        return _scaled(Fraction(f"{number['sign']}{number['digits'].replace(',', '')}"), number["exponent"] or "0")
    if fraction := FRACTION.fullmatch(text):
        return _ratio(
            fraction["top"] or fraction["digit"] or "", fraction["under"] or fraction["low"] or "", fraction["sign"]
        )
    if mixed := MIXED.fullmatch(text):
        part = _value(mixed["ratio"] or mixed["frac"])
        return None if part is None else _signed(Fraction(mixed["whole"]) + part, mixed["sign"])
    if text.count("/") == 1:
        return _ratio(*text.split("/"))
    if power := POWER.fullmatch(text.replace(" ", "").replace("×", "*").replace("{", "").replace("}", "")):
        factor = Fraction(1) if power["factor"] is None else _value(power["factor"])
        return None if factor is None else _scaled(factor, power["exponent"])
    return None


def _ratio(top: str, under: str, sign: str = "") -> Fraction | None:
    above, below = NUMBER.fullmatch(top.strip()), NUMBER.fullmatch(under.strip())
    if above is None or below is None:
        return None
    numbers = _value(above[0]), _value(below[0])
    if numbers[0] is None or not numbers[1]:
        return None
    return _signed(numbers[0] / numbers[1], sign)


def _signed(value: Fraction, sign: str) -> Fraction:
    return -value if sign == "-" else value


def _scaled(value: Fraction, exponent: str) -> Fraction | None:
    # Compared as text first: int() of thousands of digits raises.
    if len(exponent) > 5 or abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return value * Fraction(10) ** int(exponent)


# Extraction


Extractor = Literal["boxed", "tags", "hashes", "last_number"]
TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
BRACES = re.compile(r"\\[{}]|\\f?box(?:ed)?\s*\{|[{}]")
"""Escaped braces, which are only signs; the beginning of a box; and braces that hold something."""


def boxed(text: str) -> str | None:
    r"""Return what the last closed ``\boxed{...}`` holds, or None. Of boxes in boxes, it is the innermost."""
    found: str | None = None
    open_braces: list[tuple[bool, int]] = []
    inner = -1
    for brace in BRACES.finditer(text):
        if brace[0] == "}" and open_braces:
            box, start = open_braces.pop()
            if box and inner < start:  # else the box that ended last lies in this one
                found, inner = text[start : brace.start()], start
        elif brace[0].endswith("{") and brace[0] != "\\{":
            open_braces.append((len(brace[0]) > 1, brace.end()))
    return found


def tags(text: str) -> str | None:
    """Return what the last closed ``<answer>...</answer>`` holds, or None."""
    found, start = None, -1
    for tag in TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            found, start = text[start : tag.start()], -1
    return found


def hashes(text: str) -> str | None:
    """Return the rest of the line after the last ``####``, as solutions of GSM8K end, or None."""
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0] if mark else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "tags": tags,
    "hashes": hashes,
    "last_number": last_number,
}
"""Name of an extractor -> what finds the last answer of its form in a text."""


def check_extractors(extractors: Sequence[str]) -> None:
    """Check names of extractors.

    Raises:
        ConfigurationError: with the name.
    """
    for name in extractors:
        if name not in EXTRACTORS:
            raise ConfigurationError(f"extractors has {name!r}; it must be some of {', '.join(get_args(Extractor))}.")
    if not extractors:
        raise ConfigurationError(f"extractors is empty; name some of {', '.join(get_args(Extractor))}.")


def extract_answer(text: str, extractors: Sequence[str]) -> str | None:
    """Return the answer that the first of these extractors finds in a text, or None."""
    return next((found for name in extractors if (found := EXTRACTORS[name](text)) is not None), None)

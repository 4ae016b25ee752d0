"""Rewards by name: the final answer, patterns and lengths; any function of an answer and a row is one, too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

from megalight.errors import ConfigurationError, DataError, nearest
from megalight.rl.environment import Answer, Reward, check_reward

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


DEFAULT_EXTRACTORS: tuple[Extractor, ...] = ("boxed", "tags", "hashes", "last_number")
BRACKETS = {"(": ")", "[": "]", "{": "}"}
ENDS = frozenset(BRACKETS.values())
ORDERED = ("(", "[")
"""Brackets of lists whose order counts; in a set, and without brackets, it does not."""
LETTER = re.compile(r"\(?([a-zA-Z])[).]?")
"""A choice, such as ``(B)``."""


class FinalAnswer:
    r"""1 if the final answer is that of the row, else 0 (or ``wrong`` and ``missing``).

    Equal are numbers of equal value, however they are written (``1,000``, ``\frac{1}{2}``, ``0.5``, ``50\%``), texts
    that differ in case, spaces and the looks of LaTeX alone, and lists whose entries are equal: in ``(1, 2)`` their
    order counts, in ``{1, 2}`` and ``1, 2`` it does not. Nothing is computed: ``\sqrt{8}`` is not ``2\sqrt{2}``. For
    that, give a function of your own with a package such as ``math-verify``.

    Args:
        column: where rows hold the right answer: a number, a text, or a list of which any is right. A text that has a
            form itself (``... #### 42``, ``... \boxed{42}``) is read there, as solutions of GSM8K and MATH are.
        extractors: where the answer is looked for. The first of these that occurs decides, and its last place counts:
            ``boxed`` is ``\boxed{...}``, ``tags`` is ``<answer>...</answer>``, ``hashes`` is the line after ``####``,
            and ``last_number`` is the last number in the text.
        after: only text after the last place of this counts, such as ``</think>``. Without it, the answer is missing.
        tolerance: how far a number may be from the right one, relative to it. Two whole numbers must be equal.
        wrong: value of another answer.
        missing: value of an answer in which none of them finds one.

    Raises:
        ConfigurationError: an extractor is unknown, or a value is not finite or negative where it cannot be.
    """

    def __init__(
        self,
        *,
        column: str = "answer",
        extractors: Sequence[Extractor] = DEFAULT_EXTRACTORS,
        after: str | None = None,
        tolerance: float = 1e-6,
        wrong: float = 0.0,
        missing: float = 0.0,
    ) -> None:
        check_extractors(extractors)
        if not 0 <= tolerance < math.inf:
            raise ConfigurationError(f"tolerance is {tolerance}; it must be finite and at least 0.")
        if after == "":
            raise ConfigurationError("after is empty; give a text such as '</think>', or leave it out.")
        self.column = column
        self.extractors = tuple(extractors)
        self.after = after
        self.tolerance = Fraction(repr(float(tolerance)))  # as it is written: 1e-6 is a millionth
        self.wrong = wrong
        self.missing = missing

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer.

        Raises:
            DataError: the row has no right answer.
        """
        truths = self.truths(row)
        text = answer.text
        if self.after is not None:
            _, found, text = text.rpartition(self.after)
            if not found:
                return self.missing
        given = extract_answer(text, self.extractors)
        if given is None:
            return self.missing
        return 1.0 if any(same(given, truth, self.tolerance) for truth in truths) else self.wrong

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without a right answer, before work starts.

        Raises:
            DataError: it has none.
        """
        self.truths(row)

    def truths(self, row: Mapping[str, Any]) -> list[str]:
        """Return what a row says is right.

        Raises:
            DataError: it says nothing, or something that is neither a text nor a number.
        """
        if self.column not in row:
            raise DataError(
                f"the row has no {self.column!r}; it has {', '.join(map(repr, row))}. Name the column of right answers "
                f"with column.{nearest(self.column, row)}"
            )
        value = row[self.column]
        found = list(value) if isinstance(value, list | tuple) else [value]
        if not found or not all(isinstance(each, str | int | float) and str(each).strip() for each in found):
            raise DataError(
                f"{self.column!r} of the row is {value!r}; it must be a text, a number, or a list of some of them."
            )
        return [extract_answer(str(each), ("boxed", "hashes")) or str(each) for each in found]


def same(given: str, truth: str, tolerance: Fraction) -> bool:
    """Return whether an answer is the right one.

    Args:
        tolerance: relative difference of numbers that are not both whole.
    """
    numbers = read_number(given), read_number(truth)
    if numbers[0] is not None and numbers[1] is not None:
        return close(numbers[0], numbers[1], tolerance)
    texts = plain(given).strip(" .").casefold(), plain(truth).strip(" .").casefold()
    lists = entries(texts[0]), entries(texts[1])
    if lists[0] and lists[1]:
        return lists[0][0] == lists[1][0] and _same_entries(*lists[0], lists[1][1], tolerance)
    letters = LETTER.fullmatch(texts[0]), LETTER.fullmatch(texts[1])
    if letters[0] and letters[1]:
        return letters[0][1] == letters[1][1]
    bare = ["".join(text.split()) for text in texts]
    return bare[0] == bare[1] != ""


def close(given: Number, truth: Number, tolerance: Fraction) -> bool:
    """Return whether numbers are equal. A percent sign is a unit or a hundredth where only one of them has it."""
    if given.percent == truth.percent:
        return _near(given.value, truth.value, tolerance)
    part, other = (given, truth) if given.percent else (truth, given)
    return _near(part.value, other.value, tolerance) or _near(part.value / 100, other.value, tolerance)


def _near(one: Fraction, other: Fraction, tolerance: Fraction) -> bool:
    if one.denominator == other.denominator == 1:
        return one == other
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _same_entries(bracket: str, given: list[str], truth: list[str], tolerance: Fraction) -> bool:
    if len(given) != len(truth):
        return False
    if bracket in ORDERED:
        return all(same(mine, theirs, tolerance) for mine, theirs in zip(given, truth, strict=True))
    left = list(truth)
    for mine in given:
        found = next((place for place, theirs in enumerate(left) if same(mine, theirs, tolerance)), None)
        if found is None:
            return False
        del left[found]
    return True


def entries(text: str) -> tuple[str, list[str]] | None:
    """Return the bracket and the entries of a list, such as ``(1, 2)`` or, without brackets, ``1, 2``.

    None if the text has no comma between entries, or ends brackets that it did not begin.
    """
    text = text.replace("\\{", "{").replace("\\}", "}")
    bracket = text[0] if len(text) > 1 and BRACKETS.get(text[0]) == text[-1] else ""
    found = _divided(text[1:-1] if bracket else text)
    if found is None and bracket:  # "(1, 2), (3, 4)" has no bracket around it
        bracket, found = "", _divided(text)
    return None if found is None or len(found) < 2 else (bracket, found)


def _divided(text: str) -> list[str] | None:
    """Divide a text at commas outside of brackets; None if a bracket ends that did not begin."""
    found, depth, start = list[str](), 0, 0
    for place, sign in enumerate(text):
        if sign in BRACKETS:
            depth += 1
        elif sign in ENDS:
            depth -= 1
            if depth < 0:
                return None
        elif sign == "," and not depth:
            found.append(text[start:place])
            start = place + 1
    return [*found, text[start:]]


class SoftOverlong:
    """0 for answers of up to ``longest - buffer`` tokens, -1 from ``longest`` on, and in between on the line.

    It is equation 13 of DAPO (https://arxiv.org/abs/2503.14476). An answer that was cut off at the longest length is
    punished less abruptly, so that the policy learns from it to be shorter.

    Args:
        longest: tokens of the longest answer, as ``max_new_tokens`` of the rollouts.
        buffer: the last tokens before it, in which the penalty grows.

    Raises:
        ConfigurationError: not ``0 < buffer <= longest``.
    """

    def __init__(self, longest: int, buffer: int) -> None:
        if not 0 < buffer <= longest:
            raise ConfigurationError(f"buffer is {buffer} and longest {longest}; buffer must be from 1 to longest.")
        self.longest = longest
        self.buffer = buffer

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer."""
        over = len(answer.tokens) - (self.longest - self.buffer)
        return -min(max(over, 0) / self.buffer, 1.0)


class Pattern:
    r"""1 if an answer has a form, else 0.

    Args:
        pattern: a regular expression of Python in which ``.`` stands for line breaks, too, such as
            ``<think>.*?</think>\s*<answer>.*?</answer>``. Where prompts end with ``<think>``, answers begin after it.
            Some patterns take very long for long answers, such as ``(a+)+b``; ``reward_timeout`` of the data module
            ends the run then.
        whole: whether the whole answer must match, without spaces around it. If not, a part of it is enough.

    Raises:
        ConfigurationError: it is no regular expression.
    """

    def __init__(self, pattern: str, *, whole: bool = True) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigurationError(f"pattern {pattern!r} is no regular expression: {error}.") from error
        self.whole = whole

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer."""
        found = self.pattern.fullmatch(answer.text.strip()) if self.whole else self.pattern.search(answer.text)
        return 1.0 if found else 0.0


class RowFilter:
    """Row filter: another reward for rows of one kind, and 0 for all others, so that a run can have several tasks.

    Args:
        column: where rows say their kind. Every row has it.
        equals: the kind.
        reward: the reward of such rows.

    Raises:
        ConfigurationError: ``reward`` is no function of an answer and a row.
    """

    def __init__(self, *, column: str, equals: str | int, reward: Reward) -> None:
        check_reward("reward", reward)
        self.column = column
        self.equals = equals
        self.reward = reward

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer."""
        return self.reward(answer, row) if row[self.column] == self.equals else 0.0

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without the column, or of the kind that the reward cannot use.

        Raises:
            DataError: it is one.
        """
        if self.column not in row:
            raise DataError(
                f"the row has no {self.column!r}; it has {', '.join(map(repr, row))}. Each row must say its kind there."
                f"{nearest(self.column, row)}"
            )
        check = getattr(self.reward, "check", None)
        if check is not None and row[self.column] == self.equals:
            check(row)

"""The errors that Megalight raises. Each message states the value, the rule and the next step."""

from __future__ import annotations

import codecs
import difflib
import fnmatch
import math
import operator
import re
from collections.abc import Iterable
from typing import Any
from unicodedata import category


class MegalightError(Exception):
    """Base class of all errors of this package."""


class LayoutError(MegalightError, ValueError):
    """A parallel layout is impossible: degrees, heads, layers or batch sizes do not divide."""


class BackendError(MegalightError, ValueError):
    """No backend can serve a request. The message lists every backend with its reason."""


class DataError(MegalightError, ValueError):
    """A data file is missing or incomplete, or does not fit the model or the tokenizer."""


class CheckpointError(MegalightError):
    """A checkpoint is missing or incomplete, has an unknown format, or belongs to another model."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is nothing at the path of a checkpoint."""


class StorageError(MegalightError):
    """Storage does not answer, or refuses. What it holds is unknown, so nobody may take it for empty."""


class HubError(MegalightError):
    """The Hugging Face Hub has no such name, refuses it, or does not answer; or its cache cannot be written."""


class ConfigurationError(MegalightError, ValueError):
    """Options contradict each other or Lightning's options."""


class MissingPackageError(MegalightError, ImportError):
    """An optional package is missing. The message contains the pip command that installs it."""


def integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return a value that must be an integer as an ``int``. Integers of numpy and torch are accepted.

    Raises:
        ConfigurationError: it is no integer (``True``, ``2.0`` and ``"2"`` are none), or it is out of range.
    """
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or is_bool(value):
        raise ConfigurationError(f"{name} is {value!r}; it must be an integer, {allowed}.")
    if number < least or (most is not None and number > most):
        raise ConfigurationError(f"{name} is {number}; it must be {allowed}.")
    return number


def is_bool(value: Any) -> bool:
    """Return whether a value is true or false, also as a scalar of numpy or torch: those pass for numbers, too."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def boolean(name: str, value: Any, advice: str = "") -> bool:
    """Return a value that must be ``True`` or ``False``.

    Raises:
        ConfigurationError: it is neither, but what Python takes for one (``5``, ``"no"``).
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is {value!r}; it must be True or False.{advice}")
    return value


def as_float(value: Any) -> float:
    """Return a number, also a scalar of numpy or torch, as a float; NaN for text, lists and all else."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def printable(text: str) -> str:
    """Return ``text`` with characters that steer a terminal written out (``\\x1b``): names in files may hold any."""
    return "".join(each if each in "\n\t" or category(each)[0] != "C" else repr(each)[1:-1] for each in text)


def decode_utf8(data: bytes, what: str, start: int = 0, line: int = 0, advice: str = "convert it to UTF-8.") -> str:
    """Return bytes as text. A mark of byte order at the beginning of a file is left out.

    Args:
        data: the bytes.
        start: position of the first of them in the file.
        line: number of their first line, for messages. 0: ``what`` says it.
        advice: the next step, for messages.

    Raises:
        DataError: they are not UTF-8. The message says which byte at which position of the file.
    """
    text = data.removeprefix(codecs.BOM_UTF8) if start == 0 else data
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        at = start + len(data) - len(text) + error.start
        place = f" line {line + text.count(10, 0, error.start)}" if line else ""
        raise DataError(
            f"{what}{place} is not UTF-8 text (byte 0x{text[error.start]:02x} at position {at}: {error.reason}); "
            f"{advice}"
        ) from error


ALIKE = 0.75
"""Share of their letters that two names have in common, in order, to be taken for spelled alike."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` with the name in ``known`` that is spelled like ``name``, or an empty string.

    Case does not count. Alike are also a name and its beginning of three letters or more (``hidden``, ``hidden_size``),
    names of the same letters (``gtp``, ``gpt``), and names in which one letter differs, but not the first. A wrong
    guess sends readers to what they did not look for, so that words that only share some letters (``images``,
    ``messages``) give none.
    """
    word = name.lower()
    spelled: dict[str, str] = {}
    for each in known:
        spelled.setdefault(each.lower(), each)
    begun = [each for each in spelled if min(len(each), len(word)) >= 3 and _begins(each, word)]
    swapped = [each for each in spelled if len(word) >= 3 and sorted(each) == sorted(word)]
    changed = [
        each for each in spelled if len(each) == len(word) and each[:1] == word[:1] and _differing(each, word) == 1
    ]
    found = [*difflib.get_close_matches(word, spelled, n=1, cutoff=ALIKE), *swapped, *sorted(begun, key=len), *changed]
    return f" Did you mean {spelled[found[0]]!r}?" if found else ""


_OF_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def hub_hint(path: object) -> str:
    """Return how to name a model of the Hugging Face Hub, if a path where nothing is looks like its name, or nothing.

    It was taken for a path because its first part is a folder here (:mod:`megalight.hub`).
    """
    name = str(path)
    return f" If it is a name of the Hugging Face Hub, write hf://{name}." if _OF_HUB.fullmatch(name) else ""


def _begins(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _differing(one: str, other: str) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def nearest_pattern(pattern: str, names: Iterable[str]) -> str:
    """Return ``" Did you mean '*.projector.*'?"`` for a glob over dotted names that matches none, or an empty string.

    Args:
        pattern: the glob: ``*.projecter.*``. Words without ``*``, ``?`` and ``[`` that are no part of a name are taken
            for misspelled.
        names: what it should have matched.
    """
    names = list(names)
    parts = dict.fromkeys(part for name in names for part in name.split("."))
    # A low cutoff: a guess is only given if it matches a name.
    close = {
        word: difflib.get_close_matches(word, parts, n=1, cutoff=0.5)
        for word in pattern.split(".")
        if word not in parts and not set(word) & set("*?[")
    }
    guess = ".".join((close.get(word) or [word])[0] for word in pattern.split("."))
    if guess != pattern and fnmatch.filter(names, guess):
        return f" Did you mean {guess!r}?"
    return nearest(pattern, names)

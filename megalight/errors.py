"""The errors that Megalight raises. Each message states the value, the rule and the next step."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
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


class ConfigurationError(MegalightError, ValueError):
    """Options contradict each other or Lightning's options."""


class MissingPackageError(MegalightError, ImportError):
    """An optional package is missing. The message contains the pip command that installs it."""


def printable(text: str) -> str:
    """Return ``text`` with characters that steer a terminal written out (``\\x1b``): names in files may hold any."""
    return "".join(each if each in "\n\t" or category(each)[0] != "C" else repr(each)[1:-1] for each in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` with the name in ``known`` that is closest to ``name``, or an empty string."""
    # A low cutoff: a wrong guess does little harm, and misspelled options are often abbreviations.
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""


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

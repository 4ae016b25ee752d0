"""The errors that Megalight raises. Each message states the value, the rule and the next step."""

from __future__ import annotations

import difflib
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
    # A low cutoff: a wrong guess does little harm, and misspelt options are often abbreviations.
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""

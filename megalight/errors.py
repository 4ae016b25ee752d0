"""The errors Megalight raises. Each message says the value, the rule, and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MegalightError(Exception):
    """Base of every error of this package that is not a plain ``ValueError`` about an argument."""


class LayoutError(MegalightError, ValueError):
    """A parallel layout that cannot exist: degrees, heads, layers or batch sizes that do not divide."""


class BackendError(MegalightError, ValueError):
    """No backend can serve a request; the message lists every backend with its reason."""


class DataError(MegalightError, ValueError):
    """A data file that is missing, torn, or does not fit the model or tokenizer."""


class CheckpointError(MegalightError):
    """A checkpoint that is missing, torn, foreign, or of another model."""


class ConfigurationError(MegalightError, ValueError):
    """Options that clash with each other or with Lightning's."""


class MissingPackageError(MegalightError, ImportError):
    """An optional package is needed; the message carries the pip command."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest of ``known``, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""

"""Mixtures of corpora: parsing them from options, and building the data set of a split from its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megalight.data.blend import BlendedDataset, Samples, cached, longest_blend, requested_sizes, whole_weights
from megalight.data.corpus import Corpus
from megalight.data.indexed import paths
from megalight.errors import DataError

SampleT = TypeVar("SampleT")
Data = str | list[str | float] | dict[str, float]
"""Options that name data. Paths are taken in the place of strings."""


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):  # a prefix, also as a path
        return None


@dataclass(frozen=True)
class Mixture:
    """Data prefixes and their weights. Without weights, every document of each is used."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, data: Data, option: str = "data") -> Mixture:
        """Parse a prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or ``{prefix: weight}``.

        Raises:
            DataError: the value has another form, or a prefix occurs twice.
        """
        if isinstance(data, (str, os.PathLike)):
            mixture = cls((os.fspath(data),))
        elif isinstance(data, Mapping):
            numbers = [_number(weight) for weight in data.values()]
            weights = tuple(number for number in numbers if number is not None)
            if len(weights) < len(numbers):
                raise DataError(f"{option} is {dict(data)}; its values are weights, which must be numbers above 0.")
            mixture = cls(tuple(map(str, data)), weights)
        else:
            # Every second entry is a number if there are weights.
            numbers = [_number(item) for item in data[::2]]
            if numbers and numbers[0] is None:
                mixture = cls(tuple(map(str, data)))
            else:
                weights = tuple(number for number in numbers if number is not None)
                if len(data) % 2 or len(weights) * 2 != len(data):
                    raise DataError(
                        f"{option} is {list(data)}; with weights it must alternate: weight, prefix, weight, prefix."
                    )
                mixture = cls(tuple(map(str, data[1::2])), weights)
        files = {os.path.realpath(paths(prefix)[0]) for prefix in mixture.prefixes}
        if not all(mixture.prefixes) or not files or len(files) < len(mixture.prefixes):
            raise DataError(f"{option} is {data!r}; it must name at least one data prefix, and each only once.")
        if mixture.weights is not None:
            whole_weights(mixture.weights)
        return mixture


@dataclass(frozen=True)
class Part:
    """A range of sequences of a corpus (whole documents) and its weight in a mixture."""

    corpus: Corpus
    documents: range
    weight: float | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of these sequences."""
        lengths = self.corpus.data.lengths[self.documents.start : self.documents.stop]
        return int(lengths.sum(dtype="int64"))


def mix(
    parts: Sequence[Part],
    dataset: Callable[[Part, int | None], Samples[SampleT]],
    *,
    num_samples: int | None,
    label: str,
    cache_dir: str | os.PathLike[str] | None,
) -> Samples[SampleT] | None:
    """Build the data set of a split from its parts. Returns None if the parts hold no text.

    Args:
        parts: the parts to mix. With weights, samples are drawn in their ratio. Without, every sample occurs, spread
            evenly.
        dataset: builds the data set of one part with the given number of samples (None: one pass).
        num_samples: number of samples needed; documents are repeated as often as this takes. None: one pass; with
            weights, the mixture ends before a part would have to repeat a sample.
        label: name of the split, for caches.
        cache_dir: folder for cached indices; by default the folder ``cache`` beside the first part's data.
    """
    live = [part for part in parts if part.num_tokens > 1]  # an input and its label take two tokens
    if not live:
        return None
    if len(live) == 1:
        return dataset(live[0], num_samples)
    weighted = live[0].weight is not None
    # Without weights, the sizes are the weights: all parts then end together.
    weights = whole_weights([part.num_tokens if part.weight is None else part.weight for part in live])
    if num_samples is not None:
        folder = cache_dir or os.path.join(os.path.dirname(live[0].corpus.data.prefix), "cache")
        index = cached(folder, label, weights, num_samples)
        sizes = requested_sizes(weights, index)
        return BlendedDataset([dataset(part, size) for part, size in zip(live, sizes, strict=True)], index, weights)
    datasets = [dataset(part, None) for part in live]
    return BlendedDataset(datasets, longest_blend(weights, [len(data) for data in datasets]) if weighted else None)

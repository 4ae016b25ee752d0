"""Blending: a mixture of data sets by weight, in integer arithmetic, so that the mix is the same on every machine.

:class:`BlendedDataset` takes each sample from the data set that is furthest behind its weight. :class:`Mixture` reads a
mixture from options, and :func:`mix` builds the data set of a split from the corpora of a mixture.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalight.data.cache import build_once
from megalight.data.corpus import Corpus
from megalight.data.indexed import paths
from megalight.errors import DataError

ItemT = TypeVar("ItemT", covariant=True)
MAX_DATASETS = np.iinfo(np.int16).max
HASHED = 4096
"""Number of entries of a blend by which it is told from others."""


class Samples(Protocol[ItemT]):
    """A data set with a known order. Item None is a sample without loss."""

    @property
    def order(self) -> str:
        """Hash of everything that the order of samples depends on."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int | None) -> ItemT: ...


def whole_weights(weights: Sequence[float | Fraction]) -> list[int]:
    """Return the smallest integers in the ratio of ``weights``.

    Raises:
        DataError: a weight is not positive and finite, or there are too many data sets.
    """
    if len(weights) > MAX_DATASETS:
        raise DataError(f"there are {len(weights)} data sets; a blend takes at most {MAX_DATASETS}. Merge some.")
    try:
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means one tenth, not the nearest binary number
    except (ValueError, OverflowError):
        exact = []
    if not exact or min(exact) <= 0:
        raise DataError(f"blend weights are {list(weights)}; each must be a number above 0.")
    # `lcm` of Python's integers: denominators of long decimals exceed 64 bits.
    common = int(np.lcm.reduce([part.denominator for part in exact], dtype=object))
    scaled = [int(part * common) for part in exact]
    divisor = int(np.gcd.reduce(scaled, dtype=object))
    return [part // divisor for part in scaled]


def blend_index(weights: Sequence[int], num_samples: int, limits: Sequence[int] | None = None) -> NDArray[np.int16]:
    """``[num_samples]``: the data set of each sample: always the one that is furthest behind its share.

    For sample ``i`` this is the argmax of ``w_d * max(i, 1) - taken_d * sum(w)``; the first one wins a tie.

    Args:
        weights: integer weights.
        limits: number of samples of each data set. A data set that is used up takes part no longer. None: no limits.
    """
    total = sum(weights)
    left = list(limits) if limits is not None else [num_samples] * len(weights)
    index = np.empty(num_samples, np.int16)
    behind: list[float] = [weight if room else -math.inf for weight, room in zip(weights, left, strict=True)]
    seen: dict[tuple[float, ...], int] = {}
    for step in range(num_samples):
        # The state can repeat only after a whole number of rounds. Checked once a round, as it costs a look-up.
        if limits is None and step % total == 1 % total and step:
            # The state is a tuple of integers, so it repeats. After a repeated state the same samples follow.
            start = seen.setdefault(tuple(behind), step)
            if start < step:
                index[step:] = np.resize(index[start:step], num_samples - step)
                break
        # `index` finds the first maximum, so ties go to the data set that is named first.
        best = behind.index(max(behind))
        index[step] = best
        behind[best] -= total
        left[best] -= 1
        if not left[best]:
            behind[best] = -math.inf
        # After step 0 nobody gains: the formula counts from `max(i, 1)`.
        if step:
            behind = [have + weight for have, weight in zip(behind, weights, strict=True)]
    return index


def occurrences(index: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """``[n]``: for each entry, how many earlier entries name the same data set: the sample to take from it."""
    found = np.empty(len(index), np.int64)
    for dataset in range(num_datasets):
        steps = np.flatnonzero(index == dataset)
        found[steps] = np.arange(len(steps))
    return found


def requested_sizes(weights: Sequence[int], index: NDArray[np.int16]) -> list[int]:
    """Number of samples to request from each data set: its share plus 0.5 %, at least what the blend takes.

    The extra 0.5 % is Megatron-LM's; it decides how often documents are repeated, and so the order.
    """
    total, target = sum(weights), len(index)
    taken = np.bincount(index, minlength=len(weights)).tolist()
    shares = [-(-target * weight // total) for weight in weights]
    return [max(count, -(-share * 1005 // 1000)) for count, share in zip(taken, shares, strict=True)]


def longest_blend(weights: Sequence[int], sizes: Sequence[int]) -> NDArray[np.int16]:
    """The longest blend in which no data set repeats a sample."""
    total = sum(weights)
    # The data set that runs out first ends the blend.
    bound = min(size * total // weight for size, weight in zip(sizes, weights, strict=True)) + len(weights)
    while True:
        index = blend_index(weights, bound)
        over = np.flatnonzero(occurrences(index, len(sizes)) >= np.asarray(sizes)[index])
        if len(over):
            return index[: over[0]]
        bound *= 2  # the bound may be a little short, because a data set can lag behind its share


def cached_blend_index(
    folder: str | os.PathLike[str], label: str, weights: Sequence[int], num_samples: int
) -> NDArray[np.int16]:
    """Return :func:`blend_index`, built once for all processes."""
    return build_once(
        folder,
        f"BlendedDataset-{label}",
        {"weights": list(weights), "samples": num_samples},
        lambda: {"dataset_index": blend_index(weights, num_samples)},
    )["dataset_index"]


class BlendedDataset(Generic[ItemT]):
    """A mixture of data sets, sample by sample.

    Args:
        datasets: the data sets. The samples of each come in its own order.
        index: ``[n]``: the data set of each sample, from :func:`blend_index`. None: every sample of each data set
            occurs once, spread evenly.
        weights: the weights of ``index``, if a longer run would have more of the same blend.

    Attributes:
        order: hash of everything that the order of samples depends on. With ``weights``, a longer blend has the same.

    Raises:
        DataError: a data set has fewer samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[Samples[ItemT]],
        index: NDArray[np.int16] | None = None,
        weights: Sequence[int] | None = None,
    ) -> None:
        sizes = [len(dataset) for dataset in datasets]
        if index is None:
            # An empty data set gets a weight, and a limit of 0 keeps it out.
            live = [max(size, 1) for size in sizes]
            index = blend_index(live, sum(sizes), sizes)
        taken = np.bincount(index, minlength=len(sizes)).tolist()
        for number, (size, count) in enumerate(zip(sizes, taken, strict=True)):
            if count > size:
                raise DataError(
                    f"the blend takes {count} samples of data set {number}, which has {size}; build the data set with "
                    "at least that many, or make the blend shorter."
                )
        first = index[:HASHED]
        if weights is not None and len(first) < HASHED:
            first = blend_index(weights, HASHED)
        facts = [dataset.order for dataset in datasets] + [hashlib.sha256(first.tobytes()).hexdigest()]
        self.order = hashlib.blake2b("".join(facts).encode(), digest_size=16).hexdigest()
        self.datasets = datasets
        self.dataset_index = index
        self.sample_index = occurrences(index, len(sizes))

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int | None) -> ItemT:
        if index is None:
            return self.datasets[0][None]
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        return self.datasets[int(self.dataset_index[index])][int(self.sample_index[index])]


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
class BlendPart:
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
    parts: Sequence[BlendPart],
    dataset: Callable[[BlendPart, int | None], Samples[SampleT]],
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
        index = cached_blend_index(folder, label, weights, num_samples)
        sizes = requested_sizes(weights, index)
        return BlendedDataset([dataset(part, size) for part, size in zip(live, sizes, strict=True)], index, weights)
    datasets = [dataset(part, None) for part in live]
    return BlendedDataset(datasets, longest_blend(weights, [len(data) for data in datasets]) if weighted else None)

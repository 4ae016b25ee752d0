"""Which corpora a split is made of, with which weights; and the data set that this comes to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megalight.data.blend import BlendedDataset, Samples, cached, longest_blend, requested_sizes, whole_weights
from megalight.data.corpus import Corpus
from megalight.data.gpt import GPTDataset, Sample, SampleOptions
from megalight.errors import DataError

SampleT = TypeVar("SampleT")
Data = str | list[str | float] | dict[str, float]


def _number(value: str | float) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


@dataclass(frozen=True)
class Mixture:
    """Data prefixes, with weights (None: every document of all of them)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, data: Data, option: str = "data") -> Mixture:
        """Read a prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or ``{prefix: weight}``.

        Raises:
            DataError: none of these, or a prefix twice.
        """
        if isinstance(data, str):
            mixture = cls((data,))
        elif isinstance(data, Mapping):
            mixture = cls(tuple(data), tuple(float(weight) for weight in data.values()))
        else:
            numbers = [_number(item) for item in data[::2]]
            if numbers and numbers[0] is None:
                mixture = cls(tuple(str(item) for item in data))
            else:
                weights = tuple(number for number in numbers if number is not None)
                if len(data) % 2 or len(weights) * 2 != len(data):
                    raise DataError(
                        f"{option} is {list(data)}; with weights it must alternate: weight, prefix, weight, prefix."
                    )
                mixture = cls(tuple(str(item) for item in data[1::2]), weights)
        if not mixture.prefixes or len(set(mixture.prefixes)) < len(mixture.prefixes):
            raise DataError(f"{option} is {data!r}; it must name at least one data prefix, and each only once.")
        if mixture.weights is not None:
            whole_weights(mixture.weights)
        return mixture


@dataclass(frozen=True)
class Part:
    """Sequences of a corpus that are whole documents, and their weight in a mixture."""

    corpus: Corpus
    documents: range
    weight: float | None

    @property
    def num_tokens(self) -> int:
        """Tokens of these sequences."""
        lengths = self.corpus.data.lengths[self.documents.start : self.documents.stop]
        return int(lengths.sum(dtype="int64"))


def build_split(
    parts: Sequence[Part],
    options: SampleOptions,
    *,
    num_samples: int | None,
    seed: int,
    label: str,
    cache_dir: str | os.PathLike[str] | None,
    drop_last_partial: bool,
) -> Samples[Sample] | None:
    """The data set of a split for GPT, or None when its parts hold no text: see :func:`mix`.

    Args:
        parts: what it is mixed of.
        options: what samples are made of.
        num_samples: see :func:`mix`.
        seed: of the order.
        label: name of the split, for messages and caches.
        cache_dir: where indices are cached.
        drop_last_partial: see :class:`megalight.data.gpt.GPTDataset`.

    Raises:
        DataError: a part too short for a sample.
    """

    def dataset(part: Part, samples: int | None) -> GPTDataset:
        return GPTDataset(
            part.corpus.data,
            part.documents,
            options,
            num_samples=samples,
            seed=seed,
            label=label,
            cache_dir=cache_dir,
            drop_last_partial=drop_last_partial,
        )

    return mix(parts, dataset, num_samples=num_samples, label=label, cache_dir=cache_dir)


def mix(
    parts: Sequence[Part],
    dataset: Callable[[Part, int | None], Samples[SampleT]],
    *,
    num_samples: int | None,
    label: str,
    cache_dir: str | os.PathLike[str] | None,
) -> Samples[SampleT] | None:
    """The data set that parts come to, or None when they hold no text.

    Args:
        parts: what it is mixed of. With weights they are mixed by them; without, every sample occurs, spread evenly.
        dataset: makes a part's own data set, of so many samples (None: one pass).
        num_samples: samples needed, repeating documents as often as that takes. None: one pass; with weights, until
            one of the parts would have to repeat a sample.
        label: name of the split, for caches.
        cache_dir: where indices are cached.
    """
    live = [part for part in parts if part.num_tokens > 1]
    if not live:
        return None
    if len(live) == 1:
        return dataset(live[0], num_samples)
    weighted = live[0].weight is not None
    weights = whole_weights([part.num_tokens if part.weight is None else part.weight for part in live])
    if num_samples is not None:
        folder = cache_dir or os.path.join(os.path.dirname(live[0].corpus.data.prefix), "cache")
        index = cached(folder, label, weights, num_samples)
        sizes = requested_sizes(weights, index)
        return BlendedDataset([dataset(part, size) for part, size in zip(live, sizes, strict=True)], index)
    datasets = [dataset(part, None) for part in live]
    return BlendedDataset(datasets, longest_blend(weights, [len(data) for data in datasets]) if weighted else None)

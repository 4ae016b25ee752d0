"""Which sentences make which sample of segment pairs: runs of sentences of one document, greedily filled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megalight.errors import DataError

Runs = NDArray[np.int64]


def runs_of(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64],
    target: int,
    short_probability: float,
    generator: np.random.Generator,
) -> Runs:
    """One pass over the documents: ``[n, 2]``, the sentences ``[first, last)`` of each sample, in order.

    A sample takes sentences until it has ``target`` tokens, or, with ``short_probability``, a random number of at
    least 2; and always two sentences. What is left of a document and is a single sentence goes to the sample before
    it; documents of one sentence make no sample.

    Args:
        lengths: ``[S]`` tokens of each sentence.
        documents: ``[D + 1]`` where documents begin, ``S`` last.
        target: tokens wanted per sample.
        short_probability: part of the samples that are shorter, so that the model sees all lengths.
        generator: of the lengths.
    """
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # tokens before each sentence
    first, stop = documents[:-1], documents[1:]
    found: list[Runs] = []
    while len(first):  # all documents advance by one sample at a time
        live = stop - first >= 2
        first, stop = first[live], stop[live]
        short = generator.random(len(first)) < short_probability
        wanted = np.where(short, generator.integers(2, target + 1, len(first)), target)
        last = np.searchsorted(ends, ends[first] + wanted)  # the first boundary with enough tokens before it
        last = np.minimum(np.maximum(last, first + 2), stop)
        last = np.where(stop - last == 1, stop, last)
        found.append(np.stack([first, last], axis=1))
        first = last
    runs = np.concatenate([np.zeros((0, 2), np.int64), *found])
    return runs[np.argsort(runs[:, 0], kind="stable")]


def sample_runs(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64],
    target: int,
    short_probability: float,
    num_samples: int | None,
    seed: int,
) -> Runs:
    """The runs of all samples, shuffled within each pass; as many passes as ``num_samples`` take (None: one).

    Raises:
        DataError: no document has two sentences.
    """
    passes: list[Runs] = []
    have = 0
    while not passes or (num_samples is not None and have < num_samples):
        generator = np.random.Generator(np.random.PCG64([seed, 0, len(passes)]))
        runs = runs_of(lengths, documents, target, short_probability, generator)
        if not len(runs):
            raise DataError(
                f"none of {len(documents) - 1} documents has two sentences, and samples are pairs. Prepare the data "
                "with: megalight prepare ... --split-sentences"
            )
        passes.append(generator.permutation(runs))
        have += len(runs)
    return np.concatenate(passes)[:num_samples]

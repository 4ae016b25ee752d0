"""The sample index of BERT's data set: consecutive sentences of one document, filled greedily to a target length."""

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
    """``[n, 2]``: the sentences ``[first, last)`` of each sample of one pass over the documents, in order.

    A sample takes sentences until it has ``target`` tokens or, with ``short_probability``, a random number of at least
    2 tokens. It always takes at least two sentences. If a single sentence is left of a document, the last sample takes
    it too. Documents of one sentence give no sample.

    Args:
        lengths: ``[S]``: number of tokens of each sentence.
        documents: ``[D + 1]``: the first sentence of each document, then ``S``.
        target: tokens per sample.
        short_probability: fraction of samples with a random shorter target, so that the model sees all lengths.
        generator: draws the shorter targets.
    """
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # tokens before each sentence
    first, stop = documents[:-1], documents[1:]
    found: list[Runs] = []
    while len(first):  # vectorized over documents: each turn takes one sample from every document that has one
        live = stop - first >= 2
        first, stop = first[live], stop[live]
        short = generator.random(len(first)) < short_probability
        wanted = np.where(short, generator.integers(2, target + 1, len(first)), target)
        last = np.searchsorted(ends, ends[first] + wanted)  # first sentence boundary after enough tokens
        last = np.minimum(np.maximum(last, first + 2), stop)
        last = np.where(stop - last == 1, stop, last)  # a single sentence left over is no sample
        found.append(np.stack([first, last], axis=1))
        first = last
    runs = np.concatenate([np.zeros((0, 2), np.int64), *found])
    # In the order of the documents, whatever turn found a sample: the order is then that of the text.
    return runs[np.argsort(runs[:, 0], kind="stable")]


def sample_runs(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64],
    target: int,
    short_probability: float,
    num_samples: int | None,
    seed: int,
) -> Runs:
    """Return the sentences of all samples, shuffled within each pass. None for ``num_samples`` means one pass.

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
                f"none of {len(documents) - 1} documents has two sentences, but a sample is a pair. Prepare the data "
                "with: megalight prepare ... --split-sentences"
            )
        # Shuffled within a pass, so that no document comes a second time before all have come once.
        passes.append(generator.permutation(runs))
        have += len(runs)
    return np.concatenate(passes)[:num_samples]

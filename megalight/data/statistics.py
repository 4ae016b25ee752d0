"""Token frequencies of a corpus, and their entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.data.indexed import IndexedDataset

CHUNK = 1 << 24


def token_counts(data: IndexedDataset) -> NDArray[np.int64]:
    """``[highest id + 1]``: how often each token id occurs. Reads all tokens once."""
    counts = np.zeros(0, np.int64)
    # In chunks, because `bincount` copies what it reads to 64 bits.
    for start in range(0, data.num_tokens, CHUNK):
        counts = add_counts(counts, data.tokens[start : start + CHUNK])
    return counts


def add_counts(counts: NDArray[np.int64], tokens: NDArray[Any]) -> NDArray[np.int64]:
    """Add the counts of ``tokens`` to ``counts``. The result is longer if a higher id occurs."""
    # As long as needed: ids of a later chunk may be higher.
    more = np.bincount(tokens, minlength=len(counts)).astype(np.int64)
    more[: len(counts)] += counts
    return more


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of the distribution of the counts, ``-sum p ln p``, in nats; 0 without counts."""
    positive = counts[counts > 0].astype(np.float64)
    if not len(positive):
        return 0.0
    shares = positive / positive.sum()
    return max(0.0, float(-(shares * np.log(shares)).sum()))


def unigram_entropy(data: IndexedDataset) -> float:
    """Entropy of the token frequencies of a corpus, in nats: the loss of the best model that ignores context."""
    return entropy(token_counts(data))

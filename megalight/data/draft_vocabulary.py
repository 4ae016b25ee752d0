"""The most frequent tokens of corpora: the vocabulary of a draft model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megalight.data.corpus import Corpus, same_tokenizer
from megalight.errors import DataError

BLOCK = 1 << 24
"""Tokens that are counted at a time."""


def frequent_ids(prefixes: Sequence[str], size: int) -> tuple[list[int], float]:
    """Return the most frequent ids in ascending order, and the fraction of all tokens that they are.

    Of conversations, tokens with a loss are counted. Of ids that are equally frequent, the lower ones are taken.

    Args:
        prefixes: data prefixes.
        size: number of ids.

    Raises:
        DataError: a file is missing, the corpora have different tokenizers, or they have fewer ids.
    """
    if size < 1:
        raise DataError(f"a vocabulary of {size} ids is none; give at least 1, such as 32000.")
    corpora = [Corpus.open(prefix) for prefix in prefixes]
    same_tokenizer(corpora)
    counts = np.zeros(0, np.int64)
    for corpus in corpora:
        for start in range(0, corpus.data.num_tokens, BLOCK):
            tokens = corpus.data.tokens[start : start + BLOCK]
            if corpus.loss is not None:
                tokens = tokens[corpus.loss.tokens[start : start + BLOCK] != 0]
            counts = _sum(counts, np.bincount(tokens[tokens >= 0]))
    order = np.argsort(-counts, kind="stable")[:size]
    if len(order) < size or not counts[order[-1]]:
        raise DataError(
            f"the data has {np.count_nonzero(counts)} different ids, and {size} are asked for; ask for fewer, or give "
            "more data."
        )
    return sorted(order.tolist()), float(counts[order].sum() / counts.sum())


def _sum(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros(max(len(a), len(b)), np.int64)
    total[: len(a)] += a
    total[: len(b)] += b
    return total

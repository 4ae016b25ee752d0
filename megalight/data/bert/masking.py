"""Masking of whole words (BERT, https://arxiv.org/abs/1810.04805; whole words since its release of May 2019)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megalight.data.bert.batch import IGNORED
from megalight.data.bert.words import Words

KEPT = 0.1
"""Part of the chosen tokens that stays as it is."""

REPLACED = 0.1
"""Part of the chosen tokens that becomes a random one; all others become the mask token."""


def mask_words(
    tokens: NDArray[np.int64], words: Words, probability: float, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose whole words until they have ``probability`` of the tokens, and hide them.

    Special tokens are never chosen. A word that would go beyond the number wanted is passed over, but one word is
    chosen always, so that no sample is without loss.

    Returns:
        the tokens with 80 % of the chosen ones masked, 10 % replaced by random ones and 10 % kept; and labels: the
        chosen tokens where they are, -100 elsewhere.
    """
    labels = np.full(len(tokens), IGNORED, np.int64)
    chosen = _choose(tokens, words, probability, generator)
    labels[chosen] = tokens[chosen]
    fate = generator.random(len(chosen))
    hidden = tokens.copy()
    hidden[chosen[fate >= KEPT + REPLACED]] = words.mask
    random = chosen[fate < REPLACED]
    hidden[random] = generator.choice(words.ordinary, len(random))
    return hidden, labels


def _choose(
    tokens: NDArray[np.int64], words: Words, probability: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Places of the chosen tokens."""
    places = np.flatnonzero(~words.special[tokens])
    if not len(places):
        return places
    word = np.cumsum(words.starts(tokens))[places]  # special tokens begin a word and end one, so none spans two
    firsts = np.flatnonzero(np.diff(word, prepend=-1))
    sizes = np.diff(firsts, append=len(places))
    wanted = max(1, round(probability * len(places)))
    taken: list[int] = []
    left = wanted
    order = generator.permutation(len(firsts))
    for index in order.tolist():
        if sizes[index] <= left:
            taken.append(index)
            left -= int(sizes[index])
        if not left:
            break
    taken = taken or [int(order[0])]
    return np.concatenate([places[firsts[k] : firsts[k] + sizes[k]] for k in sorted(taken)])

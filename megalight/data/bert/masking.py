"""Masking of whole words (BERT, https://arxiv.org/abs/1810.04805; its release of May 2019 masks whole words)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megalight.data.bert.batch import IGNORED
from megalight.data.bert.words import Words

KEPT = 0.1
"""Fraction of the chosen tokens that stays unchanged."""

REPLACED = 0.1
"""Fraction of the chosen tokens that becomes a random token. All other chosen tokens become the mask token."""


def mask_words(
    tokens: NDArray[np.int64], words: Words, probability: float, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose whole words at random until they have the fraction ``probability`` of the tokens, and mask them.

    Special tokens are never chosen. A word that would exceed the fraction is skipped. At least one word is chosen, so
    every sample has a loss.

    Returns:
        the inputs, with 80 % of the chosen tokens masked, 10 % replaced by random tokens and 10 % unchanged; and the
        labels: the chosen tokens at their positions, -100 elsewhere.
    """
    labels = np.full(len(tokens), IGNORED, np.int64)
    chosen = _choose(tokens, words, probability, generator)
    labels[chosen] = tokens[chosen]
    # One draw decides: below 0.1 a token is replaced, below 0.2 it is kept, and else it is masked.
    fate = generator.random(len(chosen))
    hidden = tokens.copy()
    hidden[chosen[fate >= KEPT + REPLACED]] = words.mask
    random = chosen[fate < REPLACED]
    # Special tokens never replace: the model would learn to expect them inside text.
    hidden[random] = generator.choice(words.ordinary, len(random))
    return hidden, labels


def _choose(
    tokens: NDArray[np.int64], words: Words, probability: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return the positions of the chosen tokens."""
    places = np.flatnonzero(~words.special[tokens])
    if not len(places):
        return places
    word = np.cumsum(words.starts(tokens))[places]  # number of each token's word; no word goes across a special token
    # Where the number of the word changes, a word begins.
    firsts = np.flatnonzero(np.diff(word, prepend=-1))
    sizes = np.diff(firsts, append=len(places))
    wanted = max(1, round(probability * len(places)))
    taken: list[int] = []
    left = wanted
    order = generator.permutation(len(firsts))
    for index in order.tolist():
        # Too long for what is left: a later word may still fit.
        if sizes[index] <= left:
            taken.append(index)
            left -= int(sizes[index])
        if not left:
            break
    taken = taken or [int(order[0])]  # every word was too long: take one anyway
    return np.concatenate([places[firsts[k] : firsts[k] + sizes[k]] for k in sorted(taken)])

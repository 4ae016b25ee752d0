"""Whole-word masking (BERT, https://arxiv.org/abs/1810.04805; its release of May 2019 masks whole words)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalight.data.bert.batch import IGNORED
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError

# Words of a vocabulary


CLASSIFY = ("[CLS]", "<s>", "<cls>")
SEPARATE = ("[SEP]", "</s>", "<sep>")
MASK = ("[MASK]", "<mask>")
OTHERS = ("[PAD]", "[UNK]", "<pad>", "<unk>", "<|pad|>", "<|endoftext|>")
"""Names of special tokens in the vocabularies of BERT, RoBERTa and ALBERT, and in those that ``prepare`` trains."""

SPACE = "Ġ"
"""The character for a space in byte-level vocabularies."""


@dataclass(frozen=True, eq=False)
class Words:
    """Arrays over a vocabulary of ``V`` ids, for masking.

    Attributes:
        classify: id of the token that begins a sample.
        separate: id of the token that ends a segment.
        mask: id of the mask token.
        inner: ``[V]`` bool: the token can continue a word.
        open: ``[V]`` bool: a word can continue after the token.
        ordinary: ids of the tokens that are not special. These can be masked, and can replace others.
        special: ``[V]`` bool: the token is special.
    """

    classify: int
    separate: int
    mask: int
    inner: NDArray[np.bool_]
    open: NDArray[np.bool_]
    ordinary: NDArray[np.int64]
    special: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words:
        """Read the vocabulary of a tokenizer.

        In WordPiece vocabularies, ``##`` marks a token that continues a word. Byte-level and SentencePiece vocabularies
        mark the space before a word instead. There, a token that begins with a letter or digit continues a word if the
        token before it ends with a letter or digit.

        Raises:
            DataError: there is no token to begin a sample, to end a segment, or to mask with.
        """
        vocabulary, size = tokenizer.vocabulary, tokenizer.vocab_size
        # In this order, so that BERT's own names win in a vocabulary that has several.
        wanted = {"begin a sample": CLASSIFY, "end a segment": SEPARATE, "stand for a masked token": MASK}
        classify, separate, mask = (_find(vocabulary, names, purpose) for purpose, names in wanted.items())
        # Ids that no token has count as special: they are never masked, and replace nothing.
        inner, opens, special = np.zeros(size, bool), np.zeros(size, bool), np.ones(size, bool)
        # One such token is enough: vocabularies of other kinds mark no continuation.
        pieces = any(token.startswith("##") for token in vocabulary)
        letter = _letter_of_bytes if any(token.startswith(SPACE) for token in vocabulary) else str.isalnum
        names = {*CLASSIFY, *SEPARATE, *MASK, *OTHERS, tokenizer.eod_token, tokenizer.pad_token}
        for token, index in vocabulary.items():
            if token in names or not token:
                continue
            special[index] = False
            inner[index] = len(token) > 2 and token.startswith("##") if pieces else letter(token[0])
            opens[index] = pieces or letter(token[-1])
        return cls(classify, separate, mask, inner, opens, np.flatnonzero(~special), special)

    def starts(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``[n]`` ids to ``[n]`` bool: whether a word begins at this token."""
        # The first token begins a word, whatever came before the sample.
        found = np.ones(len(tokens), bool)
        # The token before decides as well: after a space or a sign, a letter begins a word.
        found[1:] = ~(self.inner[tokens[1:]] & self.open[tokens[:-1]])
        return found


def _find(vocabulary: Mapping[str, int], names: tuple[str, ...], purpose: str) -> int:
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    raise DataError(
        f"the tokenizer has no token to {purpose} ({', '.join(names)}); use BERT's tokenizer, or train one with: "
        'megalight prepare ... --train-tokenizer --special-tokens "[CLS]" "[SEP]" "[MASK]"'
    )


def _letter_of_bytes(character: str) -> bool:
    """Return whether a character of a byte-level token stands for a letter, a digit, or a byte of a longer character.

    Byte-level vocabularies write bytes 0x21 to 0x7E as themselves, lower bytes (spaces and control codes) from U+0100
    on, and higher bytes as U+00A1 to U+00FF or from U+0122 on.
    """
    return character.isalnum() if character.isascii() else not 0x100 <= ord(character) <= 0x121


# Masking


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

"""Fill in the middle: documents of a sample, rearranged so that a model learns to insert text.

Bavarian et al., 2022, https://arxiv.org/abs/2207.14255. A text is cut at two random characters into prefix, middle and
suffix, and written as ``PRE prefix SUF suffix MID middle`` (PSM) or ``PRE SUF suffix MID prefix middle`` (SPM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, nearest

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FIM:
    """How often and how texts are rearranged.

    Attributes:
        rate: probability that a document of a sample is rearranged.
        spm_rate: probability of the order SPM for a rearranged text; PSM otherwise.
        split: a token that separates the fragments of a document, such as files of a repository. A document that holds
            it is chosen with ``rate`` as a whole; then each of its fragments is rearranged with ``fragment_rate``.
        fragment_rate: see ``split``.
        no_prefix: texts that start with this are never rearranged.
        prefix_token: the token PRE.
        middle_token: the token MID.
        suffix_token: the token SUF.

    Raises:
        ConfigurationError: a probability is not between 0 and 1.
    """

    rate: float
    spm_rate: float = 0.5
    split: str | None = None
    fragment_rate: float = 0.5
    no_prefix: str | None = None
    prefix_token: str = "<fim_prefix>"
    middle_token: str = "<fim_middle>"
    suffix_token: str = "<fim_suffix>"

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate", "fragment_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"fim.{name} is {getattr(self, name)}; it must be between 0 and 1.")


class FillInMiddle:
    """Rearranges the documents of samples.

    Args:
        options: how often and how.
        tokenizer: the tokenizer of the data.

    Raises:
        DataError: a token is not in the vocabulary, or the tokenizer has no end-of-document token.
    """

    def __init__(self, options: FIM, tokenizer: Tokenizer) -> None:
        def known(name: str) -> int:
            token = getattr(options, name)
            if token not in tokenizer.vocabulary:
                raise DataError(
                    f"fim.{name} is {token!r}, which is not in the vocabulary of the tokenizer."
                    + nearest(token, (name for name in tokenizer.vocabulary if "fim" in name.lower()))
                    + " Name one of its tokens, or train a tokenizer with it (--special-tokens)."
                )
            return tokenizer.vocabulary[token]

        self.options = options
        self.tokenizer = tokenizer
        self.prefix, self.middle, self.suffix = map(known, ("prefix_token", "middle_token", "suffix_token"))
        self.split = None if options.split is None else known("split")

    def __call__(self, pieces: Sequence[NDArray[Any]], size: int, random: np.random.Generator) -> list[Ids]:
        """Rearrange documents.

        New tokens and another tokenization change lengths. The result is cut to ``size``; if it is shorter, whoever
        makes the sample fills it up without loss.

        Args:
            pieces: the documents of a sample, with their end-of-document tokens.
            size: number of tokens that the sample can hold.
            random: the sample's own stream, so that the result does not depend on what was read before.
        """
        found: list[Ids] = []
        for piece in pieces:
            changed = self._document(piece.astype(np.int64), random)[:size]
            size -= len(changed)
            found.append(changed)
        return found

    def _document(self, ids: Ids, random: np.random.Generator) -> Ids:
        """Rearrange the texts between end-of-document tokens. Those tokens stay, also where several follow."""
        parts = []
        for part in _parts(ids, self.tokenizer.eod_id):
            # Not at a separator, which is a part of its own.
            chosen = len(part) > 0 and part[0] != self.tokenizer.eod_id and random.random() < self.options.rate
            parts.append(self._fragments(part, random) if chosen else part)
        return np.concatenate(parts) if parts else ids

    def _fragments(self, ids: Ids, random: np.random.Generator) -> Ids:
        if self.split is None or self.split not in ids:
            return self._permute(ids, random)
        parts = [
            self._permute(part, random)
            if part[0] != self.split and random.random() < self.options.fragment_rate
            else part
            for part in _parts(ids, self.split)
        ]
        return np.concatenate(parts)

    def _permute(self, ids: Ids, random: np.random.Generator) -> Ids:
        text = self.tokenizer.decode(ids.tolist())
        kept = self.options.no_prefix is not None and text.startswith(self.options.no_prefix)
        # A sample may begin or end inside a character. Its bytes would not survive decoding, so such text stays.
        if kept or "\ufffd" in text:
            return ids
        first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
        p, m, s = self.tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
        # Suffix first (SPM), or prefix first (PSM), as in https://arxiv.org/abs/2207.14255.
        if random.random() < self.options.spm_rate:
            order = [self.prefix, self.suffix, *s, self.middle, *p, *m]
        else:
            order = [self.prefix, *p, self.suffix, *s, self.middle, *m]
        return np.asarray(order, np.int64)


def _parts(ids: Ids, separator: int | None) -> list[Ids]:
    """Cut at a separator. Each separator is a part of its own; no part is empty."""
    places = np.flatnonzero(ids == separator) if separator is not None else np.zeros(0, np.int64)
    # Both sides of each separator are cut.
    parts = np.split(ids, np.unique(np.concatenate([places, places + 1])))
    return [part for part in parts if len(part)]

"""A prepared corpus, opened and checked against the tokenizer and the vocabulary before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from megalight.data.indexed import IndexedDataset
from megalight.data.meta import CorpusMeta, tokenizer_path
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError

SCAN_LIMIT = 1 << 26


@dataclass(frozen=True)
class Corpus:
    """Token files and the facts that came with them.

    Attributes:
        data: the token files.
        meta: what ``prepare`` wrote about them; None for files made by other programs.
    """

    data: IndexedDataset
    meta: CorpusMeta | None

    @classmethod
    def open(cls, prefix: str | os.PathLike[str]) -> Corpus:
        """Open the files of a prefix.

        Raises:
            DataError: they are missing, torn, or do not belong together.
        """
        data = IndexedDataset(prefix)
        meta = CorpusMeta.load(prefix)
        if meta is not None and meta.num_tokens != data.num_tokens:
            raise DataError(
                f"{CorpusMeta.path(prefix)} speaks of {meta.num_tokens} tokens, {data.prefix}.bin holds "
                f"{data.num_tokens}: they are of different data sets. Prepare the data again."
            )
        return cls(data, meta)

    @property
    def tokenizer_path(self) -> str | None:
        """The tokenizer that came with the corpus, or None."""
        path = tokenizer_path(self.data.prefix)
        return os.fspath(path) if path.is_file() else None

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Compare with the tokenizer the corpus was made with, where that is known.

        Raises:
            DataError: it is another one.
        """
        if self.meta is not None and self.meta.tokenizer_identity != tokenizer.identity:
            raise DataError(
                f"{self.data.prefix} was made with the tokenizer {self.meta.tokenizer_identity}, but this one is "
                f"{tokenizer.identity}: the same ids mean other text. Use {tokenizer_path(self.data.prefix)}, or "
                "prepare the data again."
            )

    def check_vocabulary(self, vocab_size: int, owner: str) -> None:
        """Compare the highest id with a vocabulary: from the facts where there are any, by reading small files.

        Raises:
            DataError: an id that the vocabulary does not have.
        """
        if self.meta is not None:
            highest = self.meta.max_token_id
        elif 0 < self.data.num_tokens <= SCAN_LIMIT:
            highest = int(self.data.tokens.max())
        else:
            return  # each sample is checked when it is read
        if highest >= vocab_size:
            raise DataError(
                f"{self.data.prefix} holds the token id {highest}, but {owner} allows {vocab_size} "
                "tokens; ids must be below that. Use the tokenizer the data was made with, and a model of its size."
            )


def same_tokenizer(corpora: Iterable[Corpus]) -> CorpusMeta | None:
    """The facts of the first corpus that has any, after checking that all were made with one tokenizer.

    Raises:
        DataError: two corpora were made with different ones.
    """
    first: Corpus | None = None
    for corpus in corpora:
        if corpus.meta is None:
            continue
        if first is None:
            first = corpus
        elif first.meta is not None and first.meta.tokenizer_identity != corpus.meta.tokenizer_identity:
            raise DataError(
                f"{first.data.prefix} and {corpus.data.prefix} were made with different tokenizers "
                f"({first.meta.tokenizer_identity}, {corpus.meta.tokenizer_identity}); a blend needs one. Prepare one "
                "of them again with the other's tokenizer."
            )
    return None if first is None else first.meta

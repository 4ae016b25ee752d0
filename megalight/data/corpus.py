"""A prepared corpus: token files that are checked against the tokenizer and the vocabulary before training."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megalight.data.indexed import IndexedDataset
from megalight.data.meta import CorpusMeta, image_prefix, loss_prefix, tokenizer_path
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError

SCAN_LIMIT = 1 << 26
"""Without facts, corpora of up to this many tokens are read once to find the highest id."""


@dataclass(frozen=True)
class Corpus:
    """Token files and the facts about them.

    Attributes:
        data: the token files.
        meta: the facts that ``prepare`` wrote; None for files of other programs.
        loss: for conversations, 1 for each token that counts in the loss and 0 for the others, in sequences as long as
            those of ``data``. None: all tokens count.
        images: for conversations with images, the bytes of image files: as many documents as ``data`` has. None: there
            are no images.
    """

    data: IndexedDataset
    meta: CorpusMeta | None
    loss: IndexedDataset | None = None
    images: IndexedDataset | None = None

    @classmethod
    def open(cls, prefix: str | os.PathLike[str]) -> Corpus:
        """Open the files of a prefix.

        Raises:
            DataError: a file is missing or incomplete, or the files do not belong together.
        """
        data = IndexedDataset(prefix)
        meta = CorpusMeta.load(prefix)
        # A copy of only one of both files is found here, and not in the loss.
        if meta is not None and meta.num_tokens != data.num_tokens:
            raise DataError(
                f"{CorpusMeta.path(prefix)} says {meta.num_tokens} tokens, but {data.prefix}.bin holds "
                f"{data.num_tokens}: they belong to different data sets. Prepare the data again."
            )
        if meta is None or meta.kind == "text":
            return cls(data, meta)
        loss = IndexedDataset(loss_prefix(prefix))
        # Equal lengths are all that can be compared without reading both.
        if not np.array_equal(loss.lengths, data.lengths):
            raise DataError(
                f"{loss.prefix}.bin does not belong to {data.prefix}.bin: their sequences differ in length. Prepare "
                "the data again, or copy all its files again."
            )
        if meta.kind != "images":
            return cls(data, meta, loss)
        images = IndexedDataset(image_prefix(prefix))
        if images.num_documents != data.num_documents or len(images) != meta.num_images:
            raise DataError(
                f"{images.prefix}.bin does not belong to {data.prefix}.bin: it holds {len(images)} images of "
                f"{images.num_documents} conversations, not {meta.num_images} of {data.num_documents}. Prepare the "
                "data again, or copy all its files again."
            )
        return cls(data, meta, loss, images)

    @property
    def kind(self) -> str:
        """What the documents are: ``text``, ``chat``, ``images`` or ``pairs``; see :class:`CorpusMeta`."""
        return "text" if self.meta is None else self.meta.kind

    @property
    def tokenizer_path(self) -> str | None:
        """Path of the tokenizer that was saved with the corpus, or None."""
        path = tokenizer_path(self.data.prefix)
        return os.fspath(path) if path.is_file() else None

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Check that the corpus was made with ``tokenizer``, if that is known.

        Raises:
            DataError: it was made with another tokenizer.
        """
        # By identity: another file of the same tokenizer serves as well.
        if self.meta is not None and self.meta.tokenizer_identity != tokenizer.identity:
            raise DataError(
                f"{self.data.prefix} was made with the tokenizer {self.meta.tokenizer_identity}, but this one is "
                f"{tokenizer.identity}: the same ids mean different text. Use {tokenizer_path(self.data.prefix)}, or "
                "prepare the data again."
            )

    def check_vocabulary(self, vocab_size: int, owner: str) -> None:
        """Check that the highest id of the corpus is in a vocabulary.

        The highest id comes from the facts. Without them small files are read, and large ones are not checked here.

        Args:
            vocab_size: size of the vocabulary.
            owner: what has this vocabulary, for the message.

        Raises:
            DataError: the corpus has an id outside the vocabulary.
        """
        if self.meta is not None:
            highest = self.meta.max_token_id
        # As large as is read in a moment. An unknown corpus of any size should not delay a start by minutes.
        elif 0 < self.data.num_tokens <= SCAN_LIMIT:
            highest = int(self.data.tokens.max())
        else:
            return  # each sample is checked when it is read
        if highest >= vocab_size:
            raise DataError(
                f"{self.data.prefix} holds the token id {highest}, but {owner} allows {vocab_size} tokens; ids must be "
                "below that. Use the tokenizer that the data was made with, and a model with its vocabulary size."
            )


def same_tokenizer(corpora: Iterable[Corpus]) -> CorpusMeta | None:
    """Check that all corpora were made with one tokenizer; return the facts of the first that has any.

    Raises:
        DataError: two corpora were made with different tokenizers.
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

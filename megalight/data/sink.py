"""Join the tokens of texts to documents, and write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.data.indexed import IndexedWriter
from megalight.data.meta import CorpusMeta
from megalight.data.statistics import add_counts, entropy
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError


@dataclass(frozen=True)
class Encoded:
    """The tokens of a block: texts laid end to end, their lengths, and which of them end a document.

    Attributes:
        tokens: ids of all texts.
        lengths: number of tokens of each text.
        ends: whether each text is the end of its document.
        skipped: one message for each line that was skipped.
        size: bytes of the input, for the progress bar.
        loss: for each token, whether it counts in the loss. None: all do.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    ends: NDArray[np.bool_]
    skipped: list[str]
    size: int
    loss: NDArray[np.uint8] | None = None


class Sink:
    """Joins texts to documents, appends the end-of-document token, counts tokens, and writes.

    Args:
        writer: writes the token files.
        eod_id: id of the end-of-document token; None: none is appended.
        keep_texts: whether each text of a document is a sequence of its own.
    """

    def __init__(self, writer: IndexedWriter, eod_id: int | None, keep_texts: bool = False) -> None:
        self.writer = writer
        self.keep_texts = keep_texts
        self.end = np.array([] if eod_id is None else [eod_id], writer.dtype)
        self.open: list[NDArray[Any]] = []
        self.counts = np.zeros(0, np.int64)
        self.num_documents = 0
        self.empty = 0

    def add(self, item: Encoded) -> None:
        """Write the documents that end in this block. Keep the start of an unfinished document for the next block."""
        bounds = np.concatenate([[0], np.cumsum(item.lengths)])
        done: list[NDArray[Any]] = []
        lengths: list[int] = []
        texts: list[int] = []
        for index, ends in enumerate(item.ends):
            self.open.append(item.tokens[bounds[index] : bounds[index + 1]])
            if not ends:
                continue
            parts = [part for part in self.open if len(part)]
            if parts:
                done.extend((*parts, self.end))
                sizes = list(map(len, parts))
                # The end token belongs to the last text of the document.
                sizes[-1] += len(self.end)
                lengths.extend(sizes if self.keep_texts else [sum(sizes)])
                texts.append(len(sizes) if self.keep_texts else 1)
            else:
                self.empty += 1
            self.open = []
        # Documents are written as whole blocks. One write for each document would take
        # longer than tokenizing it.
        if lengths:
            tokens = np.concatenate(done)
            # Counted here and not from the files, which would be read again.
            self.counts = add_counts(self.counts, tokens)
            self.writer.add_documents(tokens, lengths, texts)
            self.num_documents += len(texts)

    def special(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Return how often the texts held special tokens, by token: without the ends that were appended."""
        counts = {
            token: int(self.counts[number]) for token, number in tokenizer.specials.items() if number < len(self.counts)
        }
        if len(self.end) and tokenizer.eod_token in counts:
            counts[tokenizer.eod_token] -= self.num_documents
        return {token: count for token, count in counts.items() if count}

    def meta(self, tokenizer: Tokenizer, append_eod: bool, num_bytes: int) -> CorpusMeta:
        """Return the facts about all documents written.

        Raises:
            DataError: none was written.
        """
        if not self.num_documents:
            raise DataError(
                "the inputs hold no text, so nothing was written; check the inputs and text_key (--text-key)."
            )
        return CorpusMeta(
            num_documents=self.num_documents,
            num_tokens=int(self.counts.sum()),
            dtype=self.writer.dtype.name,
            vocab_size=tokenizer.vocab_size,
            max_token_id=len(self.counts) - 1,
            unigram_entropy_nats=entropy(self.counts),
            tokenizer_identity=tokenizer.identity,
            eod_id=tokenizer.eod_id,
            pad_id=tokenizer.safe_pad_id,
            append_eod=append_eod,
            num_bytes=num_bytes,
        )

"""Writing token files: texts are joined to documents, and their tokens are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.data.corpus import CorpusMeta
from megalight.data.indexed import IndexedDataset, IndexedWriter
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


class DocumentWriter:
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


# Token frequencies, and their entropy


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

"""Text to token files: workers tokenize blocks in the order of the input; a sink joins documents and counts."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from megalight.data.corpus import CorpusMeta
from megalight.data.indexed import IndexedDataset, IndexedWriter
from megalight.data.text_files import Block, OnBad, Text, TextFile, blocks
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError

BYTES_PER_WORKER = 8 << 20
"""Input per worker process, by default: starting a process costs more than tokenizing less than this."""

IN_FLIGHT_PER_WORKER = 3
"""Blocks that are read ahead per worker: a limit on memory."""


class BlockEncoder(Protocol):
    """Turns a block into tokens. Each worker process has a copy."""

    def __call__(self, block: Block) -> Encoded:
        """Encode all texts of a block."""


_worker: list[BlockEncoder] = []  # the encoder of this worker process


def _start_worker(encoder: BlockEncoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # several processes already use all cores
    _worker[:] = [encoder]


def _work(block: Block) -> Encoded:
    return _worker[0](block)


def encode_files(
    files: Sequence[TextFile],
    encoder: BlockEncoder,
    sink: DocumentWriter,
    *,
    on_bad: OnBad,
    workers: int | None,
    bar: Progress,
    stack: ExitStack,
) -> tuple[str, ...]:
    """Encode files into a sink, in their order. Returns one message for each file or line that was skipped.

    Raises:
        DataError: all were skipped, or one is bad.
    """
    num_bytes = sum(file.size for file in files)
    # A worker that has less than this to do costs more to start than it saves.
    count = workers or max(1, min(_cpus(), num_bytes // BYTES_PER_WORKER))
    task = bar.add_task("tokenizing", total=num_bytes)
    skipped: list[str] = []
    for item in _encode_all(blocks(files, on_bad, skipped), encoder, count, stack):
        skipped.extend(item.skipped)
        sink.add(item)
        bar.update(task, advance=item.size)
    if skipped and not sink.num_documents:
        raise DataError(f"all that was read is bad ({len(skipped)} rows or files), such as: {skipped[0]}")
    return tuple(skipped)


def _encode_all(work: Iterator[Block], encoder: BlockEncoder, workers: int, stack: ExitStack) -> Iterator[Encoded]:
    """Encode blocks, in order.

    One worker means this process, where the tokenizer uses its own threads. Several workers are processes; the number
    of blocks in flight is bounded.
    """
    if workers == 1:
        return map(encoder, work)
    # `spawn`: a fork would copy locks of threads that the tokenizer runs.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,))
    stack.callback(pool.shutdown, wait=True, cancel_futures=True)
    return _in_order(pool, work, workers * IN_FLIGHT_PER_WORKER)


def _in_order(pool: ProcessPoolExecutor, work: Iterator[Block], limit: int) -> Iterator[Encoded]:
    waiting: deque[Future[Encoded]] = deque()
    try:
        for block in work:
            waiting.append(pool.submit(_work, block))
            # Bounded, and taken in the order of the input: the output does not depend on the number of workers.
            if len(waiting) >= limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died (out of memory?), so nothing was written; use fewer workers (--workers). In a "
            "script, call prepare under: if __name__ == '__main__':"
        ) from error


def _cpus() -> int:
    # Those that this process may use, which in a container are fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SENTENCE_END = re.compile(
    r"""
    (?<=[.!?…])["'”’)\]]*\s+(?=["'“‘(\[]*[^\W_a-z])  # end mark, closing quotes, space, then no lower-case letter
    | (?<=[。！？])\s*                                # end marks of scripts without spaces
    | \n\s*\n\s*                                     # an empty line
    """,
    re.VERBOSE,
)


def sentences_of(text: Text) -> Iterator[Text]:
    """Yield the sentences of a text, stripped. The last one ends the document if the text does.

    A sentence ends at a full stop, question mark or exclamation mark that is followed by a space and no lower-case
    letter, or at an empty line. Abbreviations before a name ("Dr. Who") end a sentence too, which is harmless for pairs
    of segments. To use another rule, put an empty line after each sentence before you call ``prepare``.
    """
    found, start = [], 0
    for match in SENTENCE_END.finditer(text.text):
        closing = len(match.group()) - len(match.group().lstrip("\"'”’)]"))
        found.append(text.text[start : match.start() + closing])
        start = match.end()
    found.append(text.text[start:])
    kept = [sentence for sentence in map(str.strip, found) if sentence]
    for index, sentence in enumerate(kept):
        yield Text(sentence, text.ends and index == len(kept) - 1)
    if text.ends and not kept:
        yield Text("", True)


@dataclass(frozen=True)
class Encoded:
    """The tokens of a block: texts laid end to end, their lengths, and which of them end a document.

    Attributes:
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

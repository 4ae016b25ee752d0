"""Tokenization in worker processes: blocks of text become tokens, in the order of the input."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Protocol

from rich.progress import Progress

from megalight.data.sink import DocumentWriter, Encoded
from megalight.data.text_files import Block, OnBad, Text, TextFile, blocks
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


# Sentence splitting, for data sets of sentence pairs


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

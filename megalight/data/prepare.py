"""Text into token files: read, tokenise in parallel, write in input order, publish at the end."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from megalight.data.indexed import IndexedWriter, paths, token_dtype
from megalight.data.meta import CorpusMeta, tokenizer_path
from megalight.data.sentences import sentences_of
from megalight.data.sources import Block, Format, OnBad, Source, blocks, find, texts_of
from megalight.data.statistics import add_counts, entropy
from megalight.data.tokenizer import Tokenizer, config_path
from megalight.errors import DataError

log = logging.getLogger(__name__)

TRAINING_BYTES_PER_TOKEN = 2 << 10
BYTES_PER_WORKER = 8 << 20
IN_FLIGHT_PER_WORKER = 3


@dataclass(frozen=True)
class PrepareReport:
    """What was written.

    Attributes:
        prefix: data prefix to give to the data module; ``.bin``, ``.idx`` and ``.json`` are appended.
        tokenizer: the tokenizer's file.
        meta: counts and identities, as in ``<prefix>.json``.
        num_files: input files.
        skipped: one message for each file or line that was left out (with ``on_bad="skip"``).
        empty: documents without text, which are left out.
        seconds: wall time.
    """

    prefix: str
    tokenizer: str
    meta: CorpusMeta
    num_files: int
    skipped: tuple[str, ...]
    empty: int
    seconds: float

    def __str__(self) -> str:
        meta = self.meta
        left_out = f", {len(self.skipped)} left out" if self.skipped else ""
        rate = meta.num_bytes / max(self.seconds, 1e-9) / 1e6
        return (
            f"{self.prefix}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens ({meta.dtype}), vocabulary "
            f"{meta.vocab_size:,}, unigram entropy {meta.unigram_entropy_nats:.3f} nats, from {self.num_files:,} files"
            f"{left_out} in {self.seconds:.1f} s ({rate:.1f} MB/s)"
        )


@dataclass(frozen=True)
class _Encoded:
    """A block as tokens: texts end to end, the length of each, and which ones end a document."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    ends: NDArray[np.bool_]
    skipped: list[str]
    size: int


@dataclass(frozen=True)
class _Encoder:
    """Turns blocks into tokens; each worker process has one."""

    tokenizer: Tokenizer
    text_key: str
    on_bad: OnBad
    dtype: np.dtype[Any]
    split_sentences: bool

    def __call__(self, block: Block) -> _Encoded:
        texts, skipped = texts_of(block, self.text_key, self.on_bad)
        if self.split_sentences:
            texts = [sentence for text in texts for sentence in sentences_of(text)]
        ids = self.tokenizer.encode_batch([text.text for text in texts])
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(itertools.chain.from_iterable(ids), self.dtype, int(lengths.sum()))
        ends = np.fromiter((text.ends for text in texts), np.bool_, len(texts))
        return _Encoded(tokens, lengths, ends, skipped, sum(piece.size for piece in block))


_worker: list[_Encoder] = []


def _start_worker(tokenizer: str, text_key: str, on_bad: OnBad, dtype: str, split_sentences: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker[:] = [_Encoder(Tokenizer.from_json(tokenizer), text_key, on_bad, np.dtype(dtype), split_sentences)]


def _work(block: Block) -> _Encoded:
    return _worker[0](block)


def prepare(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    train_tokenizer: bool = False,
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = (),
    text_key: str = "text",
    format: Format = "auto",
    workers: int | None = None,
    append_eod: bool = True,
    eod_token: str | None = None,
    split_sentences: bool = False,
    on_bad: OnBad = "raise",
    progress: bool = True,
) -> PrepareReport:
    """Turn text, JSON lines or Parquet into Megatron's token files.

    Writes ``<output>.bin``, ``<output>.idx``, ``<output>.json`` (counts and identities) and
    ``<output>.tokenizer.json``, all under temporary names until everything is there. The result does not depend on the
    number of workers.

    Args:
        inputs: files, directories or globs; see :func:`megalight.data.sources.find`. A text file is one document, as is
            a JSON line and a Parquet row. ``.gz`` is read through gzip.
        output: the data prefix.
        tokenizer: a ``tokenizer.json`` file or a tokenizer's folder.
        train_tokenizer: train a byte-level BPE on the inputs instead: on an even sample of their documents, 2 KiB
            for each token of the vocabulary.
        vocab_size: tokens of the vocabulary to train.
        special_tokens: of the vocabulary to train, beside the end of documents and padding (BERT needs ``[CLS]``,
            ``[SEP]`` and ``[MASK]``).
        text_key: the JSON key or Parquet column that holds the text.
        format: what the inputs are; ``auto`` goes by the suffix (.jsonl, .ndjson, .parquet; all else is text).
        workers: processes that tokenise; by default one for each CPU, fewer for little text.
        append_eod: whether each document ends with the tokenizer's end-of-document token.
        eod_token: that token, where the tokenizer's own configuration does not name it.
        split_sentences: whether each sentence becomes a sequence of its document, as
            :func:`megalight.data.sentences.sentences_of` finds them; else a document is one sequence.
        on_bad: what a file or line that cannot be read does: ``raise`` names it and stops, ``skip`` leaves it out and
            names it in the report.
        progress: whether to show a progress bar on standard error.

    Raises:
        DataError: inputs that name nothing, bad text, no or two tokenizers, no end-of-document token to append, or
            nothing to write.
    """
    begin = time.monotonic()
    if (tokenizer is None) == (not train_tokenizer):
        raise DataError(
            f"tokenizer is {tokenizer!r} and train_tokenizer {train_tokenizer}: give exactly one of the two."
        )
    if workers is not None and workers < 1:
        raise DataError(f"workers is {workers}; at least 1 process must tokenise.")
    prefix = os.fspath(paths(output)[0])[:-4]
    sources = _apart(find(inputs, format), inputs, prefix)
    num_bytes = sum(source.size for source in sources)
    skipped: list[str] = []
    with ExitStack() as stack:
        bar = stack.enter_context(_progress(progress))
        if train_tokenizer:
            task = bar.add_task("training the tokenizer", total=None)
            chosen = _train(sources, num_bytes, vocab_size, special_tokens, text_key, on_bad)
            bar.remove_task(task)
        else:
            chosen = Tokenizer.load(str(tokenizer), eod_token)
        if append_eod and chosen.eod_id is None:
            raise DataError(
                "the tokenizer has no known end-of-document token; name one with eod_token, or set append_eod=False."
            )
        encoder = _Encoder(chosen, text_key, on_bad, token_dtype(chosen.vocab_size), split_sentences)
        count = workers or max(1, min(_cpus(), num_bytes // BYTES_PER_WORKER))
        task = bar.add_task("tokenising", total=num_bytes)
        writer = stack.enter_context(IndexedWriter(prefix, encoder.dtype))
        sink = _Sink(writer, chosen.eod_id if append_eod else None, split_sentences)
        for item in _encode_all(blocks(sources, on_bad, skipped), encoder, count, stack):
            skipped.extend(item.skipped)
            sink.add(item)
            bar.update(task, advance=item.size)
        meta = sink.meta(chosen, append_eod, num_bytes)
        # the writer publishes last, when the stack closes it: until there is an index, there is no data set
        paths(prefix)[1].unlink(missing_ok=True)
        chosen.save(tokenizer_path(prefix))
        meta.save(prefix)
    seconds = time.monotonic() - begin
    tokenizer_file = os.fspath(tokenizer_path(prefix))
    return PrepareReport(prefix, tokenizer_file, meta, len(sources), tuple(skipped), sink.empty, seconds)


def _apart(sources: list[Source], inputs: Sequence[str], prefix: str) -> list[Source]:
    """The inputs without what an earlier call wrote beside them; naming a file that would be overwritten raises."""
    tokenizer = tokenizer_path(prefix)
    outputs = (*paths(prefix), CorpusMeta.path(prefix), tokenizer, config_path(tokenizer))
    written = {path.resolve() for path in outputs}
    for name in inputs:
        if Path(name).resolve() in written:
            raise DataError(f"input {name!r} is a file that this output would overwrite; choose another output.")
    return [source for source in sources if source.path.resolve() not in written]


class _Sink:
    """Joins texts to documents, ends each with ``eod_id``, counts, and writes.

    Args:
        writer: of the files.
        eod_id: ends documents; None: nothing does.
        keep_texts: whether the texts of a document stay sequences of their own.
    """

    def __init__(self, writer: IndexedWriter, eod_id: int | None, keep_texts: bool = False) -> None:
        self.writer = writer
        self.keep_texts = keep_texts
        self.end = np.array([] if eod_id is None else [eod_id], writer.dtype)
        self.open: list[NDArray[Any]] = []
        self.counts = np.zeros(0, np.int64)
        self.num_documents = 0
        self.empty = 0

    def add(self, item: _Encoded) -> None:
        """Write the documents that end in a block; keep what is left of the last one for the next block."""
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
                sizes[-1] += len(self.end)
                lengths.extend(sizes if self.keep_texts else [sum(sizes)])
                texts.append(len(sizes) if self.keep_texts else 1)
            else:
                self.empty += 1
            self.open = []
        if lengths:
            tokens = np.concatenate(done)
            self.counts = add_counts(self.counts, tokens)
            self.writer.add_documents(tokens, lengths, texts)
            self.num_documents += len(texts)

    def meta(self, tokenizer: Tokenizer, append_eod: bool, num_bytes: int) -> CorpusMeta:
        """The facts about everything written.

        Raises:
            DataError: nothing was.
        """
        if not self.num_documents:
            raise DataError("the inputs hold no text: nothing was written. Check the inputs and text_key.")
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


def _train(
    sources: Sequence[Source],
    num_bytes: int,
    vocab_size: int,
    special_tokens: Sequence[str],
    text_key: str,
    on_bad: OnBad,
) -> Tokenizer:
    stride = max(1, num_bytes // (vocab_size * TRAINING_BYTES_PER_TOKEN))
    texts = (text.text for block in blocks(sources, on_bad) for text in texts_of(block, text_key, on_bad)[0])
    return Tokenizer.train(itertools.islice(texts, 0, None, stride), vocab_size, special_tokens=special_tokens)


def _encode_all(work: Iterator[Block], encoder: _Encoder, workers: int, stack: ExitStack) -> Iterator[_Encoded]:
    """Blocks as tokens, in order. One worker is this process (the tokenizer's own threads serve); several are
    processes, with a bounded number of blocks on the way.
    """
    if workers == 1:
        return map(encoder, work)
    options = (encoder.text_key, encoder.on_bad, encoder.dtype.str, encoder.split_sentences)
    facts = (encoder.tokenizer.to_json(), *options)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, facts)
    stack.callback(pool.shutdown, wait=True, cancel_futures=True)
    return _in_order(pool, work, workers * IN_FLIGHT_PER_WORKER)


def _in_order(pool: ProcessPoolExecutor, work: Iterator[Block], limit: int) -> Iterator[_Encoded]:
    waiting: deque[Future[_Encoded]] = deque()
    try:
        for block in work:
            waiting.append(pool.submit(_work, block))
            if len(waiting) >= limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises died (out of memory?); nothing was written. Try fewer workers. In a script, call "
            "prepare under: if __name__ == '__main__':"
        ) from error


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Rate(TextColumn):
    """Megabytes per second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Any) -> Any:
        self.text_format = f"{(task.speed or 0) / 1e6:.1f} MB/s"
        return super().render(task)


def _progress(show: bool) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        _Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    )

"""Text to token files: read, tokenize in parallel, write in the order of the input, and publish at the end."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from megalight.data.corpus import CorpusMeta, image_prefix, loss_prefix, tokenizer_path
from megalight.data.encode import DocumentWriter, Encoded, encode_files, sentences_of
from megalight.data.indexed import IndexedWriter, paths, token_dtype
from megalight.data.text_files import SUFFIXES, Block, Format, Kind, OnBad, TextFile, blocks, find, texts_of
from megalight.data.tokenizer import Tokenizer, config_path
from megalight.errors import DataError

TRAINING_BYTES_PER_TOKEN = 2 << 10
"""Text that the tokenizer is trained on, per token of its vocabulary."""

DEFAULT_TEXT_KEY = "text"
"""JSON key or column of the text, if none is given."""


@dataclass(frozen=True)
class PrepareReport:
    """What :func:`prepare` wrote.

    Attributes:
        prefix: data prefix for the data module. The files are the prefix with ``.bin``, ``.idx`` and ``.json``.
        tokenizer: path of the tokenizer file.
        meta: the content of ``<prefix>.json``.
        num_files: number of input files.
        skipped: one message for each file or line that was skipped (``on_bad="skip"``).
        empty: number of documents without text. They are not written.
        seconds: wall time.
        special: how often the texts hold special tokens, by token.
    """

    prefix: str
    tokenizer: str
    meta: CorpusMeta
    num_files: int
    skipped: tuple[str, ...]
    empty: int
    seconds: float
    special: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        meta = self.meta
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        rate = meta.num_bytes / max(self.seconds, 1e-9) / 1e6
        loss = "" if meta.num_loss_tokens is None else f", of which {meta.num_loss_tokens:,} count in the loss"
        images = "" if meta.num_images is None else f", {meta.num_images:,} images"
        return (
            f"{self.prefix}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens ({meta.dtype}){loss}{images}"
            f", vocabulary {meta.vocab_size:,}, unigram entropy {meta.unigram_entropy_nats:.3f} nats, from "
            f"{self.num_files:,} files"
            f"{skipped} in {self.seconds:.1f} s ({rate:.1f} MB/s)"
        )


@dataclass(frozen=True)
class _TextEncoder:
    """Turns a block of texts into tokens."""

    tokenizer: Tokenizer
    text_key: str
    on_bad: OnBad
    dtype: np.dtype[Any]
    split_sentences: bool

    def __call__(self, block: Block) -> Encoded:
        texts, skipped = texts_of(block, self.text_key, self.on_bad)
        if self.split_sentences:
            # Before encoding, so that no token reaches over the end of a sentence.
            texts = [sentence for text in texts for sentence in sentences_of(text)]
        ids = self.tokenizer.encode_batch([text.text for text in texts])
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        # Straight into the dtype of the file, which halves the bytes that travel between processes.
        tokens = np.fromiter(itertools.chain.from_iterable(ids), self.dtype, int(lengths.sum()))
        ends = np.fromiter((text.ends for text in texts), np.bool_, len(texts))
        return Encoded(tokens, lengths, ends, skipped, sum(piece.size for piece in block))


def prepare(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    train_tokenizer: bool = False,
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = (),
    text_key: str | None = None,
    format: Format = "auto",
    workers: int | None = None,
    append_eod: bool = True,
    eod_token: str | None = None,
    split_sentences: bool = False,
    special_as_text: bool = False,
    on_bad: OnBad = "raise",
    progress: bool = True,
) -> PrepareReport:
    """Turn text, JSON lines, CSV or Parquet into Megatron's token files.

    Writes ``<output>.bin``, ``<output>.idx``, ``<output>.json`` (counts and identities) and
    ``<output>.tokenizer.json``. All have temporary names until everything is written. The result does not depend on
    the number of workers.

    Args:
        inputs: files, directories or globs; see :func:`megalight.data.text_files.find`. A text file, a JSON line, and a
            row of CSV or Parquet are one document each. ``.gz`` files are decompressed.
        output: the data prefix.
        tokenizer: a ``tokenizer.json`` file, or the folder of a tokenizer.
        train_tokenizer: train a byte-level BPE on the inputs instead, on an even sample of the documents with about
            2 KiB of text per token of the vocabulary.
        vocab_size: size of the vocabulary to train.
        special_tokens: further special tokens of the vocabulary to train. BERT needs ``[CLS]``, ``[SEP]`` and
            ``[MASK]``.
        text_key: JSON key or column that holds the text. None: ``text``.
        format: format of the inputs. ``auto`` goes by the suffix: .jsonl, .ndjson, .csv, .tsv, .parquet, and text for
            all others; a .json file that is named itself needs a word: ``json`` for an array of rows, or ``text``.
        workers: number of processes that tokenize. Default: one per CPU, fewer for little text.
        append_eod: whether to end each document with the end-of-document token of the tokenizer.
        eod_token: the end-of-document token, if the configuration of the tokenizer does not name it.
        split_sentences: whether each sentence is a sequence of its document, as
            :func:`megalight.data.encode.sentences_of` finds them. If not, a document is one sequence.
        special_as_text: whether a text that is called as a special token, such as ``<|im_start|>``, is ordinary text.
            If not, it is that token, as in ``transformers``, and the report counts them. Tokens that stand for images
            or videos are always ordinary text.
        on_bad: what happens with a file or line that cannot be read: ``raise`` stops with an error that names it,
            ``skip`` lists it in the report.
        progress: whether to show a progress bar on standard error.

    Raises:
        DataError: an input names no file, or all files are empty or hold no text; none can have the ``text_key``; a
            text is bad; not exactly one of ``tokenizer`` and ``train_tokenizer`` is given; or there is no
            end-of-document token to append.
    """
    begin = time.monotonic()
    if (tokenizer is None) == (not train_tokenizer):
        raise DataError(
            f"tokenizer is {tokenizer!r} and train_tokenizer is {train_tokenizer}; give exactly one of the two."
        )
    prefix, files, num_bytes = find_inputs(inputs, output, format, workers)
    if text_key is not None and all(file.kind == "text" for file in files):
        raise DataError(
            f"text_key (--text-key) is {text_key!r}, but the inputs are plain text ({_some(files)}), which has no "
            "keys. Leave it out, or say with format (--format) that they are jsonl."
        )
    text_key = DEFAULT_TEXT_KEY if text_key is None else text_key
    skipped: tuple[str, ...] = ()
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(progress))
        if train_tokenizer:
            task = bar.add_task("training the tokenizer", total=None)
            chosen = _train(files, num_bytes, vocab_size, special_tokens, text_key, on_bad)
            bar.remove_task(task)
        else:
            chosen = Tokenizer.load(str(tokenizer), eod_token)
        if append_eod and chosen.eod_id is None:
            raise DataError(
                "the tokenizer has no known end-of-document token; name one with eod_token (--eod-token), or append "
                "none with append_eod=False (--no-eod)."
            )
        reader = chosen.for_plain_text(special_as_text)
        encoder = _TextEncoder(reader, text_key, on_bad, token_dtype(chosen.vocab_size), split_sentences)
        writer = stack.enter_context(IndexedWriter(prefix, encoder.dtype))
        sink = DocumentWriter(writer, chosen.eod_id if append_eod else None, split_sentences)
        skipped += encode_files(files, encoder, sink, on_bad=on_bad, workers=workers, bar=bar, stack=stack)
        meta = sink.meta(chosen, append_eod, num_bytes)
        publish_facts(prefix, chosen, meta)
    seconds = time.monotonic() - begin
    tokenizer_file = os.fspath(tokenizer_path(prefix))
    special = sink.special(chosen)
    return PrepareReport(prefix, tokenizer_file, meta, len(files), skipped, sink.empty, seconds, special)


def find_inputs(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    format: Format,
    workers: int | None,
    suffixes: Mapping[str, Kind] = SUFFIXES,
) -> tuple[str, list[TextFile], int]:
    """Return the data prefix to write, the files to read, and their size in bytes.

    Raises:
        DataError: an input names no file or would be overwritten, all are empty, or ``workers`` is below 1.
    """
    if workers is not None and workers < 1:
        raise DataError(f"workers (--workers) is {workers}; it must be at least 1.")
    prefix = os.fspath(paths(output)[0])[:-4]
    if not os.path.basename(prefix):
        raise DataError(
            f"output {os.fspath(output)!r} is a folder; it must be what the names of files begin with, such as "
            f"{os.path.join(prefix, 'book')!r}."
        )
    outputs = _outputs(prefix, inputs)
    # Silently, as a second run of the same command finds its own files in the folder.
    files = [file for file in find(inputs, format, suffixes) if file.path.resolve() not in outputs]
    num_bytes = sum(file.size for file in files)
    if not num_bytes:
        raise DataError(f"the inputs are empty ({_some(files)}), so nothing was written; check the inputs.")
    return prefix, files, num_bytes


def publish_facts(prefix: str, tokenizer: Tokenizer, meta: CorpusMeta) -> None:
    """Write the files beside the token files, before the writer of the tokens is closed.

    Readers need the index. An older one is removed first; the writer publishes the new one last. So no reader ever sees
    a mixture of old and new files.
    """
    paths(prefix)[1].unlink(missing_ok=True)
    tokenizer.save(tokenizer_path(prefix))
    meta.save(prefix)


def _some(files: Sequence[TextFile]) -> str:
    """Name the first file, and how many there are."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].path}{more}" if files else "none"


def _outputs(prefix: str, inputs: Sequence[str]) -> set[Path]:
    """Return the files that a call with this output writes.

    Raises:
        DataError: an input names such a file itself.
    """
    tokenizer = tokenizer_path(prefix)
    beside = (*paths(loss_prefix(prefix)), *paths(image_prefix(prefix)))
    outputs = (*paths(prefix), *beside, CorpusMeta.path(prefix), tokenizer, config_path(tokenizer))
    written = {path.resolve() for path in outputs}
    for name in inputs:
        if Path(name).resolve() in written:
            raise DataError(f"input {name!r} is a file that this output would overwrite; choose another output.")
    return written


def _train(
    files: Sequence[TextFile],
    num_bytes: int,
    vocab_size: int,
    special_tokens: Sequence[str],
    text_key: str,
    on_bad: OnBad,
) -> Tokenizer:
    stride = max(1, num_bytes // (vocab_size * TRAINING_BYTES_PER_TOKEN))  # every n-th text: an even sample
    texts = (text.text for block in blocks(files, on_bad) for text in texts_of(block, text_key, on_bad)[0])
    return Tokenizer.train(itertools.islice(texts, 0, None, stride), vocab_size, special_tokens=special_tokens)


class _Rate(TextColumn):
    """Megabytes per second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Any) -> Any:
        self.text_format = f"{(task.speed or 0) / 1e6:.1f} MB/s"
        return super().render(task)


def progress_bar(show: bool) -> Progress:
    """Make the progress bar of the command, on standard error."""
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

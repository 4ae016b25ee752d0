"""Turn conversations into token files with a loss mask: ``megalight prepare --chat``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megalight.data.chat.conversations import Conversation, conversations
from megalight.data.chat.template import ChatTemplate, TrainOn, encode, read_template
from megalight.data.corpus import loss_prefix, tokenizer_path
from megalight.data.encode import DocumentWriter, Encoded, encode_files
from megalight.data.indexed import IndexedWriter, token_dtype
from megalight.data.prepare import PrepareReport, find_inputs, progress_bar, publish_facts
from megalight.data.text_files import Block, Format, OnBad, TextFile, blocks, records_of
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError

Kind = Literal["chat", "pairs"]


@dataclass(frozen=True)
class ChatEncoder:
    """Turns a block of rows into the tokens of their conversations."""

    tokenizer: Tokenizer
    template: ChatTemplate
    kind: Kind
    train_on: TrainOn
    on_bad: OnBad
    dtype: np.dtype[Any]

    def __call__(self, block: Block) -> Encoded:
        """Encode all rows of a block."""
        return self.encoded(block, [])

    def encoded(self, block: Block, extras: list[Any]) -> Encoded:
        """Encode all rows of a block; ``extras`` receives what subclasses find besides tokens, once for each row."""
        # Empty pieces first: a block without rows must still give arrays of these dtypes.
        tokens, masks, lengths, ends = [np.zeros(0, self.dtype)], [np.zeros(0, np.uint8)], list[int](), list[bool]()
        skipped: list[str] = []
        for place, record in records_of(block):
            try:
                encoded = self.encode(record, place, extras)
            except DataError as error:
                if self.on_bad == "raise":
                    raise
                skipped.append(str(error))
                continue
            for number, (ids, mask) in enumerate(encoded, 1):
                tokens.append(np.asarray(ids, self.dtype))
                masks.append(mask)
                lengths.append(len(ids))
                ends.append(number == len(encoded))
        size = sum(piece.size for piece in block)
        return Encoded(
            np.concatenate(tokens),
            np.asarray(lengths, np.int64),
            np.asarray(ends, np.bool_),
            skipped,
            size,
            np.concatenate(masks),
        )

    def conversations(self, record: Any, place: str) -> tuple[Conversation, ...]:
        """Return the conversations of a row.

        Raises:
            DataError: it is none, or has images, which would be left out without a word.
        """
        given = record if isinstance(record, Mapping) else {}
        if key := next((each for each in ("image", "images") if given.get(each)), None):
            raise DataError(
                f"{place} has images (key {key!r}), and --chat reads none: prepare it with --multimodal, or leave the "
                "key out."
            )
        return conversations(record, place)

    def encode(self, record: Any, place: str, extras: list[Any]) -> list[tuple[list[int], NDArray[np.uint8]]]:
        """Return the ids and the loss mask of each conversation of a row."""
        if isinstance(record, DataError):
            raise record
        found = self.conversations(record, place)
        # Pairs have two sequences per document, so a reader takes all documents for the same kind.
        if (kind := _kind(found)) != self.kind:
            raise DataError(
                f"{place} is of the kind {kind!r}, and the first row is of the kind {self.kind!r}; a data set holds "
                "one kind. Prepare preference pairs on their own."
            )
        encoded = []
        for conversation in found:
            try:
                text, spans = self.template.spans(conversation, self.train_on)
                encoded.append(encode(self.tokenizer, text, spans))
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            # Such a row would be a row of padding for the loss.
            if not encoded[-1][1].any():
                raise DataError(
                    f"{place}: the conversation has no token of the assistant to learn from; it needs a message with "
                    "the role 'assistant', which the template writes and which is not marked with weight 0."
                )
        return encoded


class ChatSink(DocumentWriter):
    """Writes the tokens of conversations, and beside them which of them count in the loss."""

    def __init__(self, writer: IndexedWriter, loss: IndexedWriter) -> None:
        super().__init__(writer, None, keep_texts=True)
        self.loss = loss
        self.num_loss_tokens = 0

    def add(self, item: Encoded) -> None:
        """Write the conversations of a block."""
        super().add(item)
        assert item.loss is not None
        # A document ends with each row, so blocks end with a document and both files get the same sequences.
        counts = np.diff(np.flatnonzero(item.ends), prepend=-1).tolist()
        self.loss.add_documents(item.loss, item.lengths, counts)
        self.num_loss_tokens += int(item.loss.sum())


def prepare_chat(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    chat_template: str | os.PathLike[str] | None = None,
    train_on: TrainOn = "all",
    format: Format = "auto",
    workers: int | None = None,
    on_bad: OnBad = "raise",
    progress: bool = True,
) -> PrepareReport:
    """Turn JSON lines, CSV or Parquet rows of conversations into token files with a loss mask.

    Writes what :func:`megalight.data.prepare.prepare` writes, and ``<output>.loss.bin``, ``<output>.loss.idx``: 1 for
    each token that the assistant wrote and 0 for the others. The known shapes of rows are in
    :mod:`megalight.data.chat.conversations`. Preference pairs become documents of two sequences: preferred, rejected.

    Args:
        inputs: files, directories or globs; see :func:`megalight.data.text_files.find`.
        output: the data prefix.
        tokenizer: the folder of a tokenizer, or a ``tokenizer.json`` file.
        chat_template: a Jinja file. None: the tokenizer's own template. It is saved with the tokenizer.
        train_on: ``all``: every message of the assistant counts. ``last``: only the last of each conversation. One with
            ``"weight": 0`` or ``"train": false`` never counts.
        format: format of the inputs; ``auto`` goes by the suffix.
        workers: number of processes that tokenize. Default: one per CPU, fewer for little text.
        on_bad: what happens with a row that cannot be used: ``raise`` stops with an error that names file, line and
            key, ``skip`` lists it in the report.
        progress: whether to show a progress bar on standard error.

    Raises:
        DataError: an input names no file, all are empty, the tokenizer has no chat template, or a row is bad.
    """
    begin = time.monotonic()
    prefix, files, num_bytes = find_inputs(inputs, output, format, workers)
    source = None if chat_template is None else read_template(chat_template)
    chosen = Tokenizer.load(tokenizer)
    template = ChatTemplate.of(chosen, source)
    # Saved with the tokenizer, so that generation writes prompts as training saw them.
    chosen.chat_template = template.source
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(progress))
        dtype = token_dtype(chosen.vocab_size)
        encoder = ChatEncoder(chosen, template, _first_kind(files), train_on, on_bad, dtype)
        # Writers close in reverse order: the tokens' index, which readers need, is published last.
        writer = stack.enter_context(IndexedWriter(prefix, dtype))
        sink = ChatSink(writer, stack.enter_context(IndexedWriter(loss_prefix(prefix), np.uint8)))
        skipped = encode_files(files, encoder, sink, on_bad=on_bad, workers=workers, bar=bar, stack=stack)
        meta = replace(
            sink.meta(chosen, append_eod=False, num_bytes=num_bytes),
            kind=encoder.kind,
            num_loss_tokens=sink.num_loss_tokens,
        )
        publish_facts(prefix, chosen, meta)
    seconds = time.monotonic() - begin
    return PrepareReport(prefix, os.fspath(tokenizer_path(prefix)), meta, len(files), skipped, sink.empty, seconds)


def _first_kind(files: Sequence[TextFile]) -> Kind:
    """Return the kind of the first row that can be read. Bad rows before it are reported when they are encoded."""
    # Bad rows are skipped here, whatever the user chose: they are reported when they are encoded.
    for block in blocks(files, on_bad="skip"):
        for place, record in records_of(block):
            try:
                return _kind(conversations(record, place))
            except DataError:
                continue
    return "chat"


def _kind(found: Sequence[Conversation]) -> Kind:
    return "pairs" if len(found) == 2 else "chat"

"""Turn conversations with images into token files, a loss mask and image files: ``megalight prepare --multimodal``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megalight.data.chat.conversations import Conversation, conversations
from megalight.data.chat.prepare import ChatEncoder, ChatSink
from megalight.data.chat.template import TrainOn, read_template
from megalight.data.corpus import image_prefix, loss_prefix, tokenizer_path
from megalight.data.encode import Encoded, encode_files
from megalight.data.indexed import IndexedWriter, token_dtype
from megalight.data.multimodal.images import VIDEO_TOKENS, decode, videos_of
from megalight.data.multimodal.template import IMAGE_TOKEN, ImageTemplate, image_text_of, images_of, is_image
from megalight.data.prepare import PrepareReport, find_inputs, progress_bar, publish_facts
from megalight.data.text_files import ROWS, Block, Format, OnBad
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from megalight.imports import require


@dataclass(frozen=True)
class _WithImages(Encoded):
    """Tokens of a block, and the images of each of its conversations."""

    images: list[list[bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class _ImageEncoder(ChatEncoder):
    """Turns a block of rows into tokens and the bytes of image files, each of which was decoded once as a check."""

    image_token: str = IMAGE_TOKEN
    folder: str = ""
    most_pixels: int | None = None

    def __call__(self, block: Block) -> Encoded:
        # Worker processes begin with Pillow's own limit.
        pillow: Any = require("PIL.Image", "images")
        pillow.MAX_IMAGE_PIXELS = self.most_pixels
        images: list[list[bytes]] = []
        found = self.encoded(block, images)
        return _WithImages(**vars(found), images=images)

    def conversations(self, record: Any, place: str) -> tuple[Conversation, ...]:
        found = conversations(record, place, is_image)
        if len(found) > 1:
            raise DataError(f"{place} is a preference pair, and pairs with images are not read; leave it out.")
        return found

    def encode(self, record: Any, place: str, extras: list[Any]) -> list[tuple[list[int], Any]]:
        if isinstance(record, DataError):
            raise record
        if (where := videos_of(record)) is not None:
            raise DataError(
                f"{place} has a video ({where}), and videos are not read; give images of it, or leave it out."
            )
        given = list[Any]()
        if isinstance(record, Mapping):
            given = images_of(record, place)
        encoded = super().encode(record, place, extras)
        marker = self.tokenizer.vocabulary[self.image_token]
        count = sum(ids.count(marker) for ids, _ in encoded)
        if count != len(given):
            raise DataError(
                f"{place}: the text holds {self.image_token!r} {count} times, and there are {len(given)} images; each "
                "image needs one."
            )
        for token in VIDEO_TOKENS:
            if any(self.tokenizer.vocabulary.get(token, -1) in ids for ids, _ in encoded):
                raise DataError(f"{place} has {token!r}, which stands for a video, and videos are not read.")
        # Last, because it is most of the work.
        extras.append([self._read(each, place, number) for number, each in enumerate(given)])
        return encoded

    def _read(self, given: Any, place: str, number: int) -> bytes:
        """Return the bytes of an image: a path, or the bytes themselves, as columns of Parquet hold them."""
        where = f"{place}, image {number}"
        data = given.get("bytes") if isinstance(given, Mapping) else given
        if isinstance(given, Mapping) and data is None:
            data = given.get("path")
        if isinstance(data, str) and data:
            if "://" in data or data.startswith("data:"):
                raise DataError(
                    f"{where} is {data[:80]!r}; images are read from files, so download it, and name the file."
                )
            path = Path(self.folder, data)
            where = f"{where} ({str(path)[:200]})"
            try:
                data = path.read_bytes()
            except (OSError, ValueError) as error:  # paths with a zero character are values
                why = error.strerror if isinstance(error, OSError) else error
                raise DataError(f"{where} cannot be read: {why}. Is --images the right folder?") from error
        if not isinstance(data, bytes):
            raise DataError(f"{where} is {str(given)[:40]!r}; it must be the path of a file, or the bytes of one.")
        decode(data, where)
        return data


class _ImageSink(ChatSink):
    """Writes the images of conversations beside their tokens."""

    def __init__(self, writer: IndexedWriter, loss: IndexedWriter, images: IndexedWriter) -> None:
        super().__init__(writer, loss)
        self.images = images
        self.num_images = 0

    def add(self, item: Encoded) -> None:
        """Write the conversations of a block."""
        super().add(item)
        assert isinstance(item, _WithImages)
        for held in item.images:
            for data in held:
                self.images.add_sequences(np.frombuffer(data, np.uint8), [len(data)])
            self.images.end_document()
            self.num_images += len(held)


def prepare_multimodal(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    images: str | os.PathLike[str] | None = None,
    image_token: str = IMAGE_TOKEN,
    image_text: str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    train_on: TrainOn = "all",
    format: Format = "auto",
    workers: int | None = None,
    on_bad: OnBad = "raise",
    progress: bool = True,
) -> PrepareReport:
    """Turn rows of conversations with images into token files with a loss mask, and a store of image files.

    Writes what :func:`megalight.data.chat.prepare.prepare_chat` writes, and ``<output>.images.bin``,
    ``<output>.images.idx``: the bytes of each image file, unchanged. Each image is one token here; training replaces it
    by as many as the model's tower makes of an image.

    Rows have a shape of :mod:`megalight.data.chat.conversations`, such as LLaVA's ``{"image": "a.jpg", "conversations":
    [{"from": "human", "value": "<image> What is this?"}, ...]}``. ``image`` or ``images`` is a path, bytes of a file as
    Parquet holds them (``{"bytes": ...}``), or a list of these. Messages may have parts of the type ``image``, which
    stand for these images, in order, or hold them.

    Args:
        inputs: files, directories or globs: ``.json`` (an array of rows), ``.jsonl``, ``.parquet``, or ``.tar``
            (WebDataset, :mod:`megalight.data.webdataset`).
        output: the data prefix.
        tokenizer: the folder of a tokenizer, or a ``tokenizer.json`` file.
        images: the folder that paths of images are relative to. None: the folder of the first input file.
        image_token: the special token that stands for an image in the text.
        image_text: what replaces ``<image>`` in the texts, with ``image_token`` once: models put tokens of their
            own around images. None: as the published model with this image token writes it, such as
            ``<img><IMG_CONTEXT></img>``, if the tokenizer has all of its tokens; else ``image_token``.
        chat_template: a Jinja file. None: the tokenizer's own template.
        train_on: ``all``: every message of the assistant counts. ``last``: only the last of each conversation. One with
            ``"weight": 0`` or ``"train": false`` never counts.
        format: format of the inputs; ``auto`` goes by the suffix.
        workers: number of processes that tokenize and check images. Default: one per CPU, fewer for little text.
        on_bad: what happens with a row that cannot be used, a broken or missing image among the reasons: ``raise``
            stops with an error that names file, line and image, ``skip`` lists the row in the report. Rows with videos
            cannot be used.
        progress: whether to show a progress bar on standard error.

    Raises:
        DataError: an input names no file, all are empty, the tokenizer has no chat template or no image token, or a row
            is bad.
    """
    begin = time.monotonic()
    prefix, files, num_bytes = find_inputs(inputs, output, format, workers, ROWS)
    chosen = Tokenizer.load(tokenizer)
    template = ImageTemplate.of(chosen, None if chat_template is None else read_template(chat_template))
    chosen.chat_template = template.source
    if image_token not in chosen.vocabulary or chosen.encode(image_token) != [chosen.vocabulary[image_token]]:
        raise DataError(
            f"the tokenizer has no token {image_token!r} of its own; name another one with image_token "
            "(--image-token), or add it to the tokenizer as a special token."
        )
    template = replace(template, image=image_text_of(image_token, chosen.vocabulary, image_text))
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(progress))
        dtype = token_dtype(chosen.vocab_size)
        folder = os.fspath(files[0].path.parent if images is None else images)
        most = require("PIL.Image", "images").MAX_IMAGE_PIXELS
        options = image_token, folder, most
        encoder = _ImageEncoder(chosen, template, "chat", train_on, on_bad, dtype, *options)
        # Writers close in reverse order: the tokens' index, which readers need, is published last.
        writer = stack.enter_context(IndexedWriter(prefix, dtype))
        loss = stack.enter_context(IndexedWriter(loss_prefix(prefix), np.uint8))
        sink = _ImageSink(writer, loss, stack.enter_context(IndexedWriter(image_prefix(prefix), np.uint8)))
        skipped = encode_files(files, encoder, sink, on_bad=on_bad, workers=workers, bar=bar, stack=stack)
        meta = replace(
            sink.meta(chosen, append_eod=False, num_bytes=num_bytes),
            kind="images",
            num_loss_tokens=sink.num_loss_tokens,
            num_images=sink.num_images,
            image_token=chosen.vocabulary[image_token],
        )
        publish_facts(prefix, chosen, meta)
    seconds = time.monotonic() - begin
    return PrepareReport(prefix, os.fspath(tokenizer_path(prefix)), meta, len(files), skipped, sink.empty, seconds)

"""``megalight prepare``: turn text or conversations, also with images, into token files."""

from __future__ import annotations

import argparse
import glob
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megalight.errors import ConfigurationError, printable

if TYPE_CHECKING:
    from megalight.data.prepare import PrepareReport

TEXT_ONLY = (
    "train_tokenizer",
    "text_key",
    "no_eod",
    "eod_token",
    "split_sentences",
    "special_tokens",
    "special_as_text",
)
CHAT_ONLY = ("chat_template", "train_on")
IMAGES_ONLY = ("images", "image_token", "image_text")


DESCRIPTION = "turn text, JSON lines, CSV or Parquet into token files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("inputs", nargs="+", help="files, folders or globs; a text file is one document")
    parser.add_argument(
        "-o", "--output", required=True, help="prefix of the files to write: PREFIX.bin, PREFIX.idx ..."
    )
    parser.add_argument("--glob", metavar="PATTERN", help="files to take from folders, such as *.py (default: all)")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help="a tokenizer.json, or the folder of a tokenizer")
    which.add_argument("--train-tokenizer", action="store_true", help="train a byte-level BPE on the inputs")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the vocabulary to train (default: 4096)")
    parser.add_argument(
        "--special-tokens", nargs="+", default=(), metavar="TOKEN", help="more special tokens to train, such as [CLS]"
    )
    parser.add_argument("--text-key", help="JSON key or column of the text (default: text)")
    parser.add_argument(
        "--format",
        default="auto",
        choices=("auto", "text", "jsonl", "json", "csv", "parquet"),
        help="format of the inputs (default: by the suffix)",
    )
    parser.add_argument("--workers", type=int, help="processes that tokenize (default: one per CPU)")
    parser.add_argument("--no-eod", action="store_true", help="do not end documents with the end-of-document token")
    parser.add_argument("--eod-token", help="the end-of-document token, if the tokenizer does not name it")
    parser.add_argument("--split-sentences", action="store_true", help="each sentence is a sequence (for BERT)")
    parser.add_argument(
        "--special-as-text",
        action="store_true",
        help="special tokens in texts, such as <|im_start|>, are ordinary text (default: they are these tokens; "
        "those of images and videos are always text)",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--chat", action="store_true", help="the rows are conversations, for SFTDataModule")
    kind.add_argument(
        "--multimodal", action="store_true", help="the rows are conversations with images, for MultimodalDataModule"
    )
    parser.add_argument(
        "--images", metavar="FOLDER", help="the folder that paths of images begin in (default: the input's)"
    )
    parser.add_argument("--image-token", help="the special token that stands for an image (default: <image>)")
    parser.add_argument(
        "--image-text",
        help="what replaces <image> in the texts, with the image token once, such as "
        "'<img><IMG_CONTEXT></img>' (default: as the published model with this image token has it, or the token alone)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's template)")
    parser.add_argument(
        "--train-on", choices=("all", "last"), help="messages of the assistant that count in the loss (default: all)"
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip unreadable files and rows; count and list them")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print a summary."""
    inputs = [matching(name, arguments.glob) for name in arguments.inputs]
    if not arguments.multimodal:
        _refuse(arguments, IMAGES_ONLY, "is for images; add --multimodal")
    if arguments.chat or arguments.multimodal:
        which = "--chat" if arguments.chat else "--multimodal"
        _refuse(arguments, TEXT_ONLY, f"is for text, not for conversations; leave it or {which} out")
    common = {
        "tokenizer": arguments.tokenizer,
        "format": arguments.format,
        "workers": arguments.workers,
        "on_bad": "skip" if arguments.skip_bad else "raise",
        "progress": not arguments.quiet,
    }
    conversations = {**common, "chat_template": arguments.chat_template, "train_on": arguments.train_on or "all"}
    if arguments.multimodal:
        from megalight.data.multimodal.prepare import prepare_multimodal
        from megalight.data.multimodal.template import IMAGE_TOKEN

        report = prepare_multimodal(
            inputs,
            arguments.output,
            images=arguments.images,
            image_token=arguments.image_token or IMAGE_TOKEN,
            image_text=arguments.image_text,
            **conversations,
        )
    elif arguments.chat:
        from megalight.data.chat.prepare import prepare_chat

        report = prepare_chat(inputs, arguments.output, **conversations)
    else:
        # Their defaults are empty, so whatever is set was asked for.
        _refuse(arguments, CHAT_ONLY, "is for conversations; add --chat or --multimodal")
        from megalight.data.prepare import prepare

        report = prepare(
            inputs,
            arguments.output,
            train_tokenizer=arguments.train_tokenizer,
            vocab_size=arguments.vocab_size,
            special_tokens=arguments.special_tokens,
            text_key=arguments.text_key,
            append_eod=not arguments.no_eod,
            eod_token=arguments.eod_token,
            split_sentences=arguments.split_sentences,
            special_as_text=arguments.special_as_text,
            **common,
        )
    _print(report)
    return 0


def _print(report: PrepareReport) -> None:
    """Print a summary, and on standard error what was skipped, and which special tokens the texts hold."""
    print(report)
    if report.special:
        held = ", ".join(f"{printable(token)} {count:,}" for token, count in report.special.items())
        print(
            f"the texts hold special tokens: {held}. They stand for these tokens, as in transformers; with "
            "--special-as-text they are ordinary text.",
            file=sys.stderr,
        )
    for message in report.skipped:
        print(f"skipped: {message}", file=sys.stderr)


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], rule: str) -> None:
    """Refuse options that would do nothing."""
    for name in names:
        if getattr(arguments, name):
            raise ConfigurationError(f"--{name.replace('_', '-')} {rule}.")


def matching(name: str, pattern: str | None) -> str:
    """Return the input; for a folder, a glob of the files below it that match ``pattern``."""
    if pattern is None or not Path(name).is_dir():
        return name
    # Escaped, because the name of a folder may hold characters of patterns.
    return str(Path(glob.escape(name)) / "**" / pattern)

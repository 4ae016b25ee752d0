"""Facts about a corpus that ``prepare`` writes beside the token files, to check it quickly before training."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from megalight.data.indexed import paths
from megalight.errors import DataError


@dataclass(frozen=True)
class CorpusMeta:
    """Facts about a prepared corpus.

    Attributes:
        num_documents: number of documents.
        num_tokens: number of tokens, with end-of-document tokens.
        dtype: dtype of the ids on disk.
        vocab_size: number of rows that an embedding needs for the tokenizer.
        max_token_id: highest id that occurs; -1 in an empty corpus.
        unigram_entropy_nats: entropy of the token frequencies, in nats.
        tokenizer_identity: see :attr:`megalight.data.tokenizer.Tokenizer.identity`.
        eod_id: id of the end-of-document token, or None.
        pad_id: id that means only padding, or -1.
        append_eod: whether each document ends with ``eod_id``.
        num_bytes: size of the input files.
        kind: ``text``, ``chat`` (each document is a conversation; ``<prefix>.loss`` says which tokens count in the
            loss), ``images`` (as ``chat``, with images in ``<prefix>.images``) or ``pairs`` (each document is a
            preferred conversation, then a rejected one).
        num_loss_tokens: number of tokens that count in the loss.
        num_images: number of images.
        image_token: the id that stands for an image; one for each.
    """

    num_documents: int
    num_tokens: int
    dtype: str
    vocab_size: int
    max_token_id: int
    unigram_entropy_nats: float
    tokenizer_identity: str
    eod_id: int | None
    pad_id: int
    append_eod: bool
    num_bytes: int
    kind: str = "text"
    num_loss_tokens: int | None = None
    num_images: int | None = None
    image_token: int | None = None

    @staticmethod
    def path(prefix: str | os.PathLike[str]) -> Path:
        """Path of the facts about a data prefix."""
        return paths(prefix)[0].with_suffix(".json")

    @classmethod
    def load(cls, prefix: str | os.PathLike[str]) -> CorpusMeta | None:
        """Read the facts about a data prefix. Returns None if there are none (files of other programs).

        Raises:
            DataError: the file is incomplete or has another format.
        """
        path = cls.path(prefix)
        # Files of Megatron-LM have none; then ids are checked as they are read.
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            # Files of earlier versions lack newer fields, which have defaults.
            held = (field for field in fields(cls) if field.default is MISSING or field.name in content)
            return cls(**{field.name: content[field.name] for field in held})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} is incomplete or has another format ({type(error).__name__}: {error}). Prepare the data "
                "again, or remove this file to skip its checks."
            ) from error

    def save(self, prefix: str | os.PathLike[str]) -> None:
        """Write the facts atomically."""
        path = self.path(prefix)
        # With the process in its name: several jobs may prepare the same data.
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        # Replaced in one step: a reader finds the old file or the new one.
        os.replace(temporary, path)


def loss_prefix(prefix: str | os.PathLike[str]) -> str:
    """Prefix of the files that say which tokens of a prepared chat corpus count in the loss: 1 or 0 for each."""
    return f"{paths(prefix)[0].with_suffix('')}.loss"


def image_prefix(prefix: str | os.PathLike[str]) -> str:
    """Prefix of the files that hold the images of a corpus, each as the bytes of its file."""
    return f"{paths(prefix)[0].with_suffix('')}.images"


def tokenizer_path(prefix: str | os.PathLike[str]) -> Path:
    """Path of the tokenizer that ``prepare`` saves with a data prefix."""
    return paths(prefix)[0].with_suffix(".tokenizer.json")

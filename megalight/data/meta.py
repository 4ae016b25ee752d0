"""What ``prepare`` writes beside the token files: facts that are cheap to check before training."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megalight.data.indexed import paths
from megalight.errors import DataError


@dataclass(frozen=True)
class CorpusMeta:
    """Facts about a prepared corpus.

    Attributes:
        num_documents: documents in the files.
        num_tokens: tokens in the files, end-of-document tokens included.
        dtype: dtype of the ids on disk.
        vocab_size: rows an embedding needs for the tokenizer.
        max_token_id: highest id that occurs; -1 in an empty corpus.
        unigram_entropy_nats: entropy of the token frequencies.
        tokenizer_identity: see :attr:`megalight.data.tokenizer.Tokenizer.identity`.
        eod_id: id that ends documents, or None.
        pad_id: id that can only be padding, or -1.
        append_eod: whether each document was given ``eod_id`` at its end.
        num_bytes: bytes of the input files.
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

    @staticmethod
    def path(prefix: str | os.PathLike[str]) -> Path:
        """Where the facts about a data prefix are kept."""
        return paths(prefix)[0].with_suffix(".json")

    @classmethod
    def load(cls, prefix: str | os.PathLike[str]) -> CorpusMeta | None:
        """Read the facts about a data prefix, or None where there are none (files written by other programs).

        Raises:
            DataError: the file is torn or of another form.
        """
        path = cls.path(prefix)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} is torn or of another form ({type(error).__name__}: {error}). Prepare the data again, or "
                "remove this file to go without its checks."
            ) from error

    def save(self, prefix: str | os.PathLike[str]) -> None:
        """Write the facts, atomically."""
        path = self.path(prefix)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def tokenizer_path(prefix: str | os.PathLike[str]) -> Path:
    """Where ``prepare`` keeps the tokenizer of a data prefix."""
    return paths(prefix)[0].with_suffix(".tokenizer.json")

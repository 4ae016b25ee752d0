"""A prepared corpus: token files, the facts that ``prepare`` writes beside them, and train/validation/test splits.

Training checks a corpus by these facts, without a pass over the tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalight.data.indexed import IndexedDataset, paths
from megalight.data.tokenizer import Tokenizer
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


SCAN_LIMIT = 1 << 26
"""Without facts, corpora of up to this many tokens are read once to find the highest id."""


@dataclass(frozen=True)
class Corpus:
    """Token files and the facts about them.

    Attributes:
        meta: the facts that ``prepare`` wrote; None for files of other programs.
        loss: for conversations, 1 for each token that counts in the loss and 0 for the others, in sequences as long as
            those of ``data``. None: all tokens count.
        images: for conversations with images, the bytes of image files: as many documents as ``data`` has. None: there
            are no images.
    """

    data: IndexedDataset
    meta: CorpusMeta | None
    loss: IndexedDataset | None = None
    images: IndexedDataset | None = None

    @classmethod
    def open(cls, prefix: str | os.PathLike[str]) -> Corpus:
        """Open the files of a prefix.

        Raises:
            DataError: a file is missing or incomplete, or the files do not belong together.
        """
        data = IndexedDataset(prefix)
        meta = CorpusMeta.load(prefix)
        # A copy of only one of both files is found here, and not in the loss.
        if meta is not None and meta.num_tokens != data.num_tokens:
            raise DataError(
                f"{CorpusMeta.path(prefix)} says {meta.num_tokens} tokens, but {data.prefix}.bin holds "
                f"{data.num_tokens}: they belong to different data sets. Prepare the data again."
            )
        if meta is None or meta.kind == "text":
            return cls(data, meta)
        loss = IndexedDataset(loss_prefix(prefix))
        # Equal lengths are all that can be compared without reading both.
        if not np.array_equal(loss.lengths, data.lengths):
            raise DataError(
                f"{loss.prefix}.bin does not belong to {data.prefix}.bin: their sequences differ in length. Prepare "
                "the data again, or copy all its files again."
            )
        if meta.kind != "images":
            return cls(data, meta, loss)
        images = IndexedDataset(image_prefix(prefix))
        if images.num_documents != data.num_documents or len(images) != meta.num_images:
            raise DataError(
                f"{images.prefix}.bin does not belong to {data.prefix}.bin: it holds {len(images)} images of "
                f"{images.num_documents} conversations, not {meta.num_images} of {data.num_documents}. Prepare the "
                "data again, or copy all its files again."
            )
        return cls(data, meta, loss, images)

    @property
    def kind(self) -> str:
        """What the documents are: ``text``, ``chat``, ``images`` or ``pairs``; see :class:`CorpusMeta`."""
        return "text" if self.meta is None else self.meta.kind

    @property
    def tokenizer_path(self) -> str | None:
        """Path of the tokenizer that was saved with the corpus, or None."""
        path = tokenizer_path(self.data.prefix)
        return os.fspath(path) if path.is_file() else None

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Check that the corpus was made with ``tokenizer``, if that is known.

        Raises:
            DataError: it was made with another tokenizer.
        """
        # By identity: another file of the same tokenizer serves as well.
        if self.meta is not None and self.meta.tokenizer_identity != tokenizer.identity:
            raise DataError(
                f"{self.data.prefix} was made with the tokenizer {self.meta.tokenizer_identity}, but this one is "
                f"{tokenizer.identity}: the same ids mean different text. Use {tokenizer_path(self.data.prefix)}, or "
                "prepare the data again."
            )

    def check_vocabulary(self, vocab_size: int, owner: str) -> None:
        """Check that the highest id of the corpus is in a vocabulary.

        The highest id comes from the facts. Without them small files are read, and large ones are not checked here.

        Args:
            owner: what has this vocabulary, for the message.

        Raises:
            DataError: the corpus has an id outside the vocabulary.
        """
        if self.meta is not None:
            highest = self.meta.max_token_id
        # As large as is read in a moment. An unknown corpus of any size should not delay a start by minutes.
        elif 0 < self.data.num_tokens <= SCAN_LIMIT:
            highest = int(self.data.tokens.max())
        else:
            return  # each sample is checked when it is read
        if highest >= vocab_size:
            raise DataError(
                f"{self.data.prefix} holds the token id {highest}, but {owner} allows {vocab_size} tokens; ids must be "
                "below that. Use the tokenizer that the data was made with, and a model with its vocabulary size."
            )


def same_tokenizer(corpora: Iterable[Corpus]) -> CorpusMeta | None:
    """Check that all corpora were made with one tokenizer; return the facts of the first that has any.

    Raises:
        DataError: two corpora were made with different tokenizers.
    """
    first: Corpus | None = None
    for corpus in corpora:
        if corpus.meta is None:
            continue
        if first is None:
            first = corpus
        elif first.meta is not None and first.meta.tokenizer_identity != corpus.meta.tokenizer_identity:
            raise DataError(
                f"{first.data.prefix} and {corpus.data.prefix} were made with different tokenizers "
                f"({first.meta.tokenizer_identity}, {corpus.meta.tokenizer_identity}); a blend needs one. Prepare one "
                "of them again with the other's tokenizer."
            )
    return None if first is None else first.meta


SPLITS = ("train", "validation", "test")

SPLIT = "969,30,1"
"""The weights of the splits where nobody names any; they are Megatron-LM's."""


def split_bounds(split: str, num_documents: int) -> tuple[range, range, range]:
    """Return the documents of the three splits: contiguous ranges, in order, that cover all documents.

    The bounds equal Megatron-LM's: weights are normalized and accumulated as floats, and a split ends at
    ``round(bound * num_documents)``.

    Args:
        split: three weights, such as ``"969,30,1"``; or one number, which means training alone.

    Raises:
        DataError: a weight is no number or is negative, all are zero, or there are two, or more than three.
    """
    try:
        weights = [float(part) for part in str(split).replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if len(weights) not in (1, 3) or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise DataError(
            f"split is {split!r}; give three weights >= 0 for train, validation and test, such as '90,10,0', or '1' to "
            "train on all."
        )
    weights = [*weights, 0.0, 0.0][:3]
    # In floats and in this order, because another rounding would move a document to another split.
    total = sum(weights)
    bound, edges = 0.0, [0]
    for weight in weights:
        bound += weight / total
        edges.append(round(bound * num_documents))
    return range(edges[0], edges[1]), range(edges[1], edges[2]), range(edges[2], edges[3])


BLOCK = 1 << 24
"""Tokens that are counted at a time."""


def frequent_ids(prefixes: Sequence[str], size: int) -> tuple[list[int], float]:
    """Return the most frequent ids in ascending order, and the fraction of all tokens that they are.

    Of conversations, tokens with a loss are counted. Of ids that are equally frequent, the lower ones are taken.

    Raises:
        DataError: a file is missing, the corpora have different tokenizers, or they have fewer ids.
    """
    if size < 1:
        raise DataError(f"a vocabulary of {size} ids is none; give at least 1, such as 32000.")
    corpora = [Corpus.open(prefix) for prefix in prefixes]
    same_tokenizer(corpora)
    counts = np.zeros(0, np.int64)
    for corpus in corpora:
        for start in range(0, corpus.data.num_tokens, BLOCK):
            tokens = corpus.data.tokens[start : start + BLOCK]
            if corpus.loss is not None:
                tokens = tokens[corpus.loss.tokens[start : start + BLOCK] != 0]
            counts = _sum(counts, np.bincount(tokens[tokens >= 0]))
    order = np.argsort(-counts, kind="stable")[:size]
    if len(order) < size or not counts[order[-1]]:
        raise DataError(
            f"the data has {np.count_nonzero(counts)} different ids, and {size} are asked for; ask for fewer, or give "
            "more data."
        )
    return sorted(order.tolist()), float(counts[order].sum() / counts.sum())


def _sum(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros(max(len(a), len(b)), np.int64)
    total[: len(a)] += a
    total[: len(b)] += b
    return total

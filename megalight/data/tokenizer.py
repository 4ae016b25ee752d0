"""One face for tokenizers: ``tokenizer.json`` files, ``transformers`` folders, or a BPE trained on the spot."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Model  # type: ignore[import-untyped]
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalight.errors import DataError
from megalight.imports import require

log = logging.getLogger(__name__)

EOD_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
KNOWN_EOD_TOKENS = (EOD_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<eod>", "<|im_end|>", "[SEP]")
PROBE = "Hello, world!\n\tdef f(x): return x**2  # 12345 naïve 東京 🙂\n\n"


class _Backend(Protocol):
    """What a tokenizer library must do for us."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def vocabulary(self) -> dict[str, int]: ...

    def save(self, folder: Path) -> None: ...


class _TokenizersBackend:
    """The ``tokenizers`` package (Rust)."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab(with_added_tokens=True))

    def save(self, folder: Path) -> None:
        self.tokenizer.save(str(folder / "tokenizer.json"))


class _TransformersBackend:
    """A tokenizer of ``transformers`` that has no ``tokenizer.json``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab())

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(str(folder))


class Tokenizer:
    """Text to token ids and back. Made by :meth:`load` or :meth:`train`; never pickled, saved as JSON.

    Attributes:
        eod_id: the token that ends a document, or None when the tokenizer has none.
        pad_id: the padding token, or None. It may be one that also means something else: see :attr:`safe_pad_id`.
    """

    def __init__(self, backend: _Backend, eod_token: str | None = None, pad_token: str | None = None) -> None:
        self._backend = backend
        self._vocabulary = backend.vocabulary()
        for name, token in (("eod_token", eod_token), ("pad_token", pad_token)):
            if token is not None and token not in self._vocabulary:
                raise DataError(f"{name} {token!r} is not in the tokenizer's vocabulary; name one of its tokens.")
        if eod_token is None:
            eod_token = next((token for token in KNOWN_EOD_TOKENS if token in self._vocabulary), None)
        self.eod_token = eod_token
        self.pad_token = pad_token
        self.eod_id = None if eod_token is None else self._vocabulary[eod_token]
        self.pad_id = None if pad_token is None else self._vocabulary[pad_token]

    @classmethod
    def load(cls, path: str | os.PathLike[str], eod_token: str | None = None) -> Tokenizer:
        """Read a ``tokenizer.json`` file, or a folder that holds one or any tokenizer ``transformers`` can read.

        Special tokens come from ``tokenizer_config.json`` beside it where there is one; ``eod_token`` overrides the
        end-of-document token, which otherwise is the configured ``eos_token`` or the first well-known name.

        Raises:
            DataError: nothing there, not readable, or ``eod_token`` is not in the vocabulary.
            MissingPackageError: the folder needs ``transformers``.
        """
        place = Path(path)
        folder = place if place.is_dir() else place.parent
        file = place / "tokenizer.json" if place.is_dir() else place
        if not place.exists():
            raise DataError(
                f"tokenizer {os.fspath(path)!r} does not exist; give a tokenizer.json file or a folder that holds one."
            )
        config = _read_config(folder / "tokenizer_config.json")
        eod = eod_token or config.get("eos_token")
        backend: _Backend
        if file.is_file():
            backend = _TokenizersBackend(_read_tokenizer(file))
        else:
            transformers = require("transformers", f"the tokenizer in {folder}, which has no tokenizer.json,")
            try:
                loaded = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            except (OSError, ValueError) as error:
                raise DataError(f"{folder} holds no tokenizer that could be read: {error}") from error
            backend = _TransformersBackend(loaded)
        return cls(backend, eod, config.get("pad_token"))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, length: int | None = None) -> Tokenizer:
        """Train a byte-level BPE with the special tokens ``<|endoftext|>`` and ``<|pad|>``.

        The same texts in the same order give the same tokenizer.

        Args:
            texts: an iterable of documents.
            vocab_size: tokens of the vocabulary, special ones included; at least 258 (all bytes and both specials).
            length: number of texts, where known (for the trainer's own bookkeeping).

        Raises:
            DataError: ``vocab_size`` too small, or the texts too few to fill it.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        specials = [EOD_TOKEN, PAD_TOKEN]
        if vocab_size < len(alphabet) + len(specials):
            raise DataError(
                f"vocab_size is {vocab_size}; a byte-level vocabulary has at least {len(alphabet) + len(specials)}."
            )
        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer, length=length)
        if model.get_vocab_size() < vocab_size:
            raise DataError(
                f"the texts give a vocabulary of {model.get_vocab_size()} tokens, {vocab_size} were asked for. Use a "
                "smaller vocab_size or more text."
            )
        return cls(_TokenizersBackend(model), EOD_TOKEN, PAD_TOKEN)

    @property
    def vocab_size(self) -> int:
        """The smallest size of an embedding that has a row for every token: the highest id plus one."""
        return max(self._vocabulary.values()) + 1

    @cached_property
    def identity(self) -> str:
        """Hash of the vocabulary and of how a probe text is cut: equal for tokenizers that mean the same by each id,
        whatever library or version wrote them.
        """
        facts = [sorted(self._vocabulary.items(), key=lambda item: (item[1], item[0])), self.encode(PROBE)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    @property
    def safe_pad_id(self) -> int:
        """The padding id when it can mean nothing but padding, else -1, an id that cannot occur.

        A padding token that is also the end of documents or another special token would take the loss from genuine
        ones.
        """
        if self.pad_id is None:
            return -1
        if self.pad_id == self.eod_id:
            log.warning("pad token %r also ends documents; labels are not masked by its value", self.pad_token)
            return -1
        return self.pad_id

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None."""
        return self._vocabulary.get(token)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens added."""
        return self._backend.encode([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens added; in parallel where the library can."""
        return self._backend.encode(texts)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids, with or without the special tokens."""
        return self._backend.decode(ids, skip_special)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` to ``folder``; :meth:`load` and ``transformers`` read
        it.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self._backend.save(place)
        config = _read_config(place / "tokenizer_config.json")
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        config.update({"eos_token": self.eod_token, "pad_token": self.pad_token})
        text = json.dumps({key: value for key, value in config.items() if value is not None}, indent=2)
        (place / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        return place


def _read_tokenizer(file: Path) -> Any:
    try:
        return Model.from_file(str(file))
    except Exception as error:  # the package raises a bare Exception
        raise DataError(f"{file} is not a tokenizer that the package tokenizers can read: {error}") from error


def _read_config(file: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` with its special tokens as strings; empty where there is none."""
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{file} holds a {type(config).__name__}; a JSON object is expected.")
    for key in ("eos_token", "pad_token"):
        if isinstance(config.get(key), dict):
            config[key] = config[key].get("content")
    return config

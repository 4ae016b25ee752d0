"""One interface to tokenizers: ``tokenizer.json`` files, folders of ``transformers``, and byte-level BPEs we train."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer as Model  # type: ignore[import-untyped]
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalight.errors import DataError, decode_utf8, hub_hint
from megalight.hub import local
from megalight.imports import require

MEDIA = ("<image>", "<|image_pad|>", "<image_soft_token>", "<IMG_CONTEXT>", "<video>", "<|video_pad|>")
"""Tokens of published models in whose places the features of images and videos come.

Plain text does not hold them: they are read as ordinary text, as one without an image would train an embedding that
nothing else reads. Other special tokens, such as ``<|im_start|>`` in rendered conversations, are read as tokens.
"""

MEDIA_KEYS = ("image_token", "video_token", "audio_token")
"""Keys of ``tokenizer_config.json`` that name such a token."""


log = logging.getLogger(__name__)

FILE = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
EOD_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
KNOWN_EOD_TOKENS = (EOD_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<eod>", "<|im_end|>", "[SEP]")
HINTS = ("token", "vocab", "merges", "piece", "bpe", "spm", "tekken")
"""Parts of the names of files that hold a tokenizer of ``transformers``."""

SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token", *MEDIA_KEYS)
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
PROBE = "Hello, world!\n\tdef f(x): return x**2  # 12345 naïve 東京 🙂\n\n"
"""Text that is encoded to compare tokenizers (:attr:`Tokenizer.identity`)."""


class Tokenizer:
    """Converts text to token ids and back. Create one with :meth:`load` or :meth:`train`. It is saved as JSON.

    Attributes:
        eod_id: id of the end-of-document token, or None if the tokenizer has none.
        pad_id: id of the padding token, or None. It may also have another meaning: see :attr:`safe_pad_id`.
        named: special tokens by the names that ``transformers`` gives them, such as ``bos_token``.
        chat_template: the Jinja template that turns a conversation into text, or None.
    """

    def __init__(
        self,
        model: Any,
        eod_token: str | None = None,
        pad_token: str | None = None,
        others: Iterable[str] = (),
        *,
        named: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        # Files may ask for truncation and padding, which would lose text here.
        model.no_truncation()
        model.no_padding()
        self._model = model
        self._whole_texts: dict[int, str] = {}
        self._vocabulary: dict[str, int] = model.get_vocab(with_added_tokens=True)
        for name, token in (("eod_token", eod_token), ("pad_token", pad_token)):
            if token is not None and token not in self._vocabulary:
                raise DataError(f"{name} {token!r} is not in the vocabulary of the tokenizer; name one of its tokens.")
        if eod_token is None:
            eod_token = next((token for token in KNOWN_EOD_TOKENS if token in self._vocabulary), None)
        self.eod_token = eod_token
        self.pad_token = pad_token
        self.named = {name: token for name, token in (named or {}).items() if token in self._vocabulary}
        self.chat_template = chat_template
        beside = [token for name, token in self.named.items() if name != "pad_token"]
        self._others = {token for token in (eod_token, *others, *beside) if token is not None}
        self.eod_id: int | None = None if eod_token is None else self._vocabulary[eod_token]
        self.pad_id: int | None = None if pad_token is None else self._vocabulary[pad_token]

    @classmethod
    def load(cls, path: str | os.PathLike[str], eod_token: str | None = None) -> Tokenizer:
        """Read a ``tokenizer.json`` file, a folder with such a file or with a tokenizer of ``transformers``, or a name.

        A name is one of the Hugging Face Hub, such as ``Qwen/Qwen3-0.6B`` (:func:`megalight.hub.local`).

        Special tokens come from ``tokenizer_config.json`` in the same folder, if it exists (``x_config.json`` for
        ``x.json``). The end-of-document token is ``eod_token``, else the configured ``eos_token``, else the first
        well-known name in the vocabulary.

        Raises:
            DataError: the path does not exist or cannot be read, or ``eod_token`` is not in the vocabulary.
            HubError: the Hub has no such name, refuses it, or does not answer.
            MissingPackageError: the folder needs ``transformers``, or the name ``huggingface_hub``.
        """
        place = Path(local(path, "tokenizer"))
        if not place.exists():
            raise DataError(
                f"tokenizer {os.fspath(path)!r} does not exist; give a tokenizer.json file or a folder that holds one."
                f"{hub_hint(os.fspath(path))}"
            )
        file = place / FILE if place.is_dir() else place
        config = _read_config(config_path(file))
        if file.is_file():
            model = _read_model(file)
        else:
            model, known = _read_folder(place)
            config = {**known, **config}
        named = {key: config[key] for key in SPECIALS if isinstance(config.get(key), str)}
        return cls(
            model,
            eod_token or config.get("eos_token"),
            config.get("pad_token"),
            named=named,
            chat_template=_read_template(file, config),
        )

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Read the tokenizer in a folder with these files, by name, wherever they came from; see :meth:`load`."""
        # Packages for tokenizers read files of this machine alone.
        with TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            return cls.load(folder)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Create a tokenizer from the content of a ``tokenizer.json``."""
        return cls(Model.from_str(text))

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, length: int | None = None, special_tokens: Sequence[str] = ()
    ) -> Tokenizer:
        """Train a byte-level BPE. Its first special tokens are ``<|endoftext|>`` and ``<|pad|>``.

        The same texts in the same order give the same tokenizer.

        Args:
            vocab_size: size of the vocabulary with special tokens; at least 258 (all bytes and two special tokens).
            length: number of texts, if known.
            special_tokens: further special tokens, such as ``[CLS]``, ``[SEP]`` and ``[MASK]``.

        Raises:
            DataError: ``vocab_size`` is too small, or the texts are too few for it.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        specials = [EOD_TOKEN, PAD_TOKEN, *special_tokens]
        if vocab_size < len(alphabet) + len(specials):
            raise DataError(
                f"vocab_size (--vocab-size) is {vocab_size}; a byte-level vocabulary with {len(specials)} special "
                f"tokens has at least {len(alphabet) + len(specials)} tokens."
            )
        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            # Sorted, so that ids do not depend on the order of a set.
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer, length=length)
        if model.get_vocab_size() < vocab_size:
            raise DataError(
                f"the texts give a vocabulary of {model.get_vocab_size()} tokens, but vocab_size is {vocab_size}. Use "
                "a smaller vocab_size (--vocab-size) or more text."
            )
        return cls(model, EOD_TOKEN, PAD_TOKEN, special_tokens)

    @property
    def vocab_size(self) -> int:
        """The highest id plus one: the number of rows that an embedding needs."""
        return int(max(self._vocabulary.values())) + 1

    @cached_property
    def identity(self) -> str:
        """Hash of the vocabulary and of the ids of a probe text.

        Tokenizers with equal identities give each id the same meaning, also if different libraries or versions wrote
        them.
        """
        # The vocabulary alone does not show how text is divided. The probe covers spaces,
        # code, accents and emoji.
        facts = [sorted(self._vocabulary.items(), key=lambda item: (item[1], item[0])), self.encode(PROBE)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    @property
    def safe_pad_id(self) -> int:
        """The padding id if it means only padding, else -1, which never occurs in data.

        Labels with this id carry no loss. If the padding token were also the end-of-document token (or another special
        token), real tokens would lose their loss.
        """
        if self.pad_id is None:
            return -1
        if self.pad_token in self._others:
            log.info("pad token %r also has another meaning, so labels with its id keep their loss", self.pad_token)
            return -1
        return self.pad_id

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token -> id, with special tokens."""
        return self._vocabulary

    @cached_property
    def specials(self) -> Mapping[str, int]:
        """The special tokens, token -> id: those that the tokenizer itself calls so."""
        added = self._model.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def text_tokens(self) -> frozenset[int]:
        """The tokens that are not special."""
        return frozenset(self._vocabulary.values()) - {*self.specials.values()}

    @cached_property
    def byte_tokens(self) -> frozenset[int]:
        """Tokens for single bytes, such as ``<0xE2>``, if runs of them decode together (byte fallback: Llama 2, Gemma).

        One wrong byte makes all of its run replacement characters.
        """
        if '"ByteFallback"' not in json.dumps(json.loads(self.to_json()).get("decoder")):
            return frozenset()
        return frozenset(number for token, number in self._vocabulary.items() if BYTE.fullmatch(token))

    def for_plain_text(self, special_as_text: bool = False) -> Tokenizer:
        """Return a tokenizer for encoding plain text, in which no token stands for an image or a video.

        Args:
            special_as_text: whether all other special tokens are read as ordinary text, too.
        """
        media = {*MEDIA, *(token for name, token in self.named.items() if name in MEDIA_KEYS)}
        hidden = media & self._vocabulary.keys() | (self.specials.keys() if special_as_text else set())
        return Tokenizer.from_json(hide_tokens(self.to_json(), hidden)) if hidden else self

    @cached_property
    def special_ids(self) -> tuple[list[int], list[int]]:
        """The ids that ``transformers`` puts before and after a text (BERT: ``[CLS]``, ``[SEP]``); :meth:`encode` does
        not.

        They follow from the ``post_processor`` of ``tokenizer.json`` alone.
        """
        plain, whole = self.encode(PROBE), self._model.encode(PROBE).ids
        places = range(len(whole) - len(plain) + 1)
        found = [place for place in places if whole[place : place + len(plain)] == plain]
        return (whole[: found[0]], whole[found[0] + len(plain) :]) if found else ([], [])

    @property
    def start(self) -> list[int]:
        """The first of :attr:`around` (Llama, Gemma: the ``bos_token``)."""
        return self.special_ids[0]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. No special tokens are added.

        Raises:
            DataError: the text holds half of a surrogate pair.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed on all cores. No special tokens are added.

        Raises:
            DataError: a text holds half of a surrogate pair.
        """
        # Without special tokens: those at the ends of documents are added by `prepare`.
        try:
            encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            check_unicode(texts)
            raise
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the characters ``[start, end)`` that each id stands for.

        Raises:
            DataError: the text holds half of a surrogate pair.
        """
        try:
            encoding = self._model.encode(text, add_special_tokens=False)
        except TypeError:
            check_unicode([text])
            raise
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ids, with or without special tokens."""
        return str(self._model.decode(list(ids), skip_special_tokens=skip_special))

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that ids add to the text of those before them, without special tokens.

        Alone, they may read otherwise: a tokenizer that marks words (Llama 2, Mistral) drops the space of a first word.
        """
        start = self.decode(before, skip_special=True)
        text = self.decode([*before, *ids], skip_special=True)
        return text.removeprefix(start) if text.startswith(start) else self.decode(ids, skip_special=True)

    def whole_text(self, token: int) -> str:
        """Return what a token adds wherever it stands between two characters; nothing if its neighbors change that.

        Those of byte-level tokenizers (GPT-2, Llama 3, Qwen) never do, unless the token holds part of a character.
        """
        if (text := self._whole_texts.get(token)) is None:
            text = self.decode([token]) if self._is_byte_level else ""
            self._whole_texts[token] = text = "" if "\ufffd" in text else text
        return text

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self.to_json()).get("decoder")
        return decoder is not None and decoder["type"] == "ByteLevel"

    def to_json(self) -> str:
        """Return the content of ``tokenizer.json``."""
        return str(self._model.to_str(pretty=True))

    def files(self, name: str = FILE) -> dict[str, bytes]:
        """Return the files of the tokenizer by name; ``transformers`` can read them too.

        They are ``tokenizer.json``, and ``tokenizer_config.json`` with the special tokens and the chat template.
        """
        known = {"eos_token": self.eod_token, "pad_token": self.pad_token, "chat_template": self.chat_template}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.named}
        config |= {key: value for key, value in known.items() if value is not None}
        return {
            name: self.to_json().encode(),
            config_path(Path(name)).name: (json.dumps(config, indent=2) + "\n").encode(),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`files` to a folder, or under the name of a ``.json`` file. Returns the path for :meth:`load`."""
        place = Path(path)
        folder, name = (place.parent, place.name) if place.suffix == ".json" else (place, FILE)
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in self.files(name).items():
            # Under a temporary name first: a reader never sees half a tokenizer.
            temporary = folder / f"{file}.{os.getpid()}.tmp"
            temporary.write_bytes(content)
            os.replace(temporary, folder / file)
        return place


def config_path(file: Path) -> Path:
    """Path of the special tokens of a tokenizer file: ``x_config.json`` for ``x.json``."""
    return file.with_name(f"{file.stem}_config.json")


def check_unicode(texts: Sequence[str]) -> None:
    """Refuse half of a surrogate pair: JSON may hold one, and Python reads a byte that is not UTF-8 as one.

    Raises:
        DataError: a text holds one.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"a text is not Unicode: character {error.start} is {text[error.start]!r}, half of a surrogate pair."
            ) from error


def _read_model(file: Path) -> Any:
    try:
        return Model.from_file(str(file))
    except Exception as error:  # the package raises a bare Exception
        raise DataError(f"{file} is not a tokenizer that the package `tokenizers` can read: {error}") from error


def _read_folder(folder: Path) -> tuple[Any, dict[str, str]]:
    """Read a tokenizer with ``transformers``; return it in the form of ``tokenizers``, and its special tokens."""
    remedy = (
        f"Copy the files of its tokenizer into it ({FILE} and {config_path(Path(FILE)).name}), or name a tokenizer "
        "elsewhere."
    )
    # Before `transformers` is asked for, which finds no tokenizer here either.
    if not any(hint in name.lower() for name in os.listdir(folder) for hint in HINTS):
        raise DataError(f"{folder} holds no tokenizer. {remedy}")
    transformers = require("transformers", f"the tokenizer in {folder}, which has no {FILE},")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)  # more lines speak of a hub
        raise DataError(f"{folder} holds no tokenizer that can be read: {reason} {remedy}") from error
    model = getattr(loaded, "backend_tokenizer", None)
    if model is None:
        raise DataError(
            f"the tokenizer in {folder} is a {type(loaded).__name__}, which is written in Python only; convert it to "
            f"a {FILE} first."
        )
    known = {**loaded.special_tokens_map, "chat_template": getattr(loaded, "chat_template", None)}
    return model, {key: value for key, value in known.items() if isinstance(value, str)}


def _read_template(file: Path, config: Mapping[str, Any]) -> str | None:
    """Return the default chat template: that of the configuration, or ``chat_template.jinja`` of the same folder."""
    template = config.get("chat_template")
    if isinstance(template, list):  # templates by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    beside = file.with_name(CHAT_TEMPLATE)
    if template is None and file.name == FILE and beside.is_file():
        template = decode_utf8(beside.read_bytes(), str(beside))
    return template if isinstance(template, str) else None


def _read_config(file: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json`` with special tokens as strings; empty if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{file} holds a {type(config).__name__}; it must hold a JSON object.")
    for key in SPECIALS:
        if isinstance(config.get(key), dict):
            config[key] = config[key].get("content")
    return config


HIDDEN = "\U0010ffff{}\U0010ffff"
"""What a token is called that no text shall be: between characters that Unicode keeps out of texts."""


def hide_tokens(model: str, tokens: Collection[str]) -> str:
    """Return a ``tokenizer.json`` for encoding alone, that reads these tokens as ordinary text. Ids stay as they are.

    Args:
        model: the content of a ``tokenizer.json``.
    """
    content = json.loads(model)
    hidden = {token: HIDDEN.format(token) for token in tokens}
    for added in content["added_tokens"]:
        added["content"] = hidden.get(added["content"], added["content"])
    core = content["model"]
    core["vocab"] = _renamed(core["vocab"], hidden)
    if core.get("unk_token") in hidden:
        core["unk_token"] = hidden[core["unk_token"]]
    if "merges" in core:
        core["merges"] = [merge for merge in core["merges"] if not hidden.keys() & _words(merge)]
    return json.dumps(content)


def _renamed(vocabulary: Any, names: Mapping[str, str]) -> Any:
    if isinstance(vocabulary, Mapping):
        return {names.get(token, token): number for token, number in vocabulary.items()}
    return [[names.get(token, token), score] for token, score in vocabulary]


def _words(merge: str | list[str]) -> set[str]:
    """Return the two parts of a merge, and what they make."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}

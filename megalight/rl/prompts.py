"""Prompts: rows of files or of a generator, their token ids, and the order in which a run reads them."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.data.chat.conversations import prompt_messages
from megalight.data.chat.template import ChatTemplate
from megalight.data.text_files import ROWS, Format, blocks, find, records_of
from megalight.data.tokenizer import Tokenizer, check_unicode
from megalight.errors import ConfigurationError, DataError
from megalight.rl.environment import RLTask

Row = Mapping[str, Any]
SUFFIXES = {suffix: kind for suffix, kind in ROWS.items() if kind != "webdataset"}
"""Suffix -> format; shards hold images, of which prompts have none."""


class RowSource(ABC):
    """Makes rows without files. A subclass says which; equal arguments must give equal rows, on every rank."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return the rows, each with a prompt and what rewards need."""


def read_rows(inputs: Sequence[str], form: Format = "auto") -> list[tuple[str, Row]]:
    """Return the rows of files with their places for messages, in the order of :func:`~megalight.data.text_files.find`.

    Args:
        inputs: files (``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet``, also packed by gzip), directories, or
            globs.
        form: format of all files; ``auto``: by the suffix.

    Raises:
        DataError: an input names no file, or a file cannot be read or has a row that is no JSON object.
    """
    found: list[tuple[str, Row]] = []
    for block in blocks(find(inputs, form, SUFFIXES)):
        for place, record in records_of(block):
            if isinstance(record, DataError):
                raise record
            if not isinstance(record, Mapping):
                raise DataError(f"{place} is of type {type(record).__name__}; each row must be a JSON object.")
            found.append((place, record))
    return found


log = logging.getLogger(__name__)

ENCODED = 1024
"""Texts that are encoded together, on all cores."""


@dataclass(frozen=True, kw_only=True)
class PromptWriter:
    """Writes the prompt of a row.

    Attributes:
        tokenizer: the policy's, with the template of conversations.
        column: where rows hold the prompt: a text or a list of messages. None: ``prompt`` if a row has it, else its
            conversation without the last answer.
        chat: whether a text is a user's message, for the template. If not, it is the prompt as it stands.
        system: a system message before others; for the template, too.
        begin: text with which each answer begins, as part of the prompt: ``<think>``.
    """

    tokenizer: Tokenizer
    column: str | None = None
    chat: bool = False
    system: str | None = None
    begin: str = ""

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template of conversations.

        Raises:
            DataError: there is none, or it has a syntax error.
        """
        return ChatTemplate.of(self.tokenizer)

    def ends(self, chats: bool) -> tuple[int, ...]:
        """Return the tokens that end an answer: the end of a document, and of a message if there are ``chats``."""
        document = () if self.tokenizer.eod_id is None else (self.tokenizer.eod_id,)
        return tuple(dict.fromkeys([*document, *(self.chat_template.ends(self.tokenizer) if chats else ())]))

    def text(self, place: str, row: Row) -> tuple[str, bool]:
        """Return the text of a prompt, and whether the template wrote it.

        Raises:
            DataError: the row has no prompt, or it is not Unicode.
            ConfigurationError: ``system`` is given, and the prompt is no conversation.
        """
        given = row.get("prompt" if self.column is None else self.column)
        if isinstance(given, str) and not self.chat:
            if self.system is not None:
                raise ConfigurationError(
                    f"{place} has a text as its prompt, and system is a message of a conversation. Set chat to true, "
                    "so that the text is a user's message, or leave system out."
                )
            text, chat = given, False
        else:
            found, chat = prompt_messages(row, place, self.column), True
            messages = found.messages if self.system is None else [_system(self.system), *found.messages]
        try:
            if chat:
                text = self.chat_template.render(messages, found.tools, answer=True)
            check_unicode([text])
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        return text + self.begin, chat

    def ids(self, texts: Sequence[tuple[str, bool]]) -> Iterator[list[int]]:
        """Yield the ids of texts. Those that no template wrote begin as texts of ``transformers`` do (Llama: BOS)."""
        for first in range(0, len(texts), ENCODED):
            part = texts[first : first + ENCODED]
            for (_, chat), ids in zip(part, self.tokenizer.encode_batch([text for text, _ in part]), strict=True):
                yield ids if chat else [*self.tokenizer.start, *ids]


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


class PromptDataset:
    """Prompts in memory, in the order of their rows.

    Attributes:
        tokens: of all prompts, end to end.
        bounds: ``[n + 1]``: where each begins.
        chats: whether a template wrote any of them.
    """

    def __init__(self, writer: PromptWriter, rows: Iterable[tuple[str, Row]]) -> None:
        placed = list(rows)
        texts = [writer.text(place, row) for place, row in placed]
        ids = list(writer.ids(texts))
        for (place, _), each in zip(placed, ids, strict=True):
            if not each:
                raise DataError(f"{place}: the prompt is empty; an answer needs at least one token before it.")
        self.rows = [row for _, row in placed]
        self.chats = any(chat for _, chat in texts)
        self.bounds = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        self.tokens = np.fromiter((token for each in ids for token in each), np.int32, int(self.bounds[-1]))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each prompt, ``[n]``."""
        return np.diff(self.bounds)

    def __getitem__(self, place: int) -> tuple[tuple[int, ...], Row]:
        return tuple(self.tokens[self.bounds[place] : self.bounds[place + 1]].tolist()), self.rows[place]


class TaskDataset:
    """The tasks of a split. Every pass has the same prompts, in an order of its own that follows from seed and pass.

    Args:
        num_samples: number of tasks needed; passes are repeated as often as this takes. None: one pass.
        seed: seed of the order; None: that of the rows.

    Attributes:
        order: hash of everything that the order depends on.
    """

    def __init__(
        self,
        prompts: PromptDataset,
        places: NDArray[np.int64],
        *,
        num_samples: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.prompts, self.places, self.seed = prompts, places, seed
        passes = 1 if num_samples is None else max(1, -(-num_samples // len(places)))
        self._length = passes * len(places)
        digest = hashlib.blake2b(f"{seed}/{len(prompts)}".encode(), digest_size=16)
        for array in (prompts.tokens, prompts.bounds, places):
            digest.update(array.tobytes())
        self.order = digest.hexdigest()
        # Two passes: a batch may reach into the next one.
        self._permutation = lru_cache(maxsize=2)(self._permuted)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | None) -> RLTask | None:
        """Return task ``index``, which is its number; None stays None, and fills up a batch."""
        if index is None:
            return None
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}.")
        turn, place = divmod(index, len(self.places))
        return RLTask(*self.prompts[int(self._permutation(turn)[place])], number=index)

    def _permuted(self, turn: int) -> NDArray[np.int64]:
        if self.seed is None:
            return self.places
        return np.random.Generator(np.random.PCG64([self.seed, turn])).permutation(self.places)
